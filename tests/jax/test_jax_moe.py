"""The decoder in plain JAX and as a Flax module, under both scans; the demo; what importing brings along."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from ragged_model import assert_close, summed

from pagestash.jax import StashPolicy, demo
from pagestash.jax.moe import (
    STASHED,
    DecoderConfig,
    RingConfig,
    decoder_loss,
    init_decoder,
    plain_scan,
    stashed_scan,
)
from pagestash.jax.moe.decoder import place

CONFIG = DecoderConfig(
    vocabulary=32,
    width=16,
    heads=2,
    layers=3,
    moe=RingConfig(width=16, expert_width=24, experts=8, top_k=2, shards=4),
)
# Attention's matmuls, scores and mixing, the router, the experts; then the vocabulary. 4 × 8 tokens, each twice.
TERMS = 2 * CONFIG.vocabulary + summed(
    layers=CONFIG.layers, terms_a_layer=7 * CONFIG.width + 2 * 8 + 2 * CONFIG.moe.expert_width, rows=4 * 8 * 2
)
TOKENS = (jnp.arange(9) * jnp.arange(1, 5)[:, None]) % 32


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4,), ("expert",), axis_types=(jax.sharding.AxisType.Auto,))


def policy(factor):
    return StashPolicy(
        names=STASHED, capacity_factor=factor, expected_rows=16, page_rows=8, fill=float("nan")
    )


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.7, 1.5])
def test_plain_decoder(mesh, factor):
    params = place(init_decoder(jax.random.key(0), CONFIG), mesh)

    def step(scan):
        loss = lambda p: decoder_loss(p, TOKENS, config=CONFIG, mesh=mesh, scan=scan)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    assert_close(step(stashed_scan(policy(factor), mesh)), step(plain_scan), TERMS)


@pytest.mark.slow
def test_nnx_decoder_with_dropout(mesh):
    """Keys and counters of the dropout streams are in the scanned state; only parameters get gradients."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is missing: pip install pagestash[jax]")
    from pagestash.jax.moe.nnx import Decoder

    definition, params, rest = nnx.split(Decoder(CONFIG, mesh, rngs=nnx.Rngs(0), dropout=0.2), nnx.Param, ...)
    assert any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in jax.tree.leaves(rest))

    def step(scan):
        loss = lambda p: nnx.merge(definition, p, rest).loss(TOKENS, scan)[0]  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(params)

    assert_close(step(stashed_scan(policy(0.7), mesh)), step(plain_scan), TERMS)


def test_experts_that_do_not_split_are_refused():
    with pytest.raises(ValueError, match="cannot be split over 3 shards"):
        RingConfig(width=16, expert_width=24, experts=8, top_k=2, shards=3)
    with pytest.raises(ValueError, match="top_k is 9"):
        RingConfig(width=16, expert_width=24, experts=8, top_k=9)


@pytest.mark.slow
def test_the_demo_runs_and_its_losses_agree(monkeypatch, capsys):
    monkeypatch.setattr(demo, "QUICK_COMPILATION", {})  # the flags of these tests compile more quickly still
    assert demo.main(["--steps", "1"]) == 0
    assert "losses agree in all 1 steps" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_demo_is_a_program_that_asks_for_its_devices_itself(monkeypatch):
    done = run("-m", "pagestash.jax.demo", "--steps", "0")
    assert done.returncode == 2
    assert "--steps 0: expected at least 1" in done.stderr
    monkeypatch.delenv("XLA_FLAGS")
    done = run("-c", "from pagestash.jax import demo; print(demo._four_devices())")
    assert done.stdout.strip() == "True", done.stderr


def test_importing_jax_side_brings_no_torch_and_the_package_no_jax():
    done = run(
        "-c",
        "import sys, pagestash.jax, pagestash.jax.moe, pagestash.jax.demo; print('torch' in sys.modules)",
    )
    assert done.stdout.strip() == "False", done.stderr
    done = run("-c", "import sys, pagestash; print('jax' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600)
