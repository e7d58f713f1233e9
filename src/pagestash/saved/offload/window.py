"""`Window`: what stays, what leaves, what is fetched next, decided from byte counts and the order of events alone.

It knows no tensor, no stream and no clock. Whoever drives it says what happens (`put`, `get`, `drop`) and when a
copy out is over (`gone`), and carries out the decisions that it answers with. The home drives it with the copy
engine (`moving.py`), `Profile.fits`, predictions and simulations on a clock (`profiling/played_window.py`).

Bytes, all of device memory:

    d(k)   of group k when all of it is back: the plan's `device_bytes`
    W      the plan's window;  w(k): the window of k, which is its rule's `prefetch_bytes`, or W
    R      `resident`: of groups that stay and of groups that were fetched, until they are dropped
    L      `leaving`: of groups whose copy out is not known to be over
    P      `present`: of everything the home has on the device, but L
    H(k)   the plan's `headroom` at the put of k

When all decisions of an event are carried out, these hold:

    put of k, then by plan the put of n:    L = 0   or   R + L + d(n) <= max(w(k), W)   or   P + L <= H(k)
    put of k, then by plan a get:           L = 0   or   R + L <= w(k)                  or   P + L <= H(k)
    get of k:                               L = 0   or   R + L <= max(w(k), W)

Groups are fetched ahead in the order in which the plan asks for them. Group k is fetched ahead if

    R + (d of each group that is put or asked for before k, and is not resident yet) + d(k)
        <= min(w(k), max(resident_peak_bytes, d(k)))

and if, at every put and every staying group before it, that sum is at most W. The first one that does not fit ends
it. So while the last groups of forward stand there nothing is fetched; as backward uses them up, others take their
place, and the peak is that of forward. Before the fetch, L falls to what the sum leaves of W.

A group that was not fetched ahead is fetched when it is asked for. A group is fetched once. One that stays never
leaves. (Sums count what the plan expects of a group that was not put yet: all of this holds in a step that goes by
the plan, and the last paragraph in any.)
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pagestash.saved.offload.plan import Key, OffloadPlan


@dataclass(slots=True, eq=False)
class WindowGroup:
    """The bytes of one group that was put and not dropped yet."""

    key: Key
    device_bytes: int = 0
    """Of what should leave, by the rule: what it takes of the window if it stays."""
    away_bytes: int = 0
    """Of what has left, or is leaving: what it takes of the window when it is back."""
    travelling_bytes: int = 0
    """The part of `away_bytes` that is copied: not that of rows which wait in pages."""
    kept_bytes: int = 0
    """Of what is left where it is."""
    leaving_bytes: int = 0
    """Of the memory that its copy out reads, until the copy is known to be over."""
    resident_bytes: int = 0
    """What it takes of the window now."""
    fetched: bool = False


class Decision(NamedTuple):
    """What is to be done next.

    `let go`: free the memory that a copy out reads; compute waits for the copy, unless it is over. It is always
    the oldest copy out. `fetch`: start the copy back. `use`: compute waits for the copy back of the group that is
    asked for.
    """

    what: Literal["let go", "fetch", "use"]
    group: WindowGroup


class Window:
    """Decides on the groups of a step, by a plan; right, if slower, in a step that goes another way."""

    def __init__(self, plan: OffloadPlan) -> None:
        self.plan = plan
        self.groups: dict[Key, WindowGroup] = {}
        self.resident = 0
        self.leaving = 0
        self.present = 0
        """Bytes of all groups on the device, but for what is leaving."""
        self._earlier: set[WindowGroup] = set()  # of a step before, whose key was put again
        self._queue: deque[WindowGroup] = deque()  # copies out, oldest first

    def stays(self, key: Key) -> bool:
        """Whether the group of this key is not to leave."""
        return key in self.plan.stays

    # --- what happens ---

    def put(self, group: WindowGroup) -> None:
        """A group was put, and what leaves of it is on its way; `after_put` tells what to do then."""
        before = self.groups.get(group.key)
        if before is not None:
            self._earlier.add(before)
        self.groups[group.key] = group
        self.present += group.kept_bytes
        if group.leaving_bytes:
            self._queue.append(group)
            self.leaving += group.leaving_bytes
        elif self.stays(group.key):
            self._take(group, group.device_bytes)

    def after_put(self, group: WindowGroup) -> Iterator[Decision]:
        """What to do now that a group was put."""
        yield from self._prefetch(self.plan.behind(("put", group.key)))
        if self._queue:
            yield from self._let_go(self.leaving_limit(group.key))

    def get(self, group: WindowGroup, *, kept: bool = False) -> Iterator[Decision]:
        """What to do when backward asks for something of a group; `kept`: for something that never left."""
        # What still leaves is memory that backward can use, but for what is left of the window.
        taken = self.resident + (0 if group.resident_bytes else group.away_bytes)
        if self._queue:
            yield from self._let_go(max(0, self.plan.window_of(group.key) - taken), group)
        if not kept:
            if not group.fetched:
                yield Decision("fetch", group)
                self.fetched(group)
            yield Decision("use", group)
        yield from self._prefetch(self.plan.behind(("get", group.key)))

    def let_all_go(self) -> Iterator[Decision]:
        """What to do at the end of a step."""
        yield from self._let_go(0)

    def gone(self) -> None:
        """The oldest copy out is over, or compute was told to wait for it."""
        group = self._queue.popleft()
        self.leaving -= group.leaving_bytes
        group.leaving_bytes = 0

    def fetched(self, group: WindowGroup) -> None:
        """Its copy back has begun."""
        if not group.fetched:
            self.present += group.travelling_bytes
        group.fetched = True
        self._take(group, group.away_bytes)

    def shrink(self, group: WindowGroup, *, kept: int = 0, away: int = 0, travelling: int = 0) -> None:
        """A part of the group can be asked for no more: so many bytes of each kind."""
        if self.groups.get(group.key) is group or group in self._earlier:
            self.present -= kept + (travelling if group.fetched else 0)
        group.kept_bytes -= kept
        group.away_bytes -= away
        group.travelling_bytes -= travelling

    def drop(self, group: WindowGroup) -> None:
        """Nothing of the group can be asked for any more. (Its copy out may still be under way.)"""
        self.shrink(group, kept=group.kept_bytes, travelling=group.travelling_bytes)
        self._take(group, 0)
        self._earlier.discard(group)
        if self.groups.get(group.key) is group:
            del self.groups[group.key]

    # --- what follows ---

    def leaving_limit(self, key: Key) -> int:
        """Bytes that may be leaving now that `key` was put.

        They share the window with what is resident and what forward makes next. More of them may, where memory is
        known to be further from its peak than that.
        """
        plan = self.plan
        room = plan.window_of(key)
        behind = plan.behind(("put", key))
        if behind < len(plan.order):
            kind, following = plan.order[behind]
            if kind == "put":
                room = max(room, plan.window) - plan.groups[following].device_bytes
        limit = max(0, room - self.resident)
        headroom = plan.headroom.get(("put", key), 0) if plan.headroom else 0
        return limit if headroom <= limit else max(limit, headroom - self.present)

    def fetch_limit(self, key: Key) -> int:
        """Bytes that may be resident once this group is fetched ahead.

        No more than were at the end of forward, or fetching would raise the peak that offload lowers.
        """
        return min(
            self.plan.window_of(key), max(self.plan.resident_peak_bytes, self.plan.groups[key].device_bytes)
        )

    def _prefetch(self, behind: int) -> Iterator[Decision]:
        """Fetch what is asked for next, from the plan's event of index `behind` on, as long as all of it fits."""
        taken = self.resident
        seen: set[Key] = set()
        plan = self.plan
        order, planned, window = plan.order, plan.groups, plan.window
        for at in range(behind, len(order)):
            kind, key = order[at]
            group = self.groups.get(key)
            if key in seen or (group is not None and (group.resident_bytes or not group.away_bytes)):
                continue  # it is resident, or nothing of it has left
            seen.add(key)
            taken += planned[key].device_bytes
            if kind == "put" or key in plan.stays:
                if taken > window:
                    return
            elif taken > self.fetch_limit(key):
                return
            elif group is not None:  # or the step has left the plan
                # First the room: what leaves gives way to what is asked for soon.
                yield from self._let_go(max(0, window - taken), group)
                yield Decision("fetch", group)
                self.fetched(group)

    def _let_go(self, limit: int, asked: WindowGroup | None = None) -> Iterator[Decision]:
        """Let go of the oldest until no more than `limit` bytes are leaving.

        Those of `asked` are let go in any case, with all before them: it must be known whether they were changed.
        """
        while self._queue and (self.leaving > limit or (asked is not None and asked.leaving_bytes)):
            yield Decision("let go", self._queue[0])
            self.gone()

    def _take(self, group: WindowGroup, size: int) -> None:
        """So many bytes of the window are this group's now."""
        self.resident += size - group.resident_bytes
        group.resident_bytes = size
