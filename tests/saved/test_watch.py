"""In steps that are like those before, a keeper sees saved tensors only where something may move."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.policy import Policy, Rule
from pagestash.profiling.memory import MemoryMeter
from pagestash.saved import steady
from pagestash.saved.fused import claim, fused
from pagestash.torch_internals import top_saved_tensors_hooks

WIDTH, ROWS = 16, 8


def seen() -> bool:
    return top_saved_tensors_hooks(True) is not None


class Block(nn.Module):
    """x + down(gelu(up(norm(x)))), and where in it saved tensors are seen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.seen: dict[str, bool] = {}
        for name, module in list(self.named_children()):
            # (A keeper's own hook comes after it, and would open nothing yet.)
            module.forward = self._noting(name, module.forward)
        self.fail: type[BaseException] | None = None
        self.twice = False

    def _noting(self, name, forward):
        def noting(x):
            self.seen[name] = seen()
            return forward(x)

        return noting

    def forward(self, x):
        x = x.sin()
        normed = self.norm(x)
        self.seen["after norm"] = seen()
        y = self.up(normed)
        self.seen["after up"] = seen()
        if self.twice:
            y = y + normed.square().sum()  # saves the norm's output once more
        y = self.act(y)
        if self.fail is not None:
            raise self.fail
        return self.down(y) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.inner = None

    def forward(self, x):
        for block in self.blocks:
            x = block(x) if self.inner is None else self.inner(block, x)
        return x.square().sum()

    def where(self) -> set[str]:
        first, second = ({name for name, was in block.seen.items() if was} for block in self.blocks)
        assert first == second
        return first


EVERYWHERE = {"norm", "after norm", "up", "after up", "act", "down"}
NORMS = Rule("blocks.*.norm", "recompute")
ACTS = Rule("blocks.*.act", "offload", min_bytes=0, prefetch_bytes=0)


def attached(*rules: Rule, **options) -> tuple[Net, ps.Keeper]:
    torch.manual_seed(0)
    net = Net()
    return net, ps.Keeper(Policy(list(rules)), **options).attach(net)


def step(net: nn.Module, keeper: ps.Keeper, rows: int = ROWS) -> torch.Tensor:
    with keeper.step():
        loss = net(torch.linspace(0, 1, rows * WIDTH).view(rows, WIDTH))
        loss.backward()
    assert not seen()
    return loss.detach()


def settled(*rules: Rule, **options) -> tuple[Net, ps.Keeper]:
    """After steps enough that the next one is like those before."""
    net, keeper = attached(*rules, **options)
    for _ in range(4):
        step(net, keeper)
    return net, keeper


def test_the_first_steps_are_seen_as_a_whole():
    net, keeper = attached(ACTS)
    for _ in range(2):
        step(net, keeper)
        assert net.where() == EVERYWHERE


@pytest.mark.parametrize(
    ("rules", "where"),
    [
        ([ACTS], {"act"}),
        ([Rule("blocks.*.down", "stash", min_bytes=0)], {"down"}),
        # Until `up` has saved the norm's output.
        ([NORMS], {"norm", "after norm", "up"}),
        ([NORMS, ACTS], {"norm", "after norm", "up", "act"}),
        ([Rule("blocks.*.act", "recompute"), Rule("blocks.*.up", "keep")], {"act", "down"}),
        ([Rule("blocks.*", "recompute")], EVERYWHERE),
    ],
)
def test_later_steps_are_seen_where_something_moves(rules, where):
    net, keeper = settled(*rules)
    step(net, keeper)
    assert net.where() == where


@pytest.mark.parametrize("rules", [[ACTS], [NORMS], [NORMS, ACTS], [Rule("blocks.1", "recompute"), ACTS]])
def test_bits_stats_and_memory_are_those_of_a_keeper_that_sees_all(rules):
    found = []
    for check in (None, True):
        net, keeper = attached(*rules, check=check)
        for _ in range(4):
            step(net, keeper)
        meter = MemoryMeter(torch.device("cpu"))
        with meter:
            meter.mark()
            loss = step(net, keeper)
            peak = meter.mark().peak
        assert net.blocks[0].seen["down"] is (check is True)
        gradients = [parameter.grad for parameter in net.parameters()]
        found.append((loss, gradients, peak, keeper.stats()))
    (loss, gradients, peak, stats), (other_loss, others, other_peak, other_stats) = found
    assert torch.equal(loss, other_loss)
    assert all(map(torch.equal, gradients, others))
    assert peak == other_peak
    assert stats == other_stats
    homes = {rule.home for rule in rules}
    assert all(stats.homes[home].peak > 0 for home in homes)


def test_what_an_output_is_saved_more_often_than_expected_is_kept():
    gradients = []
    for check in (None, True):
        net, keeper = settled(NORMS, check=check)
        for block in net.blocks:
            block.twice = True
        net.zero_grad()
        for _ in range(3):
            step(net, keeper)
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))


class Shared(nn.Module):
    """`sin` saves what the norm saves, before it: a rule for the norm moves nothing of that."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.seen: list[bool] = []

    def forward(self, x):
        for _ in range(2):
            x = x * 2.0
            y = x.sin()
            self.seen.append(seen())
            x = self.act(self.norm(x) + y)
        return x.sum()


@pytest.mark.parametrize("home", ["offload", "stash"])
def test_a_tensor_that_stays_because_it_is_saved_elsewhere_stays(home):
    found = []
    for check in (None, True):
        net = Shared()
        options = {"prefetch_bytes": 0} if home == "offload" else {}
        rules = [Rule("norm", home, min_bytes=300, **options), Rule("act", home, min_bytes=300, **options)]
        keeper = ps.Keeper(Policy(rules), check=check).attach(net)
        for _ in range(6):
            meter = MemoryMeter(torch.device("cpu"))
            with meter:
                meter.mark()
                with keeper.step():
                    net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
                peak = meter.mark().peak
        assert net.seen[-1] is (check is True)
        found.append((keeper.stats(), peak))
    assert found[0] == found[1]
    assert found[0][0].homes[home].peak > 0


def test_marked_rows_have_every_step_seen():
    net, keeper = attached(ACTS)
    for _ in range(6):
        with keeper.step():
            net(ps.rows(torch.ones(ROWS, WIDTH), torch.tensor(3))).backward()
        assert net.where() == EVERYWHERE


def test_a_fused_operation_is_seen_where_it_saves_for_a_region_that_moves():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, part):
            claim(part, x)
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient * ctx.saved_tensors[0], None

    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.other = nn.Identity(), nn.Identity()
            self.seen: list[bool] = []

        def forward(self, x):
            for part in (self.part, self.other):
                with fused():
                    x = Square.apply(x * 0.5, part)
                    self.seen.append(seen())
            return x.sum()

    net = Fused()
    keeper = ps.Keeper(Policy([Rule("part", "stash", min_bytes=0)])).attach(net)
    for _ in range(6):
        with keeper.step():
            net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
    assert net.seen[-2:] == [True, False]
    assert keeper.stats().homes["stash"].peak == ROWS * WIDTH * 4


def test_a_region_opened_by_name_is_seen():
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[bool] = []

        def forward(self, x):
            y = x.sin()
            with ps.region("inside"):
                y = y.cos()
                self.seen.append(seen())
            self.seen.append(seen())
            return y.exp().sum()

    net = Named()
    keeper = ps.Keeper(Policy([Rule("inside", "offload", min_bytes=0)])).attach(net, ["inside"])
    for _ in range(6):
        with keeper.step():
            net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
    assert net.seen[-2:] == [True, False]


# --- others' hooks, errors, graphs in other places ---


def test_a_checkpoint_around_a_region_gets_what_is_saved_inside():
    def run(block, x):
        return checkpoint(block, x, use_reentrant=False)

    gradients = []
    for rules in ([ACTS], [Rule("blocks.*.act", "keep")]):
        net, keeper = attached(*rules)
        net.inner = run
        for _ in range(6):
            step(net, keeper)
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))


def test_a_forward_that_runs_in_backward_leaves_no_hooks_behind():
    def run(block, x):
        return checkpoint(block, x.requires_grad_(), use_reentrant=True)

    gradients = []
    for rules in ([NORMS], [Rule("blocks.*.act", "keep")]):
        net, keeper = attached(*rules)
        for number in range(8):
            # Only now, so that the steps before are seen as a whole and taken for this one.
            net.inner = run if number > 4 else None
            step(net, keeper)
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))


def test_hooks_that_a_module_opens_after_ours_and_closes_after_ours_are_closed_by_it():
    net, keeper = settled(ACTS)
    opened = []

    def open_hooks(*_):
        opened.append(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        opened[-1].__enter__()

    def close_hooks(*_):
        opened.pop().__exit__(None, None, None)

    net.blocks[0].act.register_forward_pre_hook(open_hooks)
    net.blocks[0].act.register_forward_hook(close_hooks)
    for _ in range(2):
        step(net, keeper)
    assert not opened
    assert net.blocks[1].seen["act"]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_a_region_leaves_no_hooks_behind(error):
    net, keeper = settled(Rule("blocks.0", "recompute"), ACTS)
    before = keeper.stats()
    net.blocks[0].fail = error
    with pytest.raises(error):
        step(net, keeper)
    assert not seen()
    net.blocks[0].fail = None
    net.zero_grad()
    step(net, keeper)
    plain, nothing = attached()
    step(plain, nothing)
    for parameter, other in zip(net.parameters(), plain.parameters()):
        assert torch.equal(parameter.grad, other.grad)
    assert keeper.stats() == before


def test_another_keepers_step_inside():
    def run():
        net, keeper = settled(ACTS)
        other = ps.Keeper(Policy([NORMS])).attach(net)
        for _ in range(6):
            with keeper.step(), other.step():
                net(torch.ones(ROWS, WIDTH)).backward()
            assert not seen()
        return [parameter.grad for parameter in net.parameters()]

    def plain():
        net, keeper = attached()
        for _ in range(4):
            step(net, keeper)
        for _ in range(6):
            net(torch.ones(ROWS, WIDTH)).backward()
        return [parameter.grad for parameter in net.parameters()]

    assert all(map(torch.equal, run(), plain()))


def test_a_batch_of_another_size_is_seen_as_a_whole():
    net, keeper = settled(ACTS)
    step(net, keeper)
    assert net.where() == {"act"}
    step(net, keeper, rows=2 * ROWS)
    assert net.where() == EVERYWHERE


def test_whoever_asks_within_a_step_has_all_later_steps_seen():
    net, keeper = settled(ACTS)
    with keeper.step():
        loss = net(torch.ones(ROWS, WIDTH))
        keeper.stats()
        loss.backward()
    step(net, keeper)
    assert net.where() == EVERYWHERE


def test_a_change_in_place_is_refused_in_every_step():
    net, keeper = settled(ACTS)

    def change(block, x):
        y = block(x)
        y.square().sum()
        z = y.sin()
        y.add_(1.0)
        return z

    net.inner = change
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"in.?place"):
            step(net, keeper)
        assert not seen()


def test_an_output_that_a_node_of_backward_saves_leaves_no_hooks_behind():
    """Autograd restores the hooks of its caller after each node, also those that were closed in it."""

    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            y = self.norm(x)
            return self.out(checkpoint(lambda x: x * y.sin(), x, use_reentrant=True)).sum()

    net = Closure()
    keeper = ps.Keeper(Policy([Rule("norm", "recompute")])).attach(net)
    for _ in range(6):
        with keeper.step():
            net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
        assert not seen()
    assert keeper._saved.watch.narrow


def held_before_backward(net: nn.Module, keeper: ps.Keeper, forward) -> int:
    """Bytes, after forward of a step."""
    meter = MemoryMeter(torch.device("cpu"))
    with meter, keeper.step():
        before = meter.mark().now
        loss = forward(net)
        held = meter.mark().now - before
        loss.backward()
    return held


def test_an_output_that_was_recorded_before_the_model_is_called_is_not_held():
    def forward(net):
        return net(net.blocks[0].norm(torch.ones(64, WIDTH)))

    held = []
    for check in (None, True):
        net, keeper = attached(NORMS, check=check)
        held.append([held_before_backward(net, keeper, forward) for _ in range(6)][-1])
        assert keeper._saved.watch.narrow is (check is None)
    assert held[0] == held[1]


def test_a_region_that_is_skipped_changes_nothing_for_the_others():
    """As with layers that are dropped at random."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
            self.skip = False

        def forward(self, x):
            x = x * 2.0 if self.skip else x + self.first(x)  # which nobody saves
            return self.second(x).sin().sum()

    held = []
    for check in (None, True):
        net = Dropped()
        rules = [Rule("first", "recompute"), Rule("second", "recompute")]
        keeper = ps.Keeper(Policy(rules), check=check).attach(net)
        for number in range(6):
            net.skip = number == 5
            last = held_before_backward(
                net, keeper, lambda net: net(torch.ones(64, WIDTH, requires_grad=True))
            )
        held.append(last)
        assert keeper._saved.watch.narrow is (check is None)
    assert held[0] == held[1]


def test_what_finds_no_page_is_counted():
    class Rows(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, part, count):
            claim(part, x, rows=count, capacity=len(x))
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, gradient):
            return 2 * gradient * ctx.saved_tensors[0], None, None

    class Rowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part, self.rows = nn.Identity(), 0

        def forward(self, x):
            x = x.sin().exp()
            with fused():
                return Rows.apply(x * 0.5, self.part, torch.tensor(self.rows)).sum()

    found = []
    for check in (None, True):
        net = Rowed()
        policy = Policy([Rule("part", "stash", min_bytes=0)], ps.PoolConfig(page=64))
        keeper = ps.Keeper(policy, check=check, backend="torch").attach(net)
        for number in range(6):
            net.rows = 64 if number == 5 else 4
            with keeper.step():
                net(torch.ones(64, WIDTH, requires_grad=True)).backward()
        assert keeper._saved.watch.narrow is (check is None)
        found.append(keeper.stats())
    assert found[0] == found[1]
    assert found[0].regions["part"].peak > 64 * WIDTH * 4


def test_a_module_that_was_replaced_is_noticed():
    found = []
    for check in (None, True):
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH))
        keeper = ps.Keeper(Policy([Rule("0", "recompute")]), check=check).attach(net)
        for number in range(6):
            if number == 2:
                net[1] = nn.GELU()
            with keeper.step():
                net(torch.ones(ROWS, WIDTH)).sum().backward()
        found.append(keeper.stats())
    assert found[0] == found[1]


def test_a_module_that_was_replaced_and_lives_on_is_noticed_when_the_step_is_over():
    """A step that is like others begins with the modules that the one before has found."""
    found = []
    for check in (None, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity(), nn.Linear(WIDTH, WIDTH))
        first = net[1]
        keeper = ps.Keeper(Policy([Rule("0", "recompute")]), check=check).attach(net)
        for number in range(8):
            if number == 4:
                net[1] = nn.GELU()
            with keeper.step():
                net(torch.ones(ROWS, WIDTH)).sum().backward()
        found.append((keeper.stats(), [parameter.grad.tolist() for parameter in net.parameters()]))
        assert first is not net[1]
    assert found[0] == found[1]


def test_weights_with_new_memory_are_told_apart_in_every_step():
    """Of a module outside of the region, whose weight an operation inside saves."""

    class Borrows(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.lender = [lender]  # not a module of its own

        def forward(self, x):
            return nn.functional.linear(x, self.lender[0].weight)

    found = []
    for check in (None, True):
        lender = nn.Linear(WIDTH, WIDTH, bias=False)
        net = nn.ModuleDict({"lender": lender, "part": Borrows(lender)})
        net.forward = lambda x, net=net: net["part"](net["lender"](x))
        rule = Rule("part", "stash", min_bytes=16)
        keeper = ps.Keeper(Policy([rule], ps.PoolConfig(page=256)), check=check).attach(net)
        kept = []
        for _ in range(6):
            kept.append(lender.weight.data)  # no address is used twice
            lender.weight.data = lender.weight.data.clone()
            with keeper.step():
                net(torch.ones(ROWS, WIDTH)).sum().backward()
        found.append(keeper.stats())
    assert found[0] == found[1]
    assert found[0].homes["stash"].peak == ROWS * WIDTH * 4


def test_another_thread_with_the_regions_of_the_step_is_given_no_hooks():
    at_work, main_inside, done = (threading.Event() for _ in range(3))

    class Waits(nn.Module):
        def __init__(self, says: threading.Event, waits: threading.Event) -> None:
            super().__init__()
            self.says, self.waits = says, waits

        def forward(self, x):
            self.says.set()
            assert self.waits.wait(60)
            return x.sin()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.other, self.own = Waits(at_work, main_inside), Waits(main_inside, done)

        def forward(self, x):
            for event in (at_work, main_inside, done):
                event.clear()
            x = x * 2.0

            def work():
                y = self.other(x)  # ends while the main thread is in a region
                done.set()
                return y

            future = worker.submit(copy_context().run, work)
            assert at_work.wait(60)
            return (self.own(x) * future.result(60)).sum()

    with ThreadPoolExecutor(1) as worker:
        net = Both()
        keeper = ps.Keeper(Policy([Rule("*", "stash", min_bytes=0)])).attach(net)
        for _ in range(6):
            with keeper.step():
                net(torch.ones(ROWS, WIDTH, requires_grad=True)).backward()
            assert not worker.submit(seen).result(60)
        assert keeper._saved.watch.narrow


def test_now_and_then_a_step_is_seen_as_a_whole(monkeypatch):
    """What a call saves may change in a way that its arguments do not show."""
    monkeypatch.setattr(steady, "_AGAIN", 3)
    net, keeper = attached(NORMS)
    whole = []
    for _ in range(10):
        step(net, keeper)
        whole.append(net.where() == EVERYWHERE)
    assert whole == [True] * 2 + [False] * 3 + [True] + [False] * 3 + [True]
