"""The guide's examples run as they are printed."""

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "jax.md"


def blocks():
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), flags=re.DOTALL)


def test_the_example_runs_and_says_what_it_did(capsys):
    names: dict = {}
    exec(compile(blocks()[0], str(GUIDE), "exec"), names)
    assert capsys.readouterr().out == "369 rows wanted, room for 480, 0 recomputed\n"
    assert float(abs(names["grads"]["wi"][3]).max()) == 0  # the layer without rows


def test_the_sizes_are_those_printed(capsys):
    exec(compile(blocks()[1], str(GUIDE), "exec"), {})
    assert capsys.readouterr().out.strip() in GUIDE.read_text()
