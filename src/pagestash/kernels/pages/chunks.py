"""Moving one chunk of bytes, the inner step of every copy between a buffer and a page."""

from pagestash.kernels.backend import tl, triton


@triton.jit
def page_address(page, device_slab, host_slab, PAGE: tl.constexpr, HOST_BASE: tl.constexpr = 1 << 30):
    """The first byte of a page of either tier; slabs are pointers to bytes, or addresses as integers.

    `HOST_BASE` is the layout's; see `granted_bytes` for why it is a literal.
    """
    # 64-bit before the product: a slab may be larger than 4 GiB. Chosen, not branched on: a branch would wait
    # for the page's number before the bytes that go there are even asked for.
    on_device = page < HOST_BASE
    # (Moving the host slab's base back by HOST_BASE pages instead would cost a restore 2 %.)
    index = tl.where(on_device, page, page - HOST_BASE).to(tl.int64)
    return tl.where(on_device, device_slab, host_slab) + index * PAGE


@triton.jit
def copy_chunk(target, source, count, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """Copy the first `count` bytes of a chunk (all of it when `count >= CHUNK`).

    WIDE says that both addresses are multiples of 16: words of 8 bytes, two to a thread's access. Otherwise
    (a view that starts at an odd address) byte by byte.
    """
    if WIDE:
        words = tl.arange(0, CHUNK // 8)
        to = tl.multiple_of(target.to(tl.pointer_type(tl.int64), bitcast=True) + words, 16)
        of = tl.multiple_of(source.to(tl.pointer_type(tl.int64), bitcast=True) + words, 16)
        if count >= CHUNK:
            # A mask would cost the vector access, and nearly every chunk is a full one.
            tl.store(to, tl.load(of))
        else:
            whole = (count // 8).to(tl.int32)
            tl.store(to, tl.load(of, mask=words < whole), mask=words < whole)
            rest = whole * 8 + tl.arange(0, 8)
            tl.store(target + rest, tl.load(source + rest, mask=rest < count), mask=rest < count)
    else:
        PIECE: tl.constexpr = 1024 if CHUNK > 1024 else CHUNK
        start = 0
        while start < tl.minimum(count, CHUNK):
            at = start + tl.arange(0, PIECE)
            tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)
            start += PIECE


@triton.jit
def fill_chunk(target, begin, pattern, end, CHUNK: tl.constexpr, WIDE: tl.constexpr):
    """Write the 8-byte `pattern` over bytes `begin` to `end` of a chunk; WIDE as for `copy_chunk`."""
    if WIDE:
        words = tl.arange(0, CHUNK // 8)
        to = tl.multiple_of(target.to(tl.pointer_type(tl.int64), bitcast=True) + words, 16)
        if (begin <= 0) & (end >= CHUNK):
            tl.store(to, tl.zeros((CHUNK // 8,), tl.int64) + pattern)
        else:
            first = tl.maximum((begin + 7) // 8, 0)
            last = tl.minimum(end, CHUNK) // 8
            value = tl.zeros((CHUNK // 8,), tl.int64) + pattern
            tl.store(to, value, mask=(words >= first) & (words < last))
            # The ragged bytes at both ends; where they meet in one word they write the same values.
            byte = tl.arange(0, 8)
            octet = (pattern >> (byte * 8).to(tl.int64)).to(tl.uint8)
            head = (first - 1) * 8 + byte
            tl.store(target + head, octet, mask=(head >= begin) & (head >= 0) & (head < end))
            tail = last * 8 + byte
            tl.store(target + tail, octet, mask=(tail >= begin) & (tail < end) & (tail < CHUNK))
    else:
        PIECE: tl.constexpr = 1024 if CHUNK > 1024 else CHUNK
        # A chunk starts at a multiple of 8 bytes of its buffer, so the pattern starts with it.
        start = 0
        while start < tl.minimum(end, CHUNK):
            at = start + tl.arange(0, PIECE)
            octet = (pattern >> (at % 8 * 8).to(tl.int64)).to(tl.uint8)
            tl.store(target + at, octet, mask=(at >= begin) & (at < end))
            start += PIECE
