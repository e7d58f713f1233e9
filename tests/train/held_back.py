"""`pagestash` on a rank, on one core, where the threads of gloo run when nothing else does. Needs Linux.

How many there were, and how many are left at the end, is in `threads*.txt` of the folder that `--out` names.
"""

import os
import runpy
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

seen = set()


def gloo_threads():
    """The threads of torch's gloo groups that run their collectives, as the system numbers them."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it ended meanwhile
            if (task / "comm").read_text() == "pt_gloo_runloop\n":
                found.append(int(task.name))
    return found


def hold_back():
    while True:
        for thread in gloo_threads():
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                seen.add(thread)
        time.sleep(0.1)


def left():
    """How many there are, when those that ended had time to leave the system's list."""
    until = time.monotonic() + 5
    while gloo_threads() and time.monotonic() < until:
        time.sleep(0.05)
    return len(gloo_threads())


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    threading.Thread(target=hold_back, daemon=True).start()
    try:
        runpy.run_module("pagestash", run_name="__main__", alter_sys=True)
    finally:
        out = Path(sys.argv[sys.argv.index("--out") + 1])
        (out / f"threads{rank}.txt").write_text(f"{len(seen)} {left()}")
