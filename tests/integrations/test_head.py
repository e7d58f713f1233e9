"""The fused head: only the model's own call is taken, and its loss is the one that the model would compute."""

import copy
import functools
import linecache
import threading
import warnings

import pytest
import torch
from support.tiers import slow
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.7")

from tiny import EXPERTS, FAMILIES, NEWER, SMALL, batch, tiny  # noqa: E402
from transformers.loss.loss_utils import ForCausalLMLoss as theirs  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402
from pagestash.integrations.hf.logits import steps_of  # noqa: E402
from pagestash.moe.ops import cross_entropy  # noqa: E402


@pytest.fixture
def model():
    made = tiny("Qwen3-MoE")
    pagestash.hf.optimize(made, norm=False, rope=False, attention=False)
    return made


VOCABULARY = 96


def test_a_hook_inside_the_model_gets_logits(model):
    seen = []
    model.model.layers[0].register_forward_hook(
        lambda _, __, output: seen.append(model.lm_head(output).shape[-1])
    )
    wanted = tiny("Qwen3-MoE")(**batch()).loss
    torch.testing.assert_close(model(**batch()).loss, wanted)
    assert seen == [VOCABULARY]


def test_a_copy_that_a_hook_calls_gets_logits_and_both_their_losses(model):
    teacher = copy.deepcopy(model)
    seen = []

    def distil(*_):
        seen.append(teacher(input_ids=batch()["input_ids"]).logits.shape[-1])
        seen.append(teacher(**batch()).loss.detach())

    model.model.layers[0].register_forward_hook(distil)
    output = model(**batch())
    assert output.logits is None
    assert seen[0] == VOCABULARY
    assert torch.equal(seen[1], output.loss.detach())


def test_another_thread_gets_its_own_loss_and_logits(model):
    """The hook holds the first forward open while the other thread runs the model."""
    found = {}

    def other():
        with torch.enable_grad():
            found["logits"] = model(input_ids=batch()["input_ids"]).logits.shape[-1]
            found["loss"] = model(**batch()).loss.detach()

    def run_other(*_):
        if threading.current_thread() is threading.main_thread() and not found:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    model.model.register_forward_hook(run_other)
    loss = model(**batch()).loss
    assert found["logits"] == VOCABULARY
    torch.testing.assert_close(found["loss"], loss.detach())
    assert "_loss_function" not in model.__dict__


@pytest.mark.parametrize("asked", [None, True, False])
def test_the_output_has_the_form_that_is_asked_for(model, asked):
    plain = tiny("Qwen3-MoE")(**batch(), return_dict=asked)
    assert type(model(**batch(), return_dict=asked)) is type(plain)


def test_a_loss_that_is_set_later_is_the_one_that_is_taken(model):
    plain = tiny("Qwen3-MoE")
    for each in (plain, model):
        each.loss_function = lambda logits, labels, vocab_size, **_: 3 * logits.float().logsumexp(-1).mean()
    with pytest.warns(UserWarning, match="does not fuse the head and the loss: its loss is not the usual"):
        loss = model(**batch()).loss
    torch.testing.assert_close(loss, plain(**batch()).loss)


def test_a_loss_function_is_not_known_by_its_name(model):
    plain = tiny("Qwen3-MoE")

    def ForCausalLMLoss(logits, labels, vocab_size, **options):
        return 2 * theirs(logits, labels, vocab_size, **options)

    for function in (ForCausalLMLoss, functools.partial(theirs, num_items_in_batch=7)):
        model.loss_function = plain.loss_function = function
        with pytest.warns(UserWarning, match="its loss is not the usual"):
            loss = model(**batch()).loss
        torch.testing.assert_close(loss, plain(**batch()).loss)


def test_a_hook_on_the_head_gets_logits_and_may_change_them(model):
    seen = []

    def scale(head, args, logits):
        seen.append(logits.shape[-1])
        logits.mul_(0.5)

    plain = tiny("Qwen3-MoE")
    hooks = [each.lm_head.register_forward_hook(scale) for each in (plain, model)]
    wanted = plain(**batch()).loss
    hooked = "a forward hook on its lm_head is to be given logits"
    with pytest.warns(UserWarning, match=f"does not fuse the head and the loss: {hooked}"):
        got = model(**batch())
    torch.testing.assert_close(got.loss, wanted)
    assert seen == [VOCABULARY, VOCABULARY]
    assert got.logits is not None
    (left,) = (each for each in pagestash.hf.optimize(plain).left if each.part == "head")
    assert left.why == hooked
    for hook in hooks:
        hook.remove()
    assert model(**batch()).logits is None


def test_a_rule_on_the_head_leaves_it_fused(model):
    keeper = ps.Keeper(ps.Policy([ps.Rule("lm_head", "keep")])).attach(model)
    with keeper.step():
        output = model(**batch())
        output.loss.backward()
    assert output.logits is None


@pytest.mark.parametrize("hooked", [*slow(False), True])
def test_a_model_with_a_fused_head_compiles_to_one_graph(hooked):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))
    pagestash.hf.optimize(model, norm=False, rope=False, attention=False)
    if hooked:
        model.lm_head.register_forward_hook(lambda head, args, logits: 0.5 * logits)
    with warnings.catch_warnings(action="ignore"):
        wanted = model(**batch()).loss
        got = torch.compile(model, backend="eager", fullgraph=True)(**batch()).loss
    torch.testing.assert_close(got, wanted)


def test_a_loss_type_that_is_set_later_is_the_one_that_is_taken(model):
    plain = tiny("Qwen3-MoE")
    for each in (plain, model):
        each.loss_type = "ForMaskedLM"
    with pytest.warns(UserWarning, match="its loss is not the usual"):
        loss = model(**batch()).loss
    torch.testing.assert_close(loss, plain(**batch()).loss)


def test_another_head_is_run_as_it_is(model):
    plain = tiny("Qwen3-MoE")
    for each in (plain, model):
        torch.manual_seed(0)
        each.resize_token_embeddings(128)
        each.lm_head = nn.Linear(32, 128, bias=False)
        torch.nn.init.normal_(each.lm_head.weight, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(plain.model.embed_tokens.weight)
    with pytest.warns(UserWarning, match="its lm_head was replaced after it was optimised"):
        loss = model(**batch()).loss
    torch.testing.assert_close(loss, plain(**batch()).loss)


def test_a_head_that_came_after_the_first_call_is_fused_after_undo():
    model = tiny("Qwen3-MoE")
    first = pagestash.hf.optimize(model)
    model.resize_token_embeddings(128)
    (left,) = (each for each in pagestash.hf.optimize(model).left if each.part == "head")
    assert left.why.startswith("its lm_head was replaced after it was optimised; call undo()")
    with pytest.warns(UserWarning, match="its lm_head was replaced"):
        wanted = model(**batch())
    assert wanted.logits is not None
    first.undo()
    assert [each for each in pagestash.hf.optimize(model).left if each.part == "head"] == []
    got = model(**batch())
    assert got.logits is None
    torch.testing.assert_close(got.loss, wanted.loss)


def test_a_second_derivative_is_refused():
    hidden, weight = (torch.randn(4, 8, requires_grad=True), torch.randn(6, 8, requires_grad=True))
    loss = cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 3]))
    of_hidden, of_weight = torch.autograd.grad(loss, (hidden, weight), create_graph=True)
    for gradient in (of_hidden, of_weight):
        with pytest.raises(RuntimeError, match="has no second derivative"):
            gradient.square().sum().backward(retain_graph=True)


def test_labels_that_are_none_or_no_token_give_what_the_page_says(model):
    ids = torch.randint(3, 96, (2, 11))
    nothing = model(input_ids=ids, labels=torch.full_like(ids, -100)).loss
    assert nothing == 0
    nothing.backward()
    assert model(input_ids=ids, labels=torch.full_like(ids, 96)).loss.isnan()


def test_recomputing_a_fused_head_is_refused(model):
    """A replay is no call of the model's, and would compute logits."""
    keeper = ps.Keeper(ps.Policy([ps.Rule("lm_head", "recompute", min_bytes=0)])).attach(model)
    with pytest.raises(RuntimeError, match=r"region 'lm_head'.* did something else"), keeper.step():
        model(**batch()).loss.backward()


BENT = {
    "Granite": {"logits_scaling": 3.0},
    "Cohere2": {"logit_scale": 0.25},
    "Gemma2": {"final_logit_softcapping": 2.0, "query_pre_attn_scalar": 8, "head_dim": 8},
    "Gemma2, no cap": {"final_logit_softcapping": None, "query_pre_attn_scalar": 8, "head_dim": 8},
    "Cohere2Moe": {**EXPERTS, "logit_scale": 0.25, "head_dim": 8},
    "Nemotron-H": None,
    "Gemma4": {"final_logit_softcapping": 2.0},
}
"""Models that do something to their logits: a quotient, a product, a soft cap, float32."""


@pytest.mark.parametrize("family", BENT)
def test_scales_and_soft_caps_are_those_of_the_model(family):
    made = [_bent(family) for _ in range(2)]
    report = pagestash.hf.optimize(made[1], norm=False, rope=False, attention=False)
    assert [each.part for each in report.replaced if each.part == "head"] == ["head"]
    losses = [model(**batch()).loss for model in made]
    torch.testing.assert_close(losses[1], losses[0])
    for loss in losses:
        loss.backward()
    for one, two in zip(made[1].parameters(), made[0].parameters()):
        if two.grad is not None:
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)
    # What the configuration says later holds, as in the model itself.
    if family == "Granite":
        for model in made:
            model.config.logits_scaling = 5.0
        torch.testing.assert_close(made[1](**batch()).loss, made[0](**batch()).loss)
        assert not torch.equal(made[1](**batch()).loss, losses[1])


def _bent(family):
    if family in (*FAMILIES, *NEWER):
        return tiny(family, **BENT[family] or {})
    name = family.partition(",")[0]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **BENT[family]})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.5))
    return model


@pytest.mark.parametrize(
    "done",
    [
        "logits = logits + self.config.shift",
        "logits = logits * 2",
        "logits = torch.tanh(logits); logits = torch.tanh(logits)",
        "logits = logits.softmax(-1)",
        "logits[..., 0] = 0",
        "seen = logits.sum()",
        "logits = self.lm_head(logits)",
    ],
)
def test_what_else_is_done_to_logits_is_unknown(tmp_path, done):
    lines = "; ".join(["logits = self.lm_head(hidden)", done, "return self.loss_function(logits=logits)"])
    path = tmp_path / "forwards.py"
    path.write_text(f"@can_return_tuple\ndef forward(self, hidden):\n    {lines}\n")
    found: dict = {"can_return_tuple": lambda function: function}
    linecache.cache[str(path)] = (0, None, path.read_text().splitlines(True), str(path))
    exec(compile(path.read_text(), str(path), "exec"), found)
    assert steps_of(found["forward"]) is None
