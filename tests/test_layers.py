"""The layers of docs/architecture.md are those of the code: imports point down, and never in a circle."""

import re
from pathlib import Path

import pytest
from support.imports import Graph, circles, imports, room

import pagestash as ps

DOCUMENT = Path(__file__).parents[1] / "docs" / "architecture.md"


@pytest.fixture(scope="module")
def graph() -> Graph:
    return imports()


def layers(text: str) -> list[list[str]]:
    """The rooms of each row of the first table, from the top."""
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|", text.partition("\n## ")[0], re.MULTILINE)
    return [re.findall(r"`([^`]+)`", row) for row in rows]


def upward(graph: Graph, found: list[list[str]]) -> list[tuple[str, str]]:
    """Modules that import one of a room above theirs. Rooms of one row may use each other."""
    row_of = {name: index for index, row in enumerate(found) for name in row}
    return sorted(
        (module, other)
        for module, others in graph.items()
        for other in others
        if row_of[room(module)] > row_of[room(other)]
    )


def test_the_documented_layers_are_the_rooms_of_the_package(graph):
    documented = [name for row in layers(DOCUMENT.read_text()) for name in row]
    assert sorted(documented) == sorted({room(module) for module in graph})


def test_imports_point_down(graph):
    assert upward(graph, layers(DOCUMENT.read_text())) == []


def test_no_modules_import_each_other_in_a_circle(graph):
    assert circles(graph) == []


def test_no_module_takes_the_place_of_a_function(graph):
    """Importing `pagestash.rows` would make a module of `ps.rows`."""
    modules = {module.split("/")[0].removesuffix(".py") for module in graph}
    assert modules & set(ps.__all__) == set(ps._SUBPACKAGES)


def test_an_upward_import_is_found():
    graph: Graph = {"low/a.py": {"high/b.py"}, "high/b.py": set()}
    assert upward(graph, [["high/"], ["low/"]]) == [("low/a.py", "high/b.py")]
    assert upward(graph, [["low/"], ["high/"]]) == []


@pytest.mark.parametrize(
    "line",
    [
        "from pagestash.b import x",
        "import pagestash.b",
        "from pagestash import b",
        "from . import b",
        "from .b import x",
        "def f():\n    from pagestash.b import x",
        "if TYPE_CHECKING:\n    from pagestash.b import x",
    ],
)
def test_a_circle_is_found_however_the_import_is_written(tmp_path, line):
    package = tmp_path / "pagestash"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "a.py").write_text(line)
    (package / "b.py").write_text("from pagestash.a import y")
    (package / "c.py").write_text("from pagestash.a import y")
    graph = imports(package)
    assert graph["a.py"] == {"b.py"}
    assert circles(graph) == [["a.py", "b.py"]]
