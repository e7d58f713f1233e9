"""What `ps.verify` found, and how it reads."""

from dataclasses import dataclass

from pagestash.policy import Rule
from pagestash.sizes import format_bytes
from pagestash.verifying.compare import Distance
from pagestash.verifying.runs import Key

WITHIN = 10.0
"""Results under the policy are within the spread of plain runs up to so many times their difference."""

CAUSES = {
    "recompute": (
        "a replay of its forward did not find, or leave, everything as forward did: look for what forward reads or "
        "changes beyond its arguments, weights, buffers, autocast and the global random states, such as a "
        "generator of its own, an attribute, a module outside of it, or a hook that comes and goes"
    ),
    "stash": (
        "a kernel that writes a saved tensor without telling autograd, or a gradient that reads rows beyond those "
        "that ps.rows marks as valid"
    ),
    "offload": "a kernel or a stream of its own that writes a saved tensor without telling autograd",
    "keep": "nothing moves under this rule, so this may be an error of pagestash; please report it",
}
EIGHT_BITS = "bits=8 is lossy: it holds each value with an error of up to a sixteenth"


@dataclass(frozen=True, slots=True)
class Difference:
    """The first result that a step under the policy did not have in common with one without."""

    key: Key
    rank: int | None = None
    """Of `torch.distributed`, if there are several."""
    distance: Distance | None = None
    """None for what is no tensor, has another shape, or did not differ when the steps were run once more."""

    def __str__(self) -> str:
        where = f"step {self.key.step}: {self.key.kind} {self.key.name}".replace("loss loss", "the loss")
        rank = "" if self.rank is None else f" on rank {self.rank}"
        return f"{where}{rank}" + ("" if self.distance is None else f", {self.distance}")


@dataclass(frozen=True, slots=True)
class Spread:
    """For a model whose plain runs differ: the result that a policy moves furthest, measured by what plain runs do.

    Differences are the largest of a tensor, in parts of its largest value.
    """

    key: Key
    plain: float
    """Between plain runs, here or in most tensors, whichever is more."""
    policy: float
    """Between runs with and without the policy."""

    @property
    def within(self) -> bool:
        return self.policy <= WITHIN * self.plain

    def __str__(self) -> str:
        return (
            f"step {self.key.step}: {self.key.kind} {self.key.name} differs by {self.policy:.2g} of its largest "
            f"value with and without the policy, and plain runs by {self.plain:.2g}: "
            + ("within their spread" if self.within else "more than their spread")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What `ps.verify` found. `print(report)` says it in words."""

    steps: int
    results: int
    """Results that were compared on this rank: losses, gradients, weights, buffers, states."""
    moved: dict[str, int]
    """Bytes that waited in each home at the peak."""
    difference: Difference | None = None
    refused: str | None = None
    """The error that a step under the policy raised, and one without did not."""
    rules: tuple[Rule, ...] = ()
    """The rules that the difference needs, one by itself if that is enough."""
    regions: tuple[str, ...] = ()
    """The regions that the difference needs."""
    deterministic: bool = False
    """Whether plain runs differed, so that torch's deterministic algorithms were used."""
    unsteady: Key | None = None
    """Of a model whose plain runs differ all the same: the first result that does."""
    operations: tuple[str, ...] = ()
    """Operations that have no deterministic algorithm."""
    spread: Spread | None = None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether all results are equal to the last bit."""
        return self.difference is None and self.refused is None and self.unsteady is None

    @property
    def cause(self) -> str | None:
        """What the difference most likely comes from."""
        if self.difference is None or not self.rules:
            return None
        if any(rule.bits is not None for rule in self.rules):
            return EIGHT_BITS
        return "; or ".join(dict.fromkeys(CAUSES[rule.home] for rule in self.rules))

    def __str__(self) -> str:
        lines = [self._verdict()]
        if self.regions:
            more = f" and {len(self.regions) - 3} more" if len(self.regions) > 3 else ""
            lines.append(f"  region: {', '.join(self.regions[:3])}{more}")
        lines += [f"  rule: {rule.match!r}, {rule.home!r}" for rule in self.rules]
        if self.cause is not None:
            lines.append(f"  likely cause: {self.cause}")
        if self.spread is not None:
            lines.append(f"  {self.spread}")
        if self.operations:
            lines.append(f"  without a deterministic algorithm: {', '.join(self.operations)}")
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])

    def _verdict(self) -> str:
        how = " with torch's deterministic algorithms" if self.deterministic else ""
        if self.refused is not None:
            return f"refused: {self.refused}"
        if self.difference is not None:
            return f"different{how}: {self.difference}"
        if self.unsteady is not None:
            return (
                f"not to be told to the last bit: two runs without the policy differ{how}, first in step "
                f"{self.unsteady.step}: {self.unsteady.kind} {self.unsteady.name}"
            )
        moved = ", ".join(f"{home} {format_bytes(size)}" for home, size in self.moved.items())
        return f"equal to the last bit{how}: {self.results} results of {self.steps} steps; " + (
            f"moved at the peak: {moved}" if moved else "the policy was not seen to move any tensor"
        )
