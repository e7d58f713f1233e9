"""Recompute: same bits, one more forward, and nothing held that can be made again."""

import gc
import threading
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.saved.storage import checksum

F = torch.nn.functional
WIDTH, ROWS = 16, 8


@pytest.fixture(autouse=True)
def _no_collector():
    """What is freed is freed by reference counts: a cycle through the graph would never be found."""
    torch.manual_seed(0)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Counted(nn.Module):
    """Counts its forwards, and watches the storages that its operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list = []  # (A plain number would count first forwards alone: what is set again is undone.)
        self.made: list[StorageWeakRef] = []

    @property
    def forwards(self) -> int:
        return len(self.calls)

    @forwards.setter
    def forwards(self, count: int) -> None:
        self.calls[:] = [None] * count

    def see(self, tensor):
        self.made.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor

    def alive(self) -> list[bool]:
        return [not ref.expired() for ref in self.made]


class MLP(Counted):
    def __init__(self, inner: int = 64, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        self.calls.append(None)
        h = self.see(self.up(x))
        a = self.see(F.silu(h))
        return self.see(self.down(self.dropout(a)))


class Square(Counted):
    """Saves its input, and nothing else."""

    def forward(self, x):
        self.calls.append(None)
        return self.see(x.square())


def keep(model, *rules, homes=None, **pool) -> ps.Keeper:
    rules = [rule if isinstance(rule, ps.Rule) else ps.Rule(rule, "recompute") for rule in rules]
    return ps.Keeper(ps.Policy(rules, ps.PoolConfig(page=256, **pool)), backend="torch").attach(model)


def step(model, x, keeper=None, loss=lambda out: out.square().sum(), seed=1):
    """The loss and all gradients, the input's too."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    if keeper is None:
        value = loss(model(x))
        value.backward()
    else:
        with keeper.step():
            value = loss(model(x))
            value.backward()
    after = torch.rand(())  # the random state goes on as if nothing had been run again
    return [
        value.detach(),
        after,
        x.grad,
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
    ]


def same(left, right) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right))


def empty(keeper: ps.Keeper) -> bool:
    stats = keeper.stats()
    return all(home.bytes == 0 for home in stats.homes.values())


X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


# --- same bits, one more forward ---


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_losses_and_gradients_are_the_same_to_the_last_bit(dropout):
    model = nn.Sequential(MLP(dropout=dropout), MLP(dropout=dropout), MLP(dropout=dropout))
    plain = step(model, X)
    keeper = keep(model, "0", "2")
    for layer in model:
        layer.forwards = 0
    for number in range(1, 3):
        assert same(step(model, X, keeper), plain)
        assert [layer.forwards for layer in model] == [2 * number, number, 2 * number]
    assert empty(keeper)


def test_what_the_region_saved_and_its_output_die_in_forward():
    model = nn.Sequential(MLP(), Square())
    keeper = keep(model, "0")
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert model[0].alive() == [False, False, False]
        assert keeper.stats().homes["keep"].bytes == x.nbytes
        assert keeper.stats().homes["recompute"].bytes == 0
        loss.backward()
    # Made again, all at once: h, the activation (saved with its dropout), and the output that Square saved.
    assert keeper.stats().homes["recompute"].peak == 4 * ROWS * (64 + 64 + WIDTH)
    assert not any(model[0].alive())
    assert empty(keeper)


def test_an_explicit_keep_rule_keeps_the_output():
    model = nn.Sequential(MLP(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("1", "keep"))
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert keeper.stats().homes["keep"].bytes == 2 * x.nbytes
        loss.backward()
    assert same(step(model, X, keeper), plain)


@pytest.mark.parametrize("home", ["stash", "recompute"])
def test_the_next_region_needs_no_home_for_the_output(home):
    model = nn.Sequential(nn.LayerNorm(WIDTH), Square(), nn.Linear(WIDTH, WIDTH))
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("1", home, min_bytes=16))
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    assert keeper.stats().homes["stash"].peak == 0
    assert empty(keeper)


def test_forward_stops_when_it_has_what_is_waited_for():
    class Tail(Counted):
        def forward(self, x):
            self.calls.append(None)
            y = x.sin().cos().view(-1)  # the cosine's input is the last tensor saved
            reached.append(1)
            return y + 1

    reached: list = []
    model = nn.Sequential(Tail())
    keeper = keep(model, "0")
    step(model, X, keeper, loss=lambda out: out.sum())
    assert model[0].forwards == 2
    assert len(reached) == 1


def test_inputs_are_not_run_for():
    """A projection saves its input alone, which is held: nothing to run again unless its output is wanted."""
    calls = []
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity())
    model[0].register_forward_pre_hook(lambda *_: calls.append(1))
    forward = model[0].forward
    model[0].forward = lambda x: (calls.append("forward"), forward(x))[1]
    plain = step(model, X)
    calls.clear()
    keeper = keep(model, "0")
    assert same(
        step(model, X, keeper, loss=lambda out: out.sum()), step(model, X, loss=lambda out: out.sum())
    )
    assert calls.count("forward") == 2
    assert same(step(model, X, keeper), plain)
    assert calls.count("forward") == 4, "the loss squares the output, which is made again"


# --- what forward depends on ---


def test_autocast_is_as_it_was():
    model = nn.Sequential(MLP(), MLP())

    def loss(out):
        assert out.dtype == torch.bfloat16
        return out.float().square().sum()

    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                return self.inner(x)

    cast = Cast()
    plain = step(cast, X, loss=loss)
    for rules in (["inner.0", "inner.1"], ["inner"], ["inner.1"]):
        keeper = keep(cast, *rules)
        assert same(step(cast, X, keeper, loss=loss), plain)
        keeper.detach()


class Norm(nn.Module):
    """Changes buffers in forward, in place and by taking another tensor, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(32768))
        self.register_buffer("quiet", torch.zeros(32768))

    def forward(self, x):
        self.quiet.numpy()[0] += 1  # as a kernel would that counts no version
        self.seen += 1
        y = self.batch(x) * self.seen.clone() + self.last
        self.last = x.detach().mean(0)
        self.large[0] += 1
        return (y * self.large[0].clone()).sin()


def test_buffers_are_changed_once():
    results = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(Norm(), Square())
        keeper = keep(model, "0") if kept else None
        results.append([step(model, X + number, keeper) for number in range(3)])
        results[-1].append([buffer.clone() for buffer in model.buffers()])
    assert all(same(a, b) for a, b in zip(*results))
    assert model[0].seen == 3


def test_a_large_buffer_that_begins_to_change_is_refused():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("large", torch.zeros(32768))

        def forward(self, x):
            if x.shape[0] > 8:
                self.large += 1
            return x.sin() * self.large[0]

    model = nn.Sequential(Late())
    keeper = keep(model, "0")
    step(model, X, keeper)
    with pytest.raises(
        RuntimeError, match=r"region '0'.*buffer 'large' for the first time.*run the step again"
    ):
        step(model, X.repeat(2, 1), keeper)
    step(model, X.repeat(2, 1), keeper)
    assert model[0].large[0] == 2


@dataclass
class Batch:
    x: torch.Tensor
    scale: float
    extra: dict


class Odd(Counted):
    """Tuples, dicts, dataclasses and non-tensors, in and out."""

    def forward(self, batch, power, *, mask=None, flag=True):
        self.calls.append(None)
        assert flag is True
        y = batch.x.sin() * batch.scale + batch.extra["more"][0].cos()
        if mask is not None:
            y = torch.where(mask, y, 0.0)
        return {"y": (y**power, y.exp()), "n": 3}


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = Odd()

    def forward(self, x):
        batch = Batch(x, 0.5, {"more": [x * 2, "text"]})
        out = self.odd(batch, 3, mask=x > 0, flag=True)
        assert out["n"] == 3
        return out["y"][0] * out["y"][1]


def test_structured_arguments_and_outputs():
    model = Caller()
    plain = step(model, X)
    keeper = keep(model, "odd")
    model.odd.forwards = 0
    assert same(step(model, X, keeper), plain)
    assert model.odd.forwards == 2, "both outputs were saved, and are made in one run"
    assert empty(keeper)


def test_hooks_of_others_stand_outside_what_is_run_again():
    model = nn.Sequential(MLP(), Square())
    keeper = keep(model, "0")
    model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    model[0].register_forward_hook(lambda module, args, out: out + 1, prepend=True)
    kept = step(model, X, keeper)
    keeper.detach()
    assert same(kept, step(model, X))


# --- chains, nesting, other homes ---


def test_a_chain_of_light_regions_holds_the_first_input_alone():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), Square())
    plain = step(model, X)
    keeper = keep(model, "0", "1")
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert keeper.stats().homes["keep"].bytes == x.nbytes
        loss.backward()
    assert same(step(model, X, keeper), plain)
    assert empty(keeper)


def test_what_is_kept_anyway_is_not_made_again():
    model = nn.Sequential(MLP(), Square(), Square())
    model[1].forward = lambda x: (x.square(), x)
    model[2].forward = lambda pair: pair[0] * pair[1].sin()
    plain = step(model, X)
    model[0].forwards = 0
    keeper = keep(model, "0", ps.Rule("1", "keep"))
    assert same(step(model, X, keeper), plain)
    assert model[0].forwards == 2
    assert keeper.stats().homes["recompute"].peak == 4 * ROWS * (64 + 64), "h and the activation, no output"


def test_layers_hold_their_inputs_and_run_once_more_each():
    """Else the last layer's backward would run all the layers before it."""
    model = nn.Sequential(*(MLP(inner=8 * WIDTH) for _ in range(4)))
    keeper = keep(model, "*")
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).sum()
        assert keeper.stats().homes["keep"].bytes == 4 * x.nbytes
        loss.backward()
    assert [layer.forwards for layer in model] == [2] * 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, x):
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize(
    "rules",
    [
        [ps.Rule("*", "recompute"), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("*", "recompute"), ps.Rule("*.mlp", "stash", min_bytes=16)],
        [ps.Rule("*", "recompute"), ps.Rule("*.mlp", "keep")],
        [ps.Rule("*", "stash", min_bytes=16), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("*.norm", "recompute"), ps.Rule("*.mlp", "stash", min_bytes=16)],
        [ps.Rule("*.norm", "recompute"), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("*", "stash", min_bytes=16), ps.Rule("*.norm", "recompute"), ps.Rule("*.mlp", "recompute")],
        [ps.Rule("**", "recompute")],
        [ps.Rule("*", "recompute", min_bytes=1024)],
    ],
    ids=lambda rules: " ".join(f"{rule.match}={rule.home}" for rule in rules),
)
def test_regions_inside_and_beside_each_other(rules):
    model = nn.Sequential(Layer(), Layer())
    plain = step(model, X)
    keeper = keep(model, *rules)
    for _ in range(3):
        assert same(step(model, X, keeper), plain)
    assert empty(keeper)


def test_an_inner_region_of_another_home_is_taken_once():
    model = nn.Sequential(Layer())
    keeper = keep(model, "0", ps.Rule("0.mlp", "stash", min_bytes=16))
    step(model, X, keeper)
    keeper.reset_peaks()
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).square().sum()
        stashed = keeper.stats().homes["stash"].bytes
        # The region's input (the norm's output), h, and the activation.
        assert stashed == 4 * ROWS * (WIDTH + 64 + 64)
        loss.backward()
    assert keeper.stats().homes["stash"].peak == stashed


def test_a_stretch_of_another_home_inside_a_region():
    class Opens(nn.Module):
        def forward(self, x):
            with ps.region("part"):
                y = x.sin().cos()
            return y.exp().tanh()

    model = nn.Sequential(Opens(), Square())
    plain = step(model, X)
    policy = ps.Policy([ps.Rule("0", "recompute"), ps.Rule("0.part", "stash", min_bytes=16)])
    keeper = ps.Keeper(policy, backend="torch").attach(model, regions=["0.part"])
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    assert keeper.stats().homes["stash"].peak == X.nbytes  # the cosine's input; the sine's is the region's
    assert empty(keeper)


def test_an_input_is_let_go_when_nobody_can_ask_for_the_output():
    model = nn.Sequential(Square(), nn.Linear(WIDTH, WIDTH).requires_grad_(False))
    keeper = keep(model, "1")
    x = X.clone().requires_grad_()
    with keeper.step():
        losses = [model(x).sum() for _ in range(2)]
        assert model[0].alive() == [False, True]
        del losses
    assert not any(model[0].alive())


def test_the_input_waits_in_the_home_of_the_region_around():
    model = nn.Sequential(nn.Sequential(nn.Tanh(), MLP()))
    keeper = keep(model, ps.Rule("0", "stash", min_bytes=16), "0.1")
    plain = step(model, X)
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    keeper.reset_peaks()
    assert same(step(model, X, keeper), plain)
    # tanh's output, which is also the MLP's input.
    assert keeper.stats().homes["stash"].peak == X.nbytes


def test_a_module_that_recomputes_by_itself_is_told_to():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.on = None

        def use_recompute(self, on):
            self.on = on

        def forward(self, x):
            return x.sin().cos()

    model = nn.Sequential(Own(), nn.Sequential(Own()))
    keeper = keep(model, "0", "1.0")
    assert model[0].on is True
    assert model[1][0].on is True
    plain = step(model, X)
    assert same(step(model, X, keeper), plain)
    keeper.detach()
    assert model[0].on is False
    # Inside another region that is run again it is run with that one.
    model[1][0].on = None
    keep(model, "**")
    assert model[1][0].on is None


# --- backward more than once ---


def test_retain_graph_runs_the_region_again():
    model = nn.Sequential(MLP(dropout=0.2), Square())
    results = []
    for kept in (False, True):
        keeper = keep(model, "0") if kept else ps.Keeper(ps.Policy())
        model.zero_grad()
        model[0].forwards = 0
        torch.manual_seed(1)
        with keeper.step():
            loss = model(X).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(*results)
    assert model[0].forwards == 3
    assert empty(keeper)


def test_split_backward_runs_the_region_twice_more_at_most():
    model = nn.Sequential(MLP(dropout=0.2), MLP(dropout=0.2), Square())
    results = []
    for kept in (False, True):
        keeper = keep(model, "0", "1") if kept else ps.Keeper(ps.Policy())
        x = X.clone().requires_grad_()
        for layer in model:
            layer.forwards = 0
        torch.manual_seed(1)
        with keeper.step():
            loss = model(x).sum()
            (dx,) = torch.autograd.grad(loss, x, retain_graph=True)
            results.append([dx, *torch.autograd.grad(loss, list(model.parameters()))])
    assert same(*results)
    assert [layer.forwards for layer in model] == [3, 3, 1]
    del loss
    assert empty(keeper)


def test_gradients_of_gradients():
    model = nn.Sequential(MLP(), Square())
    results = []
    for kept in (False, True):
        keeper = keep(model, "0") if kept else ps.Keeper(ps.Policy())
        x = X.clone().requires_grad_()
        with keeper.step():
            (dx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
            results.append(
                torch.autograd.grad(dx.square().sum(), list(model.parameters()), allow_unused=True)[:1]
            )
    assert same(*results)


def test_microbatches_in_any_order():
    results = []
    for kept in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(MLP(dropout=0.2), Norm(), Square())
        keeper = keep(model, "0", "1") if kept else ps.Keeper(ps.Policy())
        with keeper.step():
            losses = [model(X + number).sum() for number in range(3)]
            for number in (1, 2, 0):
                losses[number].backward()
        results.append([p.grad.clone() for p in model.parameters()])
    assert same(*results)


def test_backward_in_another_thread():
    """As on a GPU: autograd's thread has no regions of its own."""
    model = nn.Sequential(Layer(), Routed(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("0.mlp", "stash", min_bytes=16), "1")
    for _ in range(2):
        model.zero_grad()
        x = X.clone().requires_grad_()
        torch.manual_seed(1)
        with keeper.step():
            loss = model(x).square().sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert same([x.grad, *(p.grad for p in model.parameters())], plain[2:])
        del loss, thread
    assert empty(keeper)


def test_backward_after_the_step():
    model = nn.Sequential(Layer(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", ps.Rule("0.mlp", "keep"))
    model.zero_grad()
    x = X.clone().requires_grad_()
    with keeper.step():
        loss = model(x).square().sum()
    loss.backward()
    assert same([x.grad, *(p.grad for p in model.parameters())], plain[2:])
    assert empty(keeper)


# --- beside torch.utils.checkpoint ---


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["inside", "outside"])
def test_beside_checkpoint(where, reentrant):
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), MLP(dropout=0.2))

        def forward(self, x):
            y = checkpoint(self.inner, x.sin(), use_reentrant=reentrant)
            return y.cos()

    model = nn.Sequential(nn.Tanh(), Checkpointed(), Square())
    plain = step(model, X)
    keeper = keep(model, "1") if where == "inside" else keep(model, "1.inner.1", "1.inner.0")
    for _ in range(2):
        assert same(step(model, X, keeper), plain)
    assert empty(keeper)


# --- decisions ---


class Routed(Counted):
    """A layer that routes by a random choice, counts, and computes on what it received."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.work = nn.Linear(WIDTH, 4), MLP(dropout=0.2)
        self.routed = 0

    def route(self, x):
        self.routed += 1
        scores = self.gate(x)
        chosen = (scores + torch.randn(ROWS, 4)).argmax(1)
        return Batch(scores.softmax(1), 1.0, {"ids": chosen})

    def forward(self, x):
        self.calls.append(None)
        routing = ps.once(lambda: self.route(x))
        order = routing.extra["ids"].argsort(stable=True)
        weight = routing.x.gather(1, routing.extra["ids"][:, None])
        rows = ps.once(lambda: x[order] * 2)
        return self.work(rows).sin() * weight


@pytest.mark.parametrize("home", ["keep", "stash"])
def test_decisions_are_taken_once(home):
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(WIDTH), Routed()), Square())
    plain = step(model, X)
    routed = model[0][1]
    keeper = keep(model, "0.1", ps.Rule("0", home, min_bytes=16))
    for number in range(1, 4):
        routed.routed = routed.forwards = 0
        assert same(step(model, X, keeper), plain)
        assert (routed.routed, routed.forwards) == (1, 2), number
    assert empty(keeper)
    if home == "stash":
        assert keeper.stats().homes["stash"].peak > 0


def test_once_outside_a_region_is_a_call():
    assert ps.once(lambda: 3) == 3


def test_once_inside_once_and_inside_a_region_of_another_home():
    class Inner(nn.Module):
        def forward(self, x):
            calls.append("inner")
            return x.sin()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x):
            a = ps.once(lambda: ps.once(lambda: self.inner(x)) * 2)
            b = self.inner(ps.once(lambda: x.cos()))
            return (a * b).tanh() * ps.once(lambda: x.exp())

    calls: list = []
    model = nn.Sequential(Outer(), Square())
    plain = step(model, X)
    for inner in ("keep", "recompute", "stash"):
        calls.clear()
        keeper = keep(model, "0", ps.Rule("0.inner", inner, min_bytes=16))
        for number in (1, 2):
            assert same(step(model, X, keeper), plain)
            # Twice in the first forward; in the second the one inside once() is not run.
            # (Under recompute that one is a region of its own, whose input is held: nothing to run.)
            assert len(calls) == 3 * number
        assert empty(keeper)
        keeper.detach()


# --- refused by name ---


def test_a_region_that_does_something_else_is_refused():
    class Fickle(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.calls, self.change = [], change

        def forward(self, x):
            self.calls.append(None)
            y = x.sin()
            if len(self.calls) % 2 == 0:
                y = self.change(y)
            return y.cos().exp()

    for change, message in (
        (lambda y: y.tanh(), "6 tensors|tensor"),
        (
            lambda y: y[:4],
            r"tensor 1 was torch.float32 \(8, 16\) the first time, torch.float32 \(4, 16\) this time",
        ),
        (lambda y: ps.once(lambda: y), r"once\(\) was called 0 times the first time"),
    ):
        model = nn.Sequential(Fickle(change))
        keeper = keep(model, "0")
        with pytest.raises(RuntimeError, match=f"region '0' .*{message}"):
            step(model, X, keeper)
        assert empty(keeper)


def test_fewer_tensors_are_refused():
    class Fewer(nn.Module):
        def forward(self, x):
            calls.append(None)
            y = x.sin()
            return y.cos() if len(calls) == 1 else y

    calls: list = []
    model = nn.Sequential(Fewer())
    with pytest.raises(RuntimeError, match="2 tensors were saved the first time, 1 this time"):
        step(model, X, keep(model, "0"))


@pytest.mark.parametrize("home", ["keep", "stash"])
def test_an_input_changed_afterwards_is_refused(home):
    class Spoil(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MLP()

        def forward(self, x):
            y = x * 2
            z = self.inner(y)
            y.add_(1)
            return z + y

    model = nn.Sequential(Spoil())
    keeper = keep(model, "0.inner", ps.Rule("0", home, min_bytes=16))
    with pytest.raises(RuntimeError, match=r"changed in place.*clone it before changing it"):
        step(model, X, keeper)
    assert empty(keeper)


def test_a_region_that_changes_its_input_is_refused():
    class Spoil(nn.Module):
        def forward(self, x):
            x += 1
            return x.sin().cos()

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Spoil())
    with pytest.raises(RuntimeError, match=r"region '1' .*changes its input of shape \(8, 16\) in place"):
        step(model, X, keep(model, "1"))


def test_a_tensor_changed_in_place_after_it_was_saved_is_refused():
    class Spoil(nn.Module):
        def forward(self, x):
            y = x * 2
            z = y.square().sum()
            y.add_(1)
            return z * y.sin()

    model = nn.Sequential(Spoil())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step(model, X)
    with pytest.raises(RuntimeError, match="in region '0' was changed in place"):
        step(model, X, keep(model, "0"))


@pytest.mark.parametrize("what", ["weight 'linear.bias'", "buffer 'scale'"])
def test_what_was_changed_before_backward_is_refused(what):
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("scale", torch.ones(32768))

        def forward(self, x):
            return (self.linear(x) * self.scale[0].clone()).sin()

    model = nn.Sequential(Scaled())
    keeper = keep(model, "0")
    changed = {"weight 'linear.bias'": model[0].linear.bias, "buffer 'scale'": model[0].scale}[what]
    with keeper.step():
        loss = model(X).sum()
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match=rf"region '0' .*{what} was changed in place"):
            loss.backward()


def test_gradients_taken_inside_forward_are_refused():
    class Penalty(nn.Module):
        def forward(self, x):
            y = x.sin().cos()
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            return y + g

    model = nn.Sequential(Penalty())
    with pytest.raises(RuntimeError, match=r"region '0' .*takes gradients inside its own forward"):
        step(model, X, keep(model, "0"))


def test_a_region_that_is_no_module_is_refused():
    class Opens(nn.Module):
        def forward(self, x):
            with ps.region("part"):
                return x.sin()

    model = nn.Sequential(Opens())
    rule = ps.Rule("0.part", "recompute")
    with pytest.raises(ValueError, match=r"rule '0.part': home='recompute' needs a module"):
        ps.Keeper(ps.Policy([rule])).attach(model, regions=["0.part"])
    keeper = ps.Keeper(ps.Policy([ps.Rule("0.**", "recompute"), ps.Rule("0", "keep")])).attach(
        nn.Sequential(nn.Sequential(Opens()))
    )
    with keeper.step(), pytest.raises(ValueError, match="needs a module"), ps.region("0.part"):
        pass


class Sneak(torch.autograd.Function):
    """Turns its input in place, as a fused kernel may, without telling autograd; the backward is right."""

    @staticmethod
    def forward(ctx, x):
        x.detach().numpy().__imul__(-1)
        return x

    @staticmethod
    def backward(ctx, grad):
        return -grad


@pytest.mark.parametrize("rule", ["output", "input", "kept"])
def test_a_kernel_that_changes_a_tensor_behind_autograd_is_found_out(rule):
    class Behind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.tail = nn.Linear(WIDTH, WIDTH), Square()

        def forward(self, x):
            y = self.linear(x)
            if rule == "input":
                return self.tail(y) + Sneak.apply(y)
            return self.tail(Sneak.apply(y))

    model = nn.Sequential(Behind())
    plain = step(model, X)
    if rule == "kept":
        keeper = keep(model, "0.linear", ps.Rule("0.tail", "keep"))
        assert same(step(model, X, keeper), plain)
    elif rule == "output":
        with pytest.raises(RuntimeError, match=r"output of region '0.linear'.*rule of 'keep'"):
            step(model, X, keep(model, "0.linear"))
    else:
        model[0].tail = nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        with pytest.raises(RuntimeError, match=r"region '0.tail'.*changed in place"):
            step(model, X, keep(model, "0.tail"))


def test_another_choice_each_time_is_found_out():
    """Of the same shape, so that only its values tell: the rows would get the gradients of others."""

    class Shuffles(nn.Module):
        def forward(self, x):
            order = torch.randperm(ROWS, generator=generator)
            return x.sin().index_select(0, order if not decides else ps.once(lambda: order))

    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(Shuffles())
    decides = False
    with pytest.raises(
        RuntimeError, match=r"region '0' .*tensor 1, torch.int64 \(8,\), had other values.*once"
    ):
        step(model, X, keep(model, "0"))
    decides = True
    generator.manual_seed(0)
    kept = step(model, X, keep(model, "0"))
    generator.manual_seed(0)
    assert same(step(model, X), kept)


def test_indices_that_a_region_returns_are_held():
    class Chooses(Counted):
        def forward(self, x):
            self.calls.append(None)
            return x.sin(), x.detach().sum(1).argsort()

    class Gathers(nn.Module):
        def forward(self, pair):
            return pair[0].index_select(0, pair[1])

    model = nn.Sequential(Chooses(), Gathers())
    plain = step(model, X, loss=lambda out: out.sum())
    keeper = keep(model, "0")
    model[0].forwards = 0
    with keeper.step():
        loss = model(X.clone().requires_grad_()).sum()
        assert keeper.stats().homes["keep"].bytes == X.nbytes + 8 * ROWS
    del loss
    assert same(step(model, X, keeper, loss=lambda out: out.sum()), plain)
    assert model[0].forwards == 2, "the sine's input is the region's: there was nothing to run again"


def test_a_scalar_that_a_region_returns_is_held():
    class Sums(Counted):
        def forward(self, x):
            self.calls.append(None)
            return x.sin(), x.sum()

    class Scales(nn.Module):
        def forward(self, pair):
            return pair[0] + pair[1].sin()

    model = nn.Sequential(Sums(), Scales())
    plain = step(model, X, loss=lambda out: out.sum())
    model[0].forwards = 0
    assert same(step(model, X, keep(model, "0"), loss=lambda out: out.sum()), plain)
    assert model[0].forwards == 1


def test_another_output_each_time_is_found_out():
    class Fickle(nn.Module):
        def forward(self, x):
            calls.append(None)
            return x.sin() * len(calls)

    calls: list = []
    model = nn.Sequential(Fickle(), Square())
    with pytest.raises(RuntimeError, match="came out otherwise"):
        step(model, X, keep(model, "0"))


# --- exceptions ---


def test_an_exception_in_either_forward_leaves_nothing():
    class Fails(MLP):
        fail_at = 0

        def forward(self, x):
            y = super().forward(x)
            if self.forwards == self.fail_at:
                raise ValueError("as asked")
            return y.sin()

    model = nn.Sequential(MLP(), Fails(), Square())
    plain = step(model, X)
    keeper = keep(model, "0", "1")
    for fail_at in (1, 2):
        model[1].forwards, model[1].fail_at = 0, fail_at
        with pytest.raises(ValueError, match="as asked"):
            step(model, X, keeper)
        assert empty(keeper)
        assert not any(model[0].alive() + model[1].alive())
        model[1].fail_at = 0
        assert same(step(model, X, keeper), plain)
    assert empty(keeper)


def test_a_step_without_backward_leaves_nothing():
    model = nn.Sequential(Layer(), Square())
    keeper = keep(model, "0")
    with keeper.step():
        loss = model(X).sum()
    del loss
    assert empty(keeper)
    assert not any(model[0].mlp.alive() + model[1].alive())


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0), (), (3, 2)])
def test_a_checksum_of_any_shape(shape):
    assert checksum(torch.zeros(shape)).item() == 0
    assert checksum(torch.ones(shape)).item() != 0 or 0 in shape
