"""The keeper: same bits with and without it, and a pool that is empty again after every kind of step."""

import gc
import threading

import pytest
import torch
from stack import CAPACITY, WIDTH, Experts, Stack, batch, policy, run, same
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.saved.packed import Untouched
from pagestash.saved.region import claim
from pagestash.saved.storage import modules_in

POOLS = {
    "measured": {},
    "spilling": {"device": 256 * 20, "host": "1MiB"},
    "host only": {"device": 256, "host": "1MiB"},
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def in_use(keeper: ps.Keeper) -> int:
    gc.collect()
    stats = keeper.stats()
    assert stats.pool is not None
    assert stats.homes["keep"].bytes == 0
    assert stats.pool.valid_bytes == 0
    return stats.pool.device.in_use + stats.pool.host.in_use


@pytest.fixture
def sized():
    """A model, a keeper whose pool exists, and the plain result for `batch(20)`."""
    model = Stack()
    x, rows = batch(20)
    plain = run(model, x, rows)
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    assert same(run(model, x, rows, keeper), plain)
    assert keeper.pool is not None
    return model, keeper, plain


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
@pytest.mark.parametrize(
    "rows", [0, pytest.param(1, marks=pytest.mark.slow), 20, pytest.param(CAPACITY, marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_the_same_to_the_last_bit(backend, pool, rows):
    model = Stack(depth=2)
    x, count = batch(rows)
    plain = run(model, x, count)
    keeper = ps.Keeper(policy(headroom=2.0, **pool), backend=backend).attach(model)
    for _ in range(3):
        try:
            result = run(model, x, count, keeper)
        except ps.PoolOverflow:
            pytest.fail("the pool was large enough")
        assert same(result, plain)
    if rows:
        assert in_use(keeper) == 0
        assert (keeper.stats().spilled_bytes > 0) == (bool(pool) and (rows >= 20 or pool["device"] == 256))


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


def test_weights_stay_where_they_are(sized):
    model, keeper, _ = sized
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    packed = []
    original = keeper._saved.pack

    def spy(tensor):
        out = original(tensor)
        packed.append((tensor.untyped_storage()._cdata in weights, isinstance(out, Untouched)))
        return out

    keeper._saved.pack = spy
    x, rows = batch(20)
    run(model, x, rows, keeper)
    assert any(is_weight for is_weight, _ in packed)
    assert all(through for is_weight, through in packed if is_weight)


def test_weights_reallocated_before_forward_stay_where_they_are():
    """As FSDP2 does it: the parameter of a child gets new storage in a hook of its own, after the step began."""
    model = nn.Sequential(nn.Sequential(nn.Linear(16, 16, bias=False)))
    linear = model[0][0]

    def reallocate(module, args):
        module.weight = nn.Parameter(module.weight.detach().clone())

    linear.register_forward_pre_hook(reallocate, prepend=True)
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    x = torch.randn(8, 16, requires_grad=True)
    for _ in range(2):
        with keeper.step():
            model(x).square().sum().backward()
    peak = keeper.stats().homes["stash"].peak
    assert peak == x.nbytes  # the input, for the weight's gradient; the weight itself was not taken


class Borrower(nn.Module):
    """Uses the parameters of its parts without calling them, as a fused operation does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        return nn.functional.linear(x, self.inner.weight)


def _swap_data(model):
    model[0].inner.weight.data = model[0].inner.weight.data.clone()


def _replace_parameter(model):
    model[0].inner.weight = nn.Parameter(model[0].inner.weight.detach().clone())


def _replace_module(model):
    model[0].inner = nn.Linear(16, 16, bias=False)


def _add_parameter(model):
    model[0].register_parameter("late", nn.Parameter(torch.randn(16, 16)))
    model[0].forward = lambda x: nn.functional.linear(x, model[0].late)


@pytest.mark.parametrize("within", [False, True], ids=["between steps", "within a step"])
@pytest.mark.parametrize("change", [_swap_data, _replace_parameter, _replace_module, _add_parameter])
def test_weights_are_those_that_a_module_has_when_its_region_opens(change, within):
    model = nn.Sequential(Borrower())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256)))
    keeper.attach(model)
    x = torch.randn(8, 16, requires_grad=True)
    for _ in range(3):
        if not within:
            change(model)
        with keeper.step():
            if within:
                change(model)
            model(x).sum().backward()
    assert keeper.stats().homes["stash"].peak == x.nbytes  # and nothing of the weight, of 1024 bytes


def test_modules_are_found_once_each_wherever_they_are():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.Sequential(shared, nn.ModuleDict({"a": nn.ReLU()})))
    model.register_module("nothing", None)
    model[1].register_module("cycle", model)
    found = modules_in(model, shared)
    assert found[0] is model
    assert sorted(map(id, found)) == sorted(map(id, model.modules()))


def test_a_module_in_several_regions_notes_its_weights_once():
    model = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(4, 4))))
    ps.Keeper(ps.Policy([ps.Rule("**", "keep")])).attach(model)
    assert len(model[0][0][0]._forward_pre_hooks) == 2  # one that notes, and one that opens its own region


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
    for rule in (ps.Rule("0", "stash", min_bytes=16), ps.Rule("0", "keep")):
        keeper = ps.Keeper(ps.Policy([rule], ps.PoolConfig(page=256))).attach(model)
        x = torch.randn(64, 16, requires_grad=True)
        with keeper.step(), pytest.raises(RuntimeError, match="changed in place"):
            model(x).backward()


def test_a_weight_changed_between_forward_and_backward_is_refused(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    with keeper.step():
        loss = model(x, rows)
        with torch.no_grad():
            model.layers[1].experts.down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            loss.backward()


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_row_count_refilled_between_two_regions_is_not_taken_for_the_old_one(pool):
    class Twice(nn.Module):
        def forward(self, x, count):
            y = x * 2
            total = 0.0
            for rows in (2, 8):
                count.fill_(rows)
                with ps.region(rows=count, capacity=8):
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
            with ps.region(rows=count, capacity=8):
                y = (x * 2).square().sum()
                count.fill_(3)
            return y

    model = nn.Sequential(Early())
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", min_bytes=16)], ps.PoolConfig(page=256))).attach(
        model
    )
    with keeper.step(), pytest.raises(RuntimeError, match="row count"):
        model[0](torch.randn(8, 64, requires_grad=True), torch.tensor(8)).backward()


def test_a_forward_in_another_thread_is_left_alone(sized):
    """As when autograd runs a checkpointed forward again, in a thread of its own on a GPU."""
    model, keeper, _ = sized
    x, rows = batch(20)
    results = []
    with keeper.step():
        thread = threading.Thread(target=lambda: results.append(model(x, rows)))
        thread.start()
        thread.join()
    assert len(results) == 1


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


# --- the pool is empty again ---


def test_backward_twice_over_one_graph(sized):
    model, keeper, plain = sized
    x, rows = batch(20)
    model.zero_grad()
    torch.manual_seed(1)
    with keeper.step():
        loss = model(x, rows)
        loss.backward(retain_graph=True)
        assert keeper.stats().pool.device.in_use > 0
        loss.backward()
    assert all(torch.equal(p.grad, 2 * g) for p, g in zip(model.parameters(), plain[1]))
    assert in_use(keeper) == 0


def test_unpacking_twice_restores_twice(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    x.requires_grad_()
    with keeper.step():
        loss = model(x, rows)
        first = torch.autograd.grad(loss, x, retain_graph=True)[0]
        weights = torch.autograd.grad(loss, list(model.parameters()))
    torch.manual_seed(1)
    assert first.abs().sum() > 0
    assert all(w.abs().sum() > 0 for w in weights)
    del loss
    assert in_use(keeper) == 0


def test_gradient_accumulation_over_microbatches(sized):
    model, keeper, _ = sized
    parts = [batch(rows, seed) for seed, rows in enumerate((20, 3, 40))]
    model.zero_grad()
    torch.manual_seed(1)
    for x, rows in parts:
        model(x, rows).backward()
    plain = [p.grad.clone() for p in model.parameters()]
    keeper.pool.grow(device_pages=4096)
    model.zero_grad()
    torch.manual_seed(1)
    with keeper.step():
        for x, rows in parts:
            model(x, rows).backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain))
    assert in_use(keeper) == 0


def test_all_forwards_before_all_backwards_first_in_first_out(sized):
    model, keeper, _ = sized
    keeper.pool.grow(device_pages=4096)
    parts = [batch(rows, seed) for seed, rows in enumerate((20, 3, 40, 64))]
    plain = [run(model, *part) for part in parts]
    losses, results = [], []
    with keeper.step():
        for part in parts:
            torch.manual_seed(1)
            losses.append(model(*part))
        while losses:
            model.zero_grad()
            loss = losses.pop(0)
            loss.backward()
            results.append((loss.detach(), [p.grad.clone() for p in model.parameters()]))
            del loss
    assert all(same(a, b) for a, b in zip(results, plain))
    assert in_use(keeper) == 0


def test_passes_without_gradients_between_steps_leave_nothing(sized):
    model, keeper, plain = sized
    x, rows = batch(20)
    with torch.no_grad():
        model(x, rows)
    with keeper.step(), torch.no_grad():
        model(x, rows)
    model.eval()
    with keeper.step():
        with torch.no_grad():
            model(x, rows)
        model(x, rows)  # with gradients, and no backward
    model.train()
    assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)


def test_a_pass_without_gradients_does_not_count_as_the_measured_step():
    model = Stack()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    with keeper.step(), torch.no_grad():
        model(*batch(20))
    assert keeper.pool is None
    run(model, *batch(20), keeper)
    assert keeper.pool is not None


def test_an_exception_in_mid_forward_leaves_nothing(sized):
    model, keeper, plain = sized
    x, rows = batch(20)

    def fail(module, args):
        raise KeyError("mid-forward")

    for layer in (model.layers[2], model.layers[1].experts.down):
        hook = layer.register_forward_pre_hook(fail)
        with pytest.raises(KeyError, match="mid-forward"), keeper.step():
            model(x, rows)
        hook.remove()
        assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)


def test_an_exception_in_mid_backward_leaves_nothing(sized):
    model, keeper, plain = sized
    x, rows = batch(20)

    def fail(grad):
        raise KeyError("mid-backward")

    hook = model.layers[1].experts.down.weight.register_hook(fail)
    with pytest.raises(KeyError, match="mid-backward"), keeper.step():
        model(x, rows).backward()
    hook.remove()
    # Autograd itself holds on to the failed backward until the thread runs the next one.
    assert in_use(keeper) == 0
    assert same(run(model, x, rows, keeper), plain)
    assert in_use(keeper) == 0


def test_a_forward_whose_backward_never_runs_leaves_nothing(sized):
    model, keeper, _ = sized
    with keeper.step():
        loss = model(*batch(20))
    assert keeper.stats().pool.device.in_use > 0
    del loss
    assert in_use(keeper) == 0


# --- overflow, regions, keepers ---


def test_a_pool_of_host_pages_alone():
    model = Stack()
    x, count = batch(20)
    plain = run(model, x, count)
    keeper = ps.Keeper(policy(device=0, host="1MiB"), backend="torch").attach(model)
    assert keeper.pool is not None
    assert keeper.pool.device_pages == 0
    assert same(run(model, x, count, keeper), plain)


def test_a_fixed_pool_is_there_from_the_start():
    keeper = ps.Keeper(policy(device="1MiB"), backend="torch").attach(Stack())
    assert keeper.pool is not None
    assert keeper.pool.device_pages * keeper.pool.page_bytes == 1 << 20


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
        with ps.region(rows=torch.tensor([8]), capacity=8):
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


def test_region_outside_a_step_does_nothing_and_checks_its_arguments():
    with ps.region("anything", rows=torch.tensor(1), capacity=3):
        pass
    with pytest.raises(ValueError, match="both or neither"), ps.region(rows=torch.tensor(1)):
        pass
    with (
        pytest.raises(ValueError, match="expected an integer tensor on the device"),
        ps.region(rows=3, capacity=4),
    ):
        pass


def test_two_keepers_in_one_process_do_not_mix():
    first, second = Stack(), Stack()
    x, rows = batch(20)
    plain = run(first, x, rows), run(second, x, rows)
    keepers = [ps.Keeper(policy(), backend="torch").attach(model) for model in (first, second)]
    for _ in range(2):
        model_results = [run(model, x, rows, keeper) for model, keeper in zip((first, second), keepers)]
        assert same(model_results[0], plain[0])
        assert same(model_results[1], plain[1])
    assert keepers[0].pool is not keepers[1].pool
    first.zero_grad(), second.zero_grad()
    torch.manual_seed(1)
    with keepers[0].step(), keepers[1].step():
        loss = first(x, rows) + second(x, rows)
        loss.backward()
    del loss
    assert [in_use(keeper) for keeper in keepers] == [0, 0]


def test_a_step_inside_a_step_is_refused(sized):
    _, keeper, _ = sized
    with keeper.step(), pytest.raises(RuntimeError, match="one step at a time"), keeper.step():
        pass


def test_detach_takes_every_hook_off(sized):
    model, keeper, plain = sized
    keeper.detach()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert same(run(model, *batch(20), keeper), plain)


def test_checkpoint_outside_a_region_gives_the_same_bits(sized):
    model, keeper, _ = sized
    x, rows = batch(20)
    x.requires_grad_()

    def loss_of():
        torch.manual_seed(1)
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, rows, use_reentrant=False)
        return y[:20].square().sum()

    model.zero_grad()
    loss_of().backward()
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with keeper.step():
        loss_of().backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain))
    assert in_use(keeper) == 0


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


def test_held_tells_each_home_without_waiting():
    torch.manual_seed(0)
    model = Stack()
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    x, rows = batch(20)
    told = []
    for _ in range(2):  # measured, then in pages
        with keeper.step():
            loss = model(x, rows)
            held, stats = keeper.held(), keeper.stats()
            told.append({home: int(size) for home, size in held.items()})
            assert told[-1] == {home: each.bytes for home, each in stats.homes.items()}
            loss.backward()
    assert told[0] == told[1]
    assert told[0]["stash"] > 0
    assert int(keeper.held()["stash"]) == 0
