"""Routing: counts, places and their inverse, against a plain sort; both backends agree on every bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe import route as R

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]


def places(ids, experts, first=0):
    """Flat indices in the order of their experts, by a plain Python sort."""
    local = [int(e) - first for e in ids.reshape(-1)]
    return sorted((e, i) for i, e in enumerate(local) if 0 <= e < experts)


def distinct_ids(tokens, choices, experts):
    return torch.rand(tokens, experts).argsort(1)[:, :choices].to(torch.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("tokens", "choices", "experts"), [(1, 1, 1), (50, 8, 16), (37, 3, 200), (130, 2, 5)]
)
def test_rows_are_sorted_by_expert_and_keep_their_order(backend, dtype, tokens, choices, experts):
    ids = torch.randint(0, experts, (tokens, choices), dtype=dtype)
    found = R.route(ids, experts, backend=backend)
    wanted = places(ids, experts)
    assert found.order.tolist() == [i for _, i in wanted]
    assert found.counts.tolist() == [sum(e == x for e, _ in wanted) for x in range(experts)]
    assert found.offsets.tolist() == found.counts.cumsum(0).tolist()
    assert found.inverse.view(-1)[found.order.long()].tolist() == list(range(len(wanted)))
    assert found.rows.tolist() == [len(wanted)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_ids_of_other_ranks_get_no_row(backend):
    ids = torch.randint(0, 12, (60, 4), dtype=torch.int32)
    ids[5, 2] = -1
    found = R.route(ids, 4, first=4, backend=backend)
    wanted = places(ids, 4, first=4)
    count = len(wanted)
    assert found.order[:count].tolist() == [i for _, i in wanted]
    rest = torch.ones(240, dtype=torch.bool)
    rest[[i for _, i in wanted]] = False
    assert (found.inverse.view(-1)[rest] == -1).all()
    assert int(found.rows) == count


@pytest.mark.parametrize("backend", BACKENDS)
def test_capacity_cuts_the_last_rows_and_raises_the_flag(backend):
    ids = torch.randint(0, 6, (40, 4), dtype=torch.int32)
    wanted = [i for _, i in places(ids, 6)]
    over = torch.zeros(())
    fits = R.route(ids, 6, capacity=160, over=over, backend=backend)
    assert over == 0
    cut = R.route(ids, 6, capacity=100, over=over, backend=backend)
    assert over == 1
    assert cut.order.tolist() == wanted[:100]
    assert torch.equal(cut.counts, fits.counts)
    assert torch.equal(cut.offsets, fits.offsets.clamp(max=100))
    assert (cut.inverse >= 0).sum() == 100


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_tokens_to_one_expert_and_no_token_at_all(backend):
    ids = torch.full((200, 1), 3, dtype=torch.int32)
    found = R.route(ids, 8, backend=backend)
    assert found.order.tolist() == list(range(200))
    assert found.offsets.tolist() == [0, 0, 0, 200, 200, 200, 200, 200]
    none = R.route(torch.empty(0, 4, dtype=torch.int32), 8, backend=backend)
    assert none.offsets.tolist() == [0] * 8
    assert none.inverse.shape == (0, 4)


@pytest.mark.skipif(not interpreted(), reason="interpreter")
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 70), st.integers(1, 4), st.integers(1, 20), st.integers(0, 200), st.integers(0, 2**16))
def test_kernel_and_reference_agree(tokens, choices, experts, capacity, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (tokens, choices), generator=generator, dtype=torch.int32)
    one, two = (R.route(ids, experts, capacity=capacity, backend=b) for b in ("torch", "triton"))
    count = int(one.rows)
    assert torch.equal(one.counts, two.counts)
    assert torch.equal(one.offsets, two.offsets)
    assert torch.equal(one.inverse, two.inverse)
    assert torch.equal(one.order[:count], two.order[:count])


def test_bad_input_is_named():
    with pytest.raises(ValueError, match="ids of shape"):
        R.route(torch.zeros(4), 2)
    with pytest.raises(ValueError, match="experts=0"):
        R.route(torch.zeros(4, 1, dtype=torch.int32), 0)
