"""`play`: the copies of a step on its timeline, by the keeper's rules."""

from pagestash.profiling.copies import plan_of, play
from pagestash.profiling.groups import Move
from pagestash.profiling.link import Link
from pagestash.saved.offload.window import Window


def move(name, put_at, asked_at, dropped_at):
    return Move(
        key=(name, 0, 0),
        ready=0.0,
        needed=0.0,
        bytes=1 << 20,
        device_bytes=1 << 20,
        kept_bytes=0,
        window=None,
        storages=(),
        leaving=frozenset(),
        put_at=put_at,
        asked_at=asked_at,
        dropped_at=dropped_at,
    )


def test_the_window_is_asked_as_often_as_by_a_keeper(monkeypatch):
    """Who asks for more of the group that was asked for last finds everything decided."""
    asked, get = [], Window.get

    def noted(self, group, **named):
        asked.append(group.key[0])
        return get(self, group, **named)

    monkeypatch.setattr(Window, "get", noted)
    moves = [move("early", 1, (6, 9), 10), move("late", 2, (4, 5, 7, 8), 9)]
    play(moves, plan_of(moves), [1.0] * 10, Link(out=1e9, back=1e9))
    assert asked == ["late", "early", "late", "early"]  # at 4, 6, 7 and 9
