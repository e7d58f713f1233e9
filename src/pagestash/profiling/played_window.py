"""The keeper's window, with copies that are played on a clock: a profile's timeline, or a simulated cluster's."""

from collections import deque
from collections.abc import Generator, Iterator
from typing import Generic, Literal, TypeVar

from pagestash.saved.offload.plan import Key, OffloadPlan
from pagestash.saved.offload.window import Decision, Window, WindowGroup

Copy = TypeVar("Copy")
"""A copy that has begun."""
Way = Literal["out", "back"]
Change = Literal["put", "left", "fetched", "dropped"]


class PlayedWindow(Generic[Copy]):
    """Carries out the window's decisions. Its generators yield the copies that compute waits for."""

    def __init__(self, plan: OffloadPlan) -> None:
        self.window = Window(plan)
        self.leaving: deque[WindowGroup] = deque()
        """Groups whose copy out is not known to be over, the oldest first."""
        self.out: dict[Key, Copy] = {}
        self.back: dict[Key, Copy] = {}
        self._groups: dict[Key, WindowGroup] = {}

    def sizes(self, key: Key) -> tuple[int, int]:
        """Device bytes of the group: of what its rule moves, and of what that leaves where it is."""
        raise NotImplementedError

    def begin(self, way: Way, key: Key) -> Copy:
        """A copy of the group begins."""
        raise NotImplementedError

    def is_over(self, copy: Copy) -> bool:
        """Whether a copy is known to be over now."""
        raise NotImplementedError

    def changed(self, what: Change, group: WindowGroup) -> None:
        """The group was put, its memory on the device was freed, it was fetched, or dropped."""
        raise NotImplementedError

    def put(self, key: Key) -> Generator[Copy]:
        """The group's region has ended."""
        size, kept = self.sizes(key)
        group = self._groups[key] = WindowGroup(key, size, kept_bytes=kept)
        if self.window.stays(key):
            group.kept_bytes += size
            self.changed("put", group)
        else:
            group.away_bytes = group.travelling_bytes = group.leaving_bytes = size
            self.changed("put", group)
            self.out[key] = self.begin("out", key)
            self.leaving.append(group)
        self.window.put(group)
        yield from self.carry_out(self.window.after_put(group))

    def get(self, key: Key) -> Generator[Copy]:
        """Backward asks for something of the group."""
        group = self._groups[key]
        yield from self.carry_out(self.window.get(group, kept=not group.away_bytes))

    def drop(self, key: Key) -> None:
        """Backward is done with the group."""
        group = self._groups.pop(key)
        self.window.drop(group)
        self.changed("dropped", group)

    def carry_out(self, decisions: Iterator[Decision]) -> Generator[Copy]:
        while self.leaving and self.is_over(self.out[self.leaving[0].key]):
            self.left()
            self.window.gone()
        for what, group in decisions:
            if what == "let go":
                yield self.out[self.leaving[0].key]
                self.left()
            elif what == "fetch":
                self.back[group.key] = self.begin("back", group.key)
                self.changed("fetched", group)
            else:
                yield self.back[group.key]

    def left(self) -> None:
        """The oldest copy out is over, and its source is freed."""
        self.changed("left", self.leaving.popleft())
