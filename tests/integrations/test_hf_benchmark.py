"""The ways that `benchmarks.hf_step` and `hf_lora` compare compute the same loss."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from benchmarks import hf_step as B

TINY = B.Slice(
    layers=2, sequences=2, sequence=12, vocabulary=96, width=32, inner=16, experts=4, top_k=2, heads=4,
    key_heads=2, head_width=8,
)  # fmt: skip


def test_a_step_with_its_optimizer_gives_one_loss_in_all_ways():
    rows = B.compare_graphed(TINY, torch.device("cpu"), torch.float32, repeats=1)
    assert len({row["way"] for row in rows}) == 8
    assert len(B.graphed_claims(rows, "")) == 4
    for kind in B.OPTIMIZERS:
        losses = {row["loss"] for row in rows if kind in row["way"].split(", ")}
        assert len(losses) == 1


def test_all_ways_of_lora_give_one_loss():
    pytest.importorskip("peft")
    from benchmarks import hf_lora

    rows = hf_lora.compare(TINY, torch.device("cpu"), torch.float32, rounds=2, repeats=1)
    names = [row["way"] for row in rows]
    assert names == [hf_lora.PLAIN, hf_lora.CHECKPOINTED, hf_lora.OURS, hf_lora.POLICED]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * 4, rel=1e-5)
    assert rows[2]["loss"] == rows[3]["loss"]
    assert all(row["ms"] == min(row["round_ms"]) for row in rows)
    assert [claim.bar for claim in hf_lora.claims_of([row | {"gib": 1.0} for row in rows])] == [0.6, 0.35]


def test_all_ways_give_one_loss():
    rows = B.compare(TINY, torch.device("cpu"), torch.float32, warm=2, repeats=1)
    names = [row["way"] for row in rows]
    assert names == [B.PLAIN, B.CHECKPOINTED, B.EXPERTS, B.NORM, B.ALL, B.POLICED]
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * len(rows), rel=1e-5)
    by = {row["way"]: row["loss"] for row in rows}
    assert by[B.ALL] == by[B.POLICED]


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
