"""`pagestash train` as a user types it: bad input is one line, exit code 2, and nothing overwritten."""

import hashlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parent))
from small import run, settings, words

from pagestash.cli import app
from pagestash.train import read_metrics
from pagestash.train.metrics import Display, display


def invoke(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


def snapshot(folder):
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def refused(tmp_path, *arguments):
    """Run with bad input: the one line, once it is sure that nothing was touched."""
    before = snapshot(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2, result.output
    assert snapshot(tmp_path) == before
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    return lines[0]


def test_the_command_writes_metrics_and_a_checkpoint(tmp_path):
    result = invoke(*words(settings(tmp_path, steps=2), tmp_path / "run"), "--preset", "tiny", "--seed", "5")
    assert result.exit_code == 0, result.output
    assert "Done: 2 steps" in " ".join(result.stdout.split())
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]
    assert (tmp_path / "run/checkpoints/step-00000002/model.safetensors").exists()
    again = invoke("--resume", "--out", tmp_path / "run", "--steps", "3")
    assert again.exit_code == 0, again.output
    assert "Going on from" in again.stdout
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2, 3]


def test_progress_has_its_bar_at_80_columns():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    homes = {"keep": 3 << 30, "stash": 2 << 30, "offload": 1 << 30, "recompute": 5 << 30}
    with display(console) as progress:
        shown = Display(progress, "qwen3-30b-a3b", total=1000, done=0)
        shown.step({"step": 500, "loss": 5.4321, "tokens": 8192, "seconds": 0.2, "saved_bytes": homes})
    text = console.file.getvalue()
    assert re.search(
        r"━{10,} .*500/1000 .*\n *loss 5.4321  40,960 tokens/s  keep 3.0 GiB.*\n *recompute 5.0", text
    )


def test_progress_names_homes_that_hold_anything():
    console = Console(width=80, file=io.StringIO(), force_terminal=True, color_system=None)
    homes = {"keep": 3 << 30, "stash": 0, "offload": 1 << 30, "recompute": 0}
    with display(console) as progress:
        shown = Display(progress, "tiny", total=10, done=0)
        shown.step({"step": 5, "loss": 5.4321, "tokens": 8192, "seconds": 0.2, "saved_bytes": homes})
    text = console.file.getvalue()
    assert re.search(r"tokens/s  keep 3.0 GiB  offload 1.0 GiB", text)
    assert "stash" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "tinny"], "unknown preset 'tinny'; did you mean 'tiny'?"),
        (["--set", "leyers=2"], "unknown key leyers; did you mean layers?"),
        (["--set", "model.expert=2"], "unknown key model.expert"),
        (["--set", "model.top_k=9"], "top_k=9: there are only experts=8"),
        (["--layers", "0"], "layers=0"),
        (["--steps", "0"], "steps=0"),
        (["--corpus", "nowhere"], "corpus nowhere: no such file"),
        (["--policy", "nowhere.toml"], "nowhere.toml"),
        (["--config", "nowhere.toml"], "nowhere.toml: No such file"),
        (["--set", "device=tpu9"], "device='tpu9'"),
        (["--set", "expert_parallel=2"], "expert_parallel=2 does not divide the 1 ranks"),
        (["--set", "dispatch=mail"], "dispatch='mail'"),
        (["--resume"], "there is no run in"),
        (["--seed", "-1"], "seed=-1: expected at least 0"),
        (["--seed", 2**63], f"seed={2**63}: expected at most {2**63 - 1}"),
        (["--seed", 10**30], "seed=1000"),
        (["--schedule", "DualPipeV"], "schedule='DualPipeV' is for a pipeline: pass --pp"),
        (["--schedule", "1F1B", "--pp", "1"], "schedule='1F1B' is for a pipeline"),
        (["--set", "chunks=2"], "chunks=2 is for a pipeline"),
        (["--set", "lr=inf"], "lr=inf: expected at most"),
        (["--set", "lr=nan"], "lr=nan: expected at least 0"),
        (["--set", "lr=" + "9" * 400], "lr is too large a number"),
        (["--set", "device=meta"], "device='meta': expected auto, cpu or cuda"),
        (["--set", "model.vocab=3"], "model.vocab=3: expected at least 256"),
        (["--set", "model.layers=3"], "model.layers: set layers instead"),
        (["--set", "model.norm_eps=nan"], "norm_eps=nan: expected at least 0"),
        (["--set", "model.rope_theta=0"], "rope_theta=0.0: expected at least"),
        (["--set", "model.shared_experts=-1"], "shared_experts=-1: expected at least 0"),
        (["--set", f"model.experts={2**31 - 1}"], "weights, gradients and optimizer of this model take"),
        (
            ["--set", f"model.experts={2**31 - 1}", "--set", f"model.expert_width={2**31 - 1}"],
            "the model is too large",
        ),
        (["--set", f"model.width={10**30}"], "expected at most 2147483647"),
        (["--preset", "deepseek-v3"], "weights, gradients and optimizer of this model take"),
        (["--layers", 10**9], "layers=1000000000: expected at most 10000"),
        (["--set", "batch=1000000000"], "batch=1000000000, sequence=128: one hidden state takes"),
        (["--set", "capacity_factor=1e308"], "capacity_factor=1e+308: expected at most 1000000.0"),
        (["--set", "beta1=1"], "beta1=1.0: expected at least 0 and less than 1"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, arguments, message):
    assert message in refused(tmp_path, "--out", tmp_path / "run", *arguments)
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is not None, reason="tensorboard is installed")
def test_tensorboard_that_is_not_there_is_named(tmp_path):
    line = refused(tmp_path, "--out", tmp_path / "run", "--set", "tensorboard=true")
    assert "the tensorboard package is not installed" in line


POLICIES = {
    "match = 5": "[[rule]]\nmatch = 5\nhome = 'stash'\n",
    "headroom='a lot'": "[pool]\nheadroom = 'a lot'\n",
    "rule=3": "rule = 3\n",
    "[] is not a table": "pool = []\n",
}


@pytest.mark.parametrize("message", POLICIES)
def test_a_wrong_type_in_a_policy_is_named_with_the_file(tmp_path, message):
    (tmp_path / "policy.toml").write_text(POLICIES[message])
    line = refused(tmp_path, "--out", tmp_path / "run", "--policy", tmp_path / "policy.toml")
    assert "policy.toml: " in line
    assert message.replace(" = ", "=") in line


@pytest.mark.parametrize("option", ["--policy", "--config"])
def test_a_file_that_is_no_text_is_named(tmp_path, option):
    (tmp_path / "file.toml").write_bytes(b"\xff\xfe")
    assert "file.toml: it is no UTF-8 text" in refused(
        tmp_path, "--out", tmp_path / "run", option, tmp_path / "file.toml"
    )
    assert f"{tmp_path}: Is a directory" in refused(tmp_path, "--out", tmp_path / "run", option, tmp_path)


def test_an_empty_corpus_is_refused(tmp_path):
    (tmp_path / "nothing.txt").touch()
    (tmp_path / "folder").mkdir()
    for name in ("nothing.txt", "folder"):
        line = refused(tmp_path, "--out", tmp_path / "run", "--corpus", tmp_path / name)
        assert "it is empty" in line


def test_a_policy_that_matches_nothing_is_refused(tmp_path):
    (tmp_path / "policy.toml").write_text('[[rule]]\nmatch = "layers.*.experts"\nhome = "stash"\n')
    line = refused(tmp_path, "--out", tmp_path / "run", "--policy", tmp_path / "policy.toml")
    assert "rule 'layers.*.experts' matches no region" in line
    assert "layers.1.moe.experts" in line


def test_a_wrong_key_in_a_file_is_named_with_the_file(tmp_path):
    (tmp_path / "run.toml").write_text("stepps = 3\n")
    line = refused(tmp_path, "--out", tmp_path / "run", "--config", tmp_path / "run.toml")
    assert "run.toml: unknown key stepps; did you mean steps?" in line


@pytest.mark.parametrize(("ranks", "given"), [("3", []), ("4", ["--set", "expert_parallel=3"])])
def test_ranks_that_do_not_divide_are_refused(tmp_path, monkeypatch, ranks, given):
    monkeypatch.setenv("WORLD_SIZE", ranks)
    line = refused(tmp_path, "--out", tmp_path / "run", *given)
    assert ("3 ranks do not divide experts=8" if not given else "does not divide the 4 ranks") in line


@pytest.fixture
def finished(tmp_path):
    run(settings(tmp_path, steps=2), tmp_path / "run")
    return tmp_path


def test_another_run_is_never_overwritten(finished):
    line = refused(finished, *words(settings(finished), finished / "run"))
    assert "holds another run; --resume continues it" in line


def test_a_file_is_no_place_for_a_run(tmp_path):
    (tmp_path / "run").write_text("mine")
    assert "it is a file" in refused(tmp_path, "--out", tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--layers", "3"], "is of another shape: layers.2."),
        (["--set", "model.width=64"], "is of another shape"),
        (["--set", "model.experts=8"], "expert_fc1.weight is 4×32×32 there and 8×32×32 in this model"),
        (["--steps", "1"], "the run is at step 2, past steps=1"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(finished, change, message):
    assert message in refused(finished, "--out", finished / "run", "--resume", "--steps", "9", *change)


def test_a_corpus_that_changed_is_refused_unless_named(finished):
    corpus = finished / "corpus.txt"
    corpus.write_text(corpus.read_text().replace("return", "yield"))
    line = refused(finished, "--out", finished / "run", "--resume", "--steps", "3")
    assert "the corpus has changed" in line
    result = invoke("--out", finished / "run", "--resume", "--steps", "3", "--corpus", corpus)
    assert result.exit_code == 0, result.output
