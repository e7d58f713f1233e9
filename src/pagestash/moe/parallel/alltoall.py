"""`AllToAll`: each choice's row goes to the rank of its expert alone, and its result comes back.

T tokens of K choices, D the model's width, W ranks with E experts each. A *slot* is a row on the wire, S of them:
rank w's rows stand together, in the order of tokens and choices. `slot_TK[t, k]` is the slot of a choice, or -1.
At the other end slots are sorted by expert into R rows of capacity, so that an expert sees its rows by rank,
token and choice: the order it would see them in on a single process.

What moves, for each rank and pass in b-byte elements: b·D + 8 bytes a slot go out, b·D come back, and backward
moves as much the other way. Exact: T·K slots, of which those for experts here stay. Padded: W·C slots for C
rows of pair capacity, whatever was chosen.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pagestash.kernels.moe.combine import combine
from pagestash.kernels.moe.permute import permute
from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.rows import ALIGNMENT
from pagestash.moe.config import MoEConfig
from pagestash.moe.parallel.capacity import HEADROOM, Capacity
from pagestash.moe.parallel.collectives import Ranks, UnderWay
from pagestash.moe.parallel.dispatch import Received
from pagestash.moe.parallel.exchange import Exchange, Gradients, arrive, depart, gradients_of


class AllToAll:
    """Expert parallelism that sends rows only where they are wanted; any process group.

        dispatch = AllToAll(config, max_tokens=8192, pair_capacity=4096)    # static shapes, no host sync
        dispatch = AllToAll(config, padded=False)                           # the host reads the counts

    Padded, `pair_capacity` rows travel between every two ranks; a rank that has more for another sets its
    layer's `over_capacity`. None makes room for the worst case, `max_tokens` × min(top_k, experts here). Both
    numbers are the same on every rank; `max_tokens` is the most tokens that any rank brings to one forward.
    Exact, shapes follow the batch: the eager baseline.

    `config.capacity` bounds the rows that arrive here from all ranks; None makes room for all that can.
    """

    def __init__(
        self,
        config: MoEConfig,
        group: Any = None,
        *,
        padded: bool = True,
        max_tokens: int | None = None,
        pair_capacity: int | None = None,
    ) -> None:
        if padded and (max_tokens is None or max_tokens < 1):
            raise ValueError(
                f"max_tokens={max_tokens}: a padded AllToAll needs the most tokens any rank brings"
            )
        if not padded and pair_capacity is not None:
            raise ValueError(
                f"pair_capacity={pair_capacity}: an exact AllToAll (padded=False) has no use for it"
            )
        if pair_capacity is not None and pair_capacity < 1:
            raise ValueError(f"pair_capacity={pair_capacity}: expected at least 1 row")
        self.ranks = Ranks(group, config.experts)
        self.experts, self.padded, self.max_tokens = self.ranks.experts, padded, max_tokens
        self._fan = min(
            config.top_k, self.experts
        )  # rows that one token, of distinct ids, can have for one rank
        self._repeats_fit = self._fan == config.top_k
        self._pair, self._rows = Capacity(pair_capacity), Capacity(config.capacity)
        self._expected = config.expected_rows

    @property
    def capacity(self) -> int | None:
        return self._rows.rows

    @property
    def pair_capacity(self) -> int | None:
        """Rows that travel between every two ranks; None where the dispatch is exact."""
        return self._pair.limit(self.max_tokens * self._fan) if self.padded and self.max_tokens else None

    def send(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, over: torch.Tensor | None
    ) -> Received:
        wire = self._lay_out_padded(x, ids, over) if self.padded else self._lay_out_exact(ids)
        x_SD = _ToSlots.apply(x, wire.slot_TK, wire.slots)
        exchange = _ToExperts(wire, self.ranks)
        departed = depart(exchange, x_SD, weights.float(), ids)
        del x_SD  # from here on the exchange alone has it
        x_SD, weights_S, ids_S, wanted_W = arrive(exchange, departed)
        # At least one row: a rank that receives nothing runs the same kernels over no valid rows.
        capacity = max(1, self._rows.limit(ids_S.numel()))
        routing = route(ids_S.view(-1, 1), self.experts, capacity=capacity, over=over)
        self._rows.observe(wanted_W)
        return Received(
            x_SD,
            weights_S.view(-1, 1),
            ids_S.view(-1, 1),
            routing,
            expected_rows=self._expected,
            state=wire,
        )

    def collect(self, slots: torch.Tensor, received: Received) -> torch.Tensor:
        wire = received.state
        exchange = _ToTokens(wire, self.ranks)
        departed = depart(exchange, slots)
        del slots
        (returned_SD,) = arrive(exchange, departed)
        return _FromSlots.apply(returned_SD, wire.slot_TK)

    def grow_capacity(self, *, headroom: float = HEADROOM, alignment: int = ALIGNMENT) -> bool:
        """Make room on every rank for the most that any rank wanted. Every rank calls it; it waits."""
        grew = False
        for capacity, share in ((self._pair, 1), (self._rows, self.ranks.count)):
            if capacity.peak is not None:
                wanted = int(self.ranks.maximum(capacity.peak))
                most = wanted if self.max_tokens is None else share * self.max_tokens * self._fan
                grew |= capacity.grow(wanted, most, headroom=headroom, alignment=alignment)
        return grew

    def _lay_out_padded(self, x: torch.Tensor, ids: torch.Tensor, over: torch.Tensor | None) -> "_Wire":
        assert self.max_tokens is not None
        if x.shape[0] > self.max_tokens:
            raise ValueError(f"{x.shape[0]} tokens on rank {self.ranks.rank}: max_tokens={self.max_tokens}")
        pair = self._pair.limit(self.max_tokens * self._fan)
        owner_TK = torch.div(ids, self.experts, rounding_mode="floor")
        routing = route(owner_TK, self.ranks.count)
        if self._pair.rows is not None or not self._repeats_fit:
            most = routing.counts.max()
            self._pair.observe(most)
            if over is not None:
                over.masked_fill_(most > pair, 1.0)
        starts_W = routing.offsets - routing.counts
        # (An id that no expert has has no owner, and no row in `inverse`.)
        among_TK = routing.inverse - starts_W[owner_TK.clamp(0, self.ranks.count - 1).to(torch.int64)]
        fits_TK = (routing.inverse >= 0) & (among_TK < pair)
        slot_TK = torch.where(fits_TK, owner_TK * pair + among_TK, -1).to(torch.int32)
        return _Wire(slot_TK, self.ranks.count * pair, routing.counts, pair=pair)

    def _lay_out_exact(self, ids: torch.Tensor) -> "_Wire":
        owner_TK = torch.div(ids, self.experts, rounding_mode="floor")
        routing = route(owner_TK, self.ranks.count)
        coming_W = self.ranks.start_all_to_all(routing.counts).finish()
        # The one wait of a forward, for both.
        sent, arriving = torch.stack([routing.counts, coming_W]).tolist()
        return _Wire(routing.inverse, sum(sent), routing.counts, coming_W, sent=sent, arriving=arriving)


@dataclass(frozen=True, slots=True)
class _Wire:
    """How slots are laid out: `pair` for every rank, or as many for each as the lists say."""

    slot_TK: torch.Tensor  # int32
    slots: int
    counts_W: torch.Tensor  # int32: rows for each rank; padded: also beyond the pair's capacity
    coming_W: torch.Tensor | None = None  # int32: rows from each rank; padded, that is known on arrival
    pair: int = 0  # slots for each rank; 0: exact
    sent: list[int] | None = None
    arriving: list[int] | None = None


class _ToSlots(torch.autograd.Function):
    """Tokens [T, D] to their slots [S, D]. Saves indices only. Padding stays uninitialised; nobody reads it."""

    @staticmethod
    def forward(ctx: Any, x_TD: torch.Tensor, slot_TK: torch.Tensor, slots: int) -> torch.Tensor:
        ctx.save_for_backward(slot_TK)
        return permute(x_TD.contiguous(), slot_TK, slots)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_SD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot_TK,) = ctx.saved_tensors
        return combine(dx_SD.contiguous(), slot_TK), None, None


class _FromSlots(torch.autograd.Function):
    """Slots [S, D] to tokens [T, D], summed in the order of the choices. Saves indices only.

    Padding gets an uninitialised gradient.
    """

    @staticmethod
    def forward(ctx: Any, y_SD: torch.Tensor, slot_TK: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slot_TK)
        ctx.slots = y_SD.shape[0]
        return combine(y_SD.contiguous(), slot_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (slot_TK,) = ctx.saved_tensors
        return permute(dy_TD.contiguous(), slot_TK, ctx.slots), None


class _ToExperts(Exchange):
    """Slots [S, D], and the weights and ids [T, K] of their choices, to the experts' ranks.

    Gives the slots that arrive, their weights and experts (counted from this rank's first; -1 where a slot is
    padding), and how many rows each rank wanted to send here.
    """

    def __init__(self, wire: _Wire, ranks: Ranks) -> None:
        super().__init__()
        self._wire, self._ranks = wire, ranks

    def start(self, x_SD: torch.Tensor, weights_TK: torch.Tensor, ids_TK: torch.Tensor) -> list[UnderWay]:
        wire, ranks = self._wire, self._ranks
        about = _describe(weights_TK, ids_TK, wire, ranks)
        return [ranks.start_all_to_all(each, wire.sent, wire.arriving) for each in (x_SD, about)]

    def finish(self, x_SD: torch.Tensor, about: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wire = self._wire
        if wire.pair:
            parts = about.view(self._ranks.count, wire.pair + 1, 2)
            wanted_W, about = parts[:, 0, 0].contiguous(), parts[:, 1:].reshape(-1, 2)
        else:
            assert wire.coming_W is not None
            wanted_W = wire.coming_W.clone()
        ids_S, weights_S = (column.contiguous() for column in about.unbind(1))
        return x_SD, weights_S.view(torch.float32), ids_S, wanted_W

    def start_back(self, dx_SD: torch.Tensor, dweights_S: torch.Tensor, *_: torch.Tensor) -> list[UnderWay]:
        wire, gradients = self._wire, zip((dx_SD, dweights_S), self.needs)
        return [
            self._ranks.start_all_to_all(each, wire.arriving, wire.sent) for each, asked in gradients if asked
        ]

    def finish_back(self, *arrived: torch.Tensor) -> Gradients:
        dx_SD, back_S, _ = gradients_of(self.needs, arrived)
        dweights_TK, slot_TK = None, self._wire.slot_TK
        if back_S is not None:
            dweights_TK = torch.where(slot_TK >= 0, back_S[slot_TK.clamp(min=0).to(torch.int64)], 0.0)
        return dx_SD, dweights_TK, None


def _describe(weights_TK: torch.Tensor, ids_TK: torch.Tensor, wire: _Wire, ranks: Ranks) -> torch.Tensor:
    """Int32 [lines, 2]: expert and weight of each slot. Padded, a rank's lines begin with what was wanted."""
    slot = wire.slot_TK.view(-1).to(torch.int64)
    lines = wire.slots + (ranks.count if wire.pair else 0)
    # One line more, cut off again, for the choices that have no slot.
    about = torch.full((lines + 1, 2), -1, dtype=torch.int32, device=ids_TK.device)
    at = slot
    if wire.pair:
        about[:-1].view(ranks.count, wire.pair + 1, 2)[:, 0, 0] = wire.counts_W
        at = slot + torch.div(slot, wire.pair, rounding_mode="floor") + 1
    expert = torch.remainder(ids_TK.reshape(-1).to(torch.int32), ranks.experts)
    told = torch.stack([expert, weights_TK.reshape(-1).view(torch.int32)], dim=1)
    about[torch.where(slot >= 0, at, lines)] = told
    return about[:-1]


class _ToTokens(Exchange):
    """Results [S, D] from the experts' ranks to the slots they came from."""

    def __init__(self, wire: _Wire, ranks: Ranks) -> None:
        super().__init__()
        self._wire, self._ranks = wire, ranks

    def start(self, y_SD: torch.Tensor) -> list[UnderWay]:
        return [self._ranks.start_all_to_all(y_SD, self._wire.arriving, self._wire.sent)]

    def start_back(self, dy_SD: torch.Tensor) -> list[UnderWay]:
        return [self._ranks.start_all_to_all(dy_SD, self._wire.sent, self._wire.arriving)]
