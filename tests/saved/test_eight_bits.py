"""`bits=8`: every home holds the same codes, of wide half-precision activations, and of no others."""

import gc
import pickle
from itertools import product

import pytest
import torch
from recomputed import Log
from support import same
from support.steps import loss_and_gradients
from support.tiers import KERNELS_IN_THE_REST, slow_but
from torch import nn

import pagestash as ps
from pagestash.kernels.pages.eight_bits import CodeShape, decode_reference, encode_reference
from pagestash.planning.predict import predict
from pagestash.saved.eight_bits import can_code
from pagestash.simulation.model.homes import PolicyHomes

# No weight has as many rows: a tensor without history in the shape of a weight is not coded.
WIDTH, ROWS = 64, 32
POOLS = {
    "measured": {"headroom": 2.0},
    "tiny pages": {"page": 64, "headroom": 2.0},
    "odd pages": {"page": 2064 + 16, "headroom": 2.0},
    "too small": {"page": 256, "device": 4096},
    "spilling": {"page": 256, "device": 256 * 20, "host": "1MiB"},
    "host only": {"page": 256, "device": 256, "host": "1MiB"},
}
QUICK = ("measured", "too small", "spilling")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, depth: int = 3, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.to(dtype)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def batch(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)


def rule(home="stash", bits=8, match="layers.*"):
    window = {"prefetch_bytes": 0} if home == "offload" else {}
    return ps.Rule(match, home, min_bytes=256, bits=bits, **window)


def coded_by_hand(model, x):
    """The step if each wide half-precision activation is coded when it is saved."""
    weights = {parameter.data_ptr() for parameter in model.parameters()}

    def pack(tensor):
        if tensor.data_ptr() in weights or not can_code(tensor):
            return tensor
        shape = CodeShape.of(tensor.numel())
        values = decode_reference(encode_reference(tensor.detach().reshape(-1), shape), shape, tensor.dtype)
        return values.view(tensor.shape)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return loss_and_gradients(model, x)


@pytest.fixture(scope="module")
def model():
    return Net()


@pytest.fixture(scope="module")
def expected(model):
    found = coded_by_hand(model, batch())
    assert not same(found, loss_and_gradients(model, batch()))
    return found


def nothing_waits(keeper):
    gc.collect()
    stats = keeper.stats()
    assert all(home.bytes == 0 for home in stats.homes.values())
    assert stats.pool is None or stats.pool.device.in_use + stats.pool.host.in_use == 0


@pytest.mark.parametrize(
    ("backend", "pool"),
    slow_but([("triton", "measured"), *product(["torch"], QUICK)], product(["torch", "triton"], POOLS)),
    indirect=["backend"],
)
def test_stashed_codes_come_back_in_every_step(backend, pool, model, expected):
    policy = ps.Policy([rule()], pool=ps.PoolConfig(**{"page": 256, **POOLS[pool]}))
    keeper = ps.Keeper(policy, backend=backend).attach(model)
    for _ in range(3):
        assert same(loss_and_gradients(model, batch(), keeper), expected)
        nothing_waits(keeper)
    keeper.detach()


@KERNELS_IN_THE_REST
@pytest.mark.parametrize("home", ["keep", "offload"])
def test_other_homes_hold_the_same_codes(backend, home, model, expected):
    keeper = ps.Keeper(ps.Policy([rule(home)]), backend=backend).attach(model)
    for _ in range(3):
        assert same(loss_and_gradients(model, batch(), keeper), expected)
        nothing_waits(keeper)
    keeper.detach()


@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_half_the_bytes_are_held(home, model):
    def peak(bits):
        keeper = ps.Keeper(ps.Policy([rule(home, bits)]), backend="torch", check=True).attach(model)
        loss_and_gradients(model, batch(), keeper)
        keeper.reset_peaks()
        loss_and_gradients(model, batch(), keeper)
        keeper.detach()
        return keeper.stats().homes[home].peak

    coded, whole = peak(8), peak(None)
    # (What the loss saves outside the layers is kept, too.)
    assert 0.5 * whole < coded < (0.56 if home == "keep" else 0.51) * whole


@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_without_bits_no_bit_changes(home, model):
    keeper = ps.Keeper(ps.Policy([rule(home, None)]), backend="torch").attach(model)
    plain = loss_and_gradients(model, batch())
    for _ in range(2):
        assert same(loss_and_gradients(model, batch(), keeper), plain)
    keeper.detach()


@pytest.mark.parametrize("home", ["keep", "stash", "offload"])
def test_float32_activations_are_held_as_they_are(home, caplog):
    model, x = Net(dtype=torch.float32), batch(torch.float32)
    plain = loss_and_gradients(model, x)
    keeper = ps.Keeper(ps.Policy([rule(home)]), backend="torch").attach(model)
    with caplog.at_level("WARNING", "pagestash"):
        for _ in range(3):
            assert same(loss_and_gradients(model, x, keeper), plain)
    assert "bits=8 coded nothing" in caplog.text
    assert "torch.float32" in caplog.text
    keeper.detach()


def test_a_rule_that_codes_says_nothing(model, caplog):
    keeper = ps.Keeper(ps.Policy([rule("keep")]), backend="torch").attach(model)
    with caplog.at_level("WARNING", "pagestash"):
        for _ in range(3):
            loss_and_gradients(model, batch(), keeper)
    assert not caplog.text
    keeper.detach()


@pytest.mark.parametrize(
    ("tensor", "coded"),
    [
        (torch.zeros(4, 64).bfloat16(), True),
        (torch.zeros(4, 64).half(), True),
        (torch.zeros(4, 64), False),
        (torch.zeros(4, 64).double(), False),
        (torch.zeros(4, 64).int(), False),
        (torch.zeros(4, 64).bool(), False),
        (torch.zeros(4, 64).byte(), False),
        (torch.zeros(1000, 8).bfloat16(), False),
        (torch.zeros(1000, 1).bfloat16(), False),
        (torch.zeros(()).bfloat16(), False),
    ],
)
def test_what_can_be_coded(tensor, coded):
    assert can_code(tensor) is coded


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_that_autocast_has_cast_are_not_coded(frozen):
    """The gradient of the input is then that of exact weights and an exact gradient of the output."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.part = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.part(x).float().sum()

    model, x = Linear(), batch().requires_grad_()
    model.part.weight.requires_grad_(not frozen)
    model(x).backward()
    plain, x.grad = (x.grad, model.part.weight.grad), None
    model.zero_grad()
    keeper = ps.Keeper(ps.Policy([rule("keep", match="part")]), backend="torch").attach(model)
    with keeper.step():
        model(x).backward()
    keeper.detach()
    assert torch.equal(x.grad, plain[0])
    assert frozen or not torch.equal(model.part.weight.grad, plain[1])  # of the coded input


def test_nothing_that_is_not_finite_becomes_finite(model):
    x = batch()
    x[3, 5] = float("nan")
    keeper = ps.Keeper(ps.Policy([rule("keep")]), backend="torch").attach(model)
    _, grads = loss_and_gradients(model, x, keeper)
    _, plain = loss_and_gradients(model, x)
    keeper.detach()
    assert same([grad.isfinite() for grad in grads], [grad.isfinite() for grad in plain])
    assert not all(grad.isfinite().all() for grad in grads)


def test_backward_twice_over_one_graph(model, expected):
    for home in ("keep", "stash", "offload"):
        keeper = ps.Keeper(ps.Policy([rule(home)]), backend="torch").attach(model)
        loss_and_gradients(model, batch(), keeper)
        model.zero_grad()
        with keeper.step():
            loss = model(batch())
            loss.backward(retain_graph=True)
            model.zero_grad()
            loss.backward()
        assert same([p.grad for p in model.parameters()], expected[1])
        del loss
        nothing_waits(keeper)
        keeper.detach()


def test_an_exact_rule_does_not_share_the_codes_of_another():
    """Two regions save one tensor; what is exact by its rule stays so, whichever region comes first."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH)
            self.to(torch.bfloat16)

        def forward(self, x):
            x = x * 1.0
            return (self.a(x) + self.b(x)).float().sum()

    model, x = Two(), batch().requires_grad_()
    plain = loss_and_gradients(model, x)
    for first, second in (("a", "b"), ("b", "a")):
        policy = ps.Policy([rule(match=first), rule(match=second, bits=None)])
        keeper = ps.Keeper(policy, backend="torch").attach(model)
        for _ in range(2):
            _, grads = loss_and_gradients(model, x, keeper)
            named = dict(zip([name for name, _ in model.named_parameters()], grads))
            exact = dict(zip([name for name, _ in model.named_parameters()], plain[1]))
            assert torch.equal(named[f"{second}.weight"], exact[f"{second}.weight"])
            # What is held exactly anyway is not held a second time, in codes.
            assert torch.equal(named[f"{first}.weight"], exact[f"{first}.weight"]) is (second == "a")
        keeper.detach()


def test_views_of_other_dtypes_share_no_codes():
    found = []

    class Reinterpret(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.detach() * 1
            ctx.save_for_backward(y, y.view(torch.float16), y.view(torch.int16))
            found.append(y.clone())
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            found.extend(ctx.saved_tensors)
            return grad

    class Saves(nn.Module):
        def forward(self, x):
            return Reinterpret.apply(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = Saves()

        def forward(self, x):
            return self.part(x).sum()

    model = Model()
    keeper = ps.Keeper(ps.Policy([rule(match="part")]), backend="torch").attach(model)
    with keeper.step():
        model(batch().requires_grad_()).backward()
    expected, bf16, fp16, integers = found
    assert torch.equal(integers, expected.view(torch.int16))
    for codes, exact in ((bf16, expected), (fp16, expected.view(torch.float16))):
        assert codes.dtype == exact.dtype
        finite = exact.isfinite()
        off = (codes.double() - exact.double()).abs()
        assert (off <= exact.double().abs() / 16 + 1e-2)[finite].all()
        assert not torch.equal(codes, exact)


@pytest.mark.parametrize("home", ["stash", "keep", "offload"])
def test_inputs_of_a_recomputed_region_are_exact(home):
    """A replay sees what the first forward saw; its checks would refuse anything else."""
    model = Net()
    rules = [ps.Rule("layers.*.down", "recompute"), rule(home)]
    keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(model)
    plain = loss_and_gradients(model, batch())
    for _ in range(2):
        loss, grads = loss_and_gradients(model, batch(), keeper)
        assert torch.equal(loss, plain[0])
    names = [name for name, _ in model.named_parameters()]
    last = names.index("layers.2.down.weight")
    assert torch.equal(grads[last], plain[1][last])
    assert not torch.equal(
        grads[names.index("layers.2.up.weight")], plain[1][names.index("layers.2.up.weight")]
    )
    keeper.detach()


class Once(nn.Module):
    """Decides on rows once, as a dispatch does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)
        self.seen = Log()

    def forward(self, x):
        rows = ps.once(lambda: torch.sin(3 * x))
        self.seen.append(rows.detach().clone())
        return torch.tanh(self.up(rows))


@pytest.mark.parametrize("home", ["stash", "keep", "offload"])
def test_a_replay_sees_results_of_once_to_the_last_bit(home):
    model = nn.Sequential(nn.Sequential(Once()), nn.Sequential(Once()))
    rules = [ps.Rule("*.0", "recompute"), rule(home, match="*")]
    keeper = ps.Keeper(ps.Policy(rules), backend="torch").attach(model)
    with keeper.step():
        model(batch().requires_grad_()).float().square().sum().backward()
    for (part,) in model:
        first, replayed = part.seen
        assert torch.equal(first, replayed)
    keeper.detach()


class Rows(nn.Module):
    """A buffer of which `rows` are valid; the others are garbage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(WIDTH, WIDTH)
        self.to(torch.bfloat16)

    def forward(self, x, rows):
        return nn.functional.silu(self.up(ps.rows(x, rows)))


class RowsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = Rows()

    def forward(self, x, rows):
        y = self.experts(x, rows)
        valid = torch.arange(len(y)) < rows
        return torch.where(valid[:, None], y, 0).float().sum()


@KERNELS_IN_THE_REST
@pytest.mark.parametrize("home", ["stash", "offload", "keep"])
@pytest.mark.parametrize("count", [0, 5, ROWS])
def test_valid_rows_alone_are_coded(backend, home, count):
    model, rows = RowsNet(), torch.tensor(count)
    grads = []
    for garbage in (1e30, float("nan")):
        x = batch()
        x[count:] = garbage
        x.requires_grad_()
        keeper = ps.Keeper(ps.Policy([rule(home, match="experts")]), backend=backend).attach(model)
        for _ in range(2):
            x.grad = None
            with keeper.step():
                model(x, rows).backward()
        grads.append(x.grad[:count].clone())
        assert x.grad[:count].isfinite().all()
        nothing_waits(keeper)
        keeper.detach()
    assert torch.equal(*grads)


class TimesItself(nn.Module):
    """The gradient of its sum is twice what was held of its input."""

    def __init__(self, rows=None) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, x):
        return torch.square(x if self.rows is None else ps.rows(x, self.rows))


@pytest.mark.parametrize("counted", [False, True], ids=["no rows", "counted rows"])
@pytest.mark.parametrize("width", [32, 64, 96, 128, 200])
def test_the_error_is_within_the_bound_that_the_guide_states(width, counted):
    """Blocks of 128 values cross rows, except where valid rows are counted."""
    sizes = torch.tensor([0.5, 3e5, 1e-3, 0.5, 40.0, 0.0, 7e-6, 2.0])[:, None]
    held = (sizes * torch.randn(8, width, generator=torch.Generator().manual_seed(0))).bfloat16()
    model = nn.Sequential(TimesItself(torch.tensor(8) if counted else None))
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", "stash", bits=8, min_bytes=0)]), backend="torch").attach(model)
    x = held.clone().requires_grad_()
    with keeper.step():
        (model(x * 1) * 0.5).sum().backward()
    rows = held.double() if counted else held.double().view(1, -1)
    blocks = nn.functional.pad(rows, (0, -rows.shape[1] % 128)).unflatten(-1, (-1, 128))
    largest = blocks.abs().amax(-1, keepdim=True)
    allowed = torch.maximum(blocks.abs() / 16, largest / 2**17).clamp(min=2**-110)
    allowed = allowed.flatten(1)[:, : rows.shape[1]].reshape(held.shape)
    error = (x.grad.double() - held.double()).abs()
    assert (error <= allowed).all()
    assert error.any()
    by_row = torch.maximum(held.abs() / 16, held.abs().amax(1, keepdim=True) / 2**17)
    assert bool((error > by_row).any()) == (not counted and width % 128 != 0)


def test_a_step_that_fails_leaves_no_pages_behind(model, expected):
    keeper = ps.Keeper(ps.Policy([rule()]), backend="torch").attach(model)
    loss_and_gradients(model, batch(), keeper)
    losses = []

    def fails():
        with keeper.step():
            losses.append(model(batch()))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    nothing_waits(keeper)
    with pytest.raises(RuntimeError, match="ended by an exception"):
        losses[0].backward()
    assert same(loss_and_gradients(model, batch(), keeper), expected)
    keeper.detach()


@KERNELS_IN_THE_REST
def test_an_overflow_is_refused_and_the_next_step_is_right(backend, model, expected):
    pool = ps.PoolConfig(page=256, device=2048, on_overflow="raise")
    keeper = ps.Keeper(ps.Policy([rule()], pool=pool), backend=backend).attach(model)
    with pytest.raises(ps.PoolOverflow):
        loss_and_gradients(model, batch(), keeper)
    model.zero_grad()
    assert same(loss_and_gradients(model, batch(), keeper), expected)
    keeper.detach()


# --- the rule ---


def test_bits_in_a_policy_file(tmp_path):
    policy = ps.Policy([rule(), rule("keep", None, "norm")])
    policy.save(tmp_path / "policy.toml")
    assert ps.Policy.load(tmp_path / "policy.toml") == policy
    assert policy.to_toml().count("bits = 8") == 1
    assert pickle.loads(pickle.dumps(policy)) == policy


@pytest.mark.parametrize("bits", [4, 16, "8", True, 8.5])
def test_other_numbers_of_bits_are_refused(bits):
    with pytest.raises(ValueError, match="expected 8"):
        rule(bits=bits)


def test_recompute_has_no_bits():
    with pytest.raises(ValueError, match="recomputed is held nowhere"):
        rule("recompute")


def test_what_would_count_full_sizes_refuses_by_name(model):
    policy = ps.Policy([rule()])
    with pytest.raises(ValueError, match="a profile does not know bits=8"):
        ps.profile(model, batch(), policy=policy)
    found = ps.profile(model, batch(), repeats=1)
    for ask, who in (
        (found.fits, "fits"),
        (found.home_bytes, "home_bytes"),
        (lambda policy: predict(found, policy), "a prediction"),
        (PolicyHomes, "a simulation"),
    ):
        with pytest.raises(ValueError, match=f"{who} does not know bits=8"):
            ask(policy)
