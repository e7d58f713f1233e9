"""Low-rank updates in the expert block: what the sum of weight and update gives, without forming it."""

import pytest
import torch

from pagestash.kernels.moe.route import route
from pagestash.moe.local import local_experts
from pagestash.moe.projection import LowRank, Weight
from pagestash.moe.received import received_experts
from pagestash.moe.saving import BlockOptions, Half, Saving

EXPERTS, WIDTH, INNER = 3, 16, 24


def leaves(rank):
    torch.manual_seed(0)
    shapes = {
        "up": (EXPERTS, 2 * INNER, WIDTH),
        "down": (EXPERTS, WIDTH, INNER),
        "up_a": (EXPERTS, rank, WIDTH),
        "up_b": (EXPERTS, 2 * INNER, rank),
        "down_a": (EXPERTS, rank, INNER),
        "down_b": (EXPERTS, WIDTH, rank),
    }
    return {name: (0.3 * torch.randn(shape)).requires_grad_() for name, shape in shapes.items()}


def block(weights, *, summed, x, ids, choices, capacity, received=False, expected=0, **options):
    """The output, by the block, of the sums of weights and updates, or of both apart."""
    up, down = (
        Weight(weights[name] + scale * weights[f"{name}_b"] @ weights[f"{name}_a"])
        if summed
        else Weight(weights[name], None, LowRank(weights[f"{name}_a"], weights[f"{name}_b"], scale))
        for name, scale in (("up", 0.5), ("down", 1.75))
    )
    routing = route(ids, EXPERTS, capacity=capacity)
    given = (x, choices, up, down, ids, routing, BlockOptions(**options))
    return received_experts(*given, expected_rows=expected) if received else local_experts(*given)


@pytest.mark.parametrize("rank", [3, 16])
@pytest.mark.parametrize(
    ("received", "expected", "recompute"),
    [
        (False, 0, False),
        (False, 0, True),
        (True, 0, False),
        (True, 9, False),
        (True, 9, True),
        (True, 40, False),
    ],
)
def test_outputs_and_gradients_are_those_of_the_sum(rank, received, expected, recompute):
    weights = leaves(rank)
    x = torch.randn(20, WIDTH, requires_grad=True)
    # An id past the last expert is no choice: there are fewer rows than the capacity.
    ids = torch.randint(0, EXPERTS + 1, (20, 1 if received else 2))
    choices = torch.rand(ids.shape, requires_grad=True)
    case = {
        "x": x,
        "ids": ids,
        "choices": choices,
        "capacity": 40,
        "received": received,
        "expected": expected,
    }
    got = block(weights, summed=False, h=Saving(recompute=recompute), **case)
    wanted = block(weights, summed=True, **case)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    gradient, inputs = torch.randn_like(got), [x, choices, *weights.values()]
    found = torch.autograd.grad(got, inputs, gradient)
    for name, a, b in zip(
        ["x", "choices", *weights], found, torch.autograd.grad(wanted, inputs, gradient), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, msg=name)


def test_garbage_in_the_rows_of_no_choice_stays_there(monkeypatch):
    """Buffers are not initialised: with NaN in them the results are the same."""
    weights = leaves(4)
    x = torch.randn(20, WIDTH, requires_grad=True)
    ids = torch.randint(0, EXPERTS + 1, (20, 2))
    case = {"x": x, "ids": ids, "choices": torch.rand(20, 2), "capacity": 64}
    inputs = [x, *weights.values()]
    wanted = torch.autograd.grad(block(weights, summed=False, **case).sum(), inputs)
    empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor,
        "new_empty",
        lambda like, *shape, **options: (
            made.fill_(torch.nan) if (made := empty(like, *shape, **options)).is_floating_point() else made
        ),
    )
    got = torch.autograd.grad(block(weights, summed=False, **case).sum(), inputs)
    for a, b in zip(got, wanted):
        assert torch.equal(a, b)


def test_each_half_of_a_split_backward_has_its_gradients():
    weights = leaves(4)
    x = torch.randn(20, WIDTH, requires_grad=True)
    case = {"x": x, "ids": torch.randint(0, EXPERTS, (20, 2)), "choices": torch.rand(20, 2), "capacity": 40}
    inputs = [x, *weights.values()]
    half = Half()
    y = block(weights, summed=False, half=half, **case).sum()
    wanted = torch.autograd.grad(y, inputs, retain_graph=True)
    half.weights = False
    got = torch.autograd.grad(y, inputs, retain_graph=True, allow_unused=True)
    assert torch.equal(got[0], wanted[0])
    assert got[1:] == (None,) * 6
    half.inputs, half.weights = False, True
    got = torch.autograd.grad(y, inputs, allow_unused=True)
    assert got[0] is None
    assert all(torch.equal(a, b) for a, b in zip(got[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("received", [False, True])
@pytest.mark.parametrize(("tokens", "capacity"), [(0, None), (5, 0)], ids=["tokens", "capacity"])
def test_without_rows_gradients_are_zeros(received, tokens, capacity):
    weights = leaves(3)
    x, choices = torch.randn(tokens, WIDTH), torch.rand(tokens, 2)
    ids = torch.zeros(tokens, 2, dtype=torch.int64)
    y = block(weights, summed=False, x=x, ids=ids, choices=choices, capacity=capacity, received=received)
    assert not y.any()
    y.sum().backward()
    assert all(torch.equal(weight.grad, torch.zeros_like(weight)) for weight in weights.values())
