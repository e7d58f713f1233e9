"""Which bytes the keeper takes: each saved tensor once, its valid rows, as it was when it was saved."""

import pytest
import torch
from stack import CAPACITY, Experts, Stack, batch, run
from torch import nn

import pagestash as ps
from pagestash.torch_internals import StorageWeakRef


def test_tails_may_be_nan(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    seen = []

    def poison(module, args):
        # Rows past `rows` are garbage by contract; what is stashed and restored must not depend on them.
        with torch.no_grad():
            args[0][20:] = float("nan")

    def look(group, entry):
        flat = original(group, entry)
        if entry.rows is not None:
            seen.append(flat.view(CAPACITY, -1)[20:])
        return flat

    hook = model.layers[0].experts.register_forward_pre_hook(poison, prepend=True)
    stash = keeper._stash._paged
    original, stash.get = stash.get, look
    try:
        run(model, x, rows, keeper)
    finally:
        hook.remove()
    assert seen
    assert all((tail == 0).all() for tail in seen)


def test_only_valid_rows_take_pages(sized):
    model, keeper, _ = sized
    full = batch(CAPACITY)
    keeper.pool.grow(device_pages=4096)
    keeper.reset_peaks()
    run(model, *full, keeper)
    all_rows = keeper.stats().homes["stash"].peak
    keeper.reset_peaks()
    run(model, full[0], torch.tensor(CAPACITY // 4), keeper)
    assert keeper.stats().homes["stash"].peak * 4 == all_rows


def test_a_tensor_saved_twice_is_stored_once():
    class Twice(nn.Module):
        def forward(self, x):
            y = x * 2
            return (y * y.detach().clone().requires_grad_()).sum() + (y**3).sum()  # y is saved by both

    model = nn.Sequential(Twice())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    x = torch.randn(64, 16, requires_grad=True)
    for _ in range(2):
        with keeper.step():
            model(x).backward()
    # y and the detached copy: two tensors of 4 KiB, though three operations saved y's bytes.
    assert keeper.stats().homes["stash"].peak == 2 * x.nbytes


def test_both_halves_of_one_buffer_are_one_entry():
    model = nn.Sequential(Experts())
    x = torch.randn(CAPACITY, 32)
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    rows = torch.tensor(CAPACITY)
    for _ in range(2):
        with keeper.step():
            model[0](x, rows).sum().backward()
    row = 4 * (32 + 96 + 48 + 48)  # x, the projection (gate and value), silu(gate), their product
    assert keeper.stats().homes["stash"].peak == CAPACITY * row


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(
    "odd",
    [
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        lambda x: x[:0],
        lambda x: x.to_sparse(),
    ],
    ids=["conjugate", "negative", "quantised", "empty", "sparse"],
)
def test_what_is_not_its_bytes_as_they_stand_is_not_moved(odd):
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            saved.append(odd(x.detach().clone()))
            ctx.save_for_backward(saved[-1])
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            came_back.extend(ctx.saved_tensors)
            return grad.expand(8, 16)

    class Module(nn.Module):
        def forward(self, x):
            return Save.apply(x)

    saved: list[torch.Tensor] = []
    came_back: list[torch.Tensor] = []
    model = nn.Sequential(Module())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=0)], ps.PoolConfig(page=64))).attach(model)
    x = torch.randn(8, 16, requires_grad=True)
    with keeper.step():
        model(x).backward()
    (was,), (value,) = saved, came_back
    assert keeper.stats().homes["stash"].peak == 0
    assert (value.layout, value.dtype, value.shape) == (was.layout, was.dtype, was.shape)
    assert (value.is_conj(), value.is_neg()) == (was.is_conj(), was.is_neg())
    assert torch.equal(_plain(value), _plain(was))


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return tensor.dequantize() if tensor.is_quantized else tensor.resolve_conj().resolve_neg()


def test_small_tensors_are_kept():
    model = Stack()
    rule = ps.Rule("layers.*.experts", "stash", min_bytes="1MiB")
    keeper = ps.Keeper(ps.Policy([rule])).attach(model)
    run(model, *batch(20), keeper)
    stats = keeper.stats()
    assert stats.homes["stash"].peak == 0
    assert stats.homes["keep"].peak > 0
    assert keeper.pool is None  # nothing was stashed yet: the next step measures again


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[:, 3:5],
        lambda x: x[:, : x.shape[1] // 2 + 1],
        lambda x: x[::7],
        lambda x: x[1:2].expand(9, -1),
        lambda x: x.view(4, -1).transpose(0, 1),
        lambda x: x[5:].flatten()[3:],
        lambda x: x.view(torch.int32)[2:].view(torch.float32),
    ],
    ids=["transposed", "narrow", "wide", "strided", "expanded", "reshaped", "odd start", "other dtype"],
)
def test_views_come_back_with_their_strides(backend, view):
    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, v):
            ctx.save_for_backward(v)
            return x.sum()

        @staticmethod
        def backward(ctx, grad):
            (v,) = ctx.saved_tensors
            came_back.append((v.clone(), v.stride(), v.shape, v.dtype))
            return torch.ones(40, 16) * grad, None

    class Module(nn.Module):
        def forward(self, x):
            return Save.apply(x, view((x * 3).detach()))

    came_back: list = []
    model = nn.Sequential(Module())
    keeper = ps.Keeper(
        ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=64)), backend=backend
    ).attach(model)
    x = torch.randn(40, 16, requires_grad=True)
    for _ in range(2):
        with keeper.step():
            model(x).backward()
    expected = view((x * 3).detach())
    for value, stride, shape, dtype in came_back:
        assert torch.equal(value, expected)
        assert (stride, shape, dtype) == (expected.stride(), expected.shape, expected.dtype)
    stats = keeper.stats()
    assert 0 < stats.homes["stash"].peak <= max(2 * expected.nbytes, 80)
    if 0 in expected.stride():
        assert stats.homes["stash"].peak < expected.nbytes, "an expanded view was written out"


def test_a_tensor_changed_in_place_after_it_was_saved_is_refused(sized):
    class Spoil(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y.square().sum()  # saves y
            y.add_(1)
            return z

    model = nn.Sequential(Spoil())
    rule = ps.Rule("0", "stash", min_bytes=16)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256))).attach(model)
    x = torch.randn(64, 16, requires_grad=True)
    with keeper.step(), pytest.raises(RuntimeError, match="changed in place"):
        model(x).backward()


def test_a_tensor_changed_in_place_after_its_region_is_as_it_was_when_saved():
    class Square(nn.Module):
        def forward(self, x):
            self.y = x * 2
            return self.y.square().sum()

    model = nn.Sequential(Square())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    x = torch.randn(64, 16, requires_grad=True)
    with keeper.step():
        loss = model(x)
        with torch.no_grad():
            model[0].y.add_(1)
        loss.backward()
    assert torch.equal(x.grad, 2 * (x * 2).detach() * 2)


class FusedProjection(nn.Module):
    """Queries, keys and values are slices of one result; all of them are saved."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 64, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).split([40, 12, 12], dim=1)
        return q.square().sum() + k.square().sum() + v.square().sum()


@pytest.mark.parametrize("home", ["stash", "offload"])
def test_thin_slices_of_what_leaves_anyway_take_no_bytes_of_their_own(home):
    torch.manual_seed(0)
    model, x = nn.Sequential(FusedProjection()), torch.randn(32, 16)
    model(x).backward()
    plain = model[0].qkv.weight.grad.clone()
    rule = ps.Rule("0", home, min_bytes=1024)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256)), backend="torch").attach(model)
    held = []
    for _ in range(3):
        model.zero_grad()
        with keeper.step():
            loss = model(x)
            held.append(keeper.stats().homes[home].bytes)
            loss.backward()
        assert torch.equal(model[0].qkv.weight.grad, plain)
    # The projection, whole, and its input. (From the second step on, the only group is within offload's window.)
    assert held[0] == 32 * 64 * 4 + x.nbytes


class Dropped(FusedProjection):
    """Nobody asks for the queries."""

    def forward(self, x):
        q, k, _ = self.qkv(x).split([40, 12, 12], dim=1)
        q.square()
        return k.square().sum()


def test_a_thin_slice_does_not_bring_back_a_buffer_that_nobody_asks_for():
    model, x = nn.Sequential(Dropped()), torch.randn(32, 16)
    rule = ps.Rule("0", "stash", min_bytes=1024)
    keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256)), backend="torch").attach(model)
    with keeper.step():
        loss = model(x)
        assert keeper.stats().homes["stash"].bytes == 32 * 12 * 4 + x.nbytes
        loss.backward()


@pytest.mark.parametrize("thin", [False, True])
def test_what_only_a_graph_that_was_let_go_of_has_saved_is_free_when_its_region_is_over(thin):
    class Looks(nn.Module):
        def forward(self, x):
            figure = x * 2.0
            seen.append(StorageWeakRef(figure.untyped_storage()))
            (figure[:, :2] if thin else figure).square().sum()  # nobody keeps the result
            return x.sin()

    seen: list[StorageWeakRef] = []
    model = nn.Sequential(Looks())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    with keeper.step():
        loss = model(torch.randn(64, 16, requires_grad=True)).sum()
        assert seen[0].expired()
        loss.backward()
