"""The time of a step on two lanes: the host launches its segments, and the device runs them.

Steps follow each other, and the host waits for none of them (`ahead`): it launches one while the device runs the
one before. Then a step takes what the slower lane takes, device or host. A loop that waits for the device before
each step, such as one that reads the loss, begins it with both lanes level: there, a host that is slow in forward
costs time, even if it would catch up in backward. The same holds if the model itself makes the host wait in each
step, wherever it does.

A host is not always as fast as when it was measured: its cores may be shared. On the machine of an H200 the same
forward was launched now in 16 ms, now in 25. A step that the device bounds does not notice, until a policy's work
for the host takes up the host's lead. So policies are compared by what a step takes on average if the host takes
half as long again in half of all steps: one with little work for the host is preferred to another that would be as
fast on a quick host. A host that is ahead makes up in one step for what it lost in another, so there it is slower
by less, but for seconds at a time: loops of a second or more, in which the host launched steps just in time, took
up to a tenth longer in one round than in another.

The link to the host is not always as fast, either. Copies that were measured at 55 GB/s ran at 48 in whole steps,
and at 55 again in other runs, under every load that was tried. So in the slow steps the link is slower, too: a plan
that would just hide all its copies waits for them then.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pagestash.profiling.profiled import ProfiledStep

SLOWER = 1.5
"""A slow host takes so many times as long as one that is as quick as measured, in a step of its own."""
SLOWER_IN_LOOP = 1.15
"""The same of a host that is ahead, in all steps of a second or so."""
SLOWER_LINK = 0.87
"""Part of the measured rates that copies have in the same steps."""
SLOW_STEPS = 0.5
"""Part of all steps in which host and link are slow."""
HOST_BOUND = 0.7
"""The step waits for the host here and there, if the host takes this part of the device's time."""


@dataclass(frozen=True, slots=True)
class Lanes:
    """Seconds of each segment on the device, and on the host that launches it (none where both are one)."""

    device: list[float]
    host: list[float]
    ahead: bool = False
    """Whether the host launches a step while the device runs the one before."""

    @classmethod
    def of(cls, profile: ProfiledStep, *, loops: bool = False) -> "Lanes":
        """The lanes whose step takes what the unobserved one took, by itself or in a loop (`loops`)."""
        if not loops:
            return cls._level(profile, profile.plain_seconds)
        whole = profile.loop_seconds
        if profile.host_waits or not whole:
            return cls._level(profile, whole or profile.plain_seconds)
        device = [segment.seconds for segment in profile.segments]
        host = [segment.host_seconds or 0.0 for segment in profile.segments]
        # The slower one takes what the loop took: a device is slower at its power limit, a host when it is in use.
        slower = max(sum(device), sum(host), 1e-12)
        scales = [
            whole / slower if sum(own) == slower else min(1.0, whole / slower) for own in (device, host)
        ]
        return cls([scales[0] * own for own in device], [scales[1] * own for own in host], ahead=True)

    @classmethod
    def _level(cls, profile: ProfiledStep, plain: float) -> "Lanes":
        """Those of a step that begins when the device is idle, and takes `plain`.

        Observing costs time on a CPU. On a GPU the device runs by itself in an observed step, and cooler: it is
        slower where the step is bound by it. If the host alone takes longer than the step did, both are scaled.
        """
        device = [segment.seconds for segment in profile.segments]
        host = [segment.host_seconds or 0.0 for segment in profile.segments]
        whole = sum(cls(device, host).seconds())
        if not (whole > 0 and plain > 0):
            return cls(device, host)
        if sum(host) < plain and whole < plain:
            low, high = 1.0, plain / max(sum(device), 1e-12)
            while high - low > 1e-9 * high:
                middle = (low + high) / 2
                takes = sum(cls([middle * own for own in device], host).seconds())
                low, high = (middle, high) if takes < plain else (low, middle)
            device = [high * own for own in device]
            whole = sum(cls(device, host).seconds())
        factor = plain / whole
        return cls([factor * own for own in device], [factor * own for own in host])

    def copy(self) -> "Lanes":
        return Lanes(list(self.device), list(self.host), self.ahead)

    def add(self, at: int, *, device: float = 0.0, host: float = 0.0) -> None:
        """Segment `at` takes longer."""
        self.device[at] += device
        self.host[at] += host

    @classmethod
    def of_graph(cls, profile: ProfiledStep) -> "Lanes":
        """Those of the same step as a CUDA graph: the host launches all of it at once.

        Where the device bounds the unobserved step, it takes as long in a graph. Where the host does, that step
        does not tell how fast the device is, and it takes what was observed. In between both count in part.
        """
        device = [segment.seconds for segment in profile.segments]
        host = [segment.host_seconds or 0.0 for segment in profile.segments]
        part = sum(host) / max(sum(device), 1e-12)
        tells = min(1.0, max(0.0, (1 - part) / (1 - HOST_BOUND)))
        unobserved = cls.of(profile, loops=True).device
        found = [tells * one + (1 - tells) * other for one, other in zip(unobserved, device)]
        return cls(found, [0.0] * len(found))

    @property
    def slower(self) -> float:
        """A slow host takes so many times as long."""
        return SLOWER_IN_LOOP if self.ahead else SLOWER

    def on_slow_host(self) -> "Lanes":
        slower = self.slower
        return Lanes(self.device, [slower * own for own in self.host], self.ahead)

    def takes(self, seconds: Sequence[float]) -> float:
        """The whole step, whose `seconds()` these are."""
        return max(sum(seconds), sum(self.host)) if self.ahead else sum(seconds)

    def takes_longer(self, waited: float) -> float:
        """By so much, if compute waits so long for copies: a host that is ahead launches on meanwhile."""
        if not self.ahead:
            return waited
        return max(0.0, waited - max(0.0, sum(self.host) - sum(self.device)))

    def seconds(self) -> list[float]:
        """From the end of each segment to the end of the next; where the host is ahead, those of the device.

        The device begins a segment when it is done with the last and the host has begun to launch this one. It ends
        after the host.
        """
        if self.ahead or not any(self.host):
            return list(self.device)
        # end(s) = max(end(s-1) + device(s), launched(s-1) + device(s), launched(s)); less the device's sum up to s,
        # that is the largest lead of the host over the device so far.
        found: list[float] = []
        launched = ran = lead = before = 0.0
        for device, host in zip(self.device, self.host):
            launched += host
            ran += device
            if launched - ran > lead:
                lead = launched - ran
            end = ran + lead
            found.append(end - before)
            before = end
        return found
