"""Python's collector, with less to do for a while."""

import gc

import pytest

from pagestash.garbage import old_objects_aside


@pytest.fixture(autouse=True)
def thawed():
    """(These tests run in a process that has objects put aside.)"""
    before = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if before:
        gc.freeze()


def test_old_objects_are_put_aside_for_a_while_and_new_cycles_are_freed():
    assert not gc.get_freeze_count()
    with old_objects_aside():
        assert gc.get_freeze_count()
        cycle = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() >= 1
    assert not gc.get_freeze_count()


def test_what_python_itself_has_put_aside_is_nobodys(monkeypatch):
    """As Python 3.12 does, before it runs anything."""
    own = gc.get_freeze_count
    monkeypatch.setattr(gc, "get_freeze_count", lambda: own() + 375)
    with old_objects_aside():
        assert own() > 375
    assert own() == 0


def test_what_somebody_else_has_put_aside_stays_there():
    """(What is put aside is freed all the same when nobody refers to it.)"""
    gc.freeze()
    before = gc.get_freeze_count()
    new = [[] for _ in range(5000)]
    with old_objects_aside():
        assert gc.get_freeze_count() <= before
    assert before - len(new) < gc.get_freeze_count() <= before
    gc.unfreeze()
