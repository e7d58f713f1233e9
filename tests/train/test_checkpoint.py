"""Checkpoints: whole or not there, whenever the process dies; tensors and counters, nothing that runs."""

import errno
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from pagestash.train import checkpoint
from pagestash.train.folder import RunError

TENSORS = {
    "model": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones((), dtype=torch.bfloat16)},
    "optimizer": {"exp_avg/a": torch.zeros(2, 3)},
}


def save(run, step, keep=2):
    return checkpoint.save(run, step, TENSORS, {"step": step}, keep)


def loadable(path):
    checkpoint.verify(path)
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
    *(("checkpoint", "sync", call) for call in range(1, 7)),
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
    assert sorted(file.suffix for file in path.iterdir()) == [".json"] * 2 + [".safetensors"] * 2
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


def damage_bytes(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 64
    path.write_bytes(content)


FILES = ["model.safetensors", "optimizer.safetensors", "state.json", "checksums.json"]
DAMAGES = {
    "flipped": damage_bytes,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"{}"),
    "missing": lambda path: path.unlink(),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_checkpoint_before_it_is_named(tmp_path, name, damage):
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    DAMAGES[damage](path / name)
    with pytest.raises(
        RunError, match=r"step-00000002: .*; step-00000001 before it is whole: move step-00000002 away"
    ):
        checkpoint.verify(path)


def test_every_byte_of_a_checkpoint_counts(tmp_path):
    save(tmp_path, 1)
    for file in save(tmp_path, 2).iterdir():
        content = file.read_bytes()
        for at in range(0, len(content), 5):
            file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            with pytest.raises(RunError, match="step-00000001 before it is whole"):
                checkpoint.verify(file.parent)
        file.write_bytes(content)
    checkpoint.verify(file.parent)


def test_a_file_of_another_step_is_found(tmp_path):
    first, second = (
        save(tmp_path, 1),
        checkpoint.save(tmp_path, 2, {**TENSORS, "optimizer": {}}, {"step": 2}, 2),
    )
    shutil.copy(first / "optimizer.safetensors", second)
    with pytest.raises(RunError, match=r"optimizer\.safetensors is not what was written"):
        checkpoint.verify(second)


def test_only_a_whole_checkpoint_is_offered_instead(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    paths = sorted((tmp_path / "checkpoints").iterdir())
    for path in paths[1:]:
        damage_bytes(path / "model.safetensors")
    with pytest.raises(RunError, match=r"step-00000003: .*; step-00000001 before it is whole"):
        checkpoint.verify(paths[2])
    damage_bytes(paths[0] / "model.safetensors")
    with pytest.raises(RunError, match="there is no whole one before it"):
        checkpoint.verify(paths[2])


def test_one_of_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 3)
    path = save(tmp_path, 1)
    monkeypatch.undo()
    with pytest.raises(RunError, match="format 3 is of another version of pagestash"):
        checkpoint.verify(path)


def test_what_is_no_checkpoint_is_not_taken_for_one(tmp_path):
    expected = save(tmp_path, 4)
    for name in ("step-old", "step-1", "other"):
        (expected.parent / name).mkdir()
    (expected.parent / "step-99999999").touch()
    assert checkpoint.latest(tmp_path) == expected
    later = save(tmp_path, 123_456_789)
    assert checkpoint.latest(tmp_path) == later


FULL = [
    OSError(errno.ENOSPC, "No space left on device"),
    SafetensorError("I/O error: No space left on device"),
]


@pytest.mark.parametrize("error", FULL, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("call", [1, 2])
def test_a_full_disk_leaves_the_checkpoint_before_and_gives_the_room_back(tmp_path, monkeypatch, error, call):
    before, calls = save(tmp_path, 1, keep=1), []

    def fills_up(tensors, path):
        calls.append(path)
        if len(calls) == call:
            path.write_bytes(b"the first half of ")
            raise error
        path.write_bytes(b"whole")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fills_up)
        with pytest.raises(
            RunError, match=r"cannot be written .*No space left.*last whole one is step-00000001"
        ):
            save(tmp_path, 2, keep=1)
    assert list(before.parent.iterdir()) == [before]
    assert loadable(before) == 1
    assert loadable(save(tmp_path, 2, keep=1)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["state.json", "checksums.json"])
def test_a_disk_that_fills_up_with_the_last_bytes_does_too(tmp_path, monkeypatch, name):
    before, write = save(tmp_path, 1), Path.write_text

    def fills_up(path, text):
        if path.name == name:
            raise FULL[0]
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", fills_up)
    with pytest.raises(RunError, match="No space left on device"):
        save(tmp_path, 2)
    assert list(before.parent.iterdir()) == [before]
    assert loadable(before) == 1
