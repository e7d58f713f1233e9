"""The folder of a run: one run at a time writes there; whatever ended it, the next goes on, or says why not."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import same
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline"))
sys.path.insert(0, str(Path(__file__).parent))
from gloo import spawn
from small import commands, run, settings, without_time, words

from pagestash.cli import app
from pagestash.train import checkpoint, prepare, read_metrics, train
from pagestash.train.folder import LOCK, RunError, claim, read_settings
from pagestash.train.metrics import JsonLines


class Dies(BaseException):
    """Ends a run as a kill does: nothing more is written."""


class At:
    """Does something at one step of a run."""

    def __init__(self, step, action):
        self._step, self._action = step, action

    def step(self, line):
        if line["step"] == self._step:
            self._action()


def die():
    raise Dies


def killed_at(step, given, out, **kwargs):
    with pytest.raises(Dies):
        run(given, out, listeners=[At(step, die)], **kwargs)


def files(folder):
    """Every file but the lock, whose text names the last process that asked."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def weights(out):
    return load_file(checkpoint.latest(out) / "model.safetensors")


def same_run(first, second):
    """Whether two runs have the same weights and metrics, to the last bit."""
    metrics = (without_time(read_metrics(out)) for out in (first, second))
    return same(weights(first), weights(second)) and same(*metrics)


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def refused(out, *arguments):
    """The one line of a run that is refused, and has changed nothing in its folder."""
    before = files(out)
    result = invoke("--out", out, *arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert files(out) == before
    (line,) = [line for line in result.stderr.splitlines() if not line.startswith("note: ")]
    assert line.startswith("error: ")
    return line


# --- before the first checkpoint, and after the last is gone ---


def test_a_run_killed_before_its_first_checkpoint_resumes_with_its_settings(tmp_path):
    given = settings(tmp_path, seed=7, lr=0.01, checkpoint_every=5)
    run(given, tmp_path / "whole")
    killed_at(3, given, tmp_path / "killed")
    assert len(read_metrics(tmp_path / "killed")) == 3
    result = invoke("--resume", "--out", tmp_path / "killed")
    assert result.exit_code == 0, result.output
    assert "has no checkpoint yet; its run begins again, with its settings" in result.stderr
    assert same_run(tmp_path / "whole", tmp_path / "killed")


def test_settings_given_to_a_resume_outlive_its_kill(tmp_path):
    given = settings(tmp_path, steps=2)
    run(given, tmp_path / "run")
    killed_at(3, {"steps": 6, "lr": 0.01, "checkpoint_every": 0}, tmp_path / "run", resume=True)
    plan = prepare({}, tmp_path / "run", resume=True)
    assert (plan.config.steps, plan.config.lr, plan.config.batch) == (6, 0.01, given["batch"])
    assert plan.start.name == "step-00000002"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A run of 4 steps with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("base")
    run(settings(folder, steps=4), folder / "run")
    return folder / "run"


@pytest.fixture
def out(base, tmp_path):
    return shutil.copytree(base, tmp_path / "run")


def test_a_run_whose_checkpoints_are_gone_says_so(out):
    shutil.rmtree(out / "checkpoints")
    assert "checkpoints of" in (line := refused(out, "--resume"))
    assert "are gone, the last one was of step 4" in line
    (out / "checkpoints").mkdir()
    assert "are gone, the last one was of step 4" in refused(out, "--resume")
    (out / "settings.json").unlink()
    assert "has neither a checkpoint nor settings.json" in refused(out, "--resume")


def test_an_empty_folder_holds_no_run(tmp_path):
    (tmp_path / "run").mkdir()
    assert "there is no run in" in refused(tmp_path / "run", "--resume")


def test_a_run_resumes_with_the_settings_of_its_last_checkpoint(out):
    (out / "settings.json").unlink()
    result = invoke("--resume", "--out", out, "--steps", "5")
    assert result.exit_code == 0, result.output
    assert read_settings(out).config["lr"] == 3e-3
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5]


SETTINGS = {
    "no JSON": lambda text: text[:50],
    "another type": lambda text: "[]",
    "null": lambda text: "null",
    "a key less": lambda text: text.replace('"corpus"', '"other"', 1),
    "a key more": lambda text: text.replace('"corpus"', '"more": 1, "corpus"', 1),
    "another value": lambda text: text.replace('"lr": 0.003', '"lr": 0.007'),
}


@pytest.mark.parametrize("change", SETTINGS)
def test_settings_that_changed_are_refused(out, change):
    path = out / "settings.json"
    before = path.read_text()
    path.write_text(SETTINGS[change](before))
    assert path.read_text() != before
    line = refused(out, "--resume", "--steps", "5")
    assert "settings.json cannot be read" in line
    assert "without that file, --resume takes the settings of the last checkpoint" in line
    path.unlink()
    assert prepare({"steps": 5}, out, resume=True).config.lr == 3e-3


# --- two runs, one folder ---


def test_two_runs_into_one_folder_are_one_and_a_refusal(tmp_path):
    given = settings(tmp_path, steps=4, checkpoint_every=1)
    run(given, tmp_path / "alone")
    first, second = prepare(given, tmp_path / "both"), prepare({**given, "seed": 2}, tmp_path / "both")
    told = []

    def intrude():
        with pytest.raises(
            RunError, match=f"another run \\(process {os.getpid()} on .*is writing there"
        ) as caught:
            train(second)
        told.append(caught)

    train(first, [At(2, intrude)])
    assert told
    assert same_run(tmp_path / "alone", tmp_path / "both")
    # After it has ended, too: the folder is no longer what the plan was made for.
    with pytest.raises(RunError, match="holds another run"):
        train(second)


def test_two_resumes_of_one_run_are_one_and_a_refusal(out, tmp_path):
    shutil.copytree(out, tmp_path / "alone")
    run({"steps": 6}, tmp_path / "alone", resume=True)
    first, second = (prepare({"steps": 6, **more}, out, resume=True) for more in ({}, {"lr": 0.1}))

    def intrude():
        with pytest.raises(RunError, match="is writing there"):
            train(second)

    train(first, [At(5, intrude)])
    assert same_run(tmp_path / "alone", out)
    with pytest.raises(RunError, match="another run has written there meanwhile; start again"):
        train(second)
    assert same_run(tmp_path / "alone", out)


HOLDER = """
import fcntl, sys, time
file = open(sys.argv[1], "a")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder():
    """Holds a lock in a process of its own, which is killed when asked, or at the end."""
    started = []

    def hold(path):
        process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_run_leaves_no_lock(tmp_path, holder):
    process = holder(tmp_path / LOCK)
    with pytest.raises(RunError, match="another run is writing there"), claim(tmp_path):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with claim(tmp_path):
        pass


def test_several_ranks_are_refused_together(tmp_path, holder):
    given = settings(tmp_path, steps=2)
    (tmp_path / "run").mkdir()
    holder(tmp_path / "run" / LOCK)
    spawn(commands, 2, words(given, tmp_path / "run"), tmp_path)
    codes, told = zip(*(json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)))
    assert codes == (2, 2)
    lines = [line for line in "".join(told).splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, told
    assert "another run is writing there" in lines[0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LOCK]


# --- damage ---


def edit(name, change):
    def damage(out):
        path = out / "checkpoints/step-00000004" / name
        path.write_bytes(change(path.read_bytes()))

    return damage


def flipped(content):
    return content[:-5000] + bytes([content[-5000] ^ 64]) + content[-4999:]


DAMAGES = {
    "model truncated": edit("model.safetensors", lambda content: content[:1000]),
    "model empty": edit("model.safetensors", lambda content: b""),
    "model cut in its data": edit("model.safetensors", lambda content: content[:-1000]),
    "model flipped": edit("model.safetensors", flipped),
    "optimizer flipped": edit("optimizer.safetensors", flipped),
    "optimizer truncated": edit("optimizer.safetensors", lambda content: content[:1000]),
    "optimizer missing": lambda out: (out / "checkpoints/step-00000004/optimizer.safetensors").unlink(),
    "optimizer of another step": lambda out: shutil.copy(
        out / "checkpoints/step-00000002/optimizer.safetensors", out / "checkpoints/step-00000004"
    ),
    "random missing": lambda out: (out / "checkpoints/step-00000004/random.safetensors").unlink(),
    "random truncated": edit("random.safetensors", lambda content: content[:100]),
    "state truncated": edit("state.json", lambda content: content[:50]),
    "state empty table": edit("state.json", lambda content: b"{}\n"),
    "state null": edit("state.json", lambda content: b"null\n"),
    "state with another key": edit("state.json", lambda content: content.replace(b'"lr"', b'"lrr"')),
    "state with another value": edit(
        "state.json", lambda content: content.replace(b'"seed": 0', b'"seed": 1')
    ),
    "whole checkpoint empty": lambda out: (
        shutil.rmtree(out / "checkpoints/step-00000004"),
        (out / "checkpoints/step-00000004").mkdir(),
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_named(out, name):
    DAMAGES[name](out)
    line = refused(out, "--resume", "--steps", "5")
    assert "step-00000004" in line
    assert "step-00000002 before it is whole: move step-00000004 away" in line


def test_a_resumed_run_does_not_stand_on_the_files_it_came_from(out):
    """They are deleted under it, which a network file system does not do to a file that is mapped."""
    maps = []
    run(
        {"steps": 5},
        out,
        resume=True,
        listeners=[At(5, lambda: maps.append(Path("/proc/self/maps").read_text()))],
    )
    assert str(out) not in maps[0]


def test_what_the_message_says_to_do_works(out, tmp_path):
    shutil.copytree(out, tmp_path / "good")
    run({"steps": 5}, tmp_path / "good", resume=True)
    DAMAGES["model flipped"](out)
    shutil.rmtree(out / "checkpoints/step-00000004")
    result = invoke("--resume", "--out", out, "--steps", "5")
    assert result.exit_code == 0, result.output
    assert "the run had a checkpoint of step 4, which is gone" in result.stderr
    assert same_run(tmp_path / "good", out)


def test_a_torn_last_line_is_dropped_with_a_notice(out):
    before = (out / "metrics.jsonl").read_text()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    result = invoke("--resume", "--out", out, "--steps", "5")
    assert result.exit_code == 0, result.output
    assert "last line of metrics.jsonl was not written to its end" in result.stderr
    assert (out / "metrics.jsonl").read_text().startswith(before)
    assert [line["step"] for line in read_metrics(out)] == [1, 2, 3, 4, 5]


LINES = {"text": b"not json", "empty": b"", "a list": b"[]", "no step": b"{}", "no number": b'{"step": "5"}'}
LINES |= {"bytes": b"\xff\x00\xfe", "true": b'{"step": true}', "deep": b"[" * 5000, "earlier": b'{"step": 1}'}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("at", [1, 4], ids=["in the middle", "at the end"])
def test_garbage_among_the_metrics_is_named_with_its_line(out, name, at):
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines.insert(at, LINES[name] + b"\n")
    (out / "metrics.jsonl").write_bytes(b"".join(lines))
    line = refused(out, "--resume", "--steps", "5")
    assert f"metrics.jsonl, line {at + 1} is " in line
    assert "mend it, or move the file away" in line


def test_metrics_that_are_missing_are_noted(out):
    (out / "metrics.jsonl").unlink()
    result = invoke("--resume", "--out", out, "--steps", "5")
    assert result.exit_code == 0, result.output
    assert "metrics.jsonl lacks lines of steps before 5" in result.stderr


# --- a disk that says no ---

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_full_at_a_checkpoint_is_one_line_and_the_run_can_go_on(base, tmp_path, monkeypatch):
    given, write, calls = settings(tmp_path, steps=4), checkpoint.save_file, []

    def fills_up(tensors, path):
        calls.append(path)
        if len(calls) == 5:  # in the middle of the second checkpoint
            path.write_bytes(b"half")
            raise FULL
        write(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", fills_up)
        result = invoke(*words(given, tmp_path / "run"))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert (
        "step-00000004 cannot be written (No space left on device); the last whole one is step-00000002"
        in line
    )
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-00000002"]
    assert invoke("--resume", "--out", tmp_path / "run").exit_code == 0
    assert same_run(base, tmp_path / "run")


def test_a_disk_full_at_a_line_of_the_metrics_is_one_line_too(base, tmp_path, monkeypatch):
    given, write = settings(tmp_path, steps=4), JsonLines.step

    def fills_up(self, line):
        if line["step"] == 3:
            self._file.write(b'{"step": 3, "lo')
            raise FULL
        write(self, line)

    with monkeypatch.context() as patch:
        patch.setattr(JsonLines, "step", fills_up)
        result = invoke(*words(given, tmp_path / "run"))
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert (
        "metrics.jsonl cannot be written (No space left on device); the last checkpoint is step-00000002"
        in line
    )
    assert invoke("--resume", "--out", tmp_path / "run").exit_code == 0
    assert same_run(base, tmp_path / "run")


@pytest.mark.parametrize("place", ["mine/run", "mine", "x" * 300, "loop/run"])
def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, place):
    (tmp_path / "mine").write_text("a file in the way")
    (tmp_path / "loop").symlink_to("loop")
    result = invoke(*words(settings(tmp_path), tmp_path / place))
    assert result.exit_code == 2, result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"error: --out {tmp_path / place}: ")
    assert (tmp_path / "mine").read_text() == "a file in the way"


def test_a_folder_that_may_not_be_written_to_is_one_line(tmp_path, monkeypatch):
    given = settings(tmp_path)

    def forbidden(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "mkdir", forbidden)
        result = invoke(*words(given, tmp_path / "run"))
    assert result.exit_code == 2, result.exception
    assert "cannot be written to (Permission denied)" in result.stderr
    assert len(result.stderr.splitlines()) == 1
