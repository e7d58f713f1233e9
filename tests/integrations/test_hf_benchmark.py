"""The ways that `benchmarks.hf_step` compares compute the same loss."""

import pytest
import torch

pytest.importorskip("transformers", minversion="5.7")

from benchmarks import hf_step as B
from pagestash.kernels import backend

TINY = B.Slice(
    layers=2, sequences=2, sequence=12, vocabulary=96, width=32, inner=16, experts=4, top_k=2, heads=4,
    key_heads=2, head_width=8,
)  # fmt: skip


def test_all_ways_give_one_loss(monkeypatch):
    monkeypatch.setattr(backend, "interpreted", lambda: False)
    rows = B.compare(TINY, torch.device("cpu"), torch.float32, warm=2, repeats=1)
    names = [row["way"] for row in rows]
    assert names == [B.PLAIN, B.CHECKPOINTED, *([B.LIGER, B.LIGER_CHECKPOINTED] if len(rows) == 8 else []),
                     B.EXPERTS, B.NORM, B.ALL, B.POLICED]  # fmt: skip
    assert [row["loss"] for row in rows] == pytest.approx([rows[0]["loss"]] * len(rows), rel=1e-5)
    by = {row["way"]: row["loss"] for row in rows}
    assert by[B.ALL] == by[B.POLICED]
