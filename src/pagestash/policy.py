"""The user's rules: which region's saved tensors go to which home, and how large the pool is."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

HomeName = Literal["keep", "stash", "offload", "recompute"]
HOMES: tuple[HomeName, ...] = get_args(HomeName)
MIN_BYTES: dict[str, int] = {"offload": 1 << 20, "recompute": 0}

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    f"{letter}iB": 1 << (10 * power) for power, letter in enumerate("KMGT", start=1)
}


def parse_bytes(text: str | int, what: str = "size") -> int:
    """Bytes of `"64KiB"`, `"1.5 GiB"`, `"2GB"` or a plain number.

    >>> parse_bytes("64KiB")
    65536
    """
    if isinstance(text, int) and not isinstance(text, bool):
        amount, unit = float(text), ""
    else:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
        if not found or found[2] not in _UNITS:
            raise ValueError(f"{what}={text!r}: expected a number with a unit, like '64KiB', '8GiB' or '2GB'")
        amount, unit = float(found[1]), found[2]
    if amount < 0:
        raise ValueError(f"{what}={text!r}: expected 0 or more")
    return round(amount * _UNITS[unit])


def machine_memory() -> int:
    """Bytes of memory that this machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def format_bytes(size: float) -> str:
    """A size for people: `format_bytes(1536)` is `'1.5 KiB'`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


@dataclass(frozen=True, slots=True)
class Rule:
    """Saved tensors of the regions that `match` names go to `home`.

    `*` stands for one part of a dotted name, `**` for any number of parts: `layers.*.experts` matches
    `layers.3.experts` and not `layers.3.experts.act`; `layers.**` matches both. Tensors below `min_bytes`
    (64 KiB; 1 MiB for `offload`, below which the link is not used well) stay where they are: moving them costs
    more than it frees. For `offload`: `fraction` of the bytes leave the device, and `prefetch_bytes` are on it or
    on their way back while backward runs (None: three times the largest group).
    """

    match: str
    home: HomeName
    min_bytes: int | None = None
    fraction: float = 1.0
    prefetch_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.match:
            raise ValueError("rule match='': expected a pattern like 'layers.*.experts'")
        if self.home not in HOMES:
            hint = get_close_matches(str(self.home), HOMES, n=1)
            meant = f"; did you mean {hint[0]!r}?" if hint else ""
            raise ValueError(f"rule {self.match!r}: home={self.home!r} is none of {', '.join(HOMES)}{meant}")
        if isinstance(self.fraction, bool) or not isinstance(self.fraction, int | float):
            raise ValueError(
                f"rule {self.match!r}: fraction={self.fraction!r}: expected a number from 0 to 1"
            )
        if not 0 <= self.fraction <= 1:
            raise ValueError(f"rule {self.match!r}: fraction={self.fraction!r}: expected 0 to 1")
        if self.home != "offload" and (self.fraction != 1.0 or self.prefetch_bytes is not None):
            raise ValueError(
                f"rule {self.match!r}: fraction and prefetch_bytes belong to home='offload', not to {self.home!r}"
            )
        object.__setattr__(self, "fraction", float(self.fraction))
        least = MIN_BYTES.get(self.home, 65536) if self.min_bytes is None else self.min_bytes
        object.__setattr__(self, "min_bytes", parse_bytes(least, f"rule {self.match!r}: min_bytes"))
        if self.prefetch_bytes is not None:
            ahead = parse_bytes(self.prefetch_bytes, f"rule {self.match!r}: prefetch_bytes")
            object.__setattr__(self, "prefetch_bytes", ahead)

    @property
    def least_bytes(self) -> int:
        """`min_bytes`, or what stands for it where none was given."""
        return int(self.min_bytes or 0)

    def matches(self, name: str) -> bool:
        """Whether a region of this dotted name falls under the rule."""
        return _matches(self.match, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Memory: page size, device pages (`"auto"` measures the first steps), and pinned host memory.

    `host` bounds all pinned memory: of a policy that offloads, the slabs, which grow to what is needed; of one
    that does not, the pages to spill to. `spill` sets some of it aside for spilling in both cases. `"auto"` is
    no page to spill to, and up to half of the machine's memory for offload.
    """

    page: int | str = 65536
    device: int | str = "auto"
    host: int | str = "auto"
    spill: int | str = "auto"
    headroom: float = 1.10

    def __post_init__(self) -> None:
        object.__setattr__(self, "page", parse_bytes(self.page, "pool page"))
        for name in ("device", "host", "spill"):
            if getattr(self, name) != "auto":
                object.__setattr__(self, name, parse_bytes(getattr(self, name), f"pool {name}"))
        if self.spill != "auto" and self.host != "auto" and int(self.spill) > int(self.host):
            raise ValueError(f"pool spill={self.spill}: more than host={self.host}, of which it is a part")
        if self.page_bytes == 0 or self.page_bytes % 16:
            raise ValueError(f"pool page={self.page}: expected a positive multiple of 16 bytes")
        if not self.headroom >= 1.0:
            raise ValueError(f"pool headroom={self.headroom}: expected 1.0 or more")

    @property
    def page_bytes(self) -> int:
        return int(self.page)

    @property
    def device_bytes(self) -> int | None:
        """Bytes of device pages, or None where they are to be measured."""
        return None if self.device == "auto" else int(self.device)


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules, first match wins; what no rule matches is kept.

    >>> policy = Policy(rules=[Rule("layers.*.experts", "stash")])
    >>> policy.rule_for("layers.0.experts").home
    'stash'
    """

    rules: Sequence[Rule] = ()
    pool: PoolConfig = field(default_factory=PoolConfig)

    @property
    def spill_bytes(self) -> int:
        """Pinned bytes for host pages, which a stash spills to."""
        if self.pool.spill != "auto":
            return int(self.pool.spill)
        return 0 if self.pool.host == "auto" or self._offloads else int(self.pool.host)

    @property
    def offload_bytes(self) -> int:
        """The most pinned bytes that offload may take."""
        if not self._offloads:
            return 0
        host = machine_memory() // 2 if self.pool.host == "auto" else int(self.pool.host)
        return max(0, host - self.spill_bytes)

    @property
    def _offloads(self) -> bool:
        return any(rule.home == "offload" for rule in self.rules)

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches the region `name`."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def check(self, names: Iterable[str]) -> None:
        """Refuse a rule that matches none of `names`, or only names that an earlier rule takes.

        And a limit of pinned memory that this machine cannot have.
        """
        for limit in ("host", "spill"):
            size, most = getattr(self.pool, limit), machine_memory()
            if size != "auto" and int(size) > most:
                raise ValueError(
                    f"pool {limit}={format_bytes(int(size))}: this machine has {format_bytes(most)} of memory"
                )
        known = [name for name in names if name]
        for rule in self.rules:
            matched = [name for name in known if rule.matches(name)]
            if not matched:
                near = get_close_matches(rule.match, known, n=5, cutoff=0.3) or known[:5]
                raise ValueError(
                    f"rule {rule.match!r} matches no region. Names near it: {', '.join(near) or '(none)'}. "
                    "Regions opened with ps.region() must be named to attach(model, regions=[...])."
                )
            if all(self.rule_for(name) is not rule for name in matched):
                earlier = self.rule_for(matched[0])
                assert earlier is not None
                raise ValueError(
                    f"rule {rule.match!r} never applies: {earlier.match!r} above it takes all it matches; "
                    "the first match wins, so put the narrower rule first"
                )

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """Read a policy from a TOML file."""
        try:
            return cls.from_dict(tomllib.loads(Path(path).read_text()))
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """A policy from the tables of a TOML file."""
        _known(data, {"pool", "rule"}, "policy")
        pool = data.get("pool", {})
        _known(pool, {item.name for item in fields(PoolConfig)}, "[pool]")
        rules = data.get("rule", [])
        for number, rule in enumerate(rules, start=1):
            _known(rule, {item.name for item in fields(Rule)}, f"[[rule]] {number}")
            for needed in ("match", "home"):
                if needed not in rule:
                    raise ValueError(f"[[rule]] {number}: {needed!r} is missing")
        return cls(rules=[Rule(**rule) for rule in rules], pool=PoolConfig(**pool))

    def to_toml(self) -> str:
        """The policy as TOML that `load` reads back to an equal one."""
        lines = ["[pool]"]
        for item in fields(PoolConfig):
            value = getattr(self.pool, item.name)
            lines.append(f'{item.name} = "{value}"' if value == "auto" else f"{item.name} = {value}")
        for rule in self.rules:
            match = rule.match.replace("\\", "\\\\").replace('"', '\\"')
            lines += ["", "[[rule]]", f'match = "{match}"', f'home = "{rule.home}"']
            lines += [f"min_bytes = {rule.min_bytes}"]
            if rule.fraction != 1.0:
                lines += [f"fraction = {rule.fraction}"]
            if rule.prefetch_bytes is not None:
                lines += [f"prefetch_bytes = {rule.prefetch_bytes}"]
        return "\n".join(lines) + "\n"


def _known(data: Mapping[str, Any], expected: set[str], where: str) -> None:
    for key in data:
        if key not in expected:
            hint = get_close_matches(key, expected, n=1)
            meant = f"; did you mean {hint[0]!r}?" if hint else f"; expected {', '.join(sorted(expected))}"
            raise ValueError(f"{where}: unknown key {key!r}{meant}")


@lru_cache(maxsize=2**14)  # asked in every forward, about the same names
def _matches(match: str, name: str) -> bool:
    return re.fullmatch(_pattern(match), name) is not None


def _pattern(match: str) -> str:
    """A rule's pattern as a regular expression over a dotted name."""
    parts = re.split(r"(\*\*|\*)", match)
    meaning = {"**": ".*", "*": r"[^.]+"}
    return "".join(meaning.get(part, re.escape(part)) for part in parts)
