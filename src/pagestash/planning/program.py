"""A linear program that proposes how many layers of each group take which choice.

It is solved by HiGHS (`scipy.optimize.milp`), and its counts are rounded. (A program over integers takes 30 times
as long. Its counts differ by a layer or two of a group, and every proposal is predicted anyway.) With n(g, c)
layers of group g that take choice c,

    minimise    sum of n(g, c) × seconds(c)  +  wait out  +  wait back
    such that   sum over c of n(g, c) = layers of g
                at each moment:  what a choice does not change + sum of n(g, c) × kept(c) × share(g)
                                 + (recomputed(c) + moved(c)) × n(g, c) / layers of g  <=  T
                moved / link.out   <=  forward + wait out
                moved / link.back  <=  backward + seconds of recompute + wait back
                moved              <=  host memory
                layers of g that move  <=  layers of g whose backward is far enough away for a copy out and back

where recomputed and moved bytes are back at moments of g's own backward. Moments are the model's head and the
backward of the last and the first layer of each group; share(g) is the part of g's layers whose forward comes
before that moment's layer. All of this is linear and only proposes.

Where steps follow each other and the host is ahead (`lanes.py`), a step takes what the slower of device and host
takes, and a slow host takes longer. There the program minimises

    (quick + slow) / 2  +  WORK × sum of n(g, c) × seconds(c), of device and host
    such that   quick, slow  >=  the device's seconds + sum of n(g, c) × its seconds(c)  +  wait out  +  wait back
                quick        >=  what the host takes to launch the step + sum of n(g, c) × what it takes for c
                slow         >=  `lanes.slower` × that
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagestash.planning.choices import Group, Unit
from pagestash.planning.lanes import SLOW_STEPS
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.prediction import Prediction

LITTLE = 1e-3
"""What a second on the link counts that is hidden: of plans that take the same time, the one that moves less."""
WORK = 0.1
"""What a second of device or host counts beside the step's, so that the one that is hidden counts, too: predictions
see more than these sums, and then the slower lane may be the other one."""

Counts = tuple[tuple[int, ...], ...]
"""For each group, how many of its units take each of its choices."""


def _names(group: Group) -> list[str]:
    return [unit.name for unit in group.units]


def uniform(groups: Sequence[Group], chosen: Sequence[int]) -> Counts:
    """All units of each group take one choice."""
    return tuple(
        tuple(len(group.units) if at == own else 0 for at in range(len(group.choices)))
        for group, own in zip(groups, chosen)
    )


def _rounded(group: Group, parts: Sequence[float]) -> tuple[int, ...]:
    """Whole counts with the same sum; what is left over goes to the choices that keep least."""
    counts = [int(part + 1e-6) for part in parts]
    left = sorted(
        (at for at, part in enumerate(parts) if part - counts[at] > 1e-6),
        key=lambda at: group.costs[at].kept_bytes,
    ) or [0]
    while sum(counts) < len(group.units):
        counts[left[0]] += 1
        left = left[1:] or left
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class _Moment:
    """A moment of backward: bytes that no choice changes, and for each group the share of its units that count."""

    fixed_bytes: float
    shares: tuple[float, ...]
    group: int | None
    """The group whose layer is in its backward."""


class Program:
    """The linear model of a step and its groups."""

    def __init__(
        self,
        step: MeasuredStep,
        groups: Sequence[Group],
        host_bytes: int,
        others: Callable[[str], int],
        plain: Prediction,
    ) -> None:
        """`plain`: the step without a policy."""
        self.step, self.groups, self.host_bytes = step, groups, host_bytes
        self.in_flight = others
        self.link = step.profile.link
        self.forward, self.backward = sum(step.seconds[: step.turn]), sum(step.seconds[step.turn :])
        self.others = [sum(map(others, names)) / len(names) for names in map(_names, self.groups)]
        if any(self.others):  # copies both ways have the whole of a forward and a backward
            self.forward = self.backward = self.forward + self.backward
        self._total = [sum(sizes) for sizes in zip(*plain.memory.values())]
        self.moments = self._moments()
        self.far = [sum(self._is_far(unit, group) for unit in group.units) for group in self.groups]

    def _is_far(self, unit: Unit, group: Group) -> bool:
        """Whether what the unit moves at most could leave and come back before its backward."""
        step = self.step
        if self.in_flight(unit.name):
            return True
        forward = step.forward_of(unit.name)
        backward = step.backward_of(unit.name)
        if not forward or not backward:
            return False
        most = min((cost.moved_bytes for cost in group.costs if cost.moved_bytes), default=0)
        return (
            sum(step.seconds[forward[-1] + 1 : backward[0]]) >= most / self.link.out + most / self.link.back
        )

    def _moments(self) -> list[_Moment]:
        step = self.step
        ends = {unit.name: (step.span(unit.name) or (0, 0)) for group in self.groups for unit in group.units}
        backward = {name: self._backward_peak(name) for name in ends}
        inside = {at for first, last in ends.values() for at in range(step.turn, last + 1) if at >= first}
        head = [at for at in range(step.turn - 1, step.count) if at not in inside] or [step.turn - 1]
        found = [self._moment(max(head, key=self._total.__getitem__), step.turn, ends, None)]
        for number, group in enumerate(self.groups):
            for unit in dict.fromkeys((group.units[-1].name, group.units[0].name)):
                found.append(self._moment(backward[unit], ends[unit][0], ends, number))
        return found

    def _backward_peak(self, name: str) -> int:
        """The segment of a unit's backward where memory is at its most."""
        step = self.step
        return max(step.backward_of(name), key=self._total.__getitem__, default=step.turn)

    def _moment(self, at: int, before: int, ends: dict[str, tuple[int, int]], group: int | None) -> _Moment:
        shares = tuple(
            sum(ends[unit.name][0] <= before for unit in group.units) / len(group.units)
            for group in self.groups
        )
        kept = sum(
            share * len(group.units) * group.costs[0].kept_bytes for share, group in zip(shares, self.groups)
        )
        return _Moment(self._total[at] - kept, shares, group)

    def _weights(self, moment: _Moment) -> list[list[float]]:
        """Bytes of one unit, by group and choice, at that moment."""
        return [
            [
                (others + share) * cost.kept_bytes
                + (cost.recomputed_bytes + cost.moved_bytes if moment.group == number else 0)
                / len(group.units)
                for cost in group.costs
            ]
            for number, (share, others, group) in enumerate(zip(moment.shares, self.others, self.groups))
        ]

    def level(self, counts: Counts) -> float:
        """The most memory at any moment."""
        return max(
            moment.fixed_bytes
            + sum(n * w for own, weights in zip(counts, self._weights(moment)) for n, w in zip(own, weights))
            for moment in self.moments
        )

    def least(self) -> Counts:
        """Counts with about the least memory: each group in turn takes what is best beside the others."""
        chosen = [0] * len(self.groups)
        for number in [*range(len(self.groups)), *range(len(self.groups))]:

            def tried(at: int, number: int = number) -> tuple[float, int]:
                trial = [*chosen[:number], at, *chosen[number + 1 :]]
                return self.level(uniform(self.groups, trial)), self.groups[number].costs[at].kept_bytes

            chosen[number] = min(range(len(self.groups[number].costs)), key=tried)
        return uniform(self.groups, chosen)

    def solve(self, target: float, rate: float = 1.0) -> Counts | None:
        """The counts for a memory target, with a part of the link's rates; None if there are none."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        flat = [cost for group in self.groups for cost in group.costs]
        ahead = self.step.ahead
        columns = len(flat) + (4 if ahead else 2)
        out, back = (max(1.0, rate * of) for of in (self.link.out, self.link.back))
        rows: list[list[float]] = []
        lower: list[float] = []
        upper: list[float] = []

        def add(row: Sequence[float], least: float, most: float) -> None:
            rows.append([*row, *([0.0] * (columns - len(row)))])
            lower.append(least)
            upper.append(most)

        start = 0
        for group in self.groups:
            own = [0.0] * start + [1.0] * len(group.costs)
            add(own, len(group.units), len(group.units))
            start += len(group.costs)
        for moment in self.moments:
            weights = [weight for own in self._weights(moment) for weight in own]
            add([weight / 2**20 for weight in weights], -float("inf"), (target - moment.fixed_bytes) / 2**20)
        # Milliseconds and MiB: numbers of like size are solved best.
        add([1e3 * c.moved_bytes / out for c in flat] + [-1.0], -float("inf"), 1e3 * self.forward)
        late = [1e3 * (c.moved_bytes / back - c.device_seconds) for c in flat]
        add([*late, 0.0, -1.0], -float("inf"), 1e3 * self.backward)
        host = self.host_bytes if rate else 0
        held = [1 + others for others, group in zip(self.others, self.groups) for _ in group.costs]
        add([n * c.moved_bytes / 2**20 for n, c in zip(held, flat)], 0.0, host / 2**20)
        start = 0
        for group, far in zip(self.groups, self.far):
            add([0.0] * start + [float(c.moved_bytes > 0) for c in group.costs], 0.0, far)
            start += len(group.costs)
        moving = [1e3 * LITTLE * c.moved_bytes / self.link.out for c in flat]
        if ahead:
            lanes = self.step.lanes
            device, launch = [1e3 * c.device_seconds for c in flat], [1e3 * c.launch_seconds for c in flat]
            ran, launched = 1e3 * sum(lanes.device), 1e3 * sum(lanes.host)
            for slower, takes in ((1.0, (-1.0, 0.0)), (lanes.slower, (0.0, -1.0))):
                add([*device, 1.0, 1.0, *takes], -float("inf"), -ran)
                add([*(slower * own for own in launch), 0.0, 0.0, *takes], -float("inf"), -slower * launched)
            work = [little + WORK * (one + other) for little, one, other in zip(moving, device, launch)]
            least = [*work, 0.0, 0.0, 1 - SLOW_STEPS, SLOW_STEPS]
        else:
            least = [*(1e3 * c.seconds + little for c, little in zip(flat, moving)), 1.0, 1.0]
        found = milp(
            least,
            constraints=LinearConstraint(rows, lower, upper),
            bounds=Bounds(0, [float("inf")] * columns),
        )
        if found.x is None:
            return None
        counts, start = [], 0
        for group in self.groups:
            counts.append(_rounded(group, [float(x) for x in found.x[start : start + len(group.costs)]]))
            start += len(group.costs)
        return tuple(counts)
