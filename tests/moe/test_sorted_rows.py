"""`SortedRows`: what any dispatcher may hand over. The reference multiplies expert by expert."""

import pytest
import torch
from support.compare import error, same

import pagestash as ps
from pagestash.moe import ExpertFC1, ExpertFC2, Experts, MoEAct, MoEConfig, SortedRows

E, D, N = 4, 32, 16
COUNTS = {"uneven": [5, 0, 9, 2], "one expert": [0, 0, 12, 0], "none": [0, 0, 0, 0], "all": [7, 8, 9, 8]}
ROWS = 32


def layer(*, bias=False, expected_rows=0):
    torch.manual_seed(0)
    config = MoEConfig(width=D, expert_width=N, experts=E, top_k=1, bias=bias, expected_rows=expected_rows)
    parts = ExpertFC1(E, N, D, bias=bias), MoEAct(), ExpertFC2(E, D, N, bias=bias)
    model = torch.nn.ModuleList([Experts(config, parts, dispatch=SortedRows(config)), *parts])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model


def rows_of(counts, rows=ROWS, padding=0.0):
    """A buffer of a dispatcher, with anything past the valid rows."""
    generator = torch.Generator().manual_seed(1)
    x, weights = (
        torch.randn(ROWS, D, generator=generator)[:rows],
        torch.rand(ROWS, generator=generator)[:rows],
    )
    x[sum(counts) :] = padding
    return x.requires_grad_(), weights.requires_grad_(), torch.tensor(counts)


def by_expert(model, x, weights, counts):
    _, fc1, _, fc2 = model
    done, start = torch.zeros_like(x), 0
    for expert, count in enumerate(counts.tolist()):
        end = min(start + count, x.shape[0])
        h = x[start:end] @ fc1.weight[expert].T + (0 if fc1.bias is None else fc1.bias[expert])
        a = torch.nn.functional.silu(h[:, :N]) * h[:, N:]
        y = a @ fc2.weight[expert].T + (0 if fc2.bias is None else fc2.bias[expert])
        done[start:end] = y * weights[start:end, None]
        start = end
    return done


def run(forward, model, counts, **made):
    """The results, and the gradients of rows, weights and parameters."""
    x, weights, counts = rows_of(counts, **made)
    model.zero_grad()
    y = forward(model, x, weights, counts)
    y.backward(torch.randn(ROWS, D, generator=torch.Generator().manual_seed(2))[: len(y)])
    return y, x.grad, weights.grad, *(parameter.grad.clone() for parameter in model.parameters())


def ours(model, x, weights, counts):
    return model[0](x, weights.view(-1, 1), counts)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_results_and_gradients_are_those_of_a_product_for_each_expert(counts, bias):
    model = layer(bias=bias)
    valid = sum(counts)
    for got, wanted in zip(run(ours, model, counts), run(by_expert, model, counts), strict=True):
        if got.shape[0] == ROWS:
            got, wanted = got[:valid], wanted[:valid]
        assert error(got, wanted) < 1e-5 or not wanted.any()
    assert not model[0].over_capacity


@pytest.mark.parametrize("expected_rows", [0, 8])
def test_padding_changes_nothing_whatever_is_in_it_and_comes_back_as_zeros(expected_rows):
    counts, model = COUNTS["uneven"], layer(expected_rows=expected_rows)
    valid = sum(counts)
    exact = run(ours, model, counts, rows=valid)
    padded = run(ours, model, counts, padding=float("nan"))
    for got, wanted in zip(padded, exact, strict=True):
        if got.shape[:1] == (ROWS,):
            assert not got[valid:].any()
            got = got[:valid]
        assert same(got, wanted)


def test_rows_that_the_dispatcher_had_no_room_for_are_left_out_and_said():
    model = layer()
    counts = torch.tensor([5, 4, 3, 2])
    got = run(ours, model, counts.tolist(), rows=10)
    assert model[0].over_capacity == 1
    model[0].clear_over_capacity()
    wanted = run(ours, model, [5, 4, 1, 0], rows=10)
    assert same(got, wanted)
    assert not model[0].over_capacity
    assert not model[0].grow_capacity()


def test_the_number_of_counts_is_that_of_the_experts():
    with pytest.raises(ValueError, match="expected the rows of 4 experts"):
        ours(layer(), *rows_of([3, 3]))


@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
@pytest.mark.parametrize("rows", [ROWS, 16], ids=["padded", "exact"])
def test_homes_change_no_bit(home, rows):
    counts = COUNTS["uneven"]
    plain, model = run(ours, layer(), counts, rows=rows), layer()
    moving = {} if home == "recompute" else {"min_bytes": 0}
    keeper = ps.Keeper(ps.Policy([ps.Rule("0", home, **moving)], ps.PoolConfig(page=256))).attach(model)
    for _ in range(2):
        with keeper.step():
            assert same(run(ours, model, counts, rows=rows), plain)
