"""A policy: which regions' saved tensors go to which home, and how large the pool is."""

import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

from pagestash.field_checks import (
    Check,
    bytes_or,
    check_fields,
    check_keys,
    number_from,
    number_from_or_none,
    one_of,
)
from pagestash.patterns import matches, regular_expression
from pagestash.sizes import format_bytes, host_share, machine_memory, parse_bytes
from pagestash.toml import read_toml

HomeName = Literal["keep", "stash", "offload", "recompute"]
HOMES: tuple[HomeName, ...] = get_args(HomeName)
OVERFLOW = 1e-3
"""The probability that a step overflows the pool, unless told: a rerun in 1000 steps costs 0.1 % of the time."""
MIN_BYTES: dict[str, int] = {"offload": 1 << 20, "recompute": 0}
FRACTION: dict[str, float] = {"stash": 0.0}
"""The `fraction` of a rule that gives none; 1 for the other homes."""
MOST_PAGE = 1 << 30
MADE_BY_OPTIMIZE = ("core_attn", "expert_fc1", "moe_act", "expert_fc2")
"""Parts of models of transformers that are none before `pagestash.hf.optimize`."""


def _pattern_text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"{what}={value!r}: expected a pattern like 'layers.*.moe.experts'")
    regular_expression(value)  # refuses what it cannot read
    return value


def _eight_or_none(value: Any, what: str) -> Literal[8] | None:
    if value is None:
        return None
    if isinstance(value, bool) or value != 8:
        raise ValueError(f"{what}={value!r}: expected 8, or no such key for tensors as they are")
    return 8


def _page(value: Any, what: str) -> int:
    size = parse_bytes(value, what)
    if not 0 < size <= MOST_PAGE or size % 16:
        raise ValueError(
            f"{what}={size}: expected a positive multiple of 16 bytes, at most {format_bytes(MOST_PAGE)}"
        )
    return size


@dataclass(frozen=True, slots=True)
class Rule:
    """Saved tensors of the regions that `match` names go to `home`.

    `*` matches one part of a dotted name, `**` any number of parts: `layers.*.experts` matches
    `layers.3.experts` and not `layers.3.experts.act`; `layers.**` matches both. `{0-5,8}` matches these numbers.

    Tensors below `min_bytes` stay where they are, because moving them costs more than it frees. The default is
    64 KiB, 1 MiB for `offload` (smaller copies use the link badly), and 0 for `recompute`.

    For `offload`: `fraction` of the bytes leave the device (default: all); `prefetch_bytes` is the window, the
    device memory for groups that stay, leave or come back (None: three times the largest group). For `stash`,
    `fraction` is that of an expert layer's expected rows, whose size is known (default: none leave); rows in excess
    of them wait in pages.

    `bits=8` is lossy: tensors of bfloat16 and float16 wait in 8 bits a value, with an error of up to a sixteenth of
    each (see docs/eight-bits.md). It is for `stash`, `offload` and `keep`, which then holds a coded copy.
    """

    match: str
    home: HomeName
    min_bytes: int | None = None
    fraction: float = None  # type: ignore[assignment]  # the default is the home's; from here on a number
    prefetch_bytes: int | None = None
    bits: Literal[8] | None = None

    def __post_init__(self) -> None:
        _pattern_text(self.match, "rule match")
        check_fields(self, _RULE_FIELDS, f"rule {self.match!r}:")
        if self.fraction is None:
            object.__setattr__(self, "fraction", FRACTION.get(self.home, 1.0))
        if self.home in ("keep", "recompute") and (self.fraction != 1.0 or self.prefetch_bytes is not None):
            raise ValueError(
                f"rule {self.match!r}: fraction and prefetch_bytes belong to home='offload' and 'stash', not to "
                f"{self.home!r}"
            )
        if self.prefetch_bytes is not None and not self.offloads:
            raise ValueError(
                f"rule {self.match!r}: prefetch_bytes is the window of what leaves the device, and with "
                "home='stash' nothing does; give a fraction, too"
            )
        if self.home == "recompute" and self.bits is not None:
            raise ValueError(
                f"rule {self.match!r}: bits=8 belongs to homes that hold tensors (stash, offload, keep): what is "
                "recomputed is held nowhere"
            )
        if self.min_bytes is None:
            object.__setattr__(self, "min_bytes", MIN_BYTES.get(self.home, 65536))

    @property
    def least_bytes(self) -> int:
        """`min_bytes` as an int."""
        return int(self.min_bytes or 0)

    @property
    def moves(self) -> bool:
        """Whether tensors under it may leave their storage, or be recomputed."""
        return self.home != "keep" or self.bits is not None

    def matches(self, name: str) -> bool:
        """Whether the rule matches a region of this dotted name."""
        return matches(self.match, name)

    @property
    def offloads(self) -> bool:
        """Whether anything may leave the device."""
        return self.home == "offload" or (self.home == "stash" and self.fraction > 0)

    def for_expected_rows(self) -> "Rule | None":
        """Of a stash rule, the rule of what has a known size: pages would free nothing of it. None: it stays."""
        return _of_known_size(self) if self.fraction or self.bits is not None else None


@lru_cache(maxsize=2**10)  # called in every forward; and tensors of one rule have the same object
def _of_known_size(rule: Rule) -> Rule:
    return replace(rule, home="offload") if rule.fraction else replace(rule, home="keep", fraction=1.0)


_RULE_FIELDS: dict[str, Check] = {
    "match": _pattern_text,
    "home": one_of(*HOMES),
    "min_bytes": bytes_or(None),
    "fraction": number_from_or_none(0, 1),
    "prefetch_bytes": bytes_or(None),
    "bits": _eight_or_none,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolConfig:
    """Sizes: a page, the device pages (`"auto"`: measured), and pinned host memory.

    A policy offloads if a rule does, be it the `fraction` of a stash rule.

    | `host` | policy offloads | policy does not offload |
    | --- | --- | --- |
    | `"auto"` | offload may pin half of the machine's memory, divided by its ranks | no host pages |
    | a size | offload may pin that much, less `spill` | host pages of that size |

    A machine's memory is what its cgroup may use, where that has a limit. Its ranks are `LOCAL_WORLD_SIZE`, which
    torchrun sets, or else the ranks of `torch.distributed`, but no more than there are GPUs.

    `spill` sets the size of the host pages in both cases. Host pages are pinned at once; more than the machine
    has is an error. Offload pins what it needs; a limit above the machine's memory counts as `"auto"`, with a
    warning.

    `headroom` is a factor: the pool has that many times the pages that the measured step needed. `on_overflow`
    is for eager steps: a group that finds too few pages stays where it is (`"keep"`), or the step raises
    `PoolOverflow` (`"raise"`).
    """

    page: int | str = 65536
    device: int | str = "auto"
    host: int | str = "auto"
    spill: int | str = "auto"
    headroom: float = 1.10
    on_overflow: Literal["keep", "raise"] = "keep"

    def __post_init__(self) -> None:
        check_fields(self, _POOL_FIELDS, "pool")
        if self.spill != "auto" and self.host != "auto" and int(self.spill) > int(self.host):
            raise ValueError(f"pool spill={self.spill}: more than host={self.host}, of which it is a part")

    @property
    def page_bytes(self) -> int:
        return int(self.page)

    @property
    def device_bytes(self) -> int | None:
        """Bytes of device pages, or None if they are measured."""
        return None if self.device == "auto" else int(self.device)


_POOL_FIELDS: dict[str, Check] = {
    "page": _page,
    "device": bytes_or("auto"),
    "host": bytes_or("auto"),
    "spill": bytes_or("auto"),
    "headroom": number_from(1, 100),
    "on_overflow": one_of("keep", "raise"),
}


@dataclass(frozen=True, slots=True)
class Policy:
    """Rules, of which the first that matches applies; tensors without a rule are kept.

    Examples:
        >>> policy = Policy(rules=[Rule("layers.*.moe.experts", "stash")])
        >>> policy.rule_for("layers.0.moe.experts").home
        'stash'
    """

    rules: Sequence[Rule] = ()
    pool: PoolConfig = field(default_factory=PoolConfig)

    def __post_init__(self) -> None:
        if isinstance(self.rules, str | bytes) or not isinstance(self.rules, Sequence):
            raise ValueError(f"policy rules={self.rules!r}: expected a list of Rule")
        for number, rule in enumerate(self.rules, start=1):
            if not isinstance(rule, Rule):
                raise ValueError(f"policy rules: number {number} is {rule!r}: expected a Rule")
        if not isinstance(self.pool, PoolConfig):
            raise ValueError(f"policy pool={self.pool!r}: expected a PoolConfig")
        object.__setattr__(self, "rules", tuple(self.rules))

    @property
    def spill_bytes(self) -> int:
        """Pinned bytes for host pages, which the stash spills to."""
        if self.pool.spill != "auto":
            return int(self.pool.spill)
        return 0 if self.pool.host == "auto" or self._offloads else int(self.pool.host)

    @property
    def offload_bytes(self) -> int:
        """The most bytes that offload may pin."""
        if not self._offloads:
            return 0
        # Pinning all memory would bring the machine down, so a limit above it counts as no limit.
        named = self.pool.host != "auto" and int(self.pool.host) <= machine_memory()
        return max(0, (int(self.pool.host) if named else host_share()) - self.spill_bytes)

    @property
    def _offloads(self) -> bool:
        return any(rule.offloads for rule in self.rules)

    def rule_for(self, name: str) -> Rule | None:
        """The first rule that matches the region `name`."""
        return next((rule for rule in self.rules if rule.matches(name)), None)

    def check(self, names: Iterable[str]) -> None:
        """Raise if a rule matches none of `names`, or only names that an earlier rule matches.

        Also raises if host pages exceed the machine's memory; a limit for offload that does is a warning.
        """
        self._check_host()
        known = [name for name in names if name]
        for rule in self.rules:
            matched = [name for name in known if rule.matches(name)]
            if not matched:
                # (One name of each kind: layers differ only by their number.)
                kinds = list({re.sub(r"\d+", "*", name): name for name in reversed(known)}.values())[::-1]
                near = get_close_matches(rule.match, kinds, n=5, cutoff=0.3) or kinds[:5]
                deeper = replace(rule, match=f"**.{rule.match.lstrip('*.')}")
                hint = f"{deeper.match!r} would match. " if any(map(deeper.matches, known)) else ""
                if rule.match.rpartition(".")[2] in MADE_BY_OPTIMIZE:
                    hint += (
                        "A model of transformers has it after pagestash.hf.optimize(model), with "
                        "experts_implementation='pagestash'. "
                    )
                raise ValueError(
                    f"rule {rule.match!r} matches no region. {hint}Names near it: {', '.join(near) or '(none)'}. "
                    "Regions opened with ps.region() must be declared: attach(model, regions=[...])."
                )
            if all(self.rule_for(name) is not rule for name in matched):
                earlier = self.rule_for(matched[0])
                assert earlier is not None
                raise ValueError(
                    f"rule {rule.match!r} never applies: the earlier {earlier.match!r} matches all its regions; "
                    "the first match wins, so put the narrower rule first"
                )

    def refuse_bits(self, who: str) -> None:
        """Raise if a rule has `bits=8`, for those (`who`) that would count its tensors at their full size."""
        for rule in self.rules:
            if rule.bits is not None:
                raise ValueError(
                    f"rule {rule.match!r}: {who} does not know bits={rule.bits}, and would count tensors at their "
                    "full size; leave bits out"
                )

    def _check_host(self) -> None:
        most = machine_memory()
        has = f"this machine has {format_bytes(most)} of memory"
        if self.spill_bytes > most:
            key = "host" if self.pool.spill == "auto" else "spill"
            raise ValueError(
                f"pool {key}={format_bytes(self.spill_bytes)}: {has}, and host pages are pinned at once"
            )
        if self._offloads and self.pool.host != "auto" and int(self.pool.host) > most:
            told = f"offload takes up to {format_bytes(self.offload_bytes)}"
            warnings.warn(f"pool host={format_bytes(int(self.pool.host))}: {has}; {told}", stacklevel=3)

    @classmethod
    def of(cls, given: "Policy | Sequence[Rule] | str | Path") -> "Policy":
        """A policy, from its rules or its file, too."""
        if isinstance(given, Policy):
            return given
        if isinstance(given, str) and not given.endswith(".toml") and not Path(given).exists():
            raise ValueError(
                f"policy={given!r}: no such file; expected one like 'policy.toml', or for a keeper budget='40GiB'"
            )
        return cls.load(given) if isinstance(given, str | Path) else cls(given)

    @classmethod
    def load(cls, path: str | Path) -> "Policy":
        """Read a policy from a TOML file."""
        data = read_toml(path)
        try:
            return cls.from_dict(data)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Policy":
        """A policy from the tables of a TOML file."""
        check_keys(data, {"pool", "rule"}, "policy")
        pool, rules = data.get("pool", {}), data.get("rule", [])
        check_keys(pool, {item.name for item in fields(PoolConfig)}, "[pool]")
        if isinstance(rules, str | bytes) or not isinstance(rules, Sequence):
            raise ValueError(f"rule={rules!r}: expected tables that begin with [[rule]]")
        for number, rule in enumerate(rules, start=1):
            check_keys(rule, {item.name for item in fields(Rule)}, f"[[rule]] {number}")
            for needed in ("match", "home"):
                if needed not in rule:
                    raise ValueError(f"[[rule]] {number}: {needed!r} is missing")
        return cls(rules=[Rule(**rule) for rule in rules], pool=PoolConfig(**pool))

    def save(self, path: str | Path) -> None:
        """Write `to_toml()` to a file."""
        Path(path).write_text(self.to_toml(), encoding="utf-8")

    def to_toml(self) -> str:
        """The policy as TOML; `load` reads it back to an equal policy."""
        lines = ["[pool]"]
        lines += [f"{item.name} = {_toml(getattr(self.pool, item.name))}" for item in fields(PoolConfig)]
        for rule in self.rules:
            lines += ["", "[[rule]]"]
            for item in fields(Rule):
                value = getattr(rule, item.name)
                default = FRACTION.get(rule.home, 1.0) if item.name == "fraction" else item.default
                if value != default:
                    lines.append(f"{item.name} = {_toml(value)}")
        return "\n".join(lines) + "\n"


def _toml(value: str | float) -> str:
    # A JSON string is a TOML string, except for one control character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
