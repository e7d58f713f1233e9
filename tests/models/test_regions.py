"""Ten names in every MoE layer of a decoder: any home for any of them, with the bits of no policy."""

import re
import sys
from itertools import combinations, product
from pathlib import Path

import pytest
import torch
from support import same
from support.tiers import slow, slow_but
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.moe import AllGather
from pagestash.policy import HOMES

sys.path.insert(0, str(Path(__file__).parent))
from ten_names import MORE, NAMES, TABLE, TINY, covering, pairs_of, table

SMALL = {"width": 32, "heads": 4, "kv_heads": 2, "experts": 4, "expert_width": 16, "shared_experts": 1}
MLA = {"attention": "mla", "q_rank": 16, "kv_rank": 16, "nope_dim": 8, "rope_dim": 8, "v_dim": 8}


def run(model, batch, keeper=None, retain=False):
    """The loss and the gradients of all parameters; `retain`: of the second backward through one graph."""

    def forward_and_backward():
        loss = sum(model(batch[:, :-1], batch[:, 1:]))
        if retain:
            loss.backward(retain_graph=True)
            model.zero_grad()
        loss.backward()
        return loss

    model.zero_grad()
    if keeper is None:
        loss = forward_and_backward()
    else:
        with keeper.step():
            loss = forward_and_backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


class Made:
    """A decoder of two MoE layers, a batch, and what they give without a policy."""

    def __init__(self, **changes) -> None:
        self.model = Decoder(preset("tiny", layers=2, dense_layers=0, **SMALL | changes))
        self.model.initialise(0)
        self.batch = torch.randint(0, 256, (2, 13), generator=torch.Generator().manual_seed(0))
        self.plain = run(self.model, self.batch)

    def differs(self, rules):
        """The steps under the rules whose loss or gradients are not those of no policy.

        The first is measured; the second goes by what was, and backward comes twice.
        """
        rules = [ps.Rule(f"layers.*.{name}".rstrip("."), home, min_bytes=0) for name, home in rules]
        keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=1024)), backend="torch")
        keeper.attach(self.model)
        try:
            got = [run(self.model, self.batch, keeper, retain=retain) for retain in (False, True)]
            held = {home: int(size) for home, size in keeper.held().items()}
            assert not any(held.values()), held
            return [step for step, values in enumerate(got) if not same(values, self.plain)]
        finally:
            keeper.detach()


@pytest.fixture(scope="module")
def made():
    return {"gqa": Made(), "mla": Made(**MLA)}


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_every_layer_has_a_module_of_each_name(made, kind):
    modules = dict(made[kind].model.named_modules())
    for layer in range(2):
        for name in [*NAMES, "moe.experts"]:
            assert isinstance(modules[f"layers.{layer}.{name}"], nn.Module)
    assert {name for name, _ in modules["layers.0.moe.expert_fc1"].named_parameters()} == {"weight"}
    assert modules["layers.0.moe.expert_fc1"].weight.shape == (4, 32, 32)  # gate and linear, each 16 × 32
    assert modules["layers.0.moe.expert_fc2"].weight.shape == (4, 32, 16)
    assert not list(modules["layers.0.moe.moe_act"].parameters())
    # One name each, in named_modules, state_dict and parameters alike.
    model = made[kind].model
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]


@pytest.mark.slow
def test_all_pairs_of_homes_over_all_pairs_of_regions_give_the_same_bits(made):
    """Ten homes at a time: each pair of regions has had each pair of homes in the end."""
    policies = list(covering(HOMES))
    assert len(set().union(*map(pairs_of, policies))) == 45 * len(HOMES) ** 2
    assert len(policies) < 50
    wrong = [homes for homes in policies if made["gqa"].differs(zip(NAMES, homes))]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("homes", [*product(HOMES, HOMES)])
def test_a_pair_of_homes_for_every_pair_of_regions_alone_gives_the_same_bits(made, homes):
    pairs = [list(zip(names, homes)) for names in combinations(NAMES, 2)]
    wrong = [pair for pair in pairs if made["gqa"].differs(pair)]
    assert not wrong


EXPERTS = "moe.experts"
SETS = [*([name] for name in NAMES), NAMES, [EXPERTS], [EXPERTS, "moe.moe_act"], [*NAMES, EXPERTS]]


@pytest.mark.parametrize("home", slow_but(["stash", "recompute"], HOMES))
@pytest.mark.parametrize(("kind", "sets"), [("gqa", SETS), *slow(("mla", SETS[10:]))], ids=["gqa", "mla"])
def test_a_home_for_one_region_and_for_all(made, kind, sets, home):
    wrong = [names for names in sets if made[kind].differs([(name, home) for name in names])]
    assert not wrong


@pytest.mark.parametrize(
    "homes", [*zip(HOMES, HOMES), *slow(*((pair,) for pair in product(HOMES, HOMES) if pair[0] != pair[1]))]
)
def test_homes_for_norms_of_heads_and_rope(made, homes):
    """RoPE takes what the norms made, and core attention keeps what RoPE made."""
    of_norms, of_rope = homes
    rules = [("attn.q_norm", of_norms), ("attn.k_norm", of_norms), ("attn.rope", of_rope)]
    of_core = [[], *([("attn.core_attn", home)] for home in HOMES)]
    wrong = [more for more in of_core if made["gqa"].differs(rules + more)]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("around", ["", "moe", "attn"])
def test_any_homes_inside_what_is_run_again(made, around):
    """A whole layer, or a part of it, under recompute, with rules for the regions inside."""
    few = [[], *covering(HOMES)][::6]
    rules = [[*zip(NAMES, homes), (around, "recompute")] for homes in few]
    wrong = [rule for rule in rules if made["gqa"].differs(rule)]
    assert not wrong


def test_of_a_layer_that_is_run_again_its_input_and_choices_wait(made):
    """And not what the router takes in, which the layer makes again."""
    model, batch = made["gqa"].model, made["gqa"].batch
    keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*", "recompute")])).attach(model)
    with keeper.step():
        loss = sum(model(batch[:, :-1], batch[:, 1:]))
        decided = keeper.stats().regions["layers.1"].bytes
        loss.backward()
    keeper.detach()
    choices_order_places = batch[:, 1:].numel() * model.config.top_k * 3 * 4
    # And for each expert, how many chose it, how many rows it got, and where they begin; and where the last ends.
    assert decided == choices_order_places + model.config.experts * 3 * 4 + 4


# --- the documentation's table ---

TOKENS = 256


def held(home, names, **made):
    """Bytes of the second layer, by region, at their peak."""
    model = Decoder(preset("tiny", layers=2, dense_layers=0, shared_experts=1), **made)
    rules = [ps.Rule(f"layers.*.{name}", home, min_bytes=0) for name in names]
    policy = ps.Policy(rules, ps.PoolConfig(page=1024, device=1 << 24))
    keeper = ps.Keeper(policy, backend="torch", check=True).attach(model)
    run(model, torch.randint(0, 256, (4, TOKENS // 4 + 1)), keeper)
    regions = keeper.stats().regions
    return {name: regions[f"layers.1.{name}"].peak for name in names if f"layers.1.{name}" in regions}


@pytest.mark.usefixtures("lone_rank")
def test_the_documented_bytes_are_those_of_a_step(made):
    local = held("keep", NAMES + MORE)

    def gather(config):
        return AllGather(config, max_tokens=2 * TOKENS)  # twice the rows that arrive

    wired = held("stash", ["moe.expert_fc1"], make_dispatch=gather)
    found = set()
    for region, needs, new, measured in table():
        names = re.findall("`([^`]+)`", region)
        found |= {*names}
        size = sum((wired if "parallel" in region else local).get(name, 0) for name in names)
        # Beside what grows with the tokens there are a few numbers for each expert.
        assert 0 <= size - new * TOKENS <= 8 * 8, region
        assert new == measured <= needs, region
    assert found == {*NAMES, *MORE}


def test_the_documented_bytes_of_latent_attention_are_those_of_a_step():
    [formula] = re.findall(r"`(b·\(d \+ .*rope_dim\) \+ 8)`", TABLE.read_text())
    made = Made(**MLA, width=128)
    policy = ps.Policy([ps.Rule("layers.1.attn.qkv_linear", "keep")])
    keeper = ps.Keeper(policy, check=True).attach(made.model)
    run(made.model, made.batch, keeper)
    size = keeper.stats().regions["layers.1.attn.qkv_linear"].peak
    assert size == made.batch[:, 1:].numel() * eval(formula.replace("·", "*"), TINY | MLA)
