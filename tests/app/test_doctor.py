"""`pagestash doctor` says what is there, and what to do about what is not."""

import pytest
import torch
from typer.testing import CliRunner

import pagestash
from pagestash.cli import app
from pagestash.commands import doctor
from pagestash.profiling.link import Link


def told():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 80
    text = done.output.replace("\n" + " " * 13, "; ")  # what to do is on a line of its own
    return dict(line.split(maxsplit=1) for line in text.splitlines())


def test_versions_memory_and_the_missing_gpu_have_a_line_each(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines = told()
    assert lines["pagestash"].startswith(pagestash.__version__)
    assert lines["torch"] == torch.__version__
    assert "offload may pin" in lines["host"]
    assert lines["GPU"].startswith("none: ")


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(doctor, "PACKAGES", (("no-such-package", "pip install it"),))
    assert told()["no-such-package"] == "missing;  pip install it"


@pytest.mark.parametrize(("rate", "says"), [(50e9, ""), (4e9, "little offload hides")])
def test_a_gpu_has_its_memory_kernels_and_link(monkeypatch, rate, says):
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "mem_get_info": (40 << 30, 80 << 30),
        "get_device_capability": (9, 0),
        "get_device_name": "A GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(doctor, "find_link", lambda device: Link(rate, rate, 1e12, measured=True))
    lines = told()
    assert lines["cuda:0"].startswith("A GPU, sm90, 40.0 GiB of 80.0 GiB free;  other processes")
    assert lines["link"].startswith(f"{rate / 1e9:.0f} GB/s to the host")
    assert says in lines["link"]
