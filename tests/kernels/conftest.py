"""All tests of this folder run with uninitialised memory filled with NaN."""

import pytest
from support.uninitialised import filled_with_nan


@pytest.fixture(autouse=True, scope="module")
def uninitialised_is_nan():
    """Before the module's other fixtures. Processes that a test starts must do the same."""
    with filled_with_nan():
        yield
