"""`bits=8`: an entry's values are coded when its region ends, or is handed over before; codes wait in its home.

The codes are an entry of their own, of half the bytes, so every home moves them as it moves anything else. Where
the home is a pool of device pages, the kernel that codes writes the pages itself, and the one that decodes reads
them. Which tensors can be coded is decided when they are saved (`can_code`).
"""

from collections.abc import Container, Iterable, Mapping, Sequence

import torch
from torch import nn

from pagestash.kernels.backend import choose
from pagestash.kernels.pages.eight_bits import BLOCK, CodeShape, decode, encode
from pagestash.pages.pool import PagePool
from pagestash.pages.ticket import Ticket
from pagestash.policy import HomeName
from pagestash.saved.home import Keep, TakesGroups
from pagestash.saved.stash import Stash
from pagestash.saved.storage import Entry
from pagestash.torch_internals import StorageWeakRef

CODED = (torch.bfloat16, torch.float16)
LEAST_WIDTH = 32


def can_code(tensor: torch.Tensor) -> bool:
    """Whether an error of a sixteenth is a small one in this tensor, as far as its dtype and shape tell.

    In float32 are what an exponential is taken of in backward (attention's logsumexp), the statistics of norms, and
    the router's scores. A last dimension below 32 is that of routing weights and of statistics.
    """
    return tensor.dtype in CODED and tensor.ndim > 0 and tensor.shape[-1] >= LEAST_WIDTH


def is_cast_weight(tensor: torch.Tensor, shapes: Container[tuple[int, ...]]) -> bool:
    """Whether the tensor is a weight in another dtype, as autocast makes; `shapes` are those of all weights.

    A weight that is trained is found by its history. A frozen one has none, so a tensor without history is taken
    for one if it has the shape of a weight, or of its transpose. (Nobody can be asked whether autocast is on: it is
    off while it runs an operation.)
    """
    node = tensor.grad_fn
    while node is not None and node.name() in _SAME_VALUES:
        node = node.next_functions[0][0]
    if node is not None:
        return isinstance(getattr(node, "variable", None), nn.Parameter)
    shape = tuple(tensor.shape)
    return shape in shapes or (*shape[:-2], *shape[:-3:-1]) in shapes


_SAME_VALUES = {
    f"{name}Backward0"
    for name in (
        "ToCopy", "T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Alias", "Clone", "Squeeze",
        "Unsqueeze", "Slice", "Select",
    )
}  # fmt: skip
"""Nodes of operations that change dtype, shape or layout, and no value."""


class _Coded:
    """The place of a coded entry."""

    __slots__ = ("_restored", "_shape")

    def __init__(self, shape: CodeShape) -> None:
        self._shape = shape
        self._restored: torch.Tensor | None = None

    def get(self, entry: Entry) -> torch.Tensor:
        flat = self._restored
        if flat is None:
            flat = self._decoded(entry).view(torch.uint8)
        # For the others who have saved it. One that asks again (retain_graph, split backward) decodes again.
        self._restored = flat if entry.waiting else None
        return flat

    def _decoded(self, entry: Entry) -> torch.Tensor:
        raise NotImplementedError


class InHome(_Coded):
    """Its codes are an entry of the rule's home."""

    __slots__ = ("_backend", "_codes")

    def __init__(self, shape: CodeShape, codes: Entry, backend: str) -> None:
        super().__init__(shape)
        self._codes = codes
        self._backend = backend

    def _decoded(self, entry: Entry) -> torch.Tensor:
        codes = self._codes
        assert codes.place is not None
        codes.waiting = 0
        flat = codes.place.get(codes)
        entry.spoiled |= codes.spoiled
        values = torch.empty(self._shape.values, dtype=entry.dtype, device=flat.device)
        # With a tail, codes of rows that are not valid are zeros, which are the codes of zero.
        valid = None if entry.tail else entry.rows
        backend = choose(flat.device, self._backend)
        decode(flat.view(self._shape.rows, -1), self._shape, values, backend, valid, tail=entry.tail)
        return values

    def drop(self, entry: Entry) -> None:
        self._restored = None
        if self._codes.place is not None:
            self._codes.place.drop(self._codes)


class InPages(_Coded):
    """Its codes are in pages."""

    __slots__ = ("_pool", "_ticket")

    def __init__(self, shape: CodeShape, pool: PagePool, ticket: Ticket) -> None:
        super().__init__(shape)
        self._pool = pool
        self._ticket = ticket

    def _decoded(self, entry: Entry) -> torch.Tensor:
        pool = self._pool
        pool.flush()
        values = torch.empty(self._shape.values, dtype=entry.dtype, device=pool.device)
        pages = pool.pages_of(self._ticket)
        decode(pages, self._shape, values, pool.memory.backend, tail=entry.tail)
        return values

    def drop(self, entry: Entry) -> None:
        self._restored = None
        # Not released here: this may run in any thread, on any stream.
        self._pool.release_later(self._ticket)


class EightBits:
    """Takes the groups of rules with `bits=8`, and hands their codes to the rule's home."""

    def __init__(self, homes: Mapping[HomeName, TakesGroups], keep: Keep, stash: Stash, backend: str) -> None:
        self._homes = homes
        self._keep = keep
        self._stash = stash
        self._backend = backend

    def put(self, group: Sequence[Entry]) -> None:
        rule = group[0].rule
        assert rule is not None
        exact = [entry for entry in group if entry.dtype is None]
        coded = [entry for entry in group if entry.dtype is not None]
        if rule.home == "stash":
            coded = self._put_into_pages(coded)
        codes = [self._code(entry) for entry in coded]
        if rule.home == "keep":
            for entry in (*exact, *codes):
                entry.place = self._keep.stay(entry)
        elif exact or codes:
            self._homes[rule.home].put([*exact, *codes])

    def _code(self, entry: Entry) -> Entry:
        """An entry with the codes of `entry`, of which it is the place."""
        values, shape = _values(entry)
        backend = choose(values.device, self._backend)
        codes = torch.empty(shape.rows, shape.row_bytes, dtype=torch.uint8, device=values.device)
        encode(values, shape, codes, backend, entry.rows, tail=entry.tail)
        rows = None if entry.sized else entry.rows
        inner = Entry(
            storage=StorageWeakRef(codes.untyped_storage()),
            version=codes._version,
            first=0,
            last=codes.nbytes,
            origin=codes,
            rows=rows,
            rows_version=entry.rows_version,
            capacity=0 if rows is None else entry.capacity,
            handles=1,
            waiting=1,
            region=entry.region,
            rule=entry.rule,
        )
        entry.place = InHome(shape, inner, self._backend)
        entry.origin = None
        return inner

    def _put_into_pages(self, group: Sequence[Entry]) -> list[Entry]:
        """Code the entries into pages, one reservation for all with one row count; returns those left to do.

        Left are all before there is a pool, where it has host pages, which only the copies of a side stream should
        write, and where the pool may be too full.
        """
        pool = self._stash.pool
        if pool is None or pool.host_pages or pool.page_bytes < BLOCK:
            return list(group)
        left: list[Entry] = []
        for entries in _by_row_count(group):
            found = [_values(entry) for entry in entries]
            most = sum(pool.room.pages(shape.bytes) for _, shape in found)
            if pool.room.decides and not pool.room.covers(most):
                left += entries
                continue
            tickets = pool.reserve_bytes(
                [(shape.rows, shape.row_bytes) for _, shape in found],
                entries[0].rows,
                account=self._stash.account(entries[0].region),
            )
            for entry, ticket, (values, shape) in zip(entries, tickets, found):
                encode(values, shape, pool.pages_of(ticket), pool.memory.backend)
                entry.place = InPages(shape, pool, ticket)
                entry.origin = None
        return left


def _by_row_count(group: Iterable[Entry]) -> Iterable[list[Entry]]:
    found: dict[int, list[Entry]] = {}
    for entry in group:
        found.setdefault(id(entry.rows), []).append(entry)
    return found.values()


def _values(entry: Entry) -> tuple[torch.Tensor, CodeShape]:
    """The entry's values, flat, where they are now."""
    assert entry.dtype is not None
    device = entry.source().device
    if device.type not in ("cpu", "cuda"):
        match = "" if entry.rule is None else entry.rule.match
        raise ValueError(
            f"rule {match!r}: bits=8 works on CPU and CUDA devices, and the model is on {device}"
        )
    values = entry.source().view(-1).view(entry.dtype)
    return values, CodeShape.of(values.numel(), 0 if entry.rows is None else entry.capacity)
