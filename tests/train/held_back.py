"""`pagestash` on a rank, on one core, where the threads of gloo run when nothing else does. Needs Linux.

How many of them are left at the end is in `threads*.txt` of the folder that `--out` names.
"""

import os
import runpy
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


def gloo_threads():
    """The threads of torch's gloo groups that run their collectives, as the system numbers them."""
    tasks = Path("/proc/self/task")
    return [int(task.name) for task in tasks.iterdir() if (task / "comm").read_text() == "pt_gloo_runloop\n"]


def hold_back():
    while True:
        with suppress(OSError):  # a thread ended meanwhile
            for thread in gloo_threads():
                os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
        time.sleep(0.1)


if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    threading.Thread(target=hold_back, daemon=True).start()
    try:
        runpy.run_module("pagestash", run_name="__main__", alter_sys=True)
    finally:
        out = Path(sys.argv[sys.argv.index("--out") + 1])
        (out / f"threads{rank}.txt").write_text(str(len(gloo_threads())))
