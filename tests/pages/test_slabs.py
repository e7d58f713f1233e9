"""Host memory that sizes share: no byte given twice, and none lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagestash.pages.slabs import ALIGNMENT, PIECE, HostSlabs
from pagestash.saved.storage import ViewRecipe
from pagestash.torch_internals import StorageWeakRef

CPU = torch.device("cpu")


def slabs(size: int, limit: int = 1 << 40) -> HostSlabs:
    made = HostSlabs(CPU, limit)
    made.fit(size)
    return made


def form_of(tensor: torch.Tensor) -> ViewRecipe:
    return ViewRecipe(tensor.dtype, tensor.shape, tensor.stride(), 0)


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


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 8),
        torch.randn(2, 6, 8).transpose(0, 1),
        torch.randn(3, 1, 5).permute(2, 0, 1).to(torch.bfloat16),
        torch.arange(12),
    ],
    ids=["contiguous", "transposed", "permuted", "integers"],
)
def test_a_block_in_the_form_of_a_tensor_takes_its_bytes_as_they_lie(tensor):
    made = slabs(4 * ALIGNMENT)
    made.take(ALIGNMENT)
    block = made.take(tensor.nbytes)
    form = block.in_form(form_of(tensor))
    form.copy_(tensor)
    there = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert torch.equal(block.pieces[0], there)
    made.give(block)
    # The next step has the same objects.
    assert made.take(tensor.nbytes) is block
    assert block.in_form(form_of(tensor.clone())) is form


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(4, 1).expand(4, 8),
        torch.randn(4, 8)[:, ::2],
        torch.randn(64).as_strided((2, 2), (0, 3)),
        torch.ones(8, dtype=torch.bool),
        torch.randn(8, dtype=torch.complex64),
    ],
    ids=["expanded", "strided", "as many elements as its range, some twice", "flags", "complex"],
)
def test_what_is_not_copied_byte_by_byte_has_no_form(tensor):
    made = slabs(4 * ALIGNMENT)
    assert made.take(tensor.nbytes).in_form(form_of(tensor)) is None


def test_a_block_in_pieces_has_no_form():
    made = slabs(4 * PIECE)
    first, _, third, _ = (made.take(PIECE) for _ in range(4))
    made.give(first)
    made.give(third)
    block = made.take(2 * PIECE)
    assert len(block.pieces) == 2
    assert block.in_form(form_of(torch.empty(2 * PIECE, dtype=torch.uint8))) is None


def test_no_view_keeps_memory_that_was_replaced():
    made = slabs(PIECE)
    tensor = torch.empty(PIECE, dtype=torch.uint8)
    block = made.take(PIECE)
    storage = block.pieces[0].untyped_storage()
    block.in_form(form_of(tensor))
    old = StorageWeakRef(storage)
    made.give(block)
    del block, storage
    made.fit(2 * PIECE)
    assert old.expired()
    form = made.take(PIECE).in_form(form_of(tensor))
    assert form.untyped_storage().nbytes() == 2 * PIECE


@given(st.lists(st.integers(1, 40_000), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_blocks_given_back_together_leave_what_they_leave_one_by_one(sizes, random):
    together, one_by_one = (slabs(64 * ALIGNMENT) for _ in range(2))
    pairs = [(together.take(size), one_by_one.take(size)) for size in sizes]
    pairs = [pair for pair in pairs if pair[0] is not None]
    random.shuffle(pairs)
    given_back = pairs[: random.randint(0, len(pairs))]
    together.give_all([block for block, _ in given_back])
    for _, block in given_back:
        one_by_one.give(block)
    assert (together.used, together._free) == (one_by_one.used, one_by_one._free)
