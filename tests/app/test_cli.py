"""The command line as a user types it."""

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import pagestash
from pagestash.cli import app
from pagestash.commands import options


def test_bad_options_end_with_code_2():
    assert CliRunner().invoke(app, ["nothing"]).exit_code == 2
    assert CliRunner().invoke(app, ["train"]).exit_code == 2


@pytest.mark.parametrize(
    "words",
    [
        "demo --steps 0", "demo --steps -1", "demo --seed -1", f"demo --seed {2**63}",
        "profile --batch 0", "profile --seq -1", "profile --repeats 0", "profile --depth -1", "profile --layers -1",
        f"profile --layers {10**9}", f"profile --batch {10**30}", f"profile --seq {2**63}", "profile --link 0",
        "profile --device meta", "profile --device mps", "profile --preset deepseek-v3",
    ],
)  # fmt: skip
def test_a_number_out_of_range_is_one_line_and_code_2(words):
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 2, result.exception
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")


@pytest.mark.parametrize("command", ["train", "demo"])
def test_training_without_safetensors_says_what_to_install(command, monkeypatch, tmp_path):
    loaded = ("safetensors", "pagestash.train", "pagestash.commands")
    for name in [name for name in sys.modules if name.startswith(loaded)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    result = CliRunner().invoke(app, [command, "--out", str(tmp_path / "run")])
    assert result.exit_code == 2
    assert f"pagestash {command} needs safetensors: pip install 'pagestash[train]'" in result.stderr


def test_help_and_version_load_no_torch():
    code = "import sys, json; from pagestash.cli import app\n"
    code += (
        "for words in (['--version'], ['--help'], ['train', '--help']): app(words, standalone_mode=False)\n"
    )
    code += "print(json.dumps('torch' in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == pagestash.__version__
    assert "metrics.jsonl" in done.stdout
    assert json.loads(lines[-1]) is False


@pytest.mark.parametrize("command", ["train", "profile", "partition"])
def test_help_names_the_presets(command):
    from pagestash.models import PRESETS

    assert tuple(PRESETS) == options.PRESETS
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output
    assert all(name in text for name in PRESETS)


@pytest.mark.parametrize("command", ["", *sorted(typer.main.get_command(app).commands)])
def test_help_fits_80_columns(command):
    text = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"}).output
    assert max(map(len, text.splitlines())) <= 80
    assert "…" not in text  # nothing is cut


@pytest.mark.parametrize(
    "line",
    [
        "profile --preset tiny --layers 2 --seq 16 --repeats 1 --policy policy.toml",
        "verify --preset tiny --layers 2 --seq 16 --policy policy.toml",
        "train --preset tiny --layers 1 --steps 1 --set sequence=16 --set batch=1 --policy policy.toml --out out",
        "partition --preset deepseek-v3 --stages 32 --schedule DualPipeV --shards 8",
    ],
)
def test_what_is_printed_fits_80_columns(line, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "policy.toml").write_text('[[rule]]\nmatch = "layers.*.moe.experts"\nhome = "recompute"\n')
    done = CliRunner().invoke(app, line.split(), env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = [part.rpartition("\r")[2] for part in done.output.splitlines() if "in /" not in part]
    assert max(map(len, lines)) <= 80
    assert "…" not in done.output


@pytest.mark.parametrize("command", ["train", "partition"])
def test_help_names_the_schedules(command):
    from pagestash.schedules.plan import SCHEDULES

    assert SCHEDULES == options.SCHEDULES
    text = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "300"}).output
    assert all(name in text for name in SCHEDULES)


def test_importing_the_package_loads_neither_torch_nor_jax():
    code = "import sys, pagestash; dir(pagestash); assert not {'torch', 'jax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_is_there():
    for name in pagestash.__all__:
        assert getattr(pagestash, name) is not None
