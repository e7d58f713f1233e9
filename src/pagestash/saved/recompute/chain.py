"""Whether a recomputed region's output is discarded where another recomputed region takes it as its input."""

CHAIN = 8
"""It is discarded if

    replay_bytes ≤ CHAIN × its bytes,

where `replay_bytes` is what a replay brings back. Those bytes wait through the other region's backward: nothing for
a norm or a projection, but more than was saved for a whole layer, and everything for a chain of layers."""


def discards(replay_bytes: int, output_bytes: int) -> bool:
    """Whether the output is discarded, and both regions are replayed."""
    return replay_bytes <= CHAIN * output_bytes
