"""The release notes: lines of two branches are merged by keeping both, so headings can come twice."""

import re
from pathlib import Path

import pagestash as ps

NOTES = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()


def test_no_heading_comes_twice_in_a_version():
    for version in re.split(r"^## ", NOTES, flags=re.M)[1:]:
        headings = re.findall(r"^### .*$", version, flags=re.M)
        assert len(headings) == len(set(headings)), version.splitlines()[0]


def test_the_versions_are_ours_and_come_once():
    versions = re.findall(r"^## (\d+)\.(\d+)\.(\d+)", NOTES, flags=re.M)
    numbers = [tuple(map(int, version)) for version in versions]
    assert numbers == sorted(set(numbers), reverse=True)
    ours = ps.__version__.partition(".dev")  # between releases, the next one's
    assert tuple(map(int, ours[0].split("."))) > numbers[0] if ours[1] else ours[0] == ".".join(versions[0])
