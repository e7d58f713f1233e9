"""A run that takes a moment: a model of 2 layers on a page of text."""

import json
import os
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from pagestash.cli import app
from pagestash.kernels import backend
from pagestash.train import prepare, read_metrics, train

TEXT = "".join(f"def f{n}(x):\n    return x * {n} + {n % 7}\n\n" for n in range(200))
MODEL = {"width": 32, "heads": 2, "kv_heads": 1, "dense_width": 32, "experts": 4, "expert_width": 16}
STASH = """
[pool]
page = 1024
[[rule]]
match = "layers.*.moe.experts"
home = "stash"
min_bytes = 256
"""
THREADS = 2


def settings(folder, **changes):
    """Settings of the small run; its corpus and policy are made in `folder`."""
    corpus, policy = Path(folder) / "corpus.txt", Path(folder) / "stash.toml"
    corpus.write_text(TEXT)
    policy.write_text(STASH)
    base = {"layers": 2, "model": MODEL, "corpus": (str(corpus),), "batch": 2, "sequence": 16, "steps": 6}
    return {**base, "warmup": 2, "decay_steps": 50, "checkpoint_every": 2, **changes}


def run(given, out, *, resume=False, listeners=()):
    """Train, and the metrics of all steps."""
    train(prepare(given, out, resume=resume), listeners)
    return read_metrics(Path(out))


def runs(rank, world, jobs):
    """Train on these ranks, which `gloo.spawn` started, one job after the other."""
    backend.interpreted = lambda: False
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    for given, out, resume in jobs:
        train(prepare(given, out, resume=resume))


def commands(rank, world, words, folder):
    """`pagestash train` with these words on each rank; its exit code and stderr are in `rank*.json` of `folder`."""
    backend.interpreted = lambda: False
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    done = CliRunner().invoke(app, ["train", *words])
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps([done.exit_code, done.stderr]))


def runs_short_of_pages(rank, world, given, out, short):
    """Train on these ranks; rank `short` begins with a pool of a page."""
    text = Path(given["policy"]).read_text()
    own = Path(given["policy"]).with_name(f"rank{rank}.toml")
    own.write_text(text.replace("page = 1024", f'page = 1024\ndevice = "{1 if rank == short else 4096}KiB"'))
    runs(rank, world, [({**given, "policy": str(own)}, out, False)])


def without_time(lines):
    return [{key: value for key, value in line.items() if key != "seconds"} for line in lines]


def words(given, out):
    """The same settings as words of a command line."""
    words = ["--out", str(out), "--layers", str(given["layers"]), "--steps", str(given["steps"])]
    words += ["--corpus", given["corpus"][0]]
    for key, value in given.items():
        if key not in ("layers", "steps", "corpus", "model"):
            words += ["--set", f"{key}={value}"]
    return words + [
        word for key, value in given["model"].items() for word in ("--set", f"model.{key}={value}")
    ]


def start(given, out, **kwargs):
    """`pagestash train` in a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "OMP_NUM_THREADS": str(THREADS)}
    command = [sys.executable, "-m", "pagestash", "train", *words(given, out)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )
