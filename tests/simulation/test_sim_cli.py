"""`pagestash simulate`, as a user types it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pagestash.cli import app
from pagestash.models.config import preset
from pagestash.simulation.cluster.cluster import read_cluster
from pagestash.simulation.cluster.layout import Layout
from pagestash.simulation.model.run import Run
from pagestash.simulation.result import simulate

SMALL = ("--preset", "qwen3-30b-a3b", "--layers", "8", "--cluster", "h100:16", "--pp", "2", "--ep", "8")


def run(*words, command="simulate"):
    return CliRunner().invoke(app, [command, *words])


def test_a_step_is_printed_drawn_and_written(tmp_path):
    pytest.importorskip("matplotlib")
    policy, plot, trace, out = (tmp_path / name for name in ("p.toml", "s.svg", "t.json", "o.json"))
    policy.write_text('[[rule]]\nmatch = "layers.*.moe.experts"\nhome = "offload"\n')
    words = ("--global-batch", "64", "--policy", str(policy), "--skew", "1.2")
    files = ("--plot", str(plot), "--trace", str(trace), "--json", str(out))
    done = run(*SMALL, "--vpp", "2", *words, *files)
    assert done.exit_code == 0, done.output
    assert "Interleaved1F1B, 8 microbatches of 1 × 4096 tokens" in done.output
    assert "memory     OK: " in done.output
    assert all(len(line) <= 80 for line in done.output.splitlines())
    found = json.loads(out.read_text())
    assert len(found["ranks"]) == 2
    assert found["ranks"][0]["host_bytes"] > 0
    assert found["layout"]["dp"] == 8
    assert found["seconds"] > 0
    assert plot.read_text().startswith("<?xml")
    assert json.loads(trace.read_text())["traceEvents"]


def test_skew_makes_a_step_longer_and_larger(tmp_path):
    found = []
    for skew in ("1.0", "1.5"):
        out = tmp_path / f"{skew}.json"
        done = run(*SMALL, "--global-batch", "64", "--skew", skew, "--json", str(out))
        assert done.exit_code == 0, done.output
        found.append(json.loads(out.read_text()))
    even, hot = found
    assert hot["seconds"] > even["seconds"]
    assert hot["ranks"][0]["peak_bytes"] > even["ranks"][0]["peak_bytes"]


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (("--dispatcher", "flex"), "dispatcher", "flex"),
        (("--delay-weight-gradients",), "delays_weight_gradients", True),
        (("--graphs", "attn,router"), "graphs", ("attn", "router")),
        (("--placement", "3,5"), "placement", (3, 5)),
    ],
)
def test_an_option_gives_what_the_api_gives(tmp_path, words, field, value):
    found = []
    for index, more in enumerate(((), words)):
        out = tmp_path / f"{index}.json"
        done = run(*SMALL, "--global-batch", "64", "--json", str(out), *more)
        assert done.exit_code == 0, done.output
        found.append(json.loads(out.read_text()))
    plain = Run(
        config=preset("qwen3-30b-a3b", 8),
        cluster=read_cluster("h100:16"),
        layout=Layout(devices=16, pp=2, ep=8),
        sequence=4096,
        global_batch=64,
    )
    for body, made in zip(found, (plain, replace(plain, **{field: value}))):
        told = simulate(made)
        assert body["seconds"] == told.seconds
        assert [rank["peak_bytes"] for rank in body["ranks"]] == [row.peak_bytes for row in told.rows]
    assert found[0]["seconds"] != found[1]["seconds"] or found[0]["ranks"] != found[1]["ranks"]


def test_row_counts_of_a_run_are_read(tmp_path):
    rows = tmp_path / "rank0.jsonl"
    rows.write_text(json.dumps({"iter": 1, "layer": 0, "tpe": [[1, 2], [2, 2], [4, 2]]}))
    done = run(*SMALL, "--global-batch", "64", "--rows", str(rows))
    assert done.exit_code == 0, done.output
    assert run(*SMALL, "--rows", str(rows), "--skew", "1.2").exit_code == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--cluster", "h100"), "expected a name and a number of devices"),
        (("--cluster", "h300:8"), "expected h100, h200, b200 or gb200, or a TOML file"),
        (("--ep", "7"), "EP 7 does not divide"),
        (("--pp", "3"), "does not divide 16 devices"),
        (("--vpp", "2", "--schedule", "1F1B"), "1F1B has one stage a rank"),
        (("--global-batch", "9"), "global batch 9 does not divide"),
        (("--precision", "int4"), "precision='int4': expected one of"),
        (("--seq", "0"), "--seq 0: expected at least 1"),
        (("--capacity", "nan"), "capacity=nan: expected at least 1"),
        (("--capacity", "inf"), "capacity=inf: expected at least 1"),
        (("--zero", "4"), "zero=4: expected 0, 1, 2 or 3"),
        (("--skew", "0.5"), "skew=0.5: expected 1"),
        (("--skew", "2", "--capacity", "1.2"), "capacity=1.2 holds less than skew=2"),
        (("--framework", "other"), "unknown framework 'other'"),
        (("--dispatcher", "ring"), "dispatcher='ring': expected alltoall or flex"),
        (("--graphs", "moe"), "graphs=moe: expected some of attn, router, mlp"),
        (("--graphs", "attn,full"), "graphs=attn,full: expected some of attn, router, mlp, or full"),
        (("--placement", "4,x"), "--placement 4,x: expected the layers of each stage, like 4,5,5,4"),
        (("--placement", "4,5"), "9 layers"),
        (("--reserve", "half"), "--reserve half: expected a part of the device's memory, like 6%"),
        (("--reserve", "100%"), "reserve=1.0: expected a part"),
        (
            ("--parameter-bytes", "2,4"),
            "--parameter-bytes 2,4: expected those of weight, gradient and optimizer",
        ),
        (("--parameter-bytes", "2,-4,1"), "gradient=-4.0 bytes a parameter"),
        (("--schedule", "2F2B"), "unknown schedule '2F2B'"),
        (("--preset", "llama"), "model 'llama': expected one of"),
        (("--plot", "here.doc"), "expected a picture's suffix"),
        (("--json", "/nowhere/o.json"), "expected a file in a folder that exists"),
    ],
)
def test_what_cannot_be_is_one_sentence(words, told):
    pytest.importorskip("matplotlib")
    done = run(*SMALL, "--global-batch", "64", *words)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_rule_that_matches_nothing_is_refused(tmp_path):
    policy = tmp_path / "p.toml"
    policy.write_text('[[rule]]\nmatch = "layers.*.nothing"\nhome = "recompute"\n')
    done = run(*SMALL, "--global-batch", "64", "--policy", str(policy))
    assert done.exit_code == 2
    assert "matches no region" in done.stderr


MEASURED = """
import json, sys, time
import pagestash.commands.simulate
from pagestash.cli import app
begun = time.process_time()
try:
    app(sys.argv[1:])
except SystemExit as done:
    assert not done.code
used = time.process_time() - begun
# (Not `getrusage`, whose peak is also that of the process which started this one.)
(most,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([used, int(most)]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the most memory of a process from /proc")
def test_a_step_of_256_devices_is_simulated_within_its_limits(tmp_path):
    """The command of the guide, without a picture: at most 1 GiB with imports, and 10 s of one core after them."""
    out, policy = tmp_path / "o.json", Path(__file__).parents[2] / "examples" / "offload.toml"
    layout = ("--pp", "8", "--ep", "32", "--vpp", "4", "--schedule", "Interleaved1F1B")
    step = ("--microbatch", "1", "--global-batch", "2048", "--seq", "4096", "--policy", str(policy))
    words = ("--preset", "deepseek-v3", "--cluster", "h100:256", *layout, *step, "--skew", "1.2")
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, "simulate", *words, "--json", str(out)],
        capture_output=True,
        text=True,
        check=True,
    )
    seconds, most = json.loads(done.stdout.splitlines()[-1])
    assert seconds < 10, seconds
    assert most < 1 << 20  # KiB, torch and all that is imported included
    found = json.loads(out.read_text())
    actions = 2 * 64 * 32  # forward and backward of 64 microbatches on 32 stages
    assert found["events"] <= 8 * actions
    assert found["microbatches"] == 64


@pytest.mark.parametrize(
    "words",
    [
        ("simulate", *SMALL, "--vpp", "2", "--global-batch", "64", "--skew", "1.2"),
        ("plan", "--preset", "tiny", "--cluster", "h100:2", "--global-batch", "4", "--seq", "64"),
    ],
)
def test_neither_a_simulation_nor_a_search_needs_torch(words):
    code = "import sys; sys.modules['torch'] = None\n"  # an import of it raises
    code += f"from pagestash.cli import app; app({list(words)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("reserve", "verdict"), [("0%", "OK"), ("50%", "TIGHT")])
def test_a_step_that_needs_the_reserve_is_tight(tmp_path, reserve, verdict):
    out = tmp_path / "o.json"
    done = run(*SMALL, "--layers", "36", "--global-batch", "64", "--reserve", reserve, "--json", str(out))
    assert f"memory     {verdict}: " in done.output
    assert json.loads(out.read_text())["verdict"] == verdict


def test_a_step_that_does_not_fit_lacks_memory(tmp_path):
    done = run("--cluster", "h100:16", "--ep", "16", "--global-batch", "64")
    assert done.exit_code == 0
    assert "memory     OOM: lacks " in done.output
    assert "of device memory on rank 0" in done.output


# --- calibrate ---


def test_a_measured_run_gives_the_constants_of_a_cluster(tmp_path):
    file, mine, again = (tmp_path / name for name in ("run.json", "mine.toml", "again.json"))
    words = (*SMALL[:4], "--pp", "2", "--ep", "8", "--global-batch", "64", "--framework", "megatron")
    assert run(*words, "--cluster", "h100:16", "--json", str(file)).exit_code == 0
    before = json.loads(file.read_text())
    wanted = 1.3 * before["seconds"], 1.1 * max(rank["peak_bytes"] for rank in before["ranks"])
    given = ("--measured", f"{1e3 * wanted[0]:.3f}ms", "--peak", str(int(wanted[1])), "--out", str(mine))
    done = run("--run", str(file), *given, command="calibrate")
    assert done.exit_code == 0, done.output
    assert f"--cluster {mine}:16" in done.output
    assert "fitted to run.json" in mine.read_text()
    assert run(*words, "--cluster", f"{mine}:16", "--json", str(again)).exit_code == 0
    found = json.loads(again.read_text())
    assert found["seconds"] == pytest.approx(wanted[0], rel=0.01)
    assert max(rank["peak_bytes"] for rank in found["ranks"]) == pytest.approx(wanted[1], rel=0.001)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--measured", "soon"), "--measured soon: expected the time of a step, like 41.2s or 850ms"),
        (("--measured", "0s"), "--measured 0s: expected the time"),
        (("--measured", "1ms"), "at any rate of kernels, this run takes"),
        (("--measured", "1s", "--peak", "much"), "--peak"),
        (("--measured", "1s", "--out", "mine.json"), "--out mine.json: expected a TOML file"),
        (("--measured", "1s", "--run", "/nowhere.json"), "--run /nowhere.json: No such file"),
    ],
)
def test_what_calibrates_nothing_is_one_sentence(tmp_path, words, told):
    file = tmp_path / "run.json"
    assert run(*SMALL, "--global-batch", "64", "--json", str(file)).exit_code == 0
    done = run("--run", str(file), "--out", str(tmp_path / "mine.toml"), *words, command="calibrate")
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_no_simulation_wrote_is_refused(tmp_path):
    (tmp_path / "run.json").write_text("[]")
    done = run("--run", str(tmp_path / "run.json"), "--measured", "1s", command="calibrate")
    assert done.exit_code == 2
    assert "expected what `pagestash simulate --json` wrote" in done.stderr
