"""Forward calls of watched modules that are running in this thread, each with the region it opened.

A module's hooks open a region before forward and close it afterwards. The same module may run in two threads at
once (an evaluation beside training) or inside itself. So the region that a call has opened is not stored on the
module, but here, in the context of the running thread.
"""

from contextvars import ContextVar

from pagestash.saved.region import Region

Calls = tuple[tuple[object, Region | None], ...]

_calls: ContextVar[Calls] = ContextVar("pagestash_calls", default=())

under_way = _calls.get
"""The calls, the innermost last."""


def set_calls(value: Calls) -> None:
    _calls.set(value)


def begin(hook: object, region: Region | None) -> None:
    """A call of the module of `hook` begins; it opened `region`, or none."""
    _calls.set((*_calls.get(), (hook, region)))


def end(hook: object) -> Region | None:
    """The last call of the module of `hook` is over, and all calls inside it. Returns the region that it opened."""
    calls = _calls.get()
    for index in range(len(calls) - 1, -1, -1):
        if calls[index][0] is hook:
            _calls.set(calls[:index])
            return calls[index][1]
    return None
