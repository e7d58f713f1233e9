"""The ways that `benchmarks.hf_step` and `hf_lora` compare compute the same loss."""

import dataclasses
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from support.limit import MemoryLimit

from pagestash.profiling.memory import LiveStorages

pytest.importorskip("transformers", minversion="5.7")

from support.flex import attend, stand_in
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from benchmarks import hf_step as B
from pagestash.kernels.gemm.products import described

TINY = B.Slice(
    layers=2, sequences=2, sequence=12, vocabulary=96, width=32, inner=16, experts=4, top_k=2, heads=4,
    key_heads=2, head_width=8,
)  # fmt: skip


@pytest.mark.slow
def test_a_step_with_its_optimizer_gives_one_loss_in_all_ways():
    rows = B.compare_graphed(TINY, torch.device("cpu"), torch.float32, repeats=1)
    assert len({row["way"] for row in rows}) == 8
    assert len(B.graphed_claims(rows, "")) == 4
    for kind in B.OPTIMIZERS:
        losses = {row["loss"] for row in rows if kind in row["way"].split(", ")}
        assert len(losses) == 1


@pytest.mark.slow
def test_all_ways_of_lora_give_one_loss():
    pytest.importorskip("peft")
    from benchmarks import hf_lora

    rows = hf_lora.compare(TINY, torch.device("cpu"), torch.float32, rounds=2, repeats=1)
    names = [row["way"] for row in rows]
    assert names == [hf_lora.PLAIN, hf_lora.CHECKPOINTED, hf_lora.OURS, hf_lora.POLICED]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 4, rel=1e-5)
    assert rows[2]["loss"] == rows[3]["loss"]
    assert all(row["ms"] == min(row["round_ms"]) for row in rows)
    assert [claim.bar for claim in hf_lora.claims_of([row | {"gib": 1.0} for row in rows])] == [0.42, 0.19]


def test_all_ways_give_one_loss():
    rows = B.compare(TINY, torch.device("cpu"), torch.float32, warm=2, repeats=1)
    names = [row["way"] for row in rows]
    assert names == [B.PLAIN, B.CHECKPOINTED, B.EXPERTS, B.NORM, B.ALL, B.POLICED]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * len(rows), rel=1e-5)
    by = {row["way"]: row["loss"] for row in rows}
    assert by[B.ALL] == by[B.POLICED]
    who = [row["products"] for row in rows]
    assert (
        who == ["torch (transformers' grouped_mm)"] * 2 + [described(torch.device("cpu"), torch.float32)] * 4
    )


def test_all_ways_of_gpt_oss_have_flex_attention_but_one(monkeypatch):
    attended = []

    def count(*args, **options):
        attended.append(args)
        return attend(*args, **options)

    stand_in(monkeypatch)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", count)
    fields = {field.name: getattr(TINY, field.name) for field in dataclasses.fields(TINY)}
    shape = B.GptOssSlice(**(fields | {"attention": B.GptOssSlice.attention}))
    rows = B.compare_gpt_oss(shape, torch.device("cpu"), torch.float32, warm=2, repeats=1)
    ways = [B.PLAIN, B.CHECKPOINTED, B.EXPERTS, B.NORM, B.ALL, B.POLICED, B.EAGER_ATTENTION]
    assert [row["way"] for row in rows] == [f"gpt-oss-20b: {way}" for way in ways]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * len(rows), rel=1e-5)
    # Nine steps of two layers each; checkpointing and the policy run attention again.
    assert len(attended) == 9 * 2 * (6 + 2)
    assert len({row["loss"] for row in rows[4:6]}) == 1


def test_gpt_oss_has_bars_of_its_own():
    rows = [
        {"way": way, "ms": 70.0, "gib": 2.0}
        for way in (B.ALL, B.POLICED, f"gpt-oss-20b: {B.ALL}", f"gpt-oss-20b: {B.POLICED}")
    ]
    claims = B.claims_of(rows)
    assert [claim.bar for claim in claims] == [77.0, 5.75, 87.0, 2.75, 68.0, 3.2, 75.0, 2.35]
    assert claims[4].what.startswith("gpt-oss-20b in transformers with flex attention")
    assert B.claims_of(rows[:2]) == claims[:4]


@pytest.fixture
def rival_rows():
    """Without those that compile (minutes on a CPU), replace classes (Liger), or need a GPU (TRL's offloading)."""
    from benchmarks import rivals

    pytest.importorskip("trl")
    left = ("compile", "Liger", "offloading")
    ways = [way for way in rivals.WAYS if not any(word in way for word in left)]
    cpu = {"device": torch.device("cpu"), "dtype": torch.float32}
    return [rivals.measure(way, TINY, warm=3, repeats=1, **cpu) for way in ways]


@pytest.mark.slow
def test_all_rivals_give_one_loss(rival_rows):
    assert [row["loss"] for row in rival_rows] == pytest.approx(
        [rival_rows[0]["loss"]] * len(rival_rows), rel=1e-5
    )
    ours = {row["loss"] for row in rival_rows if row["way"].startswith("pagestash")}
    assert len(ours) == 1


def test_a_rival_that_is_as_small_and_faster_is_a_miss(tmp_path):
    from benchmarks import rivals

    ways = {"transformers": (150.0, 15.0), "torch.compile": (80.0, 5.0), "pagestash: optimize": (90.0, 6.0)}
    rows = [{"way": way, "ms": ms, "gib": gib, "longest": 4096} for way, (ms, gib) in ways.items()]
    (missed,) = rivals.claims_of(rows)
    assert (missed.value, missed.holds) == (80 / 90, False)
    pytest.importorskip("matplotlib")
    rivals.draw(rows, tmp_path)
    assert "optimize" in (tmp_path / "rivals.svg").read_text()
    assert "4,096" in (tmp_path / "longest.svg").read_text()


@pytest.mark.slow
def test_a_step_that_finds_no_memory_gives_the_loss_and_the_gradients_of_one_that_does(tmp_path, monkeypatch):
    from benchmarks import out_of_memory as oom

    case = oom.Case(shape=replace(TINY, layers=4, sequence=96), room=0)
    plain = LiveStorages()

    def in_process(way, quick, budget):
        """On a CPU, which has no "auto", and where host memory would be the same."""
        options = {} if budget is None else {"budget": 0.6 if budget == "auto" else budget, "host": 0}
        peak = plain.read().peak
        around = {oom.PLAIN: plain, oom.LIMITED: MemoryLimit(int(0.85 * peak)), oom.PLANNED: nullcontext()}
        with around[way]:
            row = oom.measure(way, case, torch.device("cpu"), torch.float32, repeats=1, **options)
        return row | {"peak_bytes": row.get("budget_bytes")}

    monkeypatch.setattr(oom, "in_process", in_process)
    body = json.loads(oom.run(tmp_path, quick=True).read_text())
    unplanned, limited, planned = body["rows"]
    assert (limited["recomputed_layers"], planned["recomputed_layers"]) == (4, 0)
    assert limited["budget_bytes"] == planned["budget_bytes"]
    assert limited["rules"]
    assert unplanned["norms"] == limited["norms"] == planned["norms"]
    assert [claim["value"] for claim in body["claims"] if "time" not in claim["what"]] == [1, 1, 1, 0, 0]


def test_a_step_that_finds_no_memory_under_the_budget_is_a_miss(tmp_path, monkeypatch):
    from benchmarks import out_of_memory as oom

    gone = {"error": "OutOfMemoryError: none"}
    row = {"ms": 5.0, "loss": 2.0}
    monkeypatch.setattr(oom, "in_process", lambda way, *_: {"way": way} | (row if way == oom.PLAIN else gone))
    body = json.loads(oom.run(tmp_path).read_text())
    assert [row["way"] for row in body["rows"]] == [oom.PLAIN, oom.LIMITED]
    assert [claim["holds"] for claim in body["claims"]] == [False]


def test_gradients_are_apart_by_the_norm_that_differs_most():
    from benchmarks import out_of_memory as oom

    assert oom.norms_apart({"a": 2.0, "b": 1.1}, {"a": 2.0, "b": 1.0}) == pytest.approx(0.1)
    assert oom.norms_apart({"a": 2.0}, {"a": 2.0, "b": 1.0}) == float("inf")
    assert oom.norms_apart({"a": 0.5}, {"a": 0.0}) == 0.5
