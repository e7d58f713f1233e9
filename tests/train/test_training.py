"""Runs: the loss falls, a policy changes no bit, a resumed run is the run that never stopped."""

import json
import signal
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file
from support import same

sys.path.insert(0, str(Path(__file__).parent))
from small import run, settings, start, without_time

from pagestash.train import prepare, read_metrics, train
from pagestash.train.checkpoint import latest
from pagestash.train.config import TrainConfig
from pagestash.train.loop import learning_rate


def tensors(out):
    """Every tensor of the last checkpoint."""
    return {
        f"{file.name}/{name}": value
        for file in sorted(latest(out).glob("*.safetensors"))
        for name, value in load_file(file).items()
    }


def same_run(first, second):
    """Whether the last checkpoints of two runs are the same to the last bit."""
    return same(tensors(first), tensors(second))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 6 steps that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole")
    given = settings(folder)
    run(given, folder / "run")
    return given, folder / "run"


def test_the_loss_falls(tmp_path):
    lines = run(
        settings(tmp_path, steps=30, batch=4, lr=1e-2, warmup=3, checkpoint_every=0), tmp_path / "run"
    )
    assert lines[0]["loss"] == pytest.approx(5.55, abs=0.1)
    assert lines[-1]["loss"] < 0.75 * lines[0]["loss"]


def test_every_step_has_its_line(whole):
    given, out = whole
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    for line in lines:
        assert line["tokens"] == given["batch"] * given["sequence"]
        assert line["seconds"] > 0
        assert line["grad_norm"] > 0
        assert set(line["saved_bytes"]) == {"keep", "stash", "offload", "recompute"}
        assert not any(line["saved_bytes"].values())  # nothing moves, and nothing is counted
        assert line["overflow"] is False
        assert line["rerun"] == 0
        assert line["lr"] == learning_rate(line["step"], TrainConfig(warmup=2, decay_steps=50))


def test_the_stash_changes_no_bit(whole, tmp_path):
    _, out = whole
    policy = settings(tmp_path)
    stashed = run({**policy, "policy": str(tmp_path / "stash.toml")}, tmp_path / "run")
    plain = read_metrics(out)
    assert [line["loss"] for line in stashed] == [line["loss"] for line in plain]
    assert [line["grad_norm"] for line in stashed] == [line["grad_norm"] for line in plain]
    assert same_run(out, tmp_path / "run")
    assert all(line["saved_bytes"]["stash"] > 0 for line in stashed)


def test_offload_and_recompute_change_no_bit(whole, tmp_path):
    _, out = whole
    example = Path(__file__).parents[2] / "examples" / "offload.toml"
    moved = run({**settings(tmp_path), "policy": str(example)}, tmp_path / "run")
    plain = read_metrics(out)
    assert [line["loss"] for line in moved] == [line["loss"] for line in plain]
    assert [line["grad_norm"] for line in moved] == [line["grad_norm"] for line in plain]
    assert same_run(out, tmp_path / "run")
    # Of two layers everything comes back within a window, and stays; the first step has no plan and moves it.
    assert moved[0]["saved_bytes"]["offload"] > 0


def test_an_overflow_is_told_and_changes_no_bit(whole, tmp_path):
    given = settings(tmp_path)
    policy = (tmp_path / "stash.toml").read_text().replace("page = 1024", 'page = 1024\ndevice = "1KiB"')
    (tmp_path / "short.toml").write_text(policy)
    lines = run({**given, "policy": str(tmp_path / "short.toml")}, tmp_path / "run")
    assert [line["overflow"] for line in lines] == [True, False, False, False, False, False]
    assert [line["rerun"] for line in lines] == [1, 0, 0, 0, 0, 0]
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_metrics(whole[1])]
    assert same_run(whole[1], tmp_path / "run")


def test_routers_with_a_selection_bias_resume_too(tmp_path):
    given = settings(tmp_path, steps=4)
    given["model"] = {**given["model"], "score": "sigmoid", "correction_bias": True}
    run(given, tmp_path / "whole")
    run({**given, "steps": 2}, tmp_path / "parts")
    run({"steps": 4}, tmp_path / "parts", resume=True)
    assert same_run(tmp_path / "whole", tmp_path / "parts")
    assert tensors(tmp_path / "parts")["model.safetensors/layers.1.moe.router.correction"].abs().max() > 0


def test_a_longer_run_is_a_shorter_one_resumed(whole, tmp_path):
    given, out = whole
    run({**given, "steps": 3}, tmp_path / "run")
    lines = run({"steps": 6}, tmp_path / "run", resume=True)
    assert without_time(lines) == without_time(read_metrics(out))
    assert same_run(out, tmp_path / "run")


def test_rows_without_room_are_told_and_change_no_bit(whole, tmp_path):
    lines = run(settings(tmp_path, capacity_factor=0.5), tmp_path / "run")
    assert lines[0]["overflow"]
    assert lines[0]["rerun"] >= 1
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_metrics(whole[1])]
    assert same_run(whole[1], tmp_path / "run")


def test_room_to_spare_changes_no_bit(whole, tmp_path):
    lines = run(settings(tmp_path, capacity_factor=3.0), tmp_path / "run")
    assert [line["loss"] for line in lines] == [line["loss"] for line in read_metrics(whole[1])]
    assert same_run(whole[1], tmp_path / "run")


def test_lines_wait_for_the_next_look_and_are_all_there(whole, tmp_path):
    lines = run(settings(tmp_path, log_every=4, checkpoint_every=0), tmp_path / "run")
    assert without_time(lines) == without_time(read_metrics(whole[1]))
    assert len({line["seconds"] for line in lines}) == 2


def test_ctrl_c_ends_with_a_checkpoint_of_the_step(whole, tmp_path):
    given, out = whole

    class Interrupt:
        def step(self, line):
            if line["step"] == 3:
                signal.raise_signal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    result = train(prepare(given, tmp_path / "run"), [Interrupt()])
    assert (result.step, result.stopped) == (3, True)
    assert signal.getsignal(signal.SIGINT) is before
    assert latest(tmp_path / "run").name == "step-00000003"
    lines = run({}, tmp_path / "run", resume=True)
    assert without_time(lines) == without_time(read_metrics(out))
    assert same_run(out, tmp_path / "run")


def wait_for_lines(out, count, process):
    until = time.monotonic() + 600  # a process that hangs, not one that is slow
    while time.monotonic() < until and process.poll() is None:
        if len(read_metrics(out)) >= count:
            return
        time.sleep(0.01)
    pytest.fail(f"no {count} lines: {process.communicate()[1]}")


@pytest.mark.slow
def test_ctrl_c_on_the_command_line_ends_cleanly(tmp_path):
    process = start(settings(tmp_path, steps=100_000), tmp_path / "run")
    wait_for_lines(tmp_path / "run", 3, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in out + err
    assert "--resume" in out
    steps = len(read_metrics(tmp_path / "run"))
    assert latest(tmp_path / "run").name == f"step-{steps:08d}"


@pytest.mark.slow
def test_a_run_that_was_killed_resumes_to_the_same_bits(tmp_path):
    given = settings(tmp_path, steps=100_000, checkpoint_every=1)
    process = start(given, tmp_path / "run")
    wait_for_lines(tmp_path / "run", 8, process)
    process.kill()
    process.communicate()
    done = int(latest(tmp_path / "run").name.removeprefix("step-"))
    assert done >= 6
    steps = done + 4
    run({"steps": steps, "checkpoint_every": 100}, tmp_path / "run", resume=True)
    run({**given, "steps": steps, "checkpoint_every": 100}, tmp_path / "whole")
    assert same_run(tmp_path / "whole", tmp_path / "run")
    assert without_time(read_metrics(tmp_path / "run")) == without_time(read_metrics(tmp_path / "whole"))


def test_rates_rise_and_fall():
    config = TrainConfig(lr=1.0, min_lr=0.1, warmup=4, decay_steps=20)
    rates = [learning_rate(step, config) for step in range(1, 30)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert sorted(rates[3:20], reverse=True) == rates[3:20]
    assert rates[19:] == pytest.approx([0.1] * 10)
    assert rates[11] == pytest.approx(0.55)
    assert learning_rate(1, TrainConfig(lr=1.0, warmup=0)) == pytest.approx(1.0, abs=1e-4)
