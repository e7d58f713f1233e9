"""Who imports whom in the package, read from the source: imports in functions and under TYPE_CHECKING count, too.

`python tests/support/imports.py [src/pagestash]` prints the rooms, the arrows between them and every circle.
"""

import ast
import sys
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "pagestash"

Graph = dict[str, set[str]]
"""Modules by their path below the package (`saved/keeper.py`), and those that each one imports."""


def imports(source: Path = SOURCE) -> Graph:
    """The graph of all modules; the package's own `__init__.py`, which shows names of all rooms, is left out."""
    files = sorted(path for path in source.rglob("*.py") if path != source / "__init__.py")
    modules = {_dotted(path, source): path.relative_to(source).as_posix() for path in files}
    graph: Graph = {name: set() for name in modules.values()}
    for path in files:
        own = graph[path.relative_to(source).as_posix()]
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _names(node, path.relative_to(source.parent)):
                while name and name not in modules:  # a name that a module defines: the module
                    name = name.rpartition(".")[0]
                own |= {modules[name]} if name else set()
        own.discard(path.relative_to(source).as_posix())
    return graph


def _dotted(path: Path, source: Path) -> str:
    parts = path.relative_to(source.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _names(node: ast.AST, path: Path) -> list[str]:
    """What an import of the module at `path` names, in full."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        above = path.parts[: -node.level] if node.level else ()
        start = ".".join([*above, *([node.module] if node.module else [])])
        return [f"{start}.{alias.name}" for alias in node.names]
    return []


def room(module: str) -> str:
    """The folder of a module, or the module itself where it is in none: `saved/`, `policy.py`."""
    first, *rest = module.split("/")
    return f"{first}/" if rest else first


def arrows(graph: Graph) -> Counter[tuple[str, str]]:
    """Imports from one room to another, and how many there are."""
    pairs = ((room(a), room(b)) for a, found in graph.items() for b in found)
    return Counter((a, b) for a, b in pairs if a != b)


def circles(graph: Graph) -> list[list[str]]:
    """Every set of modules that reach each other."""
    reach = {module: _reachable(graph, module) for module in graph}
    found = {
        tuple(sorted({other for other in reach[module] if module in reach[other]}))
        for module in graph
        if module in reach[module]
    }
    return sorted(map(list, found))


def _reachable(graph: Graph, start: str) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for module in graph[waiting.pop()] - seen:
            seen.add(module)
            waiting.append(module)
    return seen


def main(source: Path = SOURCE) -> None:
    graph = imports(source)
    between = arrows(graph)
    lines = Counter()
    for module in graph:
        lines[room(module)] += len((source / module).read_text().splitlines())
    rooms = sorted({room(module) for module in graph})
    print(f"{len(graph)} modules, {sum(lines.values())} lines, {len(rooms)} rooms, {len(between)} arrows")
    for name in rooms:
        to = ", ".join(f"{b} {count}" for (a, b), count in sorted(between.items()) if a == name)
        print(f"  {name:<22} {lines[name]:>5} lines  -> {to or 'nothing'}")
    print(
        "both ways:",
        [pair for pair in sorted(between) if pair[::-1] in between and pair < pair[::-1]] or "none",
    )
    print("circles:", circles(graph) or "none")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
