"""What homes would save and cost, what a policy would do, and whether an offload hides."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash.profiling import Link, SavedTensor, Segment
from pagestash.profiling.groups import Timeline, moves_of
from pagestash.saved.offload.split import EntryShape, RowSplit

ROWS, WIDTH = 64, 16
SIZE = ROWS * WIDTH * 4


class Gate(nn.Module):
    """Saves its input (for the product) and two tensors of its own."""

    def forward(self, x):
        return x.sigmoid() * x.tanh()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, WIDTH), Gate(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.gate(self.up(x))).sum()


def run(**options):
    torch.manual_seed(0)
    return Model(), torch.randn(ROWS, WIDTH, requires_grad=True), options


def test_recompute_frees_what_was_saved_inside_and_an_output_that_only_others_saved():
    model, x, _ = run()
    found = ps.profile(model, x, repeats=1)
    gate = found.region("gate")
    # Sigmoid and tanh, each saved by itself and by the product; and the output, which `down` saved.
    assert gate.bytes == 2 * SIZE
    assert gate.homes["recompute"].saved_bytes == 3 * SIZE
    assert gate.homes["recompute"].seconds == gate.total_forward_seconds
    # `down` saved nothing but its input, from which it would be recomputed.
    assert found.region("down").homes["recompute"].saved_bytes == 0
    assert found.region("down").bytes == SIZE


class Lends(nn.Module):
    def forward(self, x):
        self.lent = x.tanh()
        return self.lent.exp()


class Borrows(nn.Module):
    """The product outside saves both tensors that `lends` has saved before."""

    def __init__(self):
        super().__init__()
        self.up, self.lends = nn.Linear(WIDTH, WIDTH), Lends()

    def forward(self, x):
        y = self.lends(self.up(x))
        total = (y * self.lends.lent).sum()
        del self.lends.lent
        return total


def test_what_another_region_keeps_is_kept():
    rule = ps.Rule("lends", "offload", min_bytes=1)
    found = ps.profile(Borrows(), torch.randn(ROWS, WIDTH), repeats=1, policy=ps.Policy([rule]))
    assert found.total_bytes == found.region("lends").bytes == 2 * SIZE
    assert found.home_bytes()["offload"] == 0


def test_what_an_outer_region_saved_too_is_not_freed():
    found = ps.profile(Borrows(), torch.randn(ROWS, WIDTH), repeats=1)
    # Of tanh and exp the first is kept for the product; the second is the output, and only saved.
    assert found.region("lends").bytes == 2 * SIZE
    assert found.region("lends").homes["recompute"].saved_bytes == SIZE


def test_an_output_held_elsewhere_is_not_freed():
    class Keeps(Model):
        def forward(self, x):
            y = self.gate(self.up(x))
            return self.down(y).sum(), y

    found = ps.profile(Keeps(), torch.randn(ROWS, WIDTH, requires_grad=True), repeats=1)
    assert found.region("gate").homes["recompute"].saved_bytes == 2 * SIZE


def test_offload_costs_what_the_region_cannot_hide():
    model, x, _ = run()
    slow = ps.profile(model, x, repeats=1, link=1e3)
    gate = slow.region("gate")
    expected = 2 * (2 * SIZE / 1e3) - gate.forward_seconds - gate.backward_seconds
    assert gate.homes["offload"].saved_bytes == 2 * SIZE
    assert gate.homes["offload"].seconds == pytest.approx(expected)
    assert ps.profile(model, x, repeats=1, link=1e15).region("gate").homes["offload"].seconds == 0
    assert gate.homes["keep"].saved_bytes == gate.homes["keep"].seconds == 0


def test_a_policy_gives_each_tensor_its_home():
    model, x, _ = run()
    rules = [ps.Rule("gate", "recompute"), ps.Rule("down", "offload", min_bytes=1)]
    found = ps.profile(model, x, repeats=1, policy=ps.Policy(rules))
    assert found.home_bytes() == {"keep": 0, "stash": 0, "offload": SIZE, "recompute": 2 * SIZE}
    # Without a rule of its own, the output of a recomputed region is recomputed with it.
    assert found.home_bytes(ps.Policy(rules[:1]))["recompute"] == 3 * SIZE
    # Under a minimum it stays; and so does the input of a recomputed region.
    assert found.home_bytes(ps.Policy([ps.Rule("down", "offload", min_bytes=SIZE + 1)]))["keep"] == 3 * SIZE
    assert found.home_bytes(ps.Policy([ps.Rule("down", "recompute")]))["keep"] == 3 * SIZE
    with pytest.raises(ValueError, match="matches no region"):
        ps.profile(model, x, repeats=1, policy=ps.Policy([ps.Rule("gat", "stash")]))


def test_bytes_by_home_are_those_a_keeper_finds():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mlp = nn.LayerNorm(WIDTH), nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU())
            self.down = nn.Linear(48, WIDTH)

        def forward(self, x):
            with ps.region():  # in which the norm's output inherits the mark
                x = ps.rows(x, torch.tensor(40))
                return x + self.down(self.mlp(self.norm(x)))

    torch.manual_seed(0)
    model, x = nn.Sequential(Layer(), Layer(), Layer()), torch.randn(ROWS, WIDTH)
    policy = ps.Policy([ps.Rule("*.mlp", "stash", min_bytes=256)], ps.PoolConfig(page=256))
    found = ps.profile(model, x, repeats=1, policy=policy)
    keeper = ps.Keeper(policy).attach(model)
    for _ in range(2):  # the first sizes the pool
        with keeper.step():
            model(x)[:40].sum().backward()
    peaks = keeper.stats().homes
    assert found.home_bytes()["keep"] + found.bytes_of("input") == peaks["keep"].peak > 0
    stashed = [t for t, home in zip(found.tensors, found.homes()) if home == "stash" and t.counted]
    assert sum(tensor.valid_bytes for tensor in stashed) == peaks["stash"].peak > 0
    assert found.home_bytes()["stash"] == sum(tensor.counted for tensor in stashed)


# --- fits ---

MS = 1e-3
MEGABYTE = 1 << 20


def used(at):
    """Of a tensor that backward asks for in one segment alone."""
    return {"needed_at": at, "freed_at": at, "asked": (at, 0), "done_at": at}


def stack(layers, *, forward=10 * MS, backward=20 * MS, size=100 * MEGABYTE, head=20 * MS, rate=20e9):
    """A profile of `layers` equal layers that save `size` bytes each, and a head."""
    names = [f"layers.{index}" for index in range(layers)]
    segments = [Segment(("", name), "forward", forward) for name in names]
    segments += [Segment(("", "head"), way, head) for way in ("forward", "backward")]
    segments += [Segment(("", name), "backward", backward) for name in reversed(names)]
    tensors = [
        SavedTensor(
            region=name,
            path=("", name),
            shape=(size,),
            dtype="uint8",
            device="cpu",
            kind="activation",
            bytes=size,
            storage=index,
            storage_bytes=size,
            counted=size,
            valid_bytes=size,
            held_by=(),
            saved_at=index,
            request=0,
            span=(0, size),
            **used(2 * layers + 1 - index),
        )
        for index, name in enumerate(names)
    ]
    regions = [
        ps.profiling.Region(
            name=name,
            path=("", name),
            calls=1,
            within=name,
            tensors=1,
            bytes=size,
            forward_seconds=forward,
            backward_seconds=backward,
            total_bytes=size,
            total_forward_seconds=forward,
            total_backward_seconds=backward,
            hidden_bytes=0,
        )
        for name in names
    ]
    return ps.Profile(
        device="cpu",
        link=Link(rate, rate),
        tensors=tensors,
        regions=regions,
        segments=segments,
        plain_seconds=sum(segment.seconds for segment in segments),
        model_bytes=0,
        gradient_bytes=0,
    )


def test_bytes_fit_when_compute_waits_for_no_copy():
    # 100 MiB take 5.2 ms at 20 GB/s; a layer computes for 10. The last three are needed within a window: they stay.
    found = stack(8).fits("layers.*")
    assert found.fits
    assert found.fraction == 1.0
    assert found.exposed_seconds == 0
    assert (found.moved_bytes, found.staying_bytes) == (500 * MEGABYTE, 300 * MEGABYTE)
    assert found.needed_seconds == pytest.approx(500 * MEGABYTE / 20e9)
    # From the end of the first layer to the end of the head.
    assert found.available_seconds == pytest.approx(90 * MS)


def test_bytes_that_do_not_fit_have_a_fraction_that_does():
    # 17.5 ms of copies a layer of 10. Five layers leave, by 10 + 5 · 17.5 = 97.4 ms; when the last layer begins,
    # after 70, the window is for it and the two others that stay.
    profile = stack(8, rate=6e9)
    copy = 100 * MEGABYTE / 6e9
    found = profile.fits("layers.*")
    assert not found.fits
    assert found.exposed_seconds == pytest.approx(10 * MS + 5 * copy - 70 * MS)
    # Whole tensors leave: with 0.78 all but the third and the seventh, of which the last three stay.
    assert found.fraction == 0.78
    less = profile.fits(ps.Policy([ps.Rule("layers.*", "offload", fraction=0.78)]))
    assert less.fits
    assert (less.moved_bytes, less.staying_bytes) == (300 * MEGABYTE, 300 * MEGABYTE)
    assert not profile.fits(ps.Policy([ps.Rule("layers.*", "offload", fraction=0.79)])).fits


def test_which_tensors_leave_under_a_fraction_is_what_the_keepers_split_says():
    profile = stack(8)
    policy = ps.Policy([ps.Rule("layers.*", "offload", fraction=0.4)])
    moves = moves_of(policy, profile.tensors, ["offload"] * 8, Timeline(profile.segments))
    split, rule = RowSplit({}), policy.rules[0]
    shares = [split.share(rule, EntryShape(100 * MEGABYTE)) for _ in range(8)]
    assert [move.bytes for move in moves] == shares
    assert [move.device_bytes for move in moves] == shares
    assert [move.kept_bytes for move in moves] == [100 * MEGABYTE - share for share in shares]
    assert [bool(move.leaving) for move in moves] == [bool(share) for share in shares]
    assert 0 < sum(map(bool, shares)) < 8


def test_rows_leave_up_to_the_part_of_those_that_are_expected():
    profile = stack(4)
    few = [
        replace(tensor, shape=(100, 1 << 20), valid_bytes=valid * MEGABYTE)
        for tensor, valid in zip(profile.tensors, (10, 20, 30, 40))
    ]
    policy = ps.Policy([ps.Rule("layers.*", "offload", fraction=0.5)])
    moves = moves_of(policy, few, ["offload"] * 4, Timeline(profile.segments))
    assert [move.bytes for move in moves] == [12 * MEGABYTE] * 4  # of a mean of 25 rows
    assert [move.device_bytes for move in moves] == [100 * MEGABYTE] * 4


def test_backward_may_be_what_does_not_fit():
    # Out is hidden. Back, the first copy may start when the first layer that stayed is done, 22 ms into backward.
    found = stack(16, backward=2 * MS).fits("layers.*")
    assert not found.fits
    # The last need is the first layer's, after 20 + 15 · 2 ms; 13 copies come before it.
    assert found.exposed_seconds == pytest.approx(22 * MS + 13 * 100 * MEGABYTE / 20e9 - 50 * MS)
    assert found.needed_seconds == pytest.approx(13 * 100 * MEGABYTE / 20e9)
    assert found.available_seconds == pytest.approx(50 * MS)


def test_a_wider_window_fetches_earlier():
    # Copies of 26.2 ms for layers of 20: with three groups in the window the link starts later than with four.
    found = stack(8, forward=40 * MS, rate=4e9)
    narrow = found.fits(ps.Policy([ps.Rule("layers.*", "offload")]))
    wide = found.fits(ps.Policy([ps.Rule("layers.*", "offload", prefetch_bytes=400 * MEGABYTE)]))
    assert narrow.exposed_seconds > wide.exposed_seconds
    assert wide.staying_bytes == 400 * MEGABYTE
    # A window smaller than a group: it comes when it is asked for, and everybody waits.
    small = found.fits(ps.Policy([ps.Rule("layers.*", "offload", prefetch_bytes=MEGABYTE)]))
    assert small.moved_bytes == 700 * MEGABYTE
    back = 100 * MEGABYTE / 4e9
    assert small.exposed_seconds > 6.99 * back


def test_a_region_leaves_when_it_ends_and_returns_whole():
    paths = [("", "layers.0", "layers.0.a"), ("", "layers.0")]
    segments = [
        Segment(paths[0], "forward", 20 * MS),
        Segment(paths[1], "forward", 10 * MS),
        Segment(("", "head"), "forward", 10 * MS),
        Segment(("", "head"), "backward", 10 * MS),
        Segment(paths[1], "backward", 10 * MS),
        Segment(paths[0], "backward", 20 * MS),
    ]
    tensor = stack(1).tensors[0]
    tensors = [
        replace(tensor, region="layers.0.a", path=paths[0], saved_at=0, **used(5)),
        replace(tensor, path=paths[1], storage=1, saved_at=1, **used(4), valid_bytes=MEGABYTE),
        replace(tensor, path=paths[1], storage=1, saved_at=1, **used(4), counted=0),
    ]
    policy = ps.Policy([ps.Rule("layers.0", "offload", fraction=0.5, prefetch_bytes=7)])
    (move,) = moves_of(policy, tensors, ["offload"] * 3, Timeline(segments))
    assert move.ready == pytest.approx(30 * MS)
    assert move.needed == pytest.approx(50 * MS)
    assert (move.put_at, move.asked_at, move.dropped_at) == (2, (4, 5), 6)
    assert (move.bytes, move.device_bytes, move.window) == (100 * MEGABYTE, 100 * MEGABYTE, 7)
    assert (move.storages, move.leaving, move.kept_bytes) == ((0, 1), {0}, 100 * MEGABYTE)


def test_a_policy_that_moves_nothing_fits_and_one_that_can_move_nothing_does_not():
    assert stack(2).fits(ps.Policy([ps.Rule("layers.*", "keep")])).fits
    alone = stack(1).fits("layers.*")
    assert not alone.fits
    assert alone.moved_bytes == 0
    assert alone.fraction == 0.0


def test_a_pattern_that_matches_nothing_is_named():
    with pytest.raises(ValueError, match=r"'layer\.\*' matches no region.*layers\.0"):
        stack(2).fits("layer.*")


def test_a_measured_step_is_judged_by_its_link():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(Gate()) for _ in range(6)))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    fast = ps.profile(model, x, repeats=1, link=1e15).fits("*", min_bytes=1)
    slow = ps.profile(model, x, repeats=1, link=1.0).fits("*", min_bytes=1)
    assert fast.moved_bytes == slow.moved_bytes > 0
    assert fast.fits
    assert not slow.fits
    assert slow.exposed_seconds > 0.5 * slow.moved_bytes
