"""Masks are made without a look at the positions, where the model counts them itself; else as before."""

import copy
import functools
import inspect

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.7")

from support.compare import same  # noqa: E402
from tiny import FAMILIES, NEWER, batch, gradients, tiny  # noqa: E402
from transformers import masking_utils  # noqa: E402

import pagestash.hf  # noqa: E402
from pagestash.integrations.hf import masks  # noqa: E402
from pagestash.integrations.hf.report import Report  # noqa: E402

PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4, 5, 6, 7, 8]])


@pytest.fixture
def looks(monkeypatch):
    """Counts how often a forward looks for packed sequences."""
    theirs, seen = masking_utils.find_packed_sequence_indices, []

    def find(position_ids):
        seen.append(position_ids)
        return theirs(position_ids)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", find)
    return seen


def run(model, **more):
    model.zero_grad()
    output = model(**batch(), **more)
    output.loss.backward()
    return output.loss.detach(), gradients(model)


def only_masks(model):
    report = Report()
    masks.replace_masks(list(model.named_modules()), report)
    assert [each.part for each in report.replaced] == ["masks"]
    return report


NEVER_LOOKS = {"gpt-oss", "gpt-oss, other limits"}


@pytest.mark.parametrize("family", sorted({*FAMILIES, *NEWER} - NEVER_LOOKS))
def test_a_model_that_counts_positions_itself_does_not_look_where_transformers_does(family, looks):
    model = tiny(family, attention="eager")
    wanted = run(model)
    if family == "DeepSeek-V4" and not looks:
        pytest.skip("transformers 5.12 never looks in DeepSeek-V4")
    assert looks
    looks.clear()
    report = only_masks(model)
    assert same(run(model), wanted)
    assert not looks
    report.undo()
    run(model)
    assert looks


@pytest.mark.parametrize("family", ["Qwen3-MoE", "DeepSeek-V3"])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_packed_sequences_are_seen_as_before(family, attention, looks):
    model = tiny(family, attention=attention)
    plain, packed = run(model), run(model, position_ids=PACKED)
    assert not torch.equal(plain[0], packed[0])
    only_masks(model)
    looks.clear()
    assert same(run(model), plain)
    assert not looks
    assert same(run(model, position_ids=PACKED), packed)
    assert looks
    assert same(run(model), plain)


@pytest.mark.parametrize("family", sorted(NEVER_LOOKS))
def test_a_model_that_never_looks_is_as_before(family, looks):
    model = tiny(family)
    wanted, packed = run(model), run(model, position_ids=PACKED)
    only_masks(model)
    assert same(run(model), wanted)
    assert same(run(model, position_ids=PACKED), packed)
    assert not looks


def test_positions_count_however_they_are_given(looks):
    """By place or by name, in a call of the module or of its forward alone."""
    model = tiny("Qwen3-MoE", attention="sdpa").eval()
    ids = batch()["input_ids"]
    wanted = model.model(ids, position_ids=PACKED)[0]
    only_masks(model)
    looks.clear()
    for found in (
        model.model(ids, None, PACKED),
        model.model.forward(ids, None, PACKED),
        model.model.forward(input_ids=ids, position_ids=PACKED),
    ):
        assert torch.equal(found[0], wanted)
    assert len(looks) == 3
    model.model.forward(ids)
    assert len(looks) == 3


def test_a_padding_mask_is_used_as_before():
    model = tiny("Qwen3-MoE", attention="sdpa")
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :4] = 0
    wanted = run(model, attention_mask=mask)
    assert not torch.equal(wanted[0], run(model)[0])
    only_masks(model)
    assert same(run(model, attention_mask=mask), wanted)


def test_a_model_of_ones_own_is_left_alone():
    """It may derive packed positions from what it is given."""

    class Own(transformers.Qwen3MoeModel):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, **options):
            if position_ids is None:
                position_ids = PACKED
            mask = masking_utils.create_causal_mask(
                config=self.config,
                inputs_embeds=self.embed_tokens(input_ids),
                attention_mask=attention_mask,
                past_key_values=None,
                position_ids=position_ids,
            )
            return super().forward(input_ids, mask, position_ids, **options)

    model = tiny("Qwen3-MoE", attention="eager")
    model.model.__class__ = Own
    wanted = run(model)
    report = pagestash.hf.optimize(model, experts=False, norm=False, rope=False, head=False)
    assert not [each for each in (*report.replaced, *report.left) if each.part == "masks"]
    assert same(run(model), wanted)


def test_the_forward_has_its_signature():
    """By which a Trainer knows the columns of its batches."""
    model = tiny("Qwen3-MoE")
    wanted = inspect.signature(model.model.forward)
    only_masks(model)
    assert inspect.signature(model.model.forward) == wanted


def test_a_model_with_its_head_in_one_class_keeps_the_fused_head(monkeypatch):
    """And says that its masks are as before. (As if the class with the head made them.)"""
    model = tiny("Qwen3-MoE", experts="pagestash")
    own = inspect.unwrap(type(model).forward)
    monkeypatch.setattr(masks, "_makers", lambda forward: {"torch": len} if forward is own else {})
    report = pagestash.hf.optimize(model)
    assert [each.name for each in report.replaced if each.part == "head"] == ["(the model)"]
    assert [(each.part, each.why) for each in report.left] == [("masks", "optimised already")]


def test_a_copy_does_not_look_either(looks):
    model = tiny("Qwen3-MoE", attention="sdpa")
    wanted = run(model)
    looks.clear()
    only_masks(model)
    other = copy.deepcopy(model)
    assert same(run(other), wanted)
    assert not looks


class Hiding:
    """A decorator that does not hold the function in a closure."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __get__(self, instance, owner=None):
        return self if instance is None else functools.partial(self.function, instance)


def empty_cell(function):
    """A decorator whose closure has a cell without contents beside that of the function."""

    @functools.wraps(function)
    def decorated(self, *args, **options):
        return later if False else function(self, *args, **options)

    if False:
        later = None
    return decorated


def test_an_empty_cell_of_a_decorator_is_no_function(monkeypatch, looks):
    model = tiny("Qwen3-MoE", attention="sdpa")
    monkeypatch.setattr(type(model.model), "forward", empty_cell(type(model.model).forward))
    only_masks(model)
    run(model)
    assert not looks


@pytest.mark.parametrize("outermost", [True, False])
def test_a_decorator_that_hides_its_function_leaves_the_model_alone(outermost, monkeypatch):
    model = tiny("Qwen3-MoE")
    hidden = Hiding(type(model.model).forward)
    if not outermost:

        @functools.wraps(hidden)
        def decorated(self, *args, **options):
            return hidden.function(self, *args, **options)

        hidden = decorated
    monkeypatch.setattr(type(model.model), "forward", hidden)
    report = pagestash.hf.optimize(model)
    assert not [each for each in report.replaced if each.part == "masks"]
    left = [each.why for each in report.left if each.part == "masks"]
    assert left == ([] if outermost else ["its decorators do not say which function they call"])
    assert run(model)[0].isfinite()
