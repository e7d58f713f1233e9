"""Every script in examples/ runs, in small, and shows what it says it shows."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def run(capsys):
    """Run an example's `main`; the lines that it printed."""

    def run(name, *arguments):
        load(EXAMPLES / f"{name}.py").main([str(argument) for argument in arguments])
        return capsys.readouterr().out.splitlines()

    return run


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(line):
    return [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", line)]


def test_every_script_is_run_and_listed():
    scripts = {path.stem for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    beside = {"megatron_train"}  # test_megatron.py runs it, where what needs a GPU is replaced
    assert scripts - beside == set(
        re.findall(r'(?:run\("|EXAMPLES / ")([a-z_]+)', Path(__file__).read_text())
    )
    listed = (EXAMPLES / "README.md").read_text()
    assert all(
        f"[`{path.name}`]" in listed
        for path in EXAMPLES.iterdir()
        if path.suffix in (".py", ".toml", ".ipynb")
    )


@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(capsys):
    pytest.importorskip("transformers", minversion="5.7")
    names = {}
    for cell in json.loads((EXAMPLES / "half_of_the_memory.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["report"].equal
    assert names["found"].total_bytes < names["before"].total_bytes
    assert names["plan"].predicted.peak_bytes <= names["plan"].budget_bytes
    assert "equal to the last bit" in capsys.readouterr().out


def test_own_loop_saves_bytes_and_changes_no_loss(run):
    equal, held, report = run("own_loop", "--steps", 3, "--capacity", 128, "--width", 32)
    assert equal == "losses equal to the last bit: True"
    assert report.startswith("equal to the last bit: ")
    kept, stashed = numbers(held)
    assert stashed < kept / 2


def test_graphed_step_runs_a_batch_again_when_the_pool_is_too_small(run):
    losses, reruns, _ = run("graphed_step", "--steps", 6, "--capacity", 128, "--width", 32)
    assert "nan" not in losses
    assert numbers(reruns) == [1]


def test_offload_by_profile_moves_bytes_and_changes_no_loss(run, caplog):
    *_, equal, host = run("offload_by_profile", "--layers", 3, "--sequence", 64, "--steps", 3)
    assert equal == "loss and gradients equal to the last bit: True"
    assert not caplog.records
    assert numbers(host) > [0]


@pytest.mark.parametrize("adapters", [[], ["--lora", 2]], ids=["weights", "adapters"])
def test_hf_finetune_gives_the_losses_of_the_trainer_alone(run, adapters):
    pytest.importorskip("transformers", minversion="5.7")
    pytest.importorskip("peft")
    printed = run("hf_finetune", "--steps", 2, "--sequence", 32, *adapters)
    assert "losses equal to those of the trainer alone: True" in printed
    peaks = {line.split(":")[0]: numbers(line) for line in printed if line.endswith("bytes at the peak")}
    assert peaks["recompute"] > [0]
    assert peaks["offload"] > [0]


def test_lightning_fit_gives_the_losses_and_weights_of_the_trainer_alone(run):
    pytest.importorskip("lightning", minversion="2.6", reason="Lightning is not installed")
    printed = run("lightning_fit", "--steps", 2, "--sequence", 32)
    assert "losses and weights equal to those of the trainer alone: True" in printed
    homes = [line for line in printed if line.endswith(" bytes at the peak")]
    assert all(numbers(line) > [0] for line in homes if not line.startswith("keep"))


def test_jax_scan_gives_the_gradients_of_the_plain_scan(run):
    rows, recomputed, equal = run("jax_scan", "--layers", 4, "--rows", 64, "--width", 16)
    wanted, room, worst = numbers(rows)
    assert wanted <= room < worst
    assert numbers(recomputed) == [0]
    assert equal == "gradients are those of the plain scan: True"


@pytest.mark.slow
def test_pipeline_moves_what_the_first_rank_holds_and_nothing_of_the_last(monkeypatch, capfd):
    script = EXAMPLES / "pipeline.py"
    monkeypatch.setattr(sys, "argv", [str(script), "--rows", "8", "--width", "16"])
    with pytest.raises(SystemExit) as ended:
        load(script).main()  # it starts its ranks
    printed = capfd.readouterr()
    assert ended.value.code == 0, printed.err
    first, last = printed.out.splitlines()
    assert numbers(first)[2] > 0
    assert last == "rank 1 of 2: 0 bytes waited on the host"
