"""Each extra brings all that its part of the package needs: nothing else that is installed here can be imported."""

import re
import subprocess
import sys
import textwrap
from importlib.metadata import distribution, packages_distributions

import pytest
from packaging.requirements import Requirement

ALONE = {
    "": """
        import pagestash.cli, pagestash.pipeline, pagestash.planning, pagestash.profiling, torch
        import pagestash as ps

        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
        keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash"), ps.Rule("1", "recompute")])).attach(net)
        with keeper.step():
            net(torch.ones(2, 64)).sum().backward()
        keeper.detach()
        assert ps.plan(net, torch.ones(512, 64), budget=0.95, repeats=1).policy
        pagestash.cli.app(["profile", "--preset", "tiny", "--layers", "1", "--seq", "16"])
    """,
    "train": """
        import sys, tempfile
        import pagestash.cli

        folder = tempfile.mkdtemp()
        pagestash.cli.app(["train", "--preset", "tiny", "--steps", "1", "--out", folder])
    """,
    "plot": """
        import tempfile
        import pagestash.cli

        picture = tempfile.mkdtemp() + "/memory.png"
        pagestash.cli.app(["profile", "--preset", "tiny", "--layers", "1", "--seq", "16", "--plot", picture])
    """,
    "hf": """
        import pagestash.hf
        from transformers import AutoModelForCausalLM, Qwen3MoeConfig

        small = dict(hidden_size=32, moe_intermediate_size=16, num_hidden_layers=1, num_experts=4, head_dim=8)
        config = Qwen3MoeConfig(vocab_size=64, num_experts_per_tok=2, num_attention_heads=4, **small)
        assert pagestash.hf.optimize(AutoModelForCausalLM.from_config(config)).replaced
    """,
    "jax": """
        import jax.numpy as jnp
        from jax.ad_checkpoint import checkpoint_name
        from pagestash.jax import Rows, StashPolicy, stash_scan

        def layer(w, x):
            return x + jnp.tanh(checkpoint_name(x @ w, "hidden")), Rows.prefix(4)

        policy = StashPolicy(names=("hidden",), expected_rows=4)
        assert stash_scan(layer, jnp.ones((8, 4)), jnp.ones((2, 4, 4)), policy=policy)[0].shape == (8, 4)
    """,
    "demo": """
        import matplotlib, safetensors
        import pagestash.commands.demo
    """,
}
"""For each extra a program that uses what it is for."""
FRAMEWORKS = {"lightning", "megatron", "quack", "torchtitan"}
"""Extras with tests of their own, by `make frameworks`, or on a GPU: `make test` does not install them."""


def closure(*requirements):
    """The names of all distributions that these need."""
    found, waiting = {}, [Requirement(each) for each in requirements]
    while waiting:
        each = waiting.pop()
        name = normal(each.name)
        if each.extras <= found.get(name, set()) and name in found:
            continue
        found[name] = found.get(name, set()) | each.extras
        for line in distribution(name).requires or ():
            needed = Requirement(line)
            extras = ["", *each.extras]
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return set(found)


def normal(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def extras():
    return set(distribution("pagestash").metadata.get_all("Provides-Extra"))


def test_every_extra_is_here():
    assert extras() == ALONE.keys() - {""} | FRAMEWORKS


@pytest.mark.slow
@pytest.mark.parametrize("extra", ALONE, ids=lambda extra: extra or "none")
def test_an_extra_needs_nothing_that_it_does_not_bring(extra, tmp_path):
    there = closure(f"pagestash[{extra}]" if extra else "pagestash")
    hidden = sorted(
        module
        for module, owners in packages_distributions().items()
        if there.isdisjoint(map(normal, owners)) and not module.startswith("_")
    )
    assert {"pytest", "hypothesis"} <= set(hidden)
    program = f"import sys\nsys.modules |= dict.fromkeys({hidden!r})\n" + textwrap.dedent(ALONE[extra])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
