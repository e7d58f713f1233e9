"""Reading compiled HLO: computations, what a loop's body reaches, copies and matmuls in it."""

import re
from dataclasses import dataclass, field

_HEAD = re.compile(r"^(ENTRY\s+)?%?([\w.\-]+)\s*\(.*\{\s*$")
_CALLS = re.compile(r"(body|condition|to_apply|calls|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclass
class Hlo:
    computations: dict[str, list[str]] = field(default_factory=dict)
    entry: str = ""

    @classmethod
    def of(cls, compiled):
        hlo, current = cls(), None
        for line in compiled.as_text().splitlines():
            head = _HEAD.match(line)
            if head:
                current = head.group(2)
                hlo.computations[current] = []
                if head.group(1):
                    hlo.entry = current
            elif current is not None:
                hlo.computations[current].append(line)
        assert hlo.entry, "no entry computation found: the text of compiled HLO has changed"
        return hlo

    def loop_lines(self):
        """Every line that runs inside some while loop."""
        bodies = [name for lines in self.computations.values() for line in lines for name in _bodies(line)]
        assert bodies, "no while loop found: the text of compiled HLO has changed"
        return [line for name in self._reach(bodies, frozenset()) for line in self.computations[name]]

    def lines(self, *, without_branch=None):
        """Every line that can run; with `without_branch=0`, not those of any conditional's false branch."""
        skipped = set()
        if without_branch is not None:
            for lines in self.computations.values():
                for line in lines:
                    skipped |= {_branches(line)[without_branch]} if _branches(line) else set()
            assert skipped, "no conditional found: the text of compiled HLO has changed"
        names = self._reach([self.entry], frozenset(skipped))
        return [line for name in names for line in self.computations[name]]

    def matmuls(self, *, without_branch=None):
        """Matmuls in the program, or outside the branches left out."""
        return sum(
            bool(re.search(r"= \S+ dot\(", line)) for line in self.lines(without_branch=without_branch)
        )

    def _reach(self, roots, skipped):
        seen, todo = set(), list(roots)
        while todo:
            name = todo.pop()
            if name in seen or name in skipped or name not in self.computations:
                continue
            seen.add(name)
            for line in self.computations[name]:
                todo += [called for _, called in _CALLS.findall(line)] + _branches(line)
        return seen


def copies_of(lines, shape):
    """Lines that copy an array of this shape, e.g. `f32[160,128]`."""
    return [line for line in lines if re.search(rf"= \(?{re.escape(shape)}\S* copy(-start)?\(", line)]


def _bodies(line):
    return [name for kind, name in _CALLS.findall(line) if kind == "body"] if " while(" in line else []


def _branches(line):
    if " conditional(" not in line:
        return []
    listed = _BRANCHES.search(line)
    if listed:
        return [name.strip().lstrip("%") for name in listed.group(1).split(",")]
    kinds = dict(_CALLS.findall(line))
    return [kinds["false_computation"], kinds["true_computation"]]
