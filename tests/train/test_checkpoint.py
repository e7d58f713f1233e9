"""Checkpoints: whole or not there, whenever the process dies; tensors and counters, nothing that runs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pagestash.train import checkpoint

TENSORS = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16)},
    "optimizer": {"exp_avg/a": torch.zeros(2, 3)},
}


def save(run, step, keep=2):
    return checkpoint.save(run, step, TENSORS, {"step": step}, keep)


def loadable(path):
    state = checkpoint.read_state(path)
    checkpoint.check_shapes(path, {"a": (2, 3), "b": ()})
    assert checkpoint.shapes(path, "optimizer") == {"exp_avg/a": (2, 3)}
    return state["step"]


# A process of its own, which forks one child a line: this one may hold threads (JAX's) that no fork survives.
DYING = """
import os, shutil, signal, sys
from pathlib import Path
import torch
from pagestash.train import checkpoint

modules = {"checkpoint": checkpoint, "os": os, "shutil": shutil}
tensors = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16)},
    "optimizer": {"exp_avg/a": torch.zeros(2, 3)},
}
for line in sys.stdin:
    run, module, name, call = line.split()
    child = os.fork()
    if child == 0:
        calls, original = [], getattr(modules[module], name)

        def counted(*args, **kwargs):
            calls.append(args)
            if len(calls) == int(call):
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(modules[module], name, counted)
        try:
            checkpoint.save(Path(run), 2, tensors, {"step": 2}, 1)
        finally:
            os._exit(0)
    print("killed" if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else "finished", flush=True)
"""


@pytest.fixture(scope="module")
def dying():
    """Saves step 2 of a run in a process that kills itself at the n-th call of a function; how that ended."""
    words = [sys.executable, "-c", DYING]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def save_and_die(run, module, name, call):
            process.stdin.write(f"{run} {module} {name} {call}\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        yield save_and_die
        process.stdin.close()


POINTS = [
    *(("checkpoint", "_sync", call) for call in range(1, 6)),
    *(("checkpoint", "save_file", call) for call in (1, 2)),
    *(("os", "rename", call) for call in (1, 2)),
    ("shutil", "rmtree", 1),
]


@pytest.mark.parametrize("point", POINTS, ids=[f"{name}-{call}" for _, name, call in POINTS])
def test_kill_9_at_any_point_leaves_a_checkpoint_that_loads(tmp_path, dying, point):
    save(tmp_path, 1, keep=1)
    assert dying(tmp_path, *point) == "killed"
    survivors = [loadable(path) for path in sorted((tmp_path / "checkpoints").glob("step-*"))]
    assert survivors in ([1], [1, 2], [2])
    # The next one is written over what was left behind.
    assert loadable(save(tmp_path, 3, keep=1)) == 3
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003"]


def test_a_file_cut_short_in_mid_write_is_never_taken_for_a_checkpoint(tmp_path):
    save(tmp_path, 1)
    partial = tmp_path / "checkpoints" / ".partial-00000002"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"\x10\0\0")
    assert checkpoint.latest(tmp_path).name == "step-00000001"


def test_the_last_ones_are_kept(tmp_path):
    for step in range(1, 6):
        save(tmp_path, step, keep=2)
    assert [path.name for path in sorted((tmp_path / "checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000005",
    ]


def test_a_step_is_written_once(tmp_path):
    first = save(tmp_path, 1)
    stamp = (first / "state.json").stat().st_mtime_ns
    assert save(tmp_path, 1) == first
    assert (first / "state.json").stat().st_mtime_ns == stamp


def test_nothing_in_a_checkpoint_is_pickled(tmp_path):
    path = save(tmp_path, 1)
    assert sorted(file.suffix for file in path.iterdir()) == [".json", ".safetensors", ".safetensors"]
    import pagestash.train

    for file in Path(pagestash.train.__file__).parent.glob("*.py"):
        text = file.read_text()
        assert "pickle" not in text
        assert "torch.load" not in text


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        ({"a": (2, 4), "b": ()}, "a is 2×3 there and 2×4 in this model"),
        ({"a": (2, 3)}, "b is a number there and missing in this model"),
        ({"a": (2, 3), "b": (), "c": (1,)}, "c is missing there and 1 in this model"),
    ],
)
def test_another_shape_is_refused(tmp_path, expected, message):
    with pytest.raises(ValueError, match=f"is of another shape: {message}"):
        checkpoint.check_shapes(save(tmp_path, 1), expected)


def test_a_damaged_file_is_named(tmp_path):
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        checkpoint.shapes(path, "model")
    (path / "state.json").write_text("{")
    with pytest.raises(ValueError, match=r"state\.json cannot be read"):
        checkpoint.read_state(path)
