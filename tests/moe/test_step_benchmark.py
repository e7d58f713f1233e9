"""The ways that `benchmarks.moe_step` compares compute the same step."""

import pytest
import torch

from benchmarks import moe_step as B
from pagestash.kernels import backend
from pagestash.pages.pool import PagePool

TINY = B.Preset(tokens=10, width=32, inner=16, top_k=8, experts=3, layers=2, expected=0.5)


@pytest.mark.parametrize("share", [1.0, 0.8])
def test_exact_kept_and_stashed_steps_agree(monkeypatch, share):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    torch.manual_seed(0)
    stack = B.Stack(TINY, torch.device("cpu"), torch.float32)
    batch = B.draw(TINY, torch.device("cpu"), torch.float32)
    # float32 rows: twice the bytes that the benchmark counts for bf16.
    pool = PagePool("cpu", 256, int(share * B.pages_wanted(TINY, [batch], 128)) + 4)
    results = []
    for forward in (
        lambda: stack.exact(batch),
        lambda: stack.padded(batch, None, TINY.expected_rows),
        lambda: stack.padded(batch, pool, TINY.expected_rows),
    ):
        loss = stack.step(forward)
        results.append([loss, *(p.grad for p in stack.parameters)])
    exact, kept, stashed = results
    for one, two in zip(exact, kept):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    for one, two in zip(kept, stashed):
        assert torch.equal(one, two)
    assert not pool.overflow
    assert pool.stats().device.in_use == 0
    assert pool.stats().given_up_groups == (0 if share == 1.0 else 1)
