"""A stand-in for the wire of an all-to-all on one GPU: it takes as long as the bytes would, and 20 multiprocessors.

The collective of one rank is a copy. Here 20 programs make it, piece by piece, each piece not before its share of
the time is over. So the communication stream, 20 multiprocessors and some memory bandwidth are occupied all the
time, as by NCCL's kernels.
"""

from typing import Any

import torch

from pagestash.moe import AllToAll, MoEConfig
from pagestash.moe.parallel.collectives import Ranks, UnderWay

PROGRAMS, PIECE = 20, 8192  # multiprocessors; eight-byte words a step of each

try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import globaltimer
except ImportError:  # on a CPU the copy is torch's
    triton = None
else:

    @triton.jit
    def _paced_copy(given, out, words, nanoseconds, pieces, PIECE: tl.constexpr):
        begin = globaltimer()
        program, programs = tl.program_id(0), tl.num_programs(0)
        for number in range(pieces):
            piece = begin * 0 + number  # in 64 bits, as all that it is multiplied with
            at = (piece * programs + program) * PIECE + tl.arange(0, PIECE)
            tl.store(out + at, tl.load(given + at, mask=at < words), mask=at < words)
            due = begin + nanoseconds * (piece + 1) // pieces
            now = globaltimer()
            while now < due:
                now = globaltimer()


def paced_copy(out: torch.Tensor, given: torch.Tensor, seconds: float) -> None:
    """Copy in no less than `seconds`, with 20 multiprocessors; in 0 seconds, as fast as all of them can."""
    if not seconds or triton is None or given.device.type != "cuda" or given.nbytes % 8:
        out.copy_(given)
        return
    words = given.nbytes // 8
    pieces = triton.cdiv(words, PIECE * PROGRAMS)
    flat = (each.view(-1).view(torch.int64) for each in (given, out))
    _paced_copy[(PROGRAMS,)](*flat, words, int(seconds * 1e9), pieces, PIECE=PIECE, num_warps=16)


class PacedRanks(Ranks):
    """One rank that is told it is one of `ranks`, with a wire of `rate` bytes a second (0: as fast as it goes)."""

    ranks, rate, waits = 1, 0.0, False
    """`waits`: compute waits for each exchange at once, as without a communication stream."""
    wire_seconds = 0.0
    """Of all exchanges that were started since it was set to 0."""

    def start_all_to_all(
        self, tensor: torch.Tensor, sent: list[int] | None = None, arriving: list[int] | None = None
    ) -> UnderWay:
        given = tensor.contiguous()
        out = torch.empty_like(given)
        seconds = given.nbytes * (self.ranks - 1) / self.ranks / self.rate if self.rate else 0.0
        self.wire_seconds += seconds

        def launch(_: bool) -> Any:
            paced_copy(out, given, seconds)
            return _Over()

        under_way = UnderWay("paced", out, given, launch)
        if self.waits:
            under_way.wait()
        return under_way


class _Over:
    def wait(self) -> None:
        pass


class PacedAllToAll(AllToAll):
    """A padded `AllToAll` over such a wire, in a process group of one rank."""

    def __init__(self, config: MoEConfig, ranks: PacedRanks, max_tokens: int) -> None:
        super().__init__(config, max_tokens=max_tokens)
        self.ranks = ranks
