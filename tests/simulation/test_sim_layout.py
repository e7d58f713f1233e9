"""Layouts: group sizes, and one sentence for each that cannot be."""

import pytest

from pagestash.models.config import PRESETS
from pagestash.simulation.cluster.layout import Layout, check_placement, place_evenly


def test_groups_of_a_layout():
    layout = Layout(devices=256, tp=2, pp=8, ep=16, vpp=4, schedule="interleaved1f1b")
    assert (layout.dp, layout.stage_ranks, layout.dense_group, layout.expert_group) == (16, 32, 16, 2)
    assert (layout.stages, layout.schedule) == (32, "Interleaved1F1B")
    assert layout.microbatches(2048, 1) == 128


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"pp": 3}, "TP 1 · CP 1 · PP 3 = 3 does not divide 8 devices"),
        ({"ep": 16}, "EP 16 does not divide the 8 ranks of a pipeline stage"),
        ({"tp": 0}, "tp=0: expected a whole number, at least 1"),
        ({"zero": 4}, "zero=4: expected 0, 1, 2 or 3"),
        ({"vpp": 2}, "1F1B has one stage a rank"),
        ({"schedule": "DualPipeV", "pp": 2}, "DualPipeV has two stages a rank"),
        ({"schedule": "Interleaved1F1B", "pp": 2}, "Interleaved1F1B needs VPP 2 or more"),
        ({"schedule": "2F2B"}, "unknown schedule '2F2B'"),
    ],
)
def test_a_layout_that_cannot_be_is_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=sentence) as error:
        Layout(**{"devices": 8} | values)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"ep": 512, "devices": 512}, "EP 512 does not divide 128 experts"),
        ({"tp": 64, "devices": 64}, "TP 64 does not divide 32 heads"),
        ({"tp": 8, "devices": 8}, "TP 8 does not divide 4 heads of keys and values"),
        ({"cp": 3, "devices": 3}, "CP 3 · TP 1 does not divide a sequence of 4096"),
        ({"pp": 51, "devices": 51}, "51 stages: the model has only 48 layers"),
    ],
)
def test_a_layout_that_a_model_does_not_allow_is_one_sentence(values, sentence):
    with pytest.raises(ValueError, match=sentence):
        Layout(**values).check_model(PRESETS["qwen3-30b-a3b"], 4096)


def test_a_batch_that_does_not_divide_is_one_sentence():
    with pytest.raises(ValueError, match="global batch 100 does not divide into microbatches of 1 on DP 8"):
        Layout(devices=8).microbatches(100, 1)


def test_layers_are_placed_from_the_first_stage():
    assert place_evenly(61, 4) == [16, 16, 16, 13]  # as in Megatron-Bridge's layouts
    assert place_evenly(61, 16) == [4] * 15 + [1]
    assert place_evenly(61, 32) == [2] * 30 + [1, 0]
    assert place_evenly(6, 8) == [0, 1, 1, 1, 1, 1, 1, 0]
    for layers in range(1, 70):
        for stages in range(1, layers + 3):
            placed = place_evenly(layers, stages)
            assert sum(placed) == layers
            assert 0 not in placed[1:-1]  # the first has the embedding, the last the head
    with pytest.raises(ValueError, match="expected 4 stages with 8 layers"):
        check_placement([4, 4], 8, 4)
