"""Ranks that capture together change expected rows after the same steps, also those that have no such layer."""

from types import SimpleNamespace

import pytest

from pagestash.step.expected import ExpectedRows


class Votes:
    """Several ranks in one process: each vote is known before it is asked for."""

    def __init__(self, others):
        self.others, self.asked = others, []

    def any(self, mine):
        self.asked.append(mine)
        return mine or self.others


class Rows:
    leave = False

    def __init__(self, wants):
        self.wants, self.calls = wants, []

    def read(self):
        self.calls.append("read")

    def decide(self):
        self.calls.append("decide")
        return self.wants

    def adopt(self):
        self.calls.append("adopt")


def changes(rows, others, steps=40):
    ranks = Votes(others)
    expected = ExpectedRows(SimpleNamespace(rows=rows), ranks)
    return [step for step in range(1, steps + 1) if expected.change()], ranks


@pytest.mark.parametrize("wants", [False, True])
@pytest.mark.parametrize("others", [False, True])
def test_a_change_anywhere_is_one_everywhere(wants, others):
    found, ranks = changes(Rows(wants), others)
    assert found == ([10, 18, 34] if wants or others else [])
    assert ranks.asked == [True, wants, wants, wants]  # whether there are layers, and then each decision


def test_a_rank_without_such_layers_votes_with_the_others():
    found, ranks = changes(None, others=True)
    assert (found, ranks.asked) == ([10, 18, 34], [False] * 4)


def test_without_such_layers_anywhere_there_is_one_vote():
    found, ranks = changes(None, others=False)
    assert (found, ranks.asked) == ([], [False])


def test_logs_are_read_two_steps_before_a_decision():
    rows = Rows(True)
    expected = ExpectedRows(SimpleNamespace(rows=rows), Votes(False))
    for _ in range(8):
        assert not expected.change()
    assert rows.calls == ["read"]
    expected.change()
    assert expected.change()
    expected.adopt()
    assert rows.calls == ["read", "decide", "adopt"]
