"""Random layers whose arithmetic is exact, so that any two programs have to agree bit for bit.

XLA may add in any order and fuse as it likes, and promises no bits where that rounds. Here nothing rounds:
every number is a small integer, values are folded back to -3 … 3 after each operation, and weights have few
entries that are not zero. Sums stay far below 2^24, up to which float32 counts exactly. `draw` makes a layer,
its inputs and a policy from a seed; what the layer holds outside its window of rows is NaN.
"""

import random
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from pagestash.jax import Rows, StashPolicy, stash_scan

NAN = float("nan")
LAYERS = 4
COUNTERS = ("int32", "int32", "uint8", "int8", "int16", "uint32")
NARROW = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int32", "int8", "bool")
FACTORS = (0.0, 0.1, 0.3, 0.5, 0.8, 1.0, 1.25)


@dataclass(frozen=True)
class Step:
    """An operation on rows whose derivative reads `tag`."""

    kind: str
    inner: int
    """Columns before."""
    outer: int
    tag: str | None = None
    stored: str = "float32"
    deep: bool = False
    """Tagged with three axes."""
    twice: bool = False
    """Tagged, and tagged again."""


@dataclass
class Case:
    """One random program; `windows()` gives it other rows, which compile nothing new."""

    rows: int
    layer: Any
    policy: StashPolicy
    weights: dict[str, Any]
    x: Any
    shared: Any
    counter: str
    choices: random.Random = field(repr=False)

    def windows(self, *shards):
        """Integers for every layer: no rows, all, past the end, the last one, or any."""
        largest = int(np.iinfo(self.counter).max)
        start, count = np.zeros((2, LAYERS, *shards), self.counter)
        for at in np.ndindex(start.shape):
            first = self.choices.randint(0, min(self.rows, largest))
            start[at], count[at] = self.choices.choice(
                [
                    (first, 0),
                    (0, min(self.rows, largest)),
                    (first, largest),
                    (min(self.rows - 1, largest), 1),
                    (first, min(self.rows - first, largest)),
                    (first, self.choices.randint(0, min(self.rows, largest))),
                ]
            )
        flags = [self.choices.random() < 0.5 for _ in range(LAYERS)]
        return {"start": jnp.asarray(start), "count": jnp.asarray(count), "flag": jnp.asarray(flags)}


def draw(seed, **policy):
    """A case; what is given of the policy stays as given."""
    choices, numbers = random.Random(seed), np.random.default_rng(seed)
    copies, tokens, width = (
        choices.choice([1, 2, 4]),
        choices.choice([1, 3, 5, 8, 16]),
        choices.choice([1, 2, 6]),
    )
    rows, steps = copies * tokens, _steps(choices, width)
    tags = sorted({step.tag for step in steps if step.tag})
    keep = tuple(tag for tag in tags[1:] if choices.random() < 0.2)
    given = {
        "names": tuple(tag for tag in tags if tag not in keep),
        "keep": keep,
        "capacity_factor": choices.choice(FACTORS),
        "expected_rows": choices.choice([None, max(rows // 2, 1)]),
        "page_rows": choices.choice(["auto", *(page for page in range(1, rows + 1) if rows % page == 0)]),
        "on_overflow": choices.choice(["recompute"] * 4 + ["poison"]),
        "fill": NAN,
    }
    return Case(
        rows=rows,
        layer=layer_of(steps, copies, rows, choices.choice(["plain", "jit", "remat", "bare"])),
        policy=StashPolicy(**{**given, **policy}),
        weights=weights_of(numbers, steps, width),
        x=jnp.asarray(numbers.integers(-3, 4, (tokens, width)), jnp.float32),
        shared=jnp.asarray(numbers.integers(-1, 2, (width,)), jnp.float32),
        counter=choices.choice(COUNTERS),
        choices=choices,
    )


def _steps(choices, width):
    steps, at = [], width
    for index in range(choices.randint(1, 3)):
        kind = choices.choice(["matmul", "matmul", "square", "cube", "cond", "loop", "mapped"])
        outer = choices.choice([1, 2, 4, 6]) if kind == "matmul" else at
        tag = f"t{choices.randrange(4)}" if index == 0 or choices.random() < 0.7 else None
        stored = choices.choice(NARROW) if choices.random() < 0.5 else "float32"
        steps.append(Step(kind, at, outer, tag, stored, choices.random() < 0.3, choices.random() < 0.2))
        at = outer
    return steps


def weights_of(numbers, steps, width):
    """Two entries of -1 or 1 in each column, the others 0."""

    def sparse(inner, outer):
        made = np.zeros((LAYERS, inner, outer), np.float32)
        for layer, column in np.ndindex(LAYERS, outer):
            made[layer, numbers.integers(inner, size=2), column] = numbers.choice([-1, 1], 2)
        return jnp.asarray(made)

    matmuls = {f"w{i}": sparse(s.inner, s.outer) for i, s in enumerate(steps) if s.kind == "matmul"}
    return {**matmuls, "back": sparse(steps[-1].outer, width)}


def layer_of(steps, copies, rows, wrapped="plain"):
    """`layer(params, x, shared)`: each token `copies` times, the steps, and the valid rows' sum back."""

    def body(params, x, shared):
        row = jnp.arange(rows)
        start, count = (jnp.minimum(params[end], rows).astype(jnp.int32) for end in ("start", "count"))
        valid = ((row >= start) & (row - start < count))[:, None]
        h = jnp.tile(fold(x + shared), (copies, 1))
        for index, step in enumerate(steps):
            h = _run(step, params, f"w{index}", jnp.where(valid, h, NAN), valid)
        back = fold(jnp.where(valid, h, 0) @ params["back"])
        return fold(x + back.reshape(copies, *x.shape).sum(0)), params["start"], params["count"], jnp.sum(x)

    def layer(params, x, shared):
        run = {"jit": jax.jit, "remat": jax.checkpoint}.get(wrapped, lambda f: f)(body)
        new, start, count, total = run(params, x, shared)
        return new, (start, count) if wrapped == "bare" else {"rows": Rows(start, count), "total": total}

    return layer


def fold(value):
    """Back into -3 … 3, by whole sevens; the derivative is 1 where nothing was taken off, else 0."""
    folded = value - 7 * jnp.round(value / 7)  # an integer's seventh is never halfway
    return jnp.where(jnp.abs(value) < 4, value, lax.stop_gradient(folded))


def _run(step, params, weight, h, valid):
    if step.kind == "matmul":
        h = fold(jnp.where(valid, h, 0) @ params[weight])
    elif step.kind == "loop":  # beside the tag, not around it
        h = lax.scan(lambda c, k: (fold(c + k * c), None), h, jnp.asarray([1, -1, 2], h.dtype))[0]
    elif step.kind == "mapped":
        h = jax.vmap(lambda row: fold(row + row[::-1]))(h)
    h = jnp.where(valid, h, NAN)
    tagged = _tagged(step, h, valid)
    if step.kind == "cond":
        return lax.cond(
            params["flag"], lambda v: fold(v * v), lambda v: fold(_tagged(step, -v, valid) * v), tagged
        )
    return fold(tagged * tagged * tagged if step.kind == "cube" else tagged * tagged)


def _tagged(step, h, valid):
    if step.tag is None:
        return h
    kind = jnp.dtype(step.stored)
    if kind == jnp.bool_:
        return jnp.where(_named(step, h > 0), h, -h)
    if kind == h.dtype or kind == jnp.float32:
        return _named(step, h)
    # A factor, not the value itself: a cotangent in a narrow type would round or overflow.
    stored = lax.stop_gradient(h if jnp.issubdtype(kind, jnp.floating) else jnp.where(valid, h, 100))
    return fold(h * _named(step, stored.astype(kind)).astype(h.dtype))


def _named(step, value):
    whole = value.reshape(value.shape[0], -1, 1) if step.deep else value
    for _ in range(2 if step.twice else 1):
        whole = checkpoint_name(whole, step.tag)
    return whole.reshape(value.shape)


def plain(case, params, x, shared):
    """What `stash_scan` stands for, in jax's own words."""
    names = jax.checkpoint_policies.save_only_these_names(*case.policy.names, *case.policy.keep)
    saved = jax.checkpoint(lambda p, c: case.layer(p, c, shared), policy=names, prevent_cse=False)
    return *lax.scan(lambda c, p: saved(p, c), x, params), None


def stashed(case, params, x, shared, **places):
    return stash_scan(case.layer, x, params, policy=case.policy, shared=shared, **places)


def loss_of(scan, case):
    """`loss(weights, x, shared, integers) -> loss, (carry, aux, report)`."""

    def loss(weights, x, shared, integers):
        y, aux, report = scan(case, {**weights, **integers}, x, shared)
        total = jnp.sum(aux["total"]) if isinstance(aux, dict) else jnp.zeros((), y.dtype)
        return jnp.sum(y * y) + total, (y, aux, report)

    return loss


def assert_exact(got, wanted):
    """Bit for bit, leaf by leaf; -0 is 0. And nothing was so large that it could have rounded."""
    got, wanted = jax.tree.leaves_with_path(got), jax.tree.leaves_with_path(wanted)
    assert len(got) == len(wanted)
    for (path, a), (_, b) in zip(got, wanted):
        at = jax.tree_util.keystr(path)
        assert (a.dtype, a.shape) == (b.dtype, b.shape), at
        a, b = np.asarray(a), np.asarray(b)
        if jnp.issubdtype(b.dtype, jnp.floating):
            assert np.abs(b.astype(np.float64)).max(initial=0) < 2**21, f"{at}: the layer is not exact"
        assert np.array_equal(a, b), f"{at}: {np.sum(a != b)} of {a.size} elements differ"
