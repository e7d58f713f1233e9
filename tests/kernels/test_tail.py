"""Rows past the valid ones become zero, and no other byte changes."""

import pytest
import torch

from pagestash.kernels.backend import choose
from pagestash.kernels.pages.tail import zero_tail


@pytest.mark.parametrize("rows", [-1, 0, 1, 7, 299, 300, 400])
@pytest.mark.parametrize("shape", [(300, 64), (300, 100), (300, 3), (7, 40_000)])
def test_only_the_tail_is_zeroed(backend, rows, shape):
    buffer = torch.randint(1, 256, shape, dtype=torch.uint8)
    expected = buffer.clone()
    expected[max(rows, 0) :] = 0
    zero_tail(buffer, torch.tensor([rows]), choose(torch.device("cpu"), backend))
    assert torch.equal(buffer, expected)


def test_a_view_at_an_odd_address(backend):
    memory = torch.full((1000 * 24 + 1,), 5, dtype=torch.uint8)
    zero_tail(memory[1:].view(1000, 24), torch.tensor(500), choose(torch.device("cpu"), backend))
    assert torch.equal(memory[: 1 + 500 * 24], torch.full((1 + 500 * 24,), 5, dtype=torch.uint8))
    assert not memory[1 + 500 * 24 :].any()


def test_an_empty_buffer_is_left_alone(backend):
    zero_tail(torch.empty(0, 8, dtype=torch.uint8), torch.tensor([0]), choose(torch.device("cpu"), backend))
