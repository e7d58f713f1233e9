"""What docs/install.md says of versions is what is pinned, and what CI runs."""

import re
import tomllib
from pathlib import Path

import pytest

from pagestash.torch_internals import CHECKED

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/install.md").read_text()
PINS = dict(re.findall(r"^([\w.-]+)==([\w.]+)", (ROOT / "constraints/pinned.txt").read_text(), re.M))


def table(first):
    """The rows of the table whose header begins so, by their first cell."""
    lines = PAGE[PAGE.index(first) :].split("\n\n")[0].splitlines()[2:]
    cells = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name.strip("`"): rest for name, *rest in cells}


VERSIONS = table("| | on an H200")


def minor(version):
    return tuple(map(int, version.split(".")[:2]))


@pytest.mark.parametrize("name", ["torch", "transformers", "triton", "jax"])
def test_the_table_has_the_pinned_versions(name):
    assert VERSIONS[name][1] == PINS[name]


def test_the_table_has_the_versions_of_torch_that_are_named_in_errors():
    assert [minor(version) for version in VERSIONS["torch"]] == list(map(minor, CHECKED))


@pytest.mark.parametrize(("column", "workflow"), [(1, "ci.yml"), (2, "weekly.yml")])
def test_the_table_has_the_pythons_of_ci(column, workflow):
    text = (ROOT / ".github/workflows" / workflow).read_text()
    (versions,) = re.findall(r"^        python: \[(.*)\]", text, re.M)
    assert VERSIONS["Python"][column] == versions.replace('"', "")


def test_pythons_of_the_makefile_are_those_of_the_page_and_of_the_package():
    (pythons,) = re.findall(r"^PYTHONS +:= (.*)", (ROOT / "Makefile").read_text(), re.M)
    found = [minor(version) for version in pythons.split()]
    named = re.findall(r"\d+\.\d+", VERSIONS["Python"][1]) + re.findall(r"for Python (\d+\.\d+)", PAGE)
    assert found == sorted(map(minor, named))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert minor(project["requires-python"].removeprefix(">=")) == found[0]


def test_the_extras_are_those_of_the_package():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras.keys() == table("| extra |").keys() - {"none"}
    for name, (_, brings) in table("| extra |").items():
        if name not in ("none", "demo"):
            assert {re.match(r"[\w-]+", each)[0] for each in extras[name]} == set(brings.split(", "))
