"""What tests on a GPU share."""

import pytest
import torch


@pytest.fixture
def one_order():
    """Attention's gradient and the embedding's add in any order else."""
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
