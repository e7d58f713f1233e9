"""Which experts of transformers the block runs: every layout without a copy of a weight; the rest by name."""

import importlib
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers", minversion="5.7")

from packaging.version import Version  # noqa: E402
from support.activations import VARIANTS, plain  # noqa: E402
from support.compare import same  # noqa: E402
from support.hf_experts import D, E, N, config, experts_of  # noqa: E402
from tiny import batch, gradients, tiny  # noqa: E402
from transformers.activations import ACT2FN  # noqa: E402
from transformers.integrations.moe import use_experts_implementation  # noqa: E402

import pagestash as ps  # noqa: E402
import pagestash.hf  # noqa: E402
from pagestash.integrations.hf import experts as ours  # noqa: E402
from pagestash.integrations.hf.layouts import activation_of  # noqa: E402
from pagestash.integrations.hf.report import Report  # noqa: E402
from pagestash.kernels.gemm import grouped  # noqa: E402
from pagestash.kernels.moe.activation import Activation  # noqa: E402


def arguments(tokens=24, choices=2, dtype=torch.float32):
    torch.manual_seed(1)
    x = torch.randn(tokens, D, dtype=dtype, requires_grad=True)
    ids = torch.rand(tokens, E).argsort(1)[:, :choices]
    return x, ids, torch.rand(tokens, choices, dtype=dtype, requires_grad=True)


def saved_by(function, *inputs):
    """The result, and each tensor that autograd saved, once for each storage."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda tensor: tensor
    ):
        return function(*inputs), saved


def close_to_grouped_mm(experts, x, ids, weights, got):
    wanted = ours.grouped_mm_experts_forward(experts, x, ids, weights)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    gradient = torch.randn_like(got)
    inputs = [x, weights, *experts.parameters()]
    for one, two in zip(
        torch.autograd.grad(got, inputs, gradient), torch.autograd.grad(wanted, inputs, gradient)
    ):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=2e-5)


LAYOUTS = [
    (name, transposed, bias, concatenated)
    for name in ("clamp, slope, one more", "relu2, no gate")
    for transposed in (False, True)
    for bias in (False, True)
    for concatenated in ((True, False) if VARIANTS[name].gated else (True,))
]


@pytest.mark.parametrize(("name", "transposed", "bias", "concatenated"), LAYOUTS)
def test_any_layout_is_run_and_saves_its_tokens_and_first_projection_alone(
    name, transposed, bias, concatenated
):
    activation = VARIANTS[name]
    experts = experts_of(activation, transposed=transposed, bias=bias, concatenated=concatenated)
    x, ids, weights = arguments()
    got, saved = saved_by(experts, x, ids, weights)
    held = {each.untyped_storage().data_ptr() for each in (*experts.parameters(), weights)}
    large = sum(each.nbytes for at, each in saved.items() if at not in held and each.is_floating_point())
    assert large == 4 * (x.numel() + ids.numel() * activation.parts * N)
    close_to_grouped_mm(experts, x, ids, weights, got)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_of_weights_are_stored_as_the_weights_are(monkeypatch, transposed):
    """What a product has written is the gradient: no copy turns it."""
    experts = experts_of(VARIANTS["clamp, slope, one more"], transposed=transposed, concatenated=False)
    products, multiply = [], grouped.grouped_mm
    monkeypatch.setattr(
        grouped, "grouped_mm", lambda *given: products.append(multiply(*given)) or products[-1]
    )
    weights = [experts.gate_up_proj, experts.down_proj]
    for weight, gradient in zip(weights, torch.autograd.grad(experts(*arguments()).sum(), weights)):
        assert gradient.stride() == weight.stride()
        assert gradient.data_ptr() in {each.data_ptr() for each in products}


def test_in_bf16_a_layout_saves_half_of_that():
    experts = experts_of(VARIANTS["relu2, no gate"], transposed=True, dtype=torch.bfloat16)
    x, ids, weights = arguments(dtype=torch.bfloat16)
    _, saved = saved_by(experts, x, ids, weights)
    held = {each.untyped_storage().data_ptr() for each in experts.parameters()}
    large = sum(each.nbytes for at, each in saved.items() if at not in held and each.dtype == x.dtype)
    assert large == 2 * (x.numel() + weights.numel() + ids.numel() * N)


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("concatenated", [False, True])
def test_an_activation_is_found_by_what_the_module_computes(name, concatenated):
    assert activation_of(experts_of(VARIANTS[name], concatenated=concatenated)) == VARIANTS[name]


@pytest.mark.parametrize(
    ("act", "found"),
    [
        ("silu", Activation()),
        ("gelu", Activation(curve="erf")),
        ("gelu_new", Activation(curve="tanh")),
        ("gelu_fast", Activation(curve="tanh")),
        ("gelu_pytorch_tanh", Activation(curve="tanh")),
        ("quick_gelu", Activation(slope=1.702)),
        ("relu2", Activation(curve="relu2")),
        ("relu", None),
        ("gelu_10", None),  # clipped to ±10
        ("mish", None),
    ],
)
def test_an_activation_of_transformers_is_known_or_refused(act, found):
    experts = experts_of(VARIANTS["silu"])
    type(experts)._apply_gate = lambda self, h: ACT2FN[act](h.chunk(2, dim=-1)[0]) * h.chunk(2, dim=-1)[1]
    got = activation_of(experts)
    assert got == found if found else "its activation is none of silu" in got


@pytest.mark.parametrize("most", [20.0, 5e4])
def test_a_clamp_under_a_name_that_nobody_knows_is_met(most):
    experts = experts_of(VARIANTS["silu"])
    type(experts)._apply_gate = lambda self, h: plain(h.clamp(max=most), VARIANTS["silu"])
    assert "its activation is none of" in activation_of(experts)


@pytest.mark.parametrize("home", ["stash", "offload", "recompute"])
def test_interleaved_gates_go_where_their_rules_send_them(home):
    model = tiny("gpt-oss", experts="pagestash")
    pagestash.hf.optimize(model)

    def run():
        model.zero_grad()
        output = model(**batch())
        output.loss.backward()
        return output.loss, gradients(model)

    wanted = run()
    keeper = ps.Keeper(ps.Policy(rules=[ps.Rule("**.moe_act", home, min_bytes=0)])).attach(model)
    for _ in range(3):
        with keeper.step():
            got = run()
        assert same(got, wanted)


# --- ids of other ranks ---


@pytest.mark.parametrize("bias", [False, True])
def test_ids_of_other_ranks_cost_no_row(bias):
    experts = experts_of(VARIANTS["silu"], bias=bias)
    experts._is_expert_parallel = True  # what transformers asks from 5.19 on, to mask them
    x = torch.randn(6, D, requires_grad=True)
    ids = torch.tensor([[0, 4], [4, 4], [3, 1], [4, 2], [1, 4], [4, 4]])
    weights = torch.rand(6, 2).masked_fill(ids == 4, 0.0).requires_grad_()
    close_to_grouped_mm(experts, x, ids, weights, experts(x, ids, weights))
    assert experts.__dict__[ours.HIDDEN].runs._route(ids, None).rows == 5


def test_stashed_rows_are_those_of_this_rank():
    """Of 1,024 choices 277 are this rank's: the others are in no page."""
    experts = experts_of(VARIANTS["silu"], dtype=torch.bfloat16)
    experts._is_expert_parallel = True
    torch.manual_seed(2)
    x = torch.randn(256, D, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.full((1024,), E)
    ids[torch.randperm(1024)[:277]] = torch.randint(0, E, (277,))
    ids = ids.view(256, 4)
    weights = torch.rand(256, 4).masked_fill(ids == E, 0.0).requires_grad_()

    def bytes_of(function):
        held = {each.untyped_storage().data_ptr() for each in experts.parameters()}
        y, saved = saved_by(function, x, ids, weights)
        return y, sum(each.nbytes for at, each in saved.items() if at not in held)

    wanted, plain_bytes = bytes_of(experts)
    _, theirs = bytes_of(lambda *inputs: ours.grouped_mm_experts_forward(experts, *inputs))
    indices = plain_bytes - 2 * x.numel() - 2 * 1024 * 2 * N
    assert indices < 6 * 4 * 1024
    assert plain_bytes < 0.5 * theirs
    gradient = torch.randn_like(wanted)
    inputs = [x, weights, *experts.parameters()]
    wanted_gradients = torch.autograd.grad(wanted, inputs, gradient)

    model = nn.ModuleDict({"experts": experts})
    ours.name_experts(model, list(model.named_modules()), Report())
    keeper = ps.Keeper(ps.Policy(rules=[ps.Rule("**.moe_act", "stash", min_bytes=0)])).attach(model)
    for _ in range(2):
        with keeper.step():
            got = experts(x, ids, weights)
            in_pages = keeper.stats().homes["stash"].bytes
            assert same(torch.autograd.grad(got, inputs, gradient), wanted_gradients)
    assert in_pages == 2 * 277 * 2 * N


# --- what the block cannot run ---


class Odd(nn.Module):
    """As transformers has them, but for its gate."""

    def __init__(self, config):
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * N, D))
        self.down_proj = nn.Parameter(torch.randn(E, D, N))

    def _apply_gate(self, h):
        return plain(h, VARIANTS["silu"]) * 2

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("the registry has another")


Odd = use_experts_implementation(Odd)


def test_what_the_block_cannot_run_is_said_once_by_name_and_runs():
    experts = Odd(config())
    ours._said.discard(Odd)
    inputs = torch.randn(5, D), torch.zeros(5, 1, dtype=torch.int64), torch.ones(5, 1)
    with pytest.warns(UserWarning, match=r"runs Odd by transformers' grouped_mm: its activation is none of"):
        got = experts(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Odd(config())(*inputs)
    assert same(got, ours.grouped_mm_experts_forward(experts, *inputs))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"has_gate": False}, "it has no weights up_proj"),
        ({"is_concatenated": False}, "its activation is none of"),
        ({"has_post_expert_norm": True}, "a norm after its experts"),
        ({"gate_up_proj": nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)}, "quantised"),
        ({"down_proj": nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))}, "quantised"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_why_a_layout_is_left(change, why):
    experts = experts_of(VARIANTS["clamped"])
    for name, value in change.items():
        setattr(experts, name, value)
    assert why in activation_of(experts)


def test_experts_in_float8_run_by_their_own_grouped_mm(monkeypatch):
    float8 = pytest.importorskip("transformers.integrations.finegrained_fp8")
    registry = float8.ALL_FP8_EXPERTS_FUNCTIONS
    monkeypatch.setattr(float8, "fp8_grouped_mm_experts_forward", lambda self, x, *choices: x + 1)
    kind = use_experts_implementation(type("Float8", (Odd.__mro__[0],), {}), experts_interface=registry)
    experts = kind(config())
    experts.gate_up_proj = nn.Parameter(torch.zeros(E, 2 * N, D).to(torch.float8_e4m3fn))
    ours._said.discard(kind)
    with pytest.warns(
        UserWarning, match=r"runs Float8 by transformers' grouped_mm: its weights are quantised"
    ):
        assert same(experts(torch.zeros(2, D), None, None), torch.ones(2, D))


def test_experts_that_were_divided_after_the_first_forward_are_refused():
    experts = experts_of(VARIANTS["silu"])
    experts(*arguments())
    experts.num_experts = 2
    with pytest.raises(RuntimeError, match="Some has 2 experts, and had 4 when it ran first"):
        experts(*arguments())


# --- all that the installed release has ---


def classes_of_experts():
    """Every class of the installed transformers that its decorator is on, with the module it is in."""
    for path in sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py")):
        found = re.findall(
            r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), flags=re.MULTILINE
        )
        for name in found:
            yield f"transformers.models.{path.parent.name}.{path.stem}", name


release = Version(transformers.__version__)
SIZES = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "moe_intermediate_size")


def made_of_a_default_config(where, name):
    """An instance without memory; of a model with several configs, by the one that has experts in it."""
    kind = getattr(importlib.import_module(where), name)
    configs = vars(importlib.import_module(where.replace(".modeling_", ".configuration_")))
    for key, value in sorted(configs.items()):
        if key.endswith("Config") and getattr(value, "__module__", "").startswith("transformers.models."):
            try:
                made = value()
                for size in SIZES:  # of some models the default has none, or one for each modality
                    given = getattr(made, size, 1)
                    if given is None or isinstance(given, list):
                        made.__dict__[size] = given[0] if given else 8  # past the config's own check
                with torch.device("meta"):
                    return kind(made)
            except (AttributeError, TypeError, KeyError, OSError):  # of its vision tower, say, or AutoConfig
                continue
    raise AssertionError(f"{name}: no config of its model has experts")


@pytest.mark.skipif(release > Version("5.22.99"), reason="what later releases have is not known")
def test_all_classes_of_experts_that_transformers_has_are_run_but_for_one_with_a_norm():
    found = {
        name: activation_of(made_of_a_default_config(where, name)) for where, name in classes_of_experts()
    }
    left = {name: why for name, why in found.items() if isinstance(why, str)}
    if release >= Version("5.22"):
        assert len(found) >= 63
        assert left == {"MuseSparkExperts": "it has a norm after its experts"}
    elif release >= Version("5.17"):
        assert len(found) >= 55
        assert left == {}
