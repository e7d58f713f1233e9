"""Eight-bit codes: errors are bounded, what is not finite stays so, and kernels agree with torch bit for bit."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagestash.kernels.backend import choose
from pagestash.kernels.pages.eight_bits import BLOCK, FLOOR, CodeShape, decode, encode, encode_reference
from pagestash.pages.pool import PagePool

CPU = torch.device("cpu")
DTYPES = list(FLOOR)


def there_and_back(values, shape=None, backend="torch", valid=None):
    shape = shape or CodeShape.of(values.numel())
    codes = torch.full((shape.rows, shape.row_bytes), 0x55, dtype=torch.uint8)
    out = torch.empty_like(values)
    encode(values, shape, codes, choose(CPU, backend), valid)
    decode(codes, shape, out, choose(CPU, backend))
    return codes, out


def from_bits(bits, dtype):
    """Values of any bits at all: subnormal ones, infinities, NaN."""
    as_int = torch.int32 if dtype == torch.float32 else torch.int16
    wrap = 1 << (8 * dtype.itemsize - 1)
    numbers = [bit % (2 * wrap) - (2 * wrap if bit % (2 * wrap) >= wrap else 0) for bit in bits]
    return torch.tensor(numbers, dtype=as_int).view(dtype)


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def bound(values, dtype):
    """The largest error of each value of one block."""
    x = values.double()
    finite = x.isfinite()
    largest = x[finite].abs().max().item() if finite.any() else 0.0
    k = max(math.frexp(largest)[1] - 1 - 7 if largest else -1000, FLOOR[dtype])
    return torch.where(finite, x.abs() / 16, 0).clamp(min=2.0 ** (k - 10)), largest, k


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.data())
def test_no_value_is_off_by_more_than_the_bound(dtype, data):
    size = data.draw(st.integers(1, BLOCK))
    centre = data.draw(st.integers(0, 2**32 - 1))
    spread = data.draw(st.sampled_from([0xFFFF, 0xFFFFFF, 0xFFFFFFFF]))
    bits = data.draw(st.lists(st.integers(0, spread).map(lambda b: b ^ centre), min_size=size, max_size=size))
    values = from_bits(bits, dtype)
    _, out = there_and_back(values)
    finite = values.isfinite()
    allowed, largest, k = bound(values, dtype)
    assert (((values.double() - out.double()).abs() <= allowed) | ~finite).all()
    assert out[finite].isfinite().all()
    if k > FLOOR[dtype]:
        assert 2.0 ** (k - 10) <= largest / 2**17
    assert torch.equal(out.isnan(), values.isnan())
    infinite = values.isinf()
    assert torch.equal(out[infinite], values[infinite])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_value_there_is_keeps_its_bound_alone_and_in_a_block_with_its_neighbours(dtype):
    values = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    for stride in (1, 128):
        blocks = values.view(-1, BLOCK) if stride == 1 else values.view(BLOCK, -1).t().contiguous()
        _, out = there_and_back(blocks.reshape(-1))
        finite = blocks.isfinite()
        x, y = blocks.double(), out.view(blocks.shape).double()
        largest = torch.where(finite, x.abs(), 0).amax(1, keepdim=True)
        k = (torch.frexp(largest)[1].double() - 8).clamp(min=FLOOR[dtype])
        allowed = torch.maximum(x.abs() / 16, 2 ** (k - 10))
        assert (((x - y).abs() <= allowed) | ~finite).all()
        assert torch.equal(y.isnan(), x.isnan())
        assert torch.equal(y[x.isinf()], x[x.isinf()])
        assert y[finite].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_value_that_is_not_finite_comes_back_and_changes_no_other(dtype):
    values = torch.randn(BLOCK * 3).to(dtype)
    _, plain = there_and_back(values)
    values[5], values[6], values[200] = math.nan, -math.inf, math.inf
    _, out = there_and_back(values)
    assert out[5].isnan()
    assert out[6] == -math.inf
    assert out[200] == math.inf
    others = torch.ones(len(values), dtype=torch.bool)
    others[[5, 6, 200]] = False
    assert torch.equal(out[others], plain[others])


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf, 0.0, -0.0])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_block_of_one_special_value_comes_back_as_it_was(backend, dtype, fill):
    values = torch.full((BLOCK + 1,), fill, dtype=dtype)
    _, out = there_and_back(values, backend=backend)
    torch.testing.assert_close(out, values, rtol=0, atol=0, equal_nan=True)
    if fill == 0:
        assert torch.equal(out.signbit(), values.signbit())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_four_bits_come_back_exactly(dtype):
    """And so does what came back once: coding twice changes nothing more."""
    values = torch.randn(1000).to(dtype)
    _, once = there_and_back(values)
    _, twice = there_and_back(once)
    assert same_bits(once, twice)
    assert not torch.equal(once, values)
    powers = torch.tensor([2.0**-n for n in range(16)] * 8, dtype=dtype)
    assert torch.equal(there_and_back(powers)[1], powers)


SHAPES = {
    "flat": CodeShape.of(5000),
    "one value": CodeShape.of(1),
    "whole blocks": CodeShape.of(4096),
    "rows of blocks": CodeShape.of(7 * 256, 7),
    "rows of other widths": CodeShape.of(11 * 200, 11),
    "narrow rows": CodeShape.of(50 * 3, 50),
    "many blocks a row": CodeShape.of(3 * 128 * 17, 3),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_agree_with_torch_bit_for_bit(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    size = (shape.values,)
    wild = from_bits(torch.randint(0, 2**32, size, generator=generator).tolist(), dtype)
    tame = (
        torch.randn(size, generator=generator) * torch.exp2(torch.randn(size, generator=generator) * 4)
    ).to(dtype)
    for values in (wild, tame):
        codes, out = there_and_back(values, shape, "triton")
        same_codes, same_out = there_and_back(values, shape, "torch")
        used = shape.blocks * (BLOCK + 1)  # the rest is padding
        assert torch.equal(codes[:, :used], same_codes[:, :used])
        torch.testing.assert_close(out, same_out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("half_way", [False, True])
def test_all_codes_and_all_ties_round_as_torch_rounds(half_way):
    codes = torch.arange(0, 0x78, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    values = (codes[1:] + codes[:-1]) / 2 if half_way else codes[1:]
    values = torch.cat([values, -values, values[-1:] * 0 + 200]).float()  # with 200, the scale is 1
    shape = CodeShape.of(values.numel())
    ours, _ = there_and_back(values, shape, "triton")
    assert torch.equal(ours[:, : shape.values], encode_reference(values, shape)[:, : shape.values])


@pytest.mark.parametrize("count", [-1, 0, 1, 6, 7, 9])
@pytest.mark.parametrize("width", [256, 200])
def test_rows_that_are_not_valid_come_back_as_zeros(backend, count, width):
    shape = CodeShape.of(7 * width, 7)
    values = torch.randn(7, width).bfloat16()
    rows = min(max(count, 0), 7)
    _, whole = there_and_back(values.view(-1), shape, backend)
    values[rows:] = math.nan
    _, out = there_and_back(values.view(-1), shape, backend, torch.tensor([count]))
    assert torch.equal(out.view(7, -1)[:rows], whole.view(7, -1)[:rows])
    assert not out.view(7, -1)[rows:].any()


@pytest.mark.parametrize("count", [-1, 0, 1, 6, 7, 9])
@pytest.mark.parametrize("width", [256, 200, 128 * 65])  # (a program has 64 blocks at a time)
def test_without_a_tail_rows_that_are_not_valid_are_neither_read_nor_written(backend, count, width):
    shape, chosen = CodeShape.of(7 * width, 7), choose(CPU, backend)
    values, valid = torch.randn(7, width).bfloat16(), torch.tensor([count])
    rows = min(max(count, 0), 7)
    _, whole = there_and_back(values.view(-1), shape, backend)
    values[rows:] = math.nan
    codes, out = torch.full((7, shape.row_bytes), 0x55, dtype=torch.uint8), torch.full_like(values, 7.0)
    encode(values.view(-1), shape, codes, chosen, valid, tail=False)
    assert (codes[rows:] == 0x55).all()
    decode(codes, shape, out.view(-1), chosen, valid, tail=False)
    assert torch.equal(out[:rows], whole.view(7, -1)[:rows])
    assert (out[rows:] == 7).all()


@pytest.mark.parametrize("pages", [1, 100])
def test_without_a_tail_valid_rows_without_pages_become_zeros(backend, pages):
    shape, chosen = CodeShape.of(7 * 200, 7), choose(CPU, backend)
    pool = PagePool(CPU, 144, device_pages=pages, backend=backend)
    values = torch.randn(7, 200).bfloat16()
    (ticket,) = pool.reserve_bytes([(shape.rows, shape.row_bytes)], torch.tensor([5]))
    encode(values.view(-1), shape, pool.pages_of(ticket), chosen)
    out = torch.full_like(values, 7.0)
    decode(pool.pages_of(ticket), shape, out.view(-1), chosen, tail=False)
    _, whole = there_and_back(values.view(-1), shape, backend)
    assert torch.equal(out[:5], whole.view(7, -1)[:5] if pages == 100 else torch.zeros(5, 200).bfloat16())
    assert (out[5:] == 7).all()


def test_garbage_behind_a_row_does_not_touch_its_error(backend):
    """A block lies in one row, whatever the row's width."""
    shape = CodeShape.of(2 * 130, 2)
    values = torch.full((2, 130), 1e30)
    values[0] = torch.linspace(1, 2, 130)
    _, out = there_and_back(values.view(-1), shape, backend)
    assert ((out.view(2, -1)[0] - values[0]).abs() <= values[0] / 16).all()


def test_values_at_an_odd_address(backend):
    memory = torch.randn(1001).bfloat16()
    codes, _ = there_and_back(memory[1:], backend=backend)
    assert torch.equal(codes[:, :1000], there_and_back(memory[1:].clone(), backend=backend)[0][:, :1000])


@pytest.mark.parametrize(
    ("shape", "size"), [(CodeShape.of(2048), 2064), (CodeShape.of(10 * 7168, 10), 10 * (7168 + 64))]
)
def test_a_coded_tensor_takes_a_byte_a_value_and_a_byte_a_block(shape, size):
    assert shape.bytes == size
