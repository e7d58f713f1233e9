"""Host memory that sizes share: no byte given twice, and none lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagestash.pages.slabs import ALIGNMENT, PIECE, HostSlabs

CPU = torch.device("cpu")


def slabs(size: int, limit: int = 1 << 40) -> HostSlabs:
    made = HostSlabs(CPU, limit)
    made.fit(size)
    return made


def addresses(block) -> set[int]:
    return {
        address
        for piece in block.pieces
        for address in range(piece.data_ptr(), piece.data_ptr() + piece.numel(), ALIGNMENT)
    }


@given(st.lists(st.one_of(st.integers(1, 40_000), st.integers(-20, -1)), max_size=60))
def test_blocks_never_overlap_and_all_memory_comes_back(operations):
    memory, held, used = slabs(64 * ALIGNMENT), [], set()
    for operation in operations:
        if operation > 0:
            block = memory.take(operation)
            if block is None:
                memory.forget(operation)
                continue
            assert sum(piece.numel() for piece in block.pieces) >= operation
            assert not addresses(block) & used
            used |= addresses(block)
            held.append(block)
        elif held:
            block = held.pop(operation % len(held))
            used -= addresses(block)
            memory.give(block)
        assert memory.used == len(used) * ALIGNMENT
    for block in held:
        memory.give(block)
    whole = memory.take(64 * ALIGNMENT)
    assert whole is not None
    assert len(whole.pieces) == 1


def test_a_tensor_is_spread_over_extents_where_none_is_large_enough():
    memory = slabs(5 * PIECE)
    blocks = [memory.take(PIECE) for _ in range(5)]
    memory.give(blocks[1])
    memory.give(blocks[3])
    spread = memory.take(2 * PIECE)
    assert spread is not None
    assert [piece.numel() for piece in spread.pieces] == [PIECE, PIECE]
    assert memory.used == memory.size


def test_it_is_not_spread_over_crumbs():
    memory = slabs(4 * PIECE)
    blocks = [memory.take(PIECE // 2) for _ in range(8)]
    for block in blocks[::2]:
        memory.give(block)
    assert memory.take(PIECE) is None
    small = memory.take(PIECE // 2)
    assert small is not None


def test_what_is_refused_is_wanted_until_it_is_forgotten():
    memory = slabs(PIECE)
    assert memory.take(PIECE) is not None
    assert memory.take(2 * PIECE) is None
    assert memory.take(PIECE) is None
    assert memory.wanted == 4 * PIECE
    memory.forget(2 * PIECE)
    memory.forget(PIECE)
    assert memory.take(PIECE) is None
    assert memory.wanted == 4 * PIECE  # the most there ever was


def test_it_grows_to_the_limit_and_shrinks_when_nothing_is_in_it():
    memory = slabs(PIECE, limit=3 * PIECE)
    held = memory.take(PIECE)
    memory.fit(10 * PIECE)
    assert memory.size == 3 * PIECE
    memory.fit(PIECE)
    assert memory.size == 3 * PIECE
    memory.give(held)
    memory.fit(PIECE)
    assert memory.size == PIECE


@pytest.mark.parametrize("seed", range(3))
def test_sizes_that_change_every_step_need_hardly_more_than_they_hold(seed):
    """Forward takes, backward gives back in reverse, with other sizes each time."""
    generator = torch.Generator().manual_seed(seed)
    memory = slabs(0)
    most = 0
    for step in range(30):
        sizes = torch.randint(PIECE, 3 * PIECE, (12,), generator=generator).tolist()
        held = [(size, memory.take(size)) for size in sizes]
        most = max(most, sum(sizes))
        refused = [size for size, block in held if block is None]
        for size, block in reversed(held):
            memory.give(block) if block is not None else memory.forget(size)
        if memory.wanted > memory.size:
            memory.fit(memory.wanted)
        else:
            assert not refused, step
    assert most <= memory.size <= 1.03 * most


def test_slabs_that_a_graph_knows_stay_where_they_are():
    memory = slabs(PIECE)
    held = memory.take(PIECE)
    address = held.pieces[0].data_ptr()
    memory.give(held)
    memory.fixed = True
    memory.fit(2 * PIECE)
    assert memory.size == 2 * PIECE
    assert address in {memory.take(PIECE).pieces[0].data_ptr() for _ in range(2)}
