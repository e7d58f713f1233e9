"""What else happens in a training script, inside a step: the gradients are the same bits under every home."""

import asyncio
import contextlib
import copy
import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from support.tiers import slow
from torch import nn
from torch.utils.checkpoint import checkpoint

import pagestash as ps
from pagestash.saved.calls import under_way
from pagestash.saved.region import frames
from pagestash.torch_internals import top_saved_tensors_hooks

X = torch.ones(4, 8).cumsum(0) / 7


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 16)
        self.b = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(x)) ** 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Part() for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        for layer in self.layers:
            x = self.drop(layer(x))
        return x.square().sum()


CASES: dict[str, Callable] = {}


def case(run):
    CASES[run.__name__] = run
    return run


@contextlib.contextmanager
def forward_as(module, forward):
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


# --- exceptions ---


def interrupted(model, step, kind):
    """A step that ends early, and one that does not."""
    with contextlib.suppress(kind), step():
        model(X).backward()
    model.zero_grad()
    torch.manual_seed(3)


def raising(kind):
    def fail(*args):
        raise kind

    return fail


@case
def a_forward_hook_that_raises(model, step):
    hook = model.layers[1].register_forward_hook(raising(KeyError))
    interrupted(model, step, KeyError)
    hook.remove()
    with step():
        model(X).backward()


@case
def an_interrupt_in_forward(model, step):
    with forward_as(model.layers[1].b, raising(KeyboardInterrupt)):
        interrupted(model, step, KeyboardInterrupt)
    with step():
        model(X).backward()


@case
def an_interrupt_in_backward(model, step):
    hook = model.layers[1].a.weight.register_hook(raising(KeyboardInterrupt))
    interrupted(model, step, KeyboardInterrupt)
    hook.remove()
    with step():
        model(X).backward()


# --- other ways to run a module ---


@case
def a_forward_that_was_replaced(model, step):
    forward = model.layers[1].forward
    with forward_as(model.layers[1], lambda x: forward(x) * 1.5), step():
        model(X).backward()


@case
def hooks_that_change_arguments_and_results(model, step):
    hooks = [
        model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
        model.layers[1].register_forward_hook(lambda module, args, output: output * 3),
    ]
    with step():
        model(X).backward()
    for hook in hooks:
        hook.remove()


@case
def a_generator_that_is_left_open(model, step):
    def layers(x):
        with ps.region("part"):
            for layer in model.layers:
                x = layer(x)
                yield x

    generator = layers(X)
    with step():
        next(generator).square().sum().backward()
    with step():
        model(X).backward()


@case
def tasks_that_take_turns(model, step):
    async def one(times):
        x = model.layers[0](X * times)
        await asyncio.sleep(0)
        x = model.layers[1](x)
        await asyncio.sleep(0)
        return x.square().sum()

    async def both():
        return await asyncio.gather(one(1), one(2))

    with step():
        sum(asyncio.run(both())).backward()


@case
def forward_and_backward_in_a_thread(model, step):
    with step():
        thread = threading.Thread(target=lambda: model(X).backward())
        thread.start()
        thread.join()


@case
def backward_in_a_thread(model, step):
    with step():
        thread = threading.Thread(target=model(X).backward)
        thread.start()
        thread.join()


@case
def one_layer_several_times(model, step):
    with step():
        model.layers[1](model.layers[0](model.layers[0](X))).square().sum().backward()


@case
def tied_weights(model, step):
    model.layers[2].a.weight = model.layers[0].a.weight
    with step():
        model(X).backward()


@case
def a_weight_that_is_replaced_in_the_step(model, step):
    with step():
        x = model.layers[0](X)
        model.layers[1].a.weight = nn.Parameter(model.layers[1].a.weight.detach().clone())
        model.layers[1](x).square().sum().backward()


@case
def a_deep_copy_in_the_step(model, step):
    with step():
        (model(X) + copy.deepcopy(model)(X)).backward()


# --- other modes ---


@case
def inference_mode_and_evaluation_inside(model, step):
    with step():
        with torch.inference_mode():
            model(X)
        with torch.no_grad():
            model(X)
        model.eval()
        model(X)
        model.train()
        model(X).backward()


@case
def no_gradients_inside_forward(model, step):
    forward = model.layers[1].forward

    def scaled(x):
        with torch.no_grad():
            scale = forward(x).mean()
        return forward(x) * scale

    with forward_as(model.layers[1], scaled), step():
        model(X).backward()


@case
def vmap(model, step):
    with step():
        torch.vmap(model.layers[0])(X).square().sum().backward()


@case
def forward_derivatives(model, step):
    """The memory of a transform's tensors is not what it seems: to copy it was a segmentation fault."""
    with step():
        _, tangent = torch.func.jvp(model.layers[0], (X,), (X,))
        tangent.sum().backward()


@case
def other_saved_tensor_hooks_inside(model, step):
    with step(), torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed):
        model(X).backward()


@case
def other_saved_tensor_hooks_outside(model, step):
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed), step():
        model(X).backward()


@case
def other_saved_tensor_hooks_around_a_layer(model, step):
    with step():
        x = model.layers[0](X)
        with torch.autograd.graph.save_on_cpu():
            x = model.layers[1](x)
        x.square().sum().backward()


@case
def autocast(model, step):
    with step(), torch.autocast("cpu", torch.bfloat16):
        model(X).backward()


# --- gradients ---


@case
def a_function_that_runs_backward_inside(model, step):
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = model.layers[1](ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx, grad):
            ctx.y.backward(grad)
            return ctx.x.grad

    with step():
        model.layers[2](Inner.apply(model.layers[0](X))).square().sum().backward()


@case
def a_gradient_penalty(model, step):
    x = X.clone().requires_grad_()
    with step():
        y = model.layers[0](x).square().sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        (y + grad.square().sum()).backward()


@case
def hooks_on_tensors_and_gradients(model, step):
    hooks = [layer.register_full_backward_hook(lambda *args: None) for layer in model.layers]
    with step():
        x = model.layers[0](X)
        x.register_hook(lambda grad: grad * 2)
        x = model.layers[1](x)
        x.retain_grad()
        x.square().sum().backward()
    for hook in hooks:
        hook.remove()


@case
def backward_when_the_step_is_over(model, step):
    with step():
        loss = model(X)
    loss.backward()


@case
def backward_twice_and_several_microbatches(model, step):
    with step():
        first, second = model(X), model(X * 2)
        first.backward(retain_graph=True)
        second.backward()
        first.backward()


# --- checkpointing ---


def checkpointed(where, reentrant):
    def run(model, step):
        x = X.clone().requires_grad_()

        def whole(y):
            for layer in model.layers:
                y = layer(y)
            return y

        def again(forward):
            return lambda y: checkpoint(forward, y, use_reentrant=reentrant)

        with contextlib.ExitStack() as stack:
            stack.enter_context(step())
            if where == "around the layers":
                loss = again(whole)(x)
            else:
                for layer in model.layers:
                    inside = where == "inside a layer"
                    changed = again(layer.forward) if inside else layer.forward
                    stack.enter_context(forward_as(layer, changed))
                loss = whole(x) if where == "inside a layer" else x
                if where == "around each layer":
                    for layer in model.layers:
                        loss = again(layer)(loss)
            loss.square().sum().backward()

    return run


for _where in ("around the layers", "around each layer", "inside a layer"):
    for _reentrant in (False, True):
        _kind = "reentrant" if _reentrant else "other"
        CASES[f"{_kind} checkpoint {_where}"] = checkpointed(_where, _reentrant)


def seeded():
    torch.manual_seed(0)
    return Net()


def gradients(name, net, step):
    torch.manual_seed(3)
    net.zero_grad()
    CASES[name](net, step)
    return [None if p.grad is None else p.grad.clone() for p in net.parameters()]


def same(found, plain):
    return all(
        a is None if b is None else a is not None and torch.equal(a, b)
        for a, b in zip(found, plain, strict=True)
    )


ALL = [*itertools.product(CASES, ["stash", "offload", "recompute"])]
ALL.remove(("backward_when_the_step_is_over", "recompute"))  # which is refused


@pytest.mark.parametrize("match", [*slow("layers.*", "layers.*.*"), "layers.**"])
@pytest.mark.parametrize(("name", "home"), ALL)
def test_gradients_are_the_same_to_the_last_bit(name, home, match):
    plain = gradients(name, seeded(), contextlib.nullcontext)
    ahead = {"prefetch_bytes": 0} if home == "offload" else {}
    policy = ps.Policy([ps.Rule(match, home, min_bytes=0, **ahead)], ps.PoolConfig(page=64))
    net = seeded()
    keeper = ps.Keeper(policy, backend="torch").attach(net)
    for _ in range(2):  # measured, then in pages and by the plan
        assert same(gradients(name, net, keeper.step), plain)
        assert top_saved_tensors_hooks(True) is None
        assert not frames()
        assert not under_way()


def test_torch_func_grad_is_refused_by_torch():
    net = Net()
    keeper = ps.Keeper(ps.Policy([ps.Rule("layers.*", "stash", min_bytes=0)])).attach(net)
    params = dict(net.named_parameters())
    grad = torch.func.grad(lambda p: torch.func.functional_call(net, p, (X,)))
    with keeper.step(), pytest.raises(RuntimeError, match="saved tensor hooks"):
        grad(params)
    grad(params)
