"""What recompute refuses by name: regions that do something else the second time."""

import random

import numpy as np
import pytest
import torch
from recomputed import MLP, ROWS, WIDTH, Counted, Log, Square, X, empty, keep, step
from support import same
from torch import nn

import pagestash as ps

pytestmark = pytest.mark.usefixtures("no_collector")


def test_a_region_that_does_something_else_is_refused():
    class Fickle(nn.Module):
        def __init__(self, change):
            super().__init__()
            self.calls, self.change = Log(), change

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


def test_a_second_loss_on_what_a_hook_kept_of_a_replay_is_refused_by_name():
    model = nn.Sequential(MLP(), MLP())
    kept = []
    model[0].up.register_forward_hook(lambda module, args, output: kept.append(output))
    keeper = keep(model, "0")
    refused = r"region '0' is under recompute, and a backward went through a tensor of its replay"
    with keeper.step():
        model(X).square().sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match=refused):
            kept[-1].square().sum().backward()


def test_a_hook_that_comes_next_to_forward_inside_the_step_is_refused_by_name():
    model = nn.Sequential(MLP(), MLP())
    keeper = keep(model, "0")
    register = [
        lambda: model[0].register_forward_hook(lambda module, args, out: out * 2, prepend=True),
        lambda: model[0].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    ]
    step(model, X, keeper)
    for each in register:
        with keeper.step():
            hook = each()
            with pytest.raises(
                RuntimeError, match=r"region '0'.*a hook was registered on it inside of the step"
            ):
                model(X)
        hook.remove()
    for each in (*register, lambda: model[0].register_forward_hook(lambda module, args, out: out * 2)):
        each()
        assert same(step(model, X, keeper), step(model, X))


class OwnGenerator(nn.Module):
    def __init__(self, make) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.make, self.source = make, None

    def forward(self, x):
        if self.source is None:
            self.source = self.make()
        return self.linear(x).tanh()


@pytest.mark.parametrize(
    "make", [torch.Generator, random.Random, np.random.default_rng, np.random.RandomState]
)
@pytest.mark.parametrize("rule", ["0", "*"])
def test_a_generator_in_an_attribute_is_refused_by_name(rule, make):
    """Also one that the first forward makes."""
    model = nn.Sequential(nn.Sequential(OwnGenerator(make), Square()), Square())
    keeper = keep(model, rule)
    with pytest.raises(
        RuntimeError, match=r"region '0'.*OwnGenerator has a generator in its attribute 'source'"
    ):
        step(model, X, keeper)
    keeper.detach()
    keeper = ps.Keeper(ps.Policy([ps.Rule(rule, "stash")]), backend="torch").attach(model)
    step(model, X, keeper)


@pytest.mark.parametrize("hold", [lambda made: [made], lambda made: {"noise": made}])
def test_a_generator_in_a_container_is_refused_by_name(hold):
    model = nn.Sequential(OwnGenerator(lambda: hold(torch.Generator())), Square())
    with pytest.raises(
        RuntimeError, match=r"region '0'.*OwnGenerator has a generator in its attribute 'source'"
    ):
        step(model, X, keep(model, "0"))


@pytest.mark.parametrize("hooks", ["_forward_pre_hooks", "_forward_hooks"])
def test_a_module_whose_hooks_were_cleared_is_named(hooks):
    model = nn.Sequential(MLP(), MLP())
    plain = step(model, X)
    keeper = keep(model, "1")
    step(model, X, keeper)
    getattr(model[1], hooks).clear()
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"hooks on '1' are gone.*detach\(\), and attach\(model\) again"
        ):
            step(model, X, keeper)
    keeper.detach()
    keeper.attach(model)
    assert same(step(model, X, keeper), plain)
    assert empty(keeper)


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
    with pytest.raises(
        RuntimeError, match=r"output of region '0', .* had other values when it was recomputed"
    ):
        step(model, X, keep(model, "0"))
