"""Memory and step time of `stash_scan` against the plain scan and JAX's own offload policy.

One device of a ring of experts: it holds a quarter of the experts and meets every token, so its tensors have
four times the rows that are valid on average (ratio 4). What differs between the variants is only the scan.

    python -m benchmarks.jax_stash [--quick] [--out DIR]
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.harness import Claim, write
from pagestash.jax import StashPolicy, stash_scan
from pagestash.jax.moe import STASHED, X_SORTED, RingConfig, init_experts, ring_moe
from pagestash.jax.moe.decoder import rms_norm

NAMES = (X_SORTED, *STASHED)
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is run: `layers` for time and memory, `more_layers` and twice as many for memory alone."""

    tokens: int
    width: int
    expert_width: int
    top_k: int = 4
    experts: int = 16
    shards: int = 4
    layers: int
    more_layers: int
    dtype: str
    capacity_factor: float = 1.25
    rounds: int

    @property
    def ring(self) -> RingConfig:
        return RingConfig(
            width=self.width,
            expert_width=self.expert_width,
            experts=self.experts,
            top_k=self.top_k,
            shards=self.shards,
        )

    @property
    def expected_rows(self) -> int:
        return self.tokens * self.top_k // self.shards

    @property
    def rounding(self) -> float:
        """What the order of sums can make of a float32 gradient, as a share of its largest entry.

        XLA chooses it anew for each program. n roundings, up as often as down, come to about sqrt(n)·eps; four
        times that is allowed. n counts the terms that are added up from an input to a gradient: in the matmuls
        of every layer, forward and backward, and over the rows of a weight's gradient.
        """
        terms_a_layer = self.experts + 2 * self.width + 2 * self.expert_width + self.top_k
        return 4 * (2 * self.layers * terms_a_layer + self.tokens * self.top_k) ** 0.5 * 2.0**-23


ON_GPU = Setting(
    tokens=16_384, width=1024, expert_width=1024, layers=16, more_layers=48, dtype="bfloat16", rounds=12
)
# XLA:CPU widens bf16 in temporary buffers, so bytes are counted in f32 there.
ON_CPU = Setting(tokens=512, width=64, expert_width=64, layers=16, more_layers=48, dtype="float32", rounds=3)
QUICK = Setting(tokens=256, width=32, expert_width=32, layers=4, more_layers=12, dtype="float32", rounds=1)

Scan = Callable[[Any, jax.Array, Any], tuple[jax.Array, Any, Any]]


def scans(setting: Setting, *, offload: bool) -> dict[str, Scan]:
    """The variants by name; the host ones only where the host is another memory."""
    policies = jax.checkpoint_policies
    stash = StashPolicy(
        names=NAMES, capacity_factor=setting.capacity_factor, expected_rows=setting.expected_rows
    )
    variants: dict[str, Scan] = {
        "plain": partial(_checkpointed, policies.save_only_these_names(*NAMES)),
        "stash": partial(_stashed, stash),
        "full recomputation": partial(_checkpointed, policies.nothing_saveable),
    }
    if offload:
        stock = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(NAMES),
            offload_src="device",
            offload_dst="pinned_host",
        )
        on_host = StashPolicy(
            names=NAMES,
            capacity_factor=setting.capacity_factor,
            expected_rows=setting.expected_rows,
            memory="pinned_host",
        )
        variants["stock offload"] = partial(_checkpointed, stock)
        variants["stash on host"] = partial(_stashed, on_host)
    return variants


def _checkpointed(policy: Any, layer: Any, x: jax.Array, params: Any) -> tuple[jax.Array, Any, None]:
    saved = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    y, aux = lax.scan(lambda carry, params_l: saved(params_l, carry), x, params)
    return y, aux, None


def _stashed(policy: StashPolicy, layer: Any, x: jax.Array, params: Any) -> tuple[jax.Array, Any, Any]:
    return stash_scan(layer, x, params, policy=policy)


def step_of(setting: Setting, scan: Scan) -> Any:
    """Loss and gradients of the stack, jitted."""

    def layer(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, rows, balance = ring_moe(weights, rms_norm(x, jnp.ones((), x.dtype)), setting.ring)
        return x + y, {"rows": rows, "balance": balance}

    def loss(weights: Any, x: jax.Array) -> tuple[jax.Array, Any]:
        y, aux, report = scan(layer, x, weights)
        return jnp.mean(jnp.square(y.astype(jnp.float32))) + 0.01 * aux["balance"].mean(), report

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def inputs_of(setting: Setting, layers: int) -> tuple[Any, Any]:
    """Weights of this shard's experts and the tokens of all shards."""
    dtype = jnp.dtype(setting.dtype)

    def one_layer(key: jax.Array) -> Any:
        weights = init_experts(key, setting.ring, dtype)
        held = {name: leaf[: setting.ring.local_experts] for name, leaf in weights._asdict().items()}
        return weights._replace(**{**held, "router_DE": weights.router_DE})

    weights = jax.jit(jax.vmap(one_layer))(jax.random.split(jax.random.key(0), layers))
    return weights, jax.random.normal(jax.random.key(1), (setting.tokens, setting.width), dtype)


def measure(setting: Setting) -> list[dict[str, Any]]:
    """One row a variant, then rows for the memory of taller stacks."""
    on_gpu = jax.default_backend() == "gpu"
    variants = scans(setting, offload=on_gpu)
    weights, x = inputs_of(setting, setting.layers)
    rows, compiled = [], {}
    for name, scan in variants.items():
        begun = time.perf_counter()
        compiled[name] = step_of(setting, scan).lower(weights, x).compile()
        rows.append({"variant": name, "layers": setting.layers, **_memory(compiled[name])})
        _say(f"{name}: compiled in {time.perf_counter() - begun:.1f} s, {_told(rows[-1])}")

    results = {name: jax.block_until_ready(step(weights, x)) for name, step in compiled.items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(setting.rounds):  # in turn, so that a slow moment hits all of them
        for name, step in compiled.items():
            begun = time.perf_counter()
            jax.block_until_ready(step(weights, x))
            times[name].append(1000 * (time.perf_counter() - begun))
    for row in rows:
        (_, report), grads = results[row["variant"]]
        row["ms"] = statistics.median(times[row["variant"]])
        row["ms_all"] = [round(ms, 2) for ms in times[row["variant"]]]
        row["gradient_difference"] = _difference(grads, results["plain"][1])
        if report is not None:
            row["report"] = {field: int(value) for field, value in report._asdict().items()}
        _say(f"{row['variant']}: {row['ms']:.1f} ms, gradients off by {row['gradient_difference']:.1e}")

    for layers in (setting.more_layers, 2 * setting.more_layers):
        tall = jax.eval_shape(lambda layers=layers: inputs_of(setting, layers))
        for name in ("plain", "stash"):
            program = step_of(setting, variants[name]).lower(*tall).compile()
            rows.append({"variant": name, "layers": layers, **_memory(program)})
            _say(f"{name}, {layers} layers: {_told(rows[-1])}")
    return rows


def claims_of(setting: Setting, rows: list[dict[str, Any]], where: str) -> list[Claim]:
    """The promised figures; step time and host bytes only where they were measured on a GPU."""
    by = {(row["variant"], row["layers"]): row for row in rows}
    short, tall = setting.layers, setting.more_layers

    def temp(variant: str, layers: int) -> int:
        return by[variant, layers]["temp_bytes"]

    ratio = {layers: temp("stash", layers) / temp("plain", layers) for layers in (short, tall)}
    # Between tall stacks: how many of a layer's temporary buffers XLA holds at once depends on what else is there,
    # and the short stack's program holds one of 512 MiB less.
    slope = (temp("stash", 2 * tall) - temp("stash", tall)) / (temp("plain", 2 * tall) - temp("plain", tall))
    stash = by["stash", short]

    def at_most(*, what: str, value: float, bar: float) -> Claim:
        return Claim(
            what=f"JAX stash_scan: {what}", value=round(value, 4), bar=round(bar, 4), better="at most"
        )

    claims = [
        at_most(what=f"temp bytes of plain, {tall} layers, {where}", value=ratio[tall], bar=ratio[short]),
        # 1.25 / 4 of the saved rows, and the layer's input, which both keep whole.
        at_most(what=f"temp bytes of plain, each further layer, {where}", value=slope, bar=0.36),
        at_most(what=f"layers recomputed, {where}", value=stash["report"]["layers_recomputed"], bar=0),
    ]
    if short >= 16:  # the bar is set for 16 layers; a shorter stack is mostly workspace
        claims.insert(
            0, at_most(what=f"temp bytes of plain, {short} layers, {where}", value=ratio[short], bar=0.55)
        )
    if ("stock offload", short) not in by:
        difference = stash["gradient_difference"]
        what = f"gradient difference from plain, {where}"
        return [*claims, at_most(what=what, value=difference, bar=setting.rounding)]
    stock, host = by["stock offload", short], by["stash on host", short]
    return [
        *claims,
        at_most(
            what="step time of plain, device memory", value=stash["ms"] / by["plain", short]["ms"], bar=1.0
        ),
        at_most(what="host bytes of stock offload", value=host["host_bytes"] / stock["host_bytes"], bar=0.33),
        at_most(what="step time of stock offload, pinned host", value=host["ms"] / stock["ms"], bar=1.0),
        at_most(
            what="device temp bytes of stock offload, pinned host",
            value=host["temp_bytes"] / stock["temp_bytes"],
            bar=1.05,
        ),
        # Two programs' bf16 matmuls are tuned apart on a GPU; a wrong residual shows as a difference near 1.
        at_most(
            what="gradient difference from plain, device memory", value=stash["gradient_difference"], bar=0.01
        ),
        at_most(
            what="gradient difference from plain, pinned host", value=host["gradient_difference"], bar=0.01
        ),
    ]


def run(out: Path | None = None, quick: bool = False) -> Path:
    """Measure, print and write `jax_stash.json` (`jax_stash_cpu.json` without a GPU)."""
    on_gpu = jax.default_backend() == "gpu"
    setting = QUICK if quick else ON_GPU if on_gpu else ON_CPU
    where = "GPU" if on_gpu else "CPU"
    _say(f"{jax.devices()[0].device_kind}, {setting}")
    rows = measure(setting)
    claims = claims_of(setting, rows, where)
    for claim in claims:
        verdict = "holds" if claim.holds else "FAILS"
        _say(f"{verdict}: {claim.what} {claim.value:.4g} ({claim.better} {claim.bar:.4g})")
    name = "jax_stash" if on_gpu else "jax_stash_cpu"
    return write(name, config={**asdict(setting), "names": NAMES}, rows=rows, claims=claims, out=out)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--out", type=Path, default=None, help="folder for the result (benchmarks/results)")
    options = parser.parse_args(argv)
    _say(f"wrote {run(out=options.out, quick=options.quick)}")


def _memory(program: Any) -> dict[str, int]:
    analysis = program.memory_analysis()
    return {
        "temp_bytes": analysis.temp_size_in_bytes,
        "host_bytes": getattr(analysis, "host_temp_size_in_bytes", 0),
    }


def _told(row: dict[str, Any]) -> str:
    return f"{row['temp_bytes'] / MIB:,.0f} MiB on the device, {row['host_bytes'] / MIB:,.0f} on the host"


def _difference(ours: Any, theirs: Any) -> float:
    """Largest difference of any gradient, as a share of that gradient's largest entry."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)):
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        worst = max(worst, float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))))
    return worst


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
