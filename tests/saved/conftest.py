"""Fixtures of the keeper's tests."""

import gc

import pytest
from stack import Stack, batch, policy, run
from support import same

import pagestash as ps


@pytest.fixture
def sized():
    """A model, a keeper whose pool exists, and the plain result for `batch(20)`."""
    model = Stack()
    x, rows = batch(20)
    plain = run(model, x, rows)
    keeper = ps.Keeper(policy(), backend="torch").attach(model)
    assert same(run(model, x, rows, keeper), plain)
    assert keeper.pool is not None
    return model, keeper, plain


@pytest.fixture
def no_collector():
    """What is freed is freed by reference counts: a cycle through the graph would never be found."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
