"""Rows that kernels code as they write them: the codes are the encoder's, bit for bit, wherever they wait."""

import pytest
import torch
from support.tiers import slow, slow_but

from pagestash.kernels.backend import interpreted
from pagestash.kernels.moe import gated
from pagestash.kernels.moe.activation import Activation
from pagestash.kernels.moe.coded_rows import decode_rows, permute_coded
from pagestash.kernels.moe.permute import permute
from pagestash.kernels.moe.route import route
from pagestash.kernels.moe.row_codes import (
    CodeRow,
    RowCodes,
    decode_rows_reference,
    encode_rows_reference,
    get_reference,
)
from pagestash.kernels.moe.row_info import RowInfo
from pagestash.kernels.pages.eight_bits import CodeShape, encode_reference
from pagestash.kernels.pages.layout import HEADER, Header, Status
from pagestash.pages.pool import PagePool

BACKENDS = [
    "torch",
    pytest.param("triton", marks=pytest.mark.skipif(not interpreted(), reason="interpreter")),
]
CAPACITY, ROWS = 37, 29
COUNT = torch.tensor([ROWS], dtype=torch.int32)
UNTOUCHED = 0x55
PLACES = ["buffer", "pages", "small pages"]
SPLITS = [0, 13, ROWS, CAPACITY]
WHERE = [(place, split) for place in PLACES for split in SPLITS if place == "buffer" or split < CAPACITY]

FEW = [("buffer", 0), ("buffer", 13), ("pages", 13), ("small pages", 0)]


def room(row, split, place):
    """Room for the codes of rows that are all garbage so far, and the pool where there is one."""

    def filled(count):
        return torch.full((count, row.bytes), UNTOUCHED, dtype=torch.uint8) if count else None

    excess = CAPACITY - split
    if place == "buffer" or not excess:
        return RowCodes(row, filled(split), filled(excess), None), None
    pool = PagePool("cpu", 4096 if place == "pages" else 144, 200, backend="torch")
    (ticket,) = pool.reserve_bytes([(excess, row.bytes)], torch.tensor([max(ROWS - split, 0)]))
    return RowCodes(row, filled(split), None, pool.pages_of(ticket)), pool


def check(codes, values):
    """They are those of `values`, and rows past the valid ones were not touched."""
    used = codes.row.parts * (codes.row.width + codes.row.blocks)
    wanted = encode_rows_reference(values, codes.row)[:, :used]
    assert torch.equal(get_reference(codes, ROWS)[:, :used], wanted)
    for buffer, valid in ((codes.expected_SC, ROWS), (codes.excess_RC, ROWS - codes.split)):
        if buffer is not None:
            assert (buffer[max(valid, 0) :] == UNTOUCHED).all()


def projection(inner, parts, dtype=torch.bfloat16):
    h = (3 * torch.randn(CAPACITY, parts * inner)).to(dtype)
    h[3, 5], h[4, 6], h[5, 7] = torch.inf, -torch.inf, torch.nan
    h[ROWS:] = torch.nan
    return h


def test_rows_of_whole_blocks_have_the_bytes_of_the_encoder():
    x = torch.randn(7, 768).bfloat16()
    wanted = encode_reference(x.view(-1), CodeShape.of(x.numel(), 7))
    for row in (CodeRow(1, 768), CodeRow(2, 384)):
        assert torch.equal(encode_rows_reference(x.view(7, row.parts, -1), row), wanted)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("place", "split"), slow_but(FEW, WHERE))
@pytest.mark.parametrize(
    ("width", "dtype"), [(40, torch.bfloat16), *slow((256, torch.bfloat16), (200, torch.float16))]
)
def test_permuted_rows_are_coded_and_come_back(backend, place, split, width, dtype):
    ids = torch.stack([torch.randperm(5)[:2] for _ in range(20)])
    routing = route(ids, 5, capacity=ROWS)  # some choices have no row
    inverse = torch.where(routing.inverse < ROWS, routing.inverse, -1)
    x = torch.randn(20, width).to(dtype)
    x[2, 3] = torch.inf
    x[(inverse < 0).all(1)] = torch.nan
    codes, _ = room(CodeRow(1, width), split, place)
    out = permute_coded(x, inverse, codes, torch.full((CAPACITY, width), 9.0, dtype=dtype), backend=backend)
    assert torch.equal(out[:ROWS], permute(x, inverse, CAPACITY, backend="torch")[:ROWS])
    assert (out[ROWS:] == 9).all()
    check(codes, out[:ROWS])
    back = decode_rows(codes, COUNT, torch.full_like(out, 9.0), backend=backend)
    again = decode_rows(codes, COUNT, torch.full_like(out, 9.0), backend="torch")
    assert torch.equal(back, again)
    assert (back[ROWS:] == 9).all()
    finite = out[:ROWS].isfinite()
    error = (back[:ROWS].float() - out[:ROWS].float()).abs()
    assert (error <= (out[:ROWS].float().abs() / 16).clamp(min=1e-4))[finite].all()
    assert torch.equal(back[:ROWS][~finite], out[:ROWS][~finite])


CASES = [
    ("silu", 72, False),
    *slow(
        ("silu", 128, False),
        ("clamped", 96, True),
        (Activation(curve="relu2", gated=False), 200, False),
    ),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("place", "split"), slow_but(FEW, WHERE))
@pytest.mark.parametrize(("activation", "inner", "interleaved"), CASES)
def test_the_activation_codes_what_it_reads_and_its_gradient_reads_that(
    backend, place, split, activation, inner, interleaved
):
    parts = gated.as_activation(activation).parts
    h = projection(inner, parts)
    weights, bias = torch.rand(CAPACITY), torch.randn(2, parts * inner).bfloat16()
    offsets = torch.tensor([10, ROWS], dtype=torch.int32)
    info = RowInfo(COUNT, weights, None, bias, offsets, interleaved)
    codes, _ = room(CodeRow(parts, inner), split, place)
    a = gated.forward(h, info, activation, codes=codes, backend=backend)
    plain = gated.forward(h, info, activation, backend=backend)
    torch.testing.assert_close(a[:ROWS], plain[:ROWS], rtol=0, atol=0, equal_nan=True)
    in_parts = h[:ROWS].view(ROWS, -1, 2).transpose(1, 2) if interleaved else h[:ROWS].view(ROWS, parts, -1)
    check(codes, in_parts)

    row = CodeRow(parts, inner)
    coded = h.clone()
    decoded = decode_rows_reference(encode_rows_reference(in_parts, row), row, h.dtype)
    coded[:ROWS] = decoded.view(ROWS, 2, -1).transpose(1, 2).flatten(1) if interleaved else decoded
    gradient = torch.randn(CAPACITY, inner).bfloat16()
    wanted = gated.backward(coded, gradient, info, activation, backend=backend)
    found = gated.backward_of_codes(codes, gradient.clone(), info, activation, backend=backend)
    for one, two in zip(found[:2], wanted[:2]):
        torch.testing.assert_close(one[:ROWS], two[:ROWS], rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found[2], wanted[2], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_whose_pages_were_refused_are_zeros(backend):
    row = CodeRow(1, 256)
    codes, _ = room(row, 13, "pages")
    inverse = torch.arange(ROWS, dtype=torch.int32)[:, None]
    x = torch.randn(ROWS, 256).bfloat16()
    book = codes.pages.book
    book[HEADER * codes.pages.member + Header.STATUS] = Status.REFUSED
    permute_coded(x, inverse, codes, torch.empty(CAPACITY, 256, dtype=x.dtype), backend=backend)
    back = decode_rows(codes, COUNT, torch.full((CAPACITY, 256), 9.0).bfloat16(), backend=backend)
    assert not back[13:ROWS].any()
    assert (back[:13] != 0).any()
    assert (back[ROWS:] == 9).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("split", [0, 13])
@pytest.mark.parametrize(("activation", "interleaved"), [("silu", False), ("clamped", True)])
def test_no_valid_row_is_coded_to_nothing(backend, split, activation, interleaved):
    none = torch.zeros(1, dtype=torch.int32)
    row = CodeRow(2, 96)
    codes, _ = room(row, split, "buffer")
    info = RowInfo(none, torch.rand(CAPACITY), interleaved=interleaved)
    gated.forward(projection(96, 2), info, activation, codes=codes, backend=backend)
    for buffer in (codes.expected_SC, codes.excess_RC):
        assert buffer is None or (buffer == UNTOUCHED).all()
    gradient = torch.randn(CAPACITY, 96).bfloat16()
    _, a, dweights = gated.backward_of_codes(codes, gradient.clone(), info, activation, backend=backend)
    assert torch.equal(a, gradient)
    assert not dweights.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_that_are_not_contiguous_are_refused(backend):
    codes, _ = room(CodeRow(1, 64), 13, "buffer")
    inverse = torch.arange(ROWS, dtype=torch.int32)[:, None]
    out = torch.empty(CAPACITY, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="contiguous"):
        permute_coded(torch.randn(64, ROWS).bfloat16().t(), inverse, codes, out, backend=backend)
