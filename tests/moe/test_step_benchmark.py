"""The ways that `benchmarks.moe_step` compares compute the same step."""

import json
from dataclasses import replace

import pytest
import torch

from benchmarks import moe_step as B

TINY = B.Preset(tokens=32, width=64, inner=32, top_k=8, experts=3, layers=2, expected=0.5)
CPU = torch.device("cpu")


def trained(preset, way, batches):
    run, row = B.measure(preset, way, batches, torch.float32)
    return [torch.tensor(row["loss"]), *run.stack.parameters()], row, run


@pytest.mark.parametrize("skewed", [False, True])
def test_exact_kept_and_stashed_steps_agree(skewed):
    preset = replace(TINY, skewed=skewed)
    torch.manual_seed(0)
    batches = [B.draw(preset, CPU) for _ in range(4)]
    exact, _, _ = trained(preset, B.EXACT, batches)
    kept, _, _ = trained(preset, B.KEPT, batches)
    stashed, row, run = trained(preset, B.STASHED, batches)
    for one, two, three in zip(exact, kept, stashed):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-5)
    assert not row["overflow"]
    assert row["pool_gib"] > 0
    assert run.keeper.stats().pool.device.in_use == 0


def test_rows_beyond_those_expected_are_in_pages_and_no_bit_differs():
    """Kept and stashed with the same expected rows."""
    torch.manual_seed(0)
    batches = [B.draw(TINY, CPU) for _ in range(3)]
    stashed, _, run = trained(TINY, B.STASHED, batches)
    torch.manual_seed(1)
    stack = B.Stack(TINY, TINY.expected_rows, CPU, torch.float32)
    optimizer = torch.optim.SGD(stack.parameters(), lr=1e-3, fused=True)
    for batch in batches:
        loss = stack(*batch.arguments())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for one, two in zip(stashed, [loss.detach(), *stack.parameters()], strict=True):
        assert torch.equal(one, two)
    assert run.keeper.stats().homes["stash"].peak > 0


def test_the_fullest_of_skewed_layers_has_three_times_the_average():
    preset = replace(B.PRESETS["skewed"], layers=12)
    torch.manual_seed(0)
    drawn = [B.draw_counts(preset) for _ in range(20)]
    for counts in drawn:
        assert max(counts) == pytest.approx(3 * preset.average, abs=2)
        assert sum(counts) == pytest.approx(12 * preset.average, abs=12)
        assert max(counts) <= preset.places * preset.tokens
    assert len({counts.index(max(counts)) for counts in drawn}) > 1


@pytest.mark.slow
def test_a_quick_run_needs_no_gpu_and_claims_nothing(tmp_path):
    path = B.run(tmp_path, quick=True)
    found = json.loads(path.read_text())
    assert [(row["preset"], row["way"]) for row in found["rows"]] == [
        (name, way) for name, preset in B.PRESETS.items() for way in preset.ways
    ]
    assert found["claims"] == []


def test_every_preset_claims_the_bars_of_its_own():
    rows = [{"ms": ms, "held_gib": held} for ms, held in ((10.0, 8.0), (6.0, 16.0), (6.12, 4.0))]
    for name, preset in B.PRESETS.items():
        time_claim, held_claim, on_over_off = B.claims_of(name, rows)
        assert (time_claim.value, time_claim.bar) == (0.612, preset.bars[0])
        assert (held_claim.value, held_claim.bar) == (0.5, preset.bars[1])
        assert (on_over_off.value, on_over_off.bar, on_over_off.holds) == (1.02, 1.02, True)


def test_the_way_of_eight_bits_claims_held_bytes_alone():
    rows = [{"ms": 1.0, "held_gib": held} for held in (8.0, 16.0, 4.0, 3.0)]
    *others, held = B.claims_of("qwen3", rows)
    assert others == B.claims_of("qwen3", rows[:3])
    assert (held.value, held.bar, held.holds) == (0.375, 0.33, False)


def test_steps_in_eight_bits_hold_half_the_bytes_and_end_near_the_exact_ones():
    preset = replace(TINY, width=256, inner=256)
    torch.manual_seed(0)
    batches = [B.draw(preset, CPU) for _ in range(3)]
    found = {way: B.measure(preset, way, batches, torch.bfloat16) for way in (B.STASHED, B.CODED)}
    peaks = [run.keeper.stats().regions["layers.0.experts"].peak for run, _ in found.values()]
    assert peaks[1] < 0.5 * peaks[0]  # (rows of 256 values take 272 bytes, and indices are held as they are)
    losses = [row["loss"] for _, row in found.values()]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
