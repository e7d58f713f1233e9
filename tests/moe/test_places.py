"""Rows and first projections of the fused experts: a home for each, valid rows only, always the same bits."""

from itertools import product

import pytest
import torch
from support import same
from support.tiers import slow
from torch import nn

import pagestash as ps
from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.rows import padded_rows
from pagestash.moe import MoE, MoEConfig, Received
from pagestash.moe.router import choose_experts
from pagestash.pages.pool import PagePool
from pagestash.policy import HOMES

D, N, E, K, T, TAIL = 32, 24, 4, 2, 40, 40
ROWS, PROJECTION = T * K * D * 4, T * K * 2 * N * 4


class Loopback:
    """A dispatch whose wire ends where it starts, with room to spare for rows."""

    experts = E
    sent = 0

    def __init__(self, expected=0):
        self.expected = expected

    def send(self, x, ids, weights, over):
        self.sent += 1
        return Received(x, weights, ids, route(ids, E, capacity=T * K + TAIL, over=over), self.expected)

    def collect(self, slots, received):
        return slots


class Made:
    """One layer as `moe`, its input, and its gradients without a policy."""

    def __init__(self, dispatch=None, **changes) -> None:
        torch.manual_seed(0)
        config = MoEConfig(width=D, expert_width=N, experts=E, top_k=K, **changes)
        self.moe = MoE(config, dispatch=dispatch)
        self.model = nn.ModuleDict({"moe": self.moe})
        self.x, self.dy = torch.randn(T, D), torch.randn(T, D)
        self.look = lambda: None
        self.held: list[dict[str, int]] = []
        """Bytes by home between forward and backward of the last two steps."""
        self.plain = self.run()

    def run(self, retain=False):
        self.model.zero_grad()
        x = self.x.clone().requires_grad_()
        y, _ = self.moe(x)
        self.look()
        if retain:
            y.backward(self.dy, retain_graph=True)
            self.model.zero_grad()
            x.grad = None
        y.backward(self.dy)
        return [y.detach(), x.grad, *(p.grad.clone() for p in self.model.parameters())]

    def under(self, layer=None, **homes):
        """Stats after a measured step and one whose backward comes twice, both with the plain bits."""
        rules = [ps.Rule(f"moe.{name}", home, min_bytes=0) for name, home in homes.items()]
        rules += [ps.Rule("moe", layer)] if layer else []
        policy = ps.Policy(rules, ps.PoolConfig(page=256))
        keeper = ps.Keeper(policy, backend="torch", check=True).attach(self.model)
        self.look = lambda: self.held.append({home: int(size) for home, size in keeper.held().items()})
        self.held.clear()
        for retain in (False, True):
            keeper.reset_peaks()
            with keeper.step():
                got = self.run(retain)
            assert same(got, self.plain), (homes, retain)
        stats = keeper.stats()
        assert not any(size.bytes for size in stats.homes.values())
        keeper.detach()
        return stats


@pytest.fixture
def wired():
    return Made(Loopback())


@pytest.fixture
def local():
    return Made()


@pytest.mark.parametrize(("rows", "h"), [*product(HOMES, HOMES)])
def test_received_rows_and_projections_have_homes_of_their_own(wired, rows, h):
    if rows == "recompute":
        with pytest.raises(ValueError, match=r"expert_fc1.*use home='stash' or home='offload'"):
            wired.under(expert_fc1=rows, moe_act=h)
        return
    stats = wired.under(expert_fc1=rows, moe_act=h)
    # What is kept has its whole buffer kept; elsewhere wait the valid rows. (Where a plan leaves something on the
    # device, which is all of a lone layer, it may stay as it is.)
    buffer = {"moe.expert_fc1": padded_rows(T * K + TAIL) * D * 4, "moe.moe_act": (T * K + TAIL) * 2 * N * 4}
    valid = {"moe.expert_fc1": (rows, ROWS), "moe.moe_act": (h, PROJECTION)}
    for name, (home, size) in valid.items():
        if home != "offload":
            whole = {"keep": buffer[name], "recompute": 0}
            assert (stats.regions[name].peak if home != "recompute" else 0) == whole.get(home, size)
    for home in ("stash", "offload"):
        moved = sum(size for chosen, size in valid.values() if chosen == home)
        assert wired.held[0][home] == moved
    if "offload" not in (rows, h) and "stash" in (rows, h):
        # The projection alone could have been given up, had there been no room.
        assert stats.pool.required == (rows == "stash") * -(-ROWS // 256)


@pytest.mark.parametrize(("rows", "h"), [*product(["keep", "stash", "offload"], HOMES)])
def test_expected_rows_take_no_pages(rows, h):
    """A size that is known gains nothing in pages; what is beyond it has the homes of its rules."""
    expected = 50
    beyond = (T * K - expected) / (T * K)
    stats = Made(Loopback(expected)).under(expert_fc1=rows, moe_act=h)
    in_pages = [size for home, size in ((rows, ROWS), (h, PROJECTION)) if home in ("stash", "offload")]
    # As above, what a lone layer offloads is in device pages, or kept where it needs none.
    assert stats.homes["stash"].peak + stats.homes["offload"].peak == beyond * sum(in_pages)
    if rows == "stash":
        head = padded_rows(expected) * D * 4
        assert stats.regions["moe.expert_fc1"].peak == head + ROWS * beyond
    if h == "stash":
        assert stats.regions["moe.moe_act"].peak == PROJECTION
    if h == "recompute":
        assert "moe.moe_act" not in stats.regions


def test_a_rule_for_the_experts_is_one_for_both_where_they_have_none(wired):
    both = wired.under(experts="stash")
    assert both.regions["moe.experts"].peak >= ROWS + PROJECTION
    assert "moe.moe_act" not in both.regions
    but_one = wired.under(moe_act="keep", experts="stash")
    assert but_one.homes["stash"].peak == both.homes["stash"].peak - PROJECTION
    assert but_one.regions["moe.moe_act"].peak > PROJECTION
    but_one = wired.under(expert_fc1="keep", experts="stash")
    assert but_one.homes["stash"].peak == both.homes["stash"].peak - ROWS
    assert but_one.regions["moe.expert_fc1"].peak > ROWS


def test_the_input_of_the_second_projection_is_never_saved(local, wired):
    for home in HOMES:
        for made in (local, wired):
            assert "moe.expert_fc2" not in made.under(expert_fc2=home).regions


def test_a_local_layers_rows_are_gathered_from_its_input_again(local):
    """The input is the router's, too: it leaves when both rules say so, and then once."""
    alone, both = local.under(expert_fc1="stash"), local.under(expert_fc1="stash", router="stash")
    assert alone.homes["stash"].peak == 0
    # Besides the input, the router's choices and their number by expert.
    assert both.homes["stash"].peak == T * D * 4 + T * K * 4
    local.moe.expert_fc1.use_recompute(True)
    assert same(local.run(retain=True), local.plain)


@pytest.mark.parametrize("made", ["local", "wired"])
@pytest.mark.parametrize("part", ["moe_act", "experts"])
def test_a_projection_that_is_made_again_is_not_saved(request, made, part):
    made = request.getfixturevalue(made)
    getattr(made.moe, part).use_recompute(True)
    saved = []

    def note(tensor):
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        assert same(made.run(), made.plain)
    assert not [shape for shape in saved if shape[-1:] == (2 * N,)]
    assert same(made.run(retain=True), made.plain)
    # A pool is not asked for what is made again.
    getattr(made.moe, part).use_pool(pool := PagePool("cpu", 256, 1000))
    assert same(made.run(), made.plain)
    assert pool.stats().device.wanted == (
        -(-ROWS // 256) if part == "experts" and made.moe.experts.dispatch else 0
    )
    getattr(made.moe, part).use_recompute(False)
    assert same(made.run(), made.plain)
    assert pool.stats().device.wanted >= -(-PROJECTION // 256)


def test_shared_experts_save_under_their_own_rule():
    made, projection = Made(shared_experts=1), T * 2 * N * 4
    assert made.under(shared_experts="stash").homes["stash"].peak == projection + 4  # and where the rows end
    assert made.under(shared_experts="offload").regions["moe.shared_experts"].peak >= projection
    kept = made.under(shared_experts="keep").homes["keep"].peak
    made.moe.shared_experts.use_recompute(True)
    assert made.under(router="keep").homes["keep"].peak == kept - projection


OWN = [*product([None, *HOMES], [None, *HOMES], [None, "stash"])]
FEW = [(None, None, None), ("stash", "stash", None), ("offload", None, "stash")]
EVERYTHING = {"correction_bias": True, "shared_experts": 1, "balance_loss": 0.1}


@pytest.mark.parametrize(("changes", "own"), [({}, OWN), (EVERYTHING, FEW)], ids=["all", "few"])
@pytest.mark.parametrize("kind", [*slow("local"), "wired"])
def test_a_layer_that_is_run_again_chooses_and_sends_once(monkeypatch, kind, changes, own):
    """Whatever homes are chosen inside; a second choice would be another one."""
    dispatch = Loopback() if kind == "wired" else None
    made, chosen, runs = Made(dispatch, **changes), [], []

    def choose(logits, correction, config):
        chosen.append(choose_experts(logits, correction, config))
        ids, weights = chosen[0]
        return chosen[0] if len(chosen) == 1 else ((ids + 1) % E, weights)

    monkeypatch.setattr("pagestash.moe.router.choose_experts", choose)
    hook = made.moe.experts.register_forward_pre_hook(lambda *_: runs.append(1))
    run = made.run

    def counted(retain=False):
        chosen.clear()
        runs.clear()
        sent = dispatch.sent if dispatch else 0
        load = made.moe.router.load
        if load is not None:
            load.zero_()
        got = run(retain)
        assert len(chosen) == 1
        assert not dispatch or dispatch.sent == sent + 1
        assert load is None or load.sum() == T * K
        return got

    made.run = counted
    for rows, h, experts in own:
        if rows == "recompute" and kind == "wired":
            continue
        homes = {"expert_fc1": rows, "moe_act": h, "experts": experts}
        made.under("recompute", **{name: home for name, home in homes.items() if home})
        if h is experts is None:
            assert len(runs) == 3  # for a backward that comes twice
    hook.remove()


def test_received_rows_wait_once_in_their_home_to_be_run_again(wired):
    stats = wired.under("recompute", expert_fc1="stash")
    assert stats.homes["stash"].peak == ROWS
    assert stats.regions["moe.expert_fc1"].peak == ROWS
    # The layer's input, and by the row its weight and places; no buffer of rows.
    assert stats.homes["keep"].peak < 2 * T * D * 4 + 64 * T
