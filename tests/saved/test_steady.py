"""A keeper that moves nothing does not watch steps that are like those before, and still counts what they keep.

(One that moves something: `test_watch.py`.)
"""

from weakref import ref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.policy import Policy, Rule
from pagestash.saved.region import frames
from pagestash.torch_internals import top_saved_tensors_hooks

WIDTH = 8
KEEP = [Rule("*", "keep")]


class Net(nn.Sequential):
    """Notes in each forward whether saved tensors are watched."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)))
        self.watched: list[bool] = []
        self.keep_every: int | None = None

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        self.watched.append(top_saved_tensors_hooks(True) is not None)
        if self.keep_every is not None:
            x = x[:: self.keep_every].tanh()
        return super().forward(x).square().sum()


def attached(rules=KEEP, **options) -> tuple[Net, ps.Keeper]:
    torch.manual_seed(0)
    net = Net()
    return net, ps.Keeper(Policy(rules), **options).attach(net)


def step(net: Net, keeper: ps.Keeper, rows: int = 4, calls: int = 1) -> None:
    with keeper.step():
        for _ in range(calls):
            net(torch.ones(rows, WIDTH)).backward()


def always_watched() -> tuple[Net, ps.Keeper]:
    return attached(check=True)


def test_the_third_step_of_a_kind_is_not_watched():
    net, keeper = attached()
    for rows in (4, 4, 4, 6, 4, 6, 6):
        step(net, keeper, rows)
    assert net.watched == [True, True, False, True, False, True, False]


@pytest.mark.parametrize("rows", [(4,) * 5, (4, 6) * 5, (6, 4, 4, 4, 4), (4, 4, 4, 4, 6, 4)])
@pytest.mark.parametrize("reset", [None, 2, 4])
def test_stats_are_those_of_a_keeper_that_watches_every_step(rows, reset):
    found = []
    for net, keeper in (attached(), always_watched()):
        for number, count in enumerate(rows):
            if number == reset:
                keeper.reset_peaks()
            step(net, keeper, count)
        found.append((keeper.stats(), keeper.held()))
        skipped = net.watched.count(False)
        assert (skipped > 0) == (keeper._check is not True)
    assert found[0] == found[1]
    assert found[0][0].homes["keep"].peak > 0


def test_peaks_that_are_counted_anew_are_those_of_steps_that_were_watched():
    found = []
    for net, keeper in (attached(), always_watched()):
        for _ in range(3):
            step(net, keeper, 8)
        net.keep_every = 4  # fewer rows are saved, and no call shows it
        keeper.reset_peaks()
        for _ in range(3):
            step(net, keeper, 8)
        found.append(keeper.stats())
        assert net.watched[3:] == [True, True, keeper._check is True]
    assert found[0] == found[1]


def test_gradients_are_the_same_to_the_last_bit():
    gradients = []
    for net, keeper in (attached(), always_watched()):
        for _ in range(4):
            step(net, keeper)
        gradients.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients))


def test_microbatches_are_part_of_the_kind():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper, calls=2)
    assert net.watched == [True] * 4 + [False] * 2
    step(net, keeper, calls=3)  # its third call was not expected
    step(net, keeper, calls=2)
    assert net.watched[6:] == [False] * 3 + [True] * 2


def test_a_step_with_fewer_calls_than_expected_ends_it():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper, calls=2)
    step(net, keeper, calls=1)
    step(net, keeper, calls=2)
    assert net.watched[-2:] == [True, True]


def test_whoever_asks_within_a_step_has_all_later_steps_watched():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    peak = keeper.stats().homes["keep"].peak
    with keeper.step():
        net(torch.ones(4, WIDTH))
        assert keeper.stats().homes["keep"].peak == peak
    for _ in range(3):
        with keeper.step():
            loss = net(torch.ones(4, WIDTH))
            assert keeper.stats().homes["keep"].bytes == peak
            loss.backward()
    assert net.watched[3:] == [False, True, True, True]


def test_bytes_that_vary_from_step_to_step_are_watched_for_good():
    net, keeper = attached()
    for every in (1, 2, 1, 2, 1, 1, 1, 1):
        net.keep_every = every
        step(net, keeper, 8)
    assert all(net.watched)


@pytest.mark.parametrize("change", ["frozen", "eval", "autocast"])
def test_another_state_of_the_model_is_another_kind(change):
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    assert net.watched.pop() is False
    if change == "frozen":
        net[0].requires_grad_(False)
    elif change == "eval":
        net[1].eval()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=change == "autocast"):
        step(net, keeper)
    assert net.watched.pop() is True


def test_another_layer_that_trains_in_the_place_of_one_is_another_kind():
    found = []
    for net, keeper in (attached(), always_watched()):
        for trains in (2, 2, 2, 0):  # below the first one that trains nothing is saved
            for number, layer in enumerate(net):
                layer.requires_grad_(number == trains)
            step(net, keeper)
        found.append(keeper.stats())
        assert net.watched[-1] is True
        assert net.watched[-2] is (keeper._check is True)
    assert found[0] == found[1]


def test_arguments_that_cannot_be_compared_are_watched():
    net, keeper = attached()
    for _ in range(4):
        with keeper.step():
            net(torch.ones(4, WIDTH), scale=0.5).backward()
    assert all(net.watched)


def test_graphs_that_outlive_their_step_are_watched():
    net, keeper = attached()
    for _ in range(4):
        with keeper.step():
            loss = net(torch.ones(4, WIDTH))
        loss.backward()
    assert all(net.watched)
    assert keeper.stats().homes["keep"].bytes == 0


def test_hooks_of_others_inside_are_left_in_place():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    seen = []
    with keeper.step():
        with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
            net(torch.ones(4, WIDTH)).backward()
        watched = top_saved_tensors_hooks(True)
    assert seen
    assert watched is not None
    assert top_saved_tensors_hooks(True) is None


def test_hooks_of_others_around_see_as_little_as_in_the_first_step():
    net, keeper = attached()
    seen = []
    for _ in range(4):
        with saved_tensors_hooks(lambda tensor: seen.append(tensor) or tensor, lambda tensor: tensor):
            step(net, keeper)
    assert not seen
    assert top_saved_tensors_hooks(True) is None


def test_a_model_that_is_called_in_backward_leaves_no_hooks_behind():
    net, keeper = attached()
    for _ in range(4):
        with keeper.step():
            x = torch.ones(4, WIDTH, requires_grad=True)
            checkpoint(net, x, use_reentrant=True).backward()
        assert top_saved_tensors_hooks(True) is None


def test_another_keepers_step_around_stays_as_it_is():
    net, keeper = attached()
    other = ps.Keeper(Policy([Rule("2", "recompute")])).attach(net)
    for _ in range(4):
        with other.step(), keeper.step():
            net(torch.ones(4, WIDTH)).backward()
    assert all(net.watched)
    assert top_saved_tensors_hooks(True) is None


def test_an_error_in_a_step_that_is_not_watched_changes_nothing():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    before = keeper.stats()
    fail = [ZeroDivisionError]
    net.register_forward_hook(lambda *_: _raise(fail.pop()) if fail else None)
    with pytest.raises(ZeroDivisionError):
        step(net, keeper)
    assert top_saved_tensors_hooks(True) is None
    assert keeper.stats() == before
    step(net, keeper)
    assert net.watched == [True, True, False, False, False]


def test_a_change_in_place_is_refused_in_every_step():
    net, keeper = attached()
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"in.?place"):
            _change_a_weight(net, keeper)
        step(net, keeper)
    assert not all(net.watched)


def _raise(error: type[Exception]) -> None:
    raise error


def _change_a_weight(net: Net, keeper: ps.Keeper) -> None:
    with keeper.step():
        loss = net(torch.ones(4, WIDTH))
        with torch.no_grad():
            net[2][0].weight.add_(1.0)
        loss.backward()


def test_marked_rows_are_not_watched_either_where_nothing_moves():
    net, keeper = attached()
    for _ in range(4):
        with keeper.step():
            net(ps.rows(torch.ones(4, WIDTH), torch.tensor(3))).backward()
    assert net.watched == [True, True, False, False]


def test_detach_takes_the_hook_off():
    net, keeper = attached()
    assert net._forward_pre_hooks
    keeper.detach()
    assert not net._forward_pre_hooks


def test_another_model_is_another_kind():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    keeper.detach()
    keeper.reset_peaks()
    other = Net()
    other[0][1] = nn.ReLU(inplace=True)  # as many modules and parameters, but fewer bytes
    keeper.attach(other)
    step(other, keeper)
    assert other.watched == [True]
    peak = keeper.stats().homes["keep"].peak
    keeper.detach()
    alone = ps.Keeper(Policy(KEEP), check=True).attach(other)
    step(other, alone)
    assert peak == alone.stats().homes["keep"].peak


def test_a_step_that_may_open_no_hooks_leaves_nothing_open():
    net, keeper = attached([Rule("*", "recompute")])
    with (
        torch.autograd.graph.disable_saved_tensors_hooks("none here"),
        pytest.raises(RuntimeError, match="none here"),
        keeper.step(),
    ):
        pass
    assert not frames()
    net(torch.ones(4, WIDTH)).backward()  # outside of a step: nothing is recomputed
    assert keeper.stats().homes["recompute"].peak == 0


def test_a_model_with_another_module_is_watched_again():
    """Where the step before was not watched, that is seen at the end of a step."""
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    net[0].append(nn.Linear(WIDTH, WIDTH))
    for _ in range(4):
        step(net, keeper)
    assert net.watched == [True, True, False, False, True, True, False]
    always, watching = always_watched()
    always[0].append(nn.Linear(WIDTH, WIDTH))
    step(always, watching)
    keeper.reset_peaks()
    for _ in range(3):
        step(net, keeper)
    assert keeper.stats() == watching.stats()


def test_a_module_that_was_taken_out_of_the_model_is_not_held():
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    gone = ref(net[2][0])
    net[2][0] = nn.Linear(WIDTH, WIDTH)
    assert gone() is None
    step(net, keeper)
    assert net[2][0].weight.grad is not None


def test_weights_are_told_apart_where_a_step_begins_with_the_contents_of_the_one_before():
    """Their storages are looked up again as soon as the step is known to be watched."""
    net, keeper = attached()
    for _ in range(3):
        step(net, keeper)
    for parameter in net.parameters():
        parameter.data = parameter.data.clone()
    keeper.reset_peaks()
    step(net, keeper, rows=6)
    always, watching = always_watched()
    step(always, watching, rows=6)
    assert (net.watched[-1], keeper.stats()) == (True, watching.stats())
