"""Regions: named stretches, row counts, and what a fused operation claims for another module."""

import pytest
import torch
from stack import POOLS, WIDTH, batch, run
from torch import nn

import pagestash as ps
from pagestash.saved.fused import claim


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_row_count_refilled_between_two_regions_is_not_taken_for_the_old_one(pool):
    class Twice(nn.Module):
        def forward(self, x, count):
            y = x * 2
            total = 0.0
            for rows in (2, 8):
                count.fill_(rows)
                with ps.region():
                    y = ps.rows(y, count)
                    total = total + y[:rows].square().sum() + (y * y)[:rows].sum()  # y is saved in both
            return total

    model = nn.Sequential(Twice())
    rule = ps.Rule("0", "stash", min_bytes=16)
    x = torch.randn(8, 64, requires_grad=True)
    (plain,) = torch.autograd.grad(model[0](x, torch.tensor(0)), x)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256, **pool)), backend="torch").attach(model)
    for _ in range(2):
        with keeper.step():
            (grad,) = torch.autograd.grad(model[0](x, torch.tensor(0)), x)
        assert torch.equal(grad, plain)


def test_a_row_count_refilled_before_its_region_ends_is_refused():
    class Early(nn.Module):
        def forward(self, x, count):
            with ps.region():
                y = ps.rows(x * 2, count).square().sum()
                count.fill_(3)
            return y

    model = nn.Sequential(Early())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    with keeper.step(), pytest.raises(RuntimeError, match="row count"):
        model[0](torch.randn(8, 64, requires_grad=True), torch.tensor(8)).backward()


def test_a_region_has_a_rule_of_its_own_when_its_name_is_declared():
    class Named(nn.Module):
        def forward(self, x):
            y = x * 2
            with ps.region("inner"):
                z = y.square()
            return (z * z).sum()

    model = nn.Sequential(Named())
    rule = ps.Rule("0.inner", "stash", min_bytes=16)
    with pytest.raises(ValueError, match=r"regions=\[\.\.\.\]"):
        ps.Keeper(ps.Policy([rule])).attach(model)
    keeper = ps.Keeper(ps.Policy([rule, ps.Rule("0", "keep")], ps.PoolConfig(page=256))).attach(
        model, ["0.inner"]
    )
    x = torch.randn(64, 16, requires_grad=True)
    for _ in range(2):
        with keeper.step():
            model(x).backward()
    stats = keeper.stats()
    assert stats.homes["stash"].peak == x.nbytes  # y; z is saved outside
    assert stats.regions["0.inner"].peak == x.nbytes


@pytest.mark.parametrize("around", [[], [ps.Rule("layers", "offload", min_bytes=16)]])
def test_a_region_is_named_after_the_module_that_opens_it_also_if_no_rule_names_that(around):
    class Named(nn.Module):
        def forward(self, x):
            y = x * 2
            with ps.region("inner"):
                z = y.square()
            return (z * z).sum()

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Sequential(Named()))

        def forward(self, x):
            return self.layers(x)

    model, x = Layers(), torch.randn(64, 16, requires_grad=True)
    found = {name for path in ps.profile(model, x, loss=torch.sum).regions for name in path.path}
    assert "layers.0.0.inner" in found
    policy = ps.Policy([ps.Rule("layers.0.0.inner", "stash", min_bytes=16), *around], ps.PoolConfig(page=256))
    keeper = ps.Keeper(policy).attach(model, ["layers.0.0.inner"])
    with keeper.step():
        model(x).backward()
    stats = keeper.stats()
    assert stats.regions["layers.0.0.inner"].peak == x.nbytes
    assert stats.homes["stash"].peak == x.nbytes  # y; z is saved outside
    assert stats.homes["offload"].peak == (x.nbytes if around else 0)


class Fused(torch.autograd.Function):
    """Two projections in one node; what it saves of the second belongs to another module."""

    @staticmethod
    def forward(ctx, x, weight, owner):
        h = x @ weight
        claim(owner, h)
        ctx.save_for_backward(x, h, weight)
        return h.relu()

    @staticmethod
    def backward(ctx, grad):
        x, h, weight = ctx.saved_tensors
        grad = grad * (h > 0)
        return grad @ weight.t(), x.t() @ grad, None


class FusedPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.act = nn.Identity()

    def forward(self, x):
        return Fused.apply(x * 1.0, self.weight, self.act)


def test_a_fused_operation_claims_what_it_saves_for_another_module():
    model = nn.ModuleDict({"pair": FusedPair()})
    x = torch.randn(8, WIDTH)
    (plain,) = torch.autograd.grad(model["pair"](x).sum(), model["pair"].weight)
    rules = [ps.Rule("pair.act", "stash", min_bytes=1), ps.Rule("pair", "keep")]
    keeper = ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256, device=8 * 1024)), backend="torch")
    keeper.attach(model)
    with keeper.step():
        loss = model["pair"](x).sum()
        held = keeper.stats()
        (gradient,) = torch.autograd.grad(loss, model["pair"].weight)
    assert torch.equal(gradient, plain)
    assert held.regions["pair.act"].bytes == held.homes["stash"].bytes == 8 * WIDTH * 4
    assert held.regions["pair"].bytes == 8 * WIDTH * 4


class Claims(nn.Module):
    """Claims tensors that are gone when others take their place."""

    def __init__(self, inside) -> None:
        super().__init__()
        self.act = nn.Identity()
        self.inside = inside

    def forward(self, x):
        if not self.inside:
            return self.chain(x)
        with ps.region():
            return self.chain(x)

    def chain(self, x):
        self.met = 0
        for _ in range(20):
            claimed = torch.zeros(8, WIDTH)
            claim(self.act, claimed)
            key = claimed.untyped_storage()._cdata
            del claimed
            x = torch.sigmoid(x)  # saved
            self.met += x.untyped_storage()._cdata == key
        return x.sum()


@pytest.mark.parametrize("inside", [False, True])
def test_a_claim_ends_with_the_tensor_it_was_for(inside):
    model = nn.ModuleDict({"m": Claims(inside)})
    x = torch.randn(8, WIDTH, requires_grad=True)
    (plain,) = torch.autograd.grad(model["m"](x), x)
    policy = ps.Policy([ps.Rule("m.act", "stash", min_bytes=1)], ps.PoolConfig(page=256, device=32 * 1024))
    keeper = ps.Keeper(policy, backend="torch").attach(model)
    with keeper.step():
        loss = model["m"](x)
        assert keeper.stats().homes["stash"].bytes == 0
        (gradient,) = torch.autograd.grad(loss, x)
    assert torch.equal(gradient, plain)
    # Without a region there is no claim, and keys are met again; a claim keeps its key from being given away.
    assert bool(model["m"].met) is not inside


def test_region_outside_a_step_does_nothing():
    with ps.region("anything"):
        pass


def test_stats_tell_regions_apart(sized):
    model, keeper, _ = sized
    keeper.reset_peaks()
    run(model, *batch(20), keeper)
    stats = keeper.stats()
    peaks = {name: region.peak for name, region in stats.regions.items()}
    outside = peaks.pop("(outside all regions)")
    assert set(peaks) == {f"layers.{i}.experts" for i in range(3)}
    assert len(set(peaks.values())) == 1
    # Every byte waits in one region: those outside are kept, the experts' are stashed.
    assert sum(peaks.values()) == stats.homes["stash"].peak
    assert outside == stats.homes["keep"].peak
    assert all(region.bytes == 0 for region in stats.regions.values())


def test_a_rule_may_match_a_module_of_another_stage_alone():
    stage = nn.Sequential(nn.Linear(4, 4))
    policy = ps.Policy([ps.Rule("7", "recompute")])
    with pytest.raises(ValueError, match="7"):
        ps.Keeper(policy).attach(stage)
    ps.Keeper(policy).attach(stage, others=["7"]).detach()
