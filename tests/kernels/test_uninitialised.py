"""The mode that this folder's tests run in: all kinds of uninitialised memory are filled."""

from contextlib import suppress

import pytest
import torch
from support.uninitialised import filled_with_nan

MAKES = {
    "empty": lambda like: torch.empty(3, dtype=like.dtype),
    "empty_like": torch.empty_like,
    "empty_strided": lambda like: torch.empty_strided((2, 2), (2, 1), dtype=like.dtype),
    "empty_permuted": lambda like: torch.empty_permuted((2, 2), (1, 0), dtype=like.dtype),
    "new_empty": lambda like: like.new_empty(3),
    "new_empty_strided": lambda like: like.new_empty_strided((2, 2), (2, 1)),
    "resize_": lambda like: torch.empty(0, dtype=like.dtype).resize_(3),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_every_way_to_get_memory_fills_it(make, dtype):
    like = torch.zeros(3, dtype=dtype)
    made = make(like)
    if dtype.is_floating_point:
        assert made.isnan().all()
    else:
        assert (made == (True if dtype == torch.bool else torch.iinfo(dtype).max)).all()


def test_the_mode_is_put_back(monkeypatch):
    with filled_with_nan():  # puts back what this test leaves
        for enabled, warn_only, fill in [(False, False, True), (True, False, False), (True, True, True)]:
            torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
            monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", fill)
            with suppress(KeyError), filled_with_nan():
                assert torch.empty(1).isnan()
                raise KeyError
            assert torch.are_deterministic_algorithms_enabled() == enabled
            assert torch.is_deterministic_algorithms_warn_only_enabled() == warn_only
            assert torch.utils.deterministic.fill_uninitialized_memory == fill
