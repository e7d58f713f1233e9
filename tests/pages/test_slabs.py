"""Host memory that groups share: no byte given twice, and none lost."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagestash.pages.slabs import ALIGNMENT, HostSlabs, places
from pagestash.saved.storage import ViewRecipe
from pagestash.torch_internals import StorageWeakRef

CPU = torch.device("cpu")
PIECE = 1 << 20


def slabs(size: int, limit: int = 1 << 40) -> HostSlabs:
    made = HostSlabs(CPU, limit)
    made.fit(size)
    return made


def form_of(tensor: torch.Tensor) -> ViewRecipe:
    return ViewRecipe(tensor.dtype, tensor.shape, tensor.stride(), 0)


def addresses(extent) -> set[int]:
    first = extent.memory.data_ptr()
    return set(range(first, first + len(extent.memory), ALIGNMENT))


@given(st.lists(st.one_of(st.integers(1, 40_000), st.integers(-20, -1)), max_size=60))
def test_extents_never_overlap_and_all_memory_comes_back(operations):
    memory, held, used = slabs(64 * ALIGNMENT), [], set()
    for operation in operations:
        if operation > 0:
            extent = memory.take(operation)
            if extent is None:
                memory.forget(operation)
                continue
            assert len(extent.memory) >= operation
            assert not addresses(extent) & used
            used |= addresses(extent)
            held.append(extent)
        elif held:
            extent = held.pop(operation % len(held))
            used -= addresses(extent)
            memory.give(extent)
        assert memory.used == len(used) * ALIGNMENT
    for extent in held:
        memory.give(extent)
    assert memory.take(64 * ALIGNMENT) is not None


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
        refused = [size for size, extent in held if extent is None]
        for size, extent in reversed(held):
            memory.give(extent) if extent is not None else memory.forget(size)
        if memory.wanted > memory.size:
            memory.fit(memory.wanted)
        else:
            assert not refused, step
    assert most <= memory.size <= 1.03 * most


def test_slabs_that_a_graph_knows_stay_where_they_are():
    memory = slabs(PIECE)
    held = memory.take(PIECE)
    address = held.memory.data_ptr()
    memory.give(held)
    memory.fixed = True
    memory.fit(2 * PIECE)
    assert memory.size == 2 * PIECE
    assert address in {memory.take(PIECE).memory.data_ptr() for _ in range(2)}


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
def test_an_extent_in_the_form_of_a_tensor_takes_its_bytes_as_they_lie(tensor):
    made = slabs(4 * ALIGNMENT)
    made.take(ALIGNMENT)
    (_, at), size = places([100, tensor.nbytes])
    extent = made.take(size)
    form = extent.in_form(at, form_of(tensor))
    form.copy_(tensor)
    there = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    assert torch.equal(extent.memory[at : at + tensor.nbytes], there)
    made.give(extent)
    # The next step has the same objects.
    assert made.take(size) is extent
    assert extent.in_form(at, form_of(tensor.clone())) is form


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
    assert made.take(tensor.nbytes).in_form(0, form_of(tensor)) is None


def test_no_view_keeps_memory_that_was_replaced():
    made = slabs(PIECE)
    tensor = torch.empty(PIECE, dtype=torch.uint8)
    extent = made.take(PIECE)
    storage = extent.memory.untyped_storage()
    extent.in_form(0, form_of(tensor))
    old = StorageWeakRef(storage)
    made.give(extent)
    del extent, storage
    made.fit(2 * PIECE)
    assert old.expired()
    form = made.take(PIECE).in_form(0, form_of(tensor))
    assert form.untyped_storage().nbytes() == 2 * PIECE
