"""A step's hooks: where nothing moves there are none, and whatever happens inside, none is left open."""

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
from pagestash.torch_internals import top_saved_tensors_hooks

WIDTH, ROWS = 16, 8


def open_hooks() -> bool:
    return top_saved_tensors_hooks(True) is not None


class Block(nn.Module):
    """x + down(gelu(up(norm(x))))"""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.fail: type[BaseException] | None = None

    def forward(self, x):
        x = x.sin()
        y = self.act(self.up(self.norm(x)))
        if self.fail is not None:
            raise self.fail
        return self.down(y) + x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.inner = None
        self.seen = False

    def forward(self, x):
        self.seen = open_hooks()
        for block in self.blocks:
            x = block(x) if self.inner is None else self.inner(block, x)
        return x.square().sum()


NORMS = Rule("blocks.*.norm", "recompute")
ACTS = Rule("blocks.*.act", "offload", min_bytes=0, prefetch_bytes=0)


def attached(*rules: Rule, **options) -> tuple[Net, ps.Keeper]:
    torch.manual_seed(0)
    net = Net()
    return net, ps.Keeper(Policy(list(rules)), **options).attach(net)


def step(net: nn.Module, keeper: ps.Keeper) -> None:
    with keeper.step():
        net(torch.linspace(0, 1, ROWS * WIDTH).view(ROWS, WIDTH)).backward()
    assert not open_hooks()


def settled(*rules: Rule) -> tuple[Net, ps.Keeper]:
    """After steps in which homes measure."""
    net, keeper = attached(*rules)
    for _ in range(3):
        step(net, keeper)
    return net, keeper


@pytest.mark.parametrize("check", [None, False, True])
def test_a_policy_that_moves_nothing_opens_no_hooks_unless_it_is_to_check(check):
    net, keeper = attached(Rule("**", "keep"), check=check)
    for _ in range(3):
        step(net, keeper)
    assert net.seen is (check is True)
    assert (keeper.stats().homes["keep"].peak > 0) is (check is True)


@pytest.mark.parametrize(("rule", "reentrant"), [(ACTS, False), (NORMS, True)])
def test_a_checkpoint_around_a_region_gets_what_is_saved_inside(rule, reentrant):
    """The reentrant kind runs the forward in backward."""

    def run(block, x):
        return checkpoint(block, x.requires_grad_() if reentrant else x, use_reentrant=reentrant)

    gradients = []
    for rules in ([rule], [Rule("blocks.*.act", "keep")]):
        net, keeper = attached(*rules)
        net.inner = run
        for _ in range(4):
            step(net, keeper)
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(map(torch.equal, *gradients))


def test_hooks_that_a_module_opens_after_ours_and_closes_after_ours_are_closed_by_it():
    net, keeper = settled(ACTS)
    opened = []

    def open_theirs(*_):
        opened.append(saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor))
        opened[-1].__enter__()

    def close_hooks(*_):
        opened.pop().__exit__(None, None, None)

    net.blocks[0].act.register_forward_pre_hook(open_theirs)
    net.blocks[0].act.register_forward_hook(close_hooks)
    for _ in range(2):
        step(net, keeper)
    assert not opened


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_error_in_a_region_leaves_no_hooks_behind(error):
    net, keeper = settled(Rule("blocks.0", "recompute"), ACTS)
    before = keeper.stats()
    net.blocks[0].fail = error
    with pytest.raises(error):
        step(net, keeper)
    assert not open_hooks()
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
            assert not open_hooks()
        return [parameter.grad for parameter in net.parameters()]

    def plain():
        net, keeper = attached()
        for _ in range(3):
            step(net, keeper)
        for _ in range(6):
            net(torch.ones(ROWS, WIDTH)).backward()
        return [parameter.grad for parameter in net.parameters()]

    assert all(map(torch.equal, run(), plain()))


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
        assert not open_hooks()


def test_weights_with_new_memory_are_told_apart_in_every_step():
    """Of a module outside of the region, whose weight an operation inside saves."""

    class Borrows(nn.Module):
        def __init__(self, lender):
            super().__init__()
            self.lender = [lender]  # not a module of its own

        def forward(self, x):
            return nn.functional.linear(x, self.lender[0].weight)

    lender = nn.Linear(WIDTH, WIDTH, bias=False)
    net = nn.ModuleDict({"lender": lender, "part": Borrows(lender)})
    net.forward = lambda x, net=net: net["part"](net["lender"](x))
    rule = Rule("part", "stash", min_bytes=16)
    keeper = ps.Keeper(Policy([rule], ps.PoolConfig(page=256))).attach(net)
    kept = []
    for _ in range(6):
        kept.append(lender.weight.data)  # no address is used twice
        lender.weight.data = lender.weight.data.clone()
        with keeper.step():
            net(torch.ones(ROWS, WIDTH)).sum().backward()
    assert keeper.stats().homes["stash"].peak == ROWS * WIDTH * 4


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
            assert not worker.submit(open_hooks).result(60)
