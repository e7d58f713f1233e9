"""Row counts of a run, as Megatron writes them: `--save-tokens-per-expert-interval` gives `tokens_per_expert/`.

Each rank has a file, `rank0.jsonl`, with a line per layer and recorded step. `tpe` has a list per microbatch: the
tokens of each of that rank's experts.

    {"iter": 100, "block": "decoder", "layer": 3, "tpe": [[128, 64], [96, 80]]}
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pagestash.row_counts.distribution import RowDistribution


def read_tokens_per_expert(path: str | Path, *, ep: int = 1, average: float | None = None) -> RowDistribution:
    """The rows that a rank received for a layer and microbatch, from a file or from all of a folder.

    The lists are of one rank's experts, as Megatron writes them. If they are of all experts, because the run that
    wrote them had no expert parallelism, `ep` divides them among so many ranks: the first experts on the first.
    `average` is what counts as 1.0; by default it is the mean. Of a single rank's file that is the rank's own, so
    pass the even load, tokens of a rank times top-k, if that rank is hotter than others.
    """
    if isinstance(ep, bool) or not isinstance(ep, int) or ep < 1:
        raise ValueError(f"ep={ep!r}: expected a count of ranks, 1 or more")
    counts = [rows for file in _files(Path(path)) for rows in _rows(file, ep)]
    if not counts:
        raise ValueError(f"{path}: no records: expected lines like {_EXAMPLE}")
    if not any(counts):
        raise ValueError(f"{path}: all counts are 0: expected some tokens")
    return RowDistribution.measured(counts, average=average)


_EXAMPLE = '{"iter": 100, "block": "decoder", "layer": 3, "tpe": [[128, 64], [96, 80]]}'


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("*.jsonl"))
    if not found:
        raise ValueError(f"{path}: the folder has no .jsonl files")
    return found


def _rows(path: Path, ep: int) -> Iterator[int]:
    """The rows of each rank, one microbatch after the other."""
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    for tokens in _record(line, f"{path}:{number}"):
                        yield from _by_rank(tokens, ep, f"{path}:{number}")
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: this is no text: expected lines like {_EXAMPLE}") from error


def _record(line: str, where: str) -> list[list[int]]:
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or not isinstance(data.get("tpe"), list):
        raise ValueError(f"{where}: expected a record like {_EXAMPLE}")
    for tokens in data["tpe"]:
        if not isinstance(tokens, list) or not tokens or not all(map(_is_count, tokens)):
            raise ValueError(
                f"{where}: 'tpe' has {str(tokens)[:60]}: expected for each microbatch a list of counts"
            )
    return data["tpe"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _by_rank(tokens: list[int], ep: int, where: str) -> list[int]:
    if len(tokens) % ep:
        raise ValueError(f"{where}: {len(tokens)} experts cannot be divided among ep={ep} ranks")
    own = len(tokens) // ep
    return [sum(tokens[first : first + own]) for first in range(0, len(tokens), own)]
