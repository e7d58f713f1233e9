"""What is predicted for a policy is what a keeper's step takes: bytes by home, and the peak of all memory."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from support.tiers import slow, slow_but
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import plan_profile
from pagestash.planning.choices import find_groups
from pagestash.planning.fused import permuted_bytes
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import predict
from pagestash.profiling import Link
from pagestash.profiling.memory import MemoryMeter

LINK = Link(out=1e15, back=1e15)  # on a CPU a copy is over when it returns
BATCH = 1040
"""A keeper counts the tokens that the embedding saves; a profile does not: the caller holds them."""


def batch(vocab=256, length=64):
    tokens = torch.randint(0, vocab, (2, length + 1), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1], tokens[:, 1:]


GIVEN = batch()


@cache
def decoder(gradients="held"):
    model = Decoder(preset("tiny", layers=4))
    model.initialise(0)
    return model, ps.profile(model, GIVEN, repeats=1, link=LINK, gradients=gradients)


@cache
def deeper_decoder():
    model = Decoder(preset("tiny", layers=6))
    model.initialise(0)
    given = batch(length=128)
    return model, given, ps.profile(model, given, repeats=1, link=LINK)


def step_under(model, policy, step, gradients="held"):
    """The most bytes that live at once in a steady step, and the keeper's counts."""
    keeper = ps.Keeper(policy, backend="torch").attach(model)
    meter = MemoryMeter(torch.device("cpu"))
    for _ in range(3):  # the first is measured
        keeper.reset_peaks()
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter) if gradients == "held" else None
        with meter:
            begun = meter.mark()
            with keeper.step():
                step()
            ended = meter.mark()
    stats = keeper.stats()
    keeper.detach()
    model.zero_grad(set_to_none=True)
    return ended.peak - begun.now, stats


def offload(match, **options):
    return ps.Rule(match, "offload", min_bytes=1024, **options)


CORE, PROJECTION = "layers.*.attn.core_attn", "layers.*.attn.attn_proj"
NORMS = [ps.Rule("layers.*.attn_norm", "recompute"), ps.Rule("layers.*.mlp_norm", "recompute")]
QKV = ps.Rule("layers.*.attn.qkv_linear", "recompute")
ROPE = ps.Rule("layers.*.attn.rope", "recompute")
POLICIES = {
    "norms": NORMS,
    "a chain of a norm and a projection": [*NORMS, QKV],
    "a chain of a projection and norms": [QKV, ps.Rule("layers.*.attn.*_norm", "recompute")],
    "RoPE, of what the norms before it keep": [ROPE],
    "a chain of norms and RoPE": [ROPE, ps.Rule("layers.*.attn.*_norm", "recompute")],
    "attention": [ps.Rule("layers.*.attn", "recompute")],
    "experts by themselves": [ps.Rule("layers.*.moe.moe_act", "recompute")],
    "layers": [ps.Rule("layers.*", "recompute")],
    "one layer": [ps.Rule("layers.2", "recompute")],
    "offloaded attention": [offload(CORE)],
    "offloaded attention, no window": [offload(CORE, prefetch_bytes=0)],
    "a third of attention offloaded": [offload(CORE, prefetch_bytes=0, fraction=0.33)],
    "two thirds of attention offloaded": [offload(CORE, fraction=0.67), offload(PROJECTION)],
    "offloaded attention with its projection": [offload(CORE, prefetch_bytes=0), offload(PROJECTION)],
    "slices of a projection, in one group": [offload("layers.*.attn", prefetch_bytes=0)],
    "slices of a projection, in two groups": [
        offload("layers.*.attn.q_norm", prefetch_bytes=0),
        offload(CORE, prefetch_bytes=0),
    ],
    "both": [*NORMS, offload(CORE, prefetch_bytes=0), offload("layers.*.moe.moe_act", prefetch_bytes=0)],
}


QUICK = [
    *((name, "held") for name in ("norms", "layers", "attention", "one layer")),
    *((name, "held") for name in POLICIES if name.startswith(("a third", "slices"))),
    ("both", "fresh"),
]


def with_gradients(policies, quick):
    """Every policy with gradients that are held, and with new ones."""
    return slow_but(quick, [(name, gradients) for gradients in ("held", "fresh") for name in policies])


@pytest.mark.parametrize(("name", "gradients"), with_gradients(POLICIES, QUICK))
def test_the_peak_and_the_bytes_of_each_home_are_those_of_a_keepers_step(name, gradients):
    policy, (model, profile) = ps.Policy(POLICIES[name]), decoder(gradients)
    found = predict(profile, policy)
    peak, stats = step_under(model, policy, lambda: sum(model(*GIVEN)).backward(), gradients)
    assert found.peak_bytes - peak < 256  # copies begin at multiples of 16 bytes
    assert peak - found.peak_bytes < (small(profile) / 4 if name == "one layer" else 256)
    # Queries span all but the last row's keys and values; here the storage counts.
    beyond = 4096 if name == "slices of a projection, in two groups" else 0
    assert 0 <= found.host_bytes - stats.homes["offload"].peak <= beyond
    if name != "experts by themselves":  # a fused layer's own tensors never pass the keeper
        # What comes back counts until backward asks for it there, and until it is freed here.
        assert stats.homes["recompute"].peak <= max(found.memory["recompute"])
    stays = max(found.memory["offload"])
    kept = max(found.memory["keep"]) + BATCH
    assert kept - BATCH <= stats.homes["keep"].peak <= kept + stays + small(profile)


@pytest.mark.slow
def test_rotated_queries_and_keys_are_made_again_from_the_projection():
    """Not from the norms' results, which would wait in their stead."""
    model, profile = decoder()

    def peak(name):
        policy = ps.Policy(POLICIES[name])
        return step_under(model, policy, lambda: sum(model(*GIVEN)).backward())[0]

    config = model.config
    rotated = 4 * GIVEN[0].numel() * (config.heads + config.kv_heads) * config.head_size
    plain = predict(profile, ps.Policy()).peak_bytes
    alone, chain = peak("RoPE, of what the norms before it keep"), peak("a chain of norms and RoPE")
    assert chain < plain - 2 * rotated < alone


CLAIMED = {
    "experts": ["layers.*.moe"],
    "dense layers and experts": ["layers.*.mlp", "layers.*.moe.experts"],
    "dense layers and norms": ["layers.*.mlp", "layers.*.attn_norm"],
    "attention, norms and experts": ["layers.*.attn", "layers.*.moe", "layers.*.attn_norm"],
}


@pytest.mark.parametrize("name", slow_but(["dense layers and experts"], CLAIMED))
def test_what_a_fused_layer_claims_moves_apart_from_what_else_its_region_saves(name):
    """A keeper's window goes by its groups: one too large, and others stay than those that a keeper keeps."""
    model, given, profile = deeper_decoder()
    policy = ps.Policy([offload(match) for match in CLAIMED[name]])
    peak, _ = step_under(model, policy, lambda: sum(model(*given)).backward())
    assert abs(predict(profile, policy).peak_bytes - peak) < 256
    as_one = replace(profile, tensors=[replace(tensor, claimed=False) for tensor in profile.tensors])
    assert abs(predict(as_one, policy).peak_bytes - peak) > 1024


GROUPED = preset(
    "gpt-oss-20b",
    4,
    vocab=128,
    width=64,
    heads=8,
    kv_heads=1,
    head_dim=8,
    experts=4,
    expert_width=32,
    top_k=2,
)
LATENT = preset(
    "deepseek-v3",
    4,
    vocab=128,
    width=64,
    heads=4,
    q_rank=32,
    kv_rank=16,
    nope_dim=8,
    rope_dim=4,
    v_dim=8,
    dense_width=128,
    experts=8,
    top_k=2,
    expert_width=32,
    groups=4,
    group_limit=2,
)
ATTENTION, QKV_UP = "layers.*.attn", ps.Rule("layers.{1-3}.attn.qkv_linear.kv_up", "recompute")
VIEWS = {
    "values, a thin slice that alone is saved of a projection": (GROUPED, [offload(CORE)]),
    "no window": (GROUPED, [offload(CORE, prefetch_bytes=0), offload(PROJECTION, prefetch_bytes=0)]),
    "half of such tensors": (GROUPED, [offload(CORE, fraction=0.5)]),
    "values, half of a projection": (LATENT, [offload(CORE), offload(PROJECTION)]),
    "most of a projection": (LATENT, [offload("layers.*.attn.qkv_linear", prefetch_bytes=0), offload(CORE)]),
}


@pytest.mark.parametrize("name", slow_but(["half of such tensors"], VIEWS))
def test_a_view_moves_as_the_range_that_it_spans_or_as_its_elements(name):
    """It is no tensor whose last rows were not filled, and a slice that is copied does not hold its storage."""
    check_exact(*VIEWS[name])


REPLAYED = {
    "an input in the group of the region around": (GROUPED, [offload(ATTENTION), QKV]),
    "a latent that a replay asks for before its own region does": (
        LATENT,
        [offload(CORE, prefetch_bytes=0), offload("layers.*.attn.qkv_linear", prefetch_bytes=0), QKV_UP],
    ),
    "the same, with a window": (LATENT, [offload(CORE), offload("layers.*.attn.qkv_linear"), QKV_UP]),
}


@pytest.mark.parametrize("name", slow_but(["an input in the group of the region around"], REPLAYED))
def test_an_input_of_a_recomputed_region_moves_with_the_region_around_it(name):
    check_exact(*REPLAYED[name])


ONE_KEEPS = [offload("layers.{0,2-5}.attn"), offload("layers.0.attn.core_attn")]
UNLIKE_LAYERS = {
    "one keeps what others move": ONE_KEEPS,
    "the same, norms recomputed": [*ONE_KEEPS, *NORMS],
    "one offloads what others hold for a replay": [
        offload("layers.0.attn"),
        offload("layers.0.attn.core_attn"),
        ps.Rule("layers.{1-4}.attn", "recompute"),
        offload("layers.*.moe.moe_act"),
    ],
    "whole layers, dense and of experts": [offload("layers.*")],
    "one projection in groups of two regions, one of which has a replay's input": [
        ps.Rule("layers.*.attn", "offload", min_bytes=16384),
        ps.Rule("layers.*.attn.q_norm", "offload", min_bytes=16384),
        ps.Rule(CORE, "recompute"),
    ],
    "slices of a projection that move as one range, without its first": [
        ps.Rule("layers.*.attn", "offload", min_bytes=16384),
        ps.Rule("layers.*.attn.q_norm", "offload", min_bytes=16384),
    ],
}


@pytest.mark.parametrize("name", slow_but(["the same, norms recomputed"], UNLIKE_LAYERS))
def test_a_storage_that_several_regions_save_is_asked_for_in_the_groups_that_have_it(name):
    """All layers save the tables of their rotations, for one. A group's first request decides whether it stays."""
    model, given, profile = deeper_decoder()
    policy = ps.Policy(UNLIKE_LAYERS[name])
    peak, _ = step_under(model, policy, lambda: sum(model(*given)).backward())
    assert abs(predict(profile, policy).peak_bytes - peak) < 256


def check_exact(config, rules):
    model = Decoder(config)
    model.initialise(0)
    given = [part[:1] for part in batch(config.vocab, 128)]
    profile = ps.profile(model, given, repeats=1, link=LINK)
    peak, _ = step_under(model, ps.Policy(rules), lambda: sum(model(*given)).backward())
    assert abs(predict(profile, ps.Policy(rules)).peak_bytes - peak) < 256


INSIDE = {
    "experts": [ps.Rule("layers.*.moe", "stash"), ps.Rule("layers.*", "recompute")],
    "an activation": [ps.Rule("layers.*.moe.moe_act", "stash"), ps.Rule("layers.*", "recompute")],
    "attention": [ps.Rule(CORE, "stash"), ps.Rule("layers.*", "recompute")],
    "attention in attention": [ps.Rule(CORE, "stash"), ps.Rule("layers.*.attn", "recompute")],
    "what a projection reads": [ps.Rule(PROJECTION, "stash"), ps.Rule("layers.*", "recompute")],
    "what is held anyway": [
        ps.Rule("layers.*.attn.qkv_linear", "stash"),
        ps.Rule("layers.*.attn", "recompute"),
    ],
    "kept attention": [ps.Rule(CORE, "keep"), ps.Rule("layers.*", "recompute")],
}


@pytest.mark.filterwarnings("ignore:rule")
@pytest.mark.parametrize(("name", "gradients"), with_gradients(INSIDE, [("experts", "held")]))
def test_a_tensor_that_a_region_inside_stashes_comes_back_with_the_replay_too(name, gradients):
    """The stash has what its region saved; what others around it saved of the same storages is recomputed."""
    policy, (model, profile) = ps.Policy(INSIDE[name], ps.PoolConfig(page=4096)), decoder(gradients)
    found = predict(profile, policy)
    peak, stats = step_under(model, policy, lambda: sum(model(*GIVEN)).backward(), gradients)
    pool = 0 if stats.pool is None else stats.pool.device.pages * 4096
    assert abs(found.pool.bytes - pool) <= 0.05 * pool
    assert found.peak_bytes == pytest.approx(peak + pool, rel=0.01)


def small(profile):
    """Indices and masks of recomputed regions: held by a keeper, and by the profile counted as discarded."""
    return sum(t.counted for t in profile.tensors if "float" not in t.dtype or t.bytes < 4096)


def test_without_a_policy_the_prediction_is_the_measured_step():
    model, profile = decoder()
    found = predict(profile, ps.Policy(), base_bytes=1000)
    assert found.seconds == pytest.approx(profile.plain_seconds)
    assert found.peak_bytes == max(segment.peak_bytes for segment in profile.segments) + 1000
    assert found.held_bytes == {"keep": profile.total_bytes, "stash": 0, "offload": 0, "recompute": 0}
    assert sum(found.at_peak().values()) == found.peak_bytes
    assert profile.model_bytes == sum(t.nbytes for t in (*model.parameters(), *model.buffers()))


def test_recompute_costs_the_forward_up_to_the_last_tensor_that_is_wanted():
    _, profile = decoder()
    scale = profile.plain_seconds / sum(segment.seconds for segment in profile.segments)
    norm = profile.region("layers.1.attn_norm")
    found = predict(profile, ps.Policy([ps.Rule("layers.1.attn_norm", "recompute")]))
    assert found.recompute_seconds == pytest.approx(scale * norm.total_forward_seconds)
    # A projection's backward needs its input alone, and nobody saves the output of this one.
    nothing = predict(profile, ps.Policy([ps.Rule(PROJECTION, "recompute")]))
    assert nothing.recompute_seconds == 0


@pytest.mark.slow
def test_copies_that_do_not_hide_make_the_step_longer():
    model, _ = decoder()
    slow = ps.profile(model, GIVEN, repeats=1, link=1e6)
    policy = ps.Policy([offload(CORE, prefetch_bytes=0)])
    found = predict(slow, policy)
    verdict = slow.fits(policy)
    assert found.moved_bytes == verdict.moved_bytes
    assert found.out_seconds == pytest.approx(verdict.moved_bytes / 1e6)
    assert found.wait_seconds > 0.5 * (found.out_seconds + found.back_seconds)
    assert found.seconds == pytest.approx(slow.plain_seconds + found.wait_seconds)
    assert sum(wait for _, wait in found.waits) == pytest.approx(found.wait_seconds)


class Shifted(nn.Module):
    """Saves its result, and nobody saves its input."""

    def forward(self, x):
        return (x + 1.0).exp()


class Doubled(nn.Module):
    def forward(self, x):
        return 2.0 * x


def test_an_input_that_nobody_saves_is_held_for_the_replay():
    model = nn.Sequential(Doubled(), Shifted(), Doubled(), Shifted(), Doubled(), Shifted())
    x = torch.randn(64, 64, requires_grad=True)
    profile = ps.profile(model, x, repeats=1)
    assert [size for _, size in profile.region("3").unsaved_inputs] == [x.nbytes]
    policy = ps.Policy([ps.Rule("3", "recompute")])
    found = predict(profile, policy)
    assert found.held_bytes["recompute"] == x.nbytes
    # One tensor is dropped and another is held: nothing is won.
    assert max(found.memory["keep"]) == max(predict(profile, ps.Policy()).memory["keep"])
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert found.peak_bytes == pytest.approx(peak, abs=x.nbytes)


class Scaled(nn.Module):
    """Saves its input, and nobody saves its result."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((256,), 0.1))

    def forward(self, x):
        return x * self.weight


@pytest.mark.parametrize("match", ["{2-3}", "{1-3}", "{2-5}", "{0-5}", "*"])
def test_an_input_that_nobody_saves_comes_back_where_its_maker_is_recomputed(match):
    """What the maker makes is there while the replay runs, and not before."""
    model = nn.Sequential(*(each for _ in range(4) for each in (Scaled(), Shifted())))
    x = torch.randn(256, 256, requires_grad=True)
    profile = ps.profile(model, x, repeats=1)
    policy = ps.Policy([ps.Rule(match, "recompute")])
    found = predict(profile, policy)
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert found.peak_bytes == pytest.approx(peak, abs=x.nbytes / 200)  # a weight's gradient has 1 / 256
    takers = [number for number in (1, 3, 5, 7) if policy.rule_for(f"{number}")]
    alone = predict(profile, ps.Policy([ps.Rule(f"{number}", "recompute") for number in takers]))
    assert max(found.memory["keep"]) < max(alone.memory["keep"])
    # All run again, but for the last two, whose result is the model's.
    step, again = MeasuredStep(profile), [f"{at}" for at in range(6) if policy.rule_for(f"{at}")]
    wanted = sum(step.seconds[at] for name in again for at in step.forward_of(name))
    assert found.recompute_seconds == pytest.approx(wanted)


def test_a_keeper_does_not_ask_a_region_again_in_which_nothing_was_saved():
    model = nn.Sequential(Scaled(), Shifted(), Doubled(), Shifted(), Scaled(), Shifted())
    x = torch.randn(256, 256, requires_grad=True)
    profile = ps.profile(model, x, repeats=1)
    policy = ps.Policy([ps.Rule("{2-3}", "recompute")])
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert predict(profile, policy).peak_bytes == pytest.approx(peak, abs=x.nbytes / 200)


class InOrder(nn.Module):
    """Calls its modules in this order, `Scaled` and `Shifted` by letters; some of them several times."""

    def __init__(self, kinds, order):
        super().__init__()
        self.m = nn.ModuleList(Scaled() if kind == "s" else Shifted() for kind in kinds)
        self.order = order

    def forward(self, x):
        for number in self.order:
            x = self.m[number](x)
        return x


@pytest.mark.parametrize(
    ("kinds", "order"),
    [("hsh", [0, 1, 2, 2]), ("shsh", [0, 1, 2, 0, 3]), ("sshs", [0, 1, 2, 0, 3])],
)
def test_chains_of_modules_that_run_several_times_are_never_predicted_too_low(kinds, order):
    """A profile does not say which call made what: an input of theirs is taken to be held."""
    model, x = InOrder(kinds, order), torch.randn(256, 256, requires_grad=True)
    profile = ps.profile(model, x, repeats=1)
    policy = ps.Policy([ps.Rule("m.{0-2}", "recompute")])
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert -x.nbytes / 100 <= predict(profile, policy).peak_bytes - peak <= 2.02 * x.nbytes


def test_a_rule_that_keeps_what_is_around_keeps_the_inputs_of_what_is_recomputed():
    model = nn.Sequential(*(nn.Sequential(Scaled(), Shifted(), Scaled(), Shifted()) for _ in range(3)))
    x = torch.randn(256, 256, requires_grad=True)
    profile = ps.profile(model, x, repeats=1)
    policy = ps.Policy([ps.Rule("*.{0-3}", "recompute"), ps.Rule("*", "keep")])
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert -x.nbytes / 100 <= predict(profile, policy).peak_bytes - peak <= 1.02 * x.nbytes


def test_a_plan_recomputes_what_gains_something_together():
    """A maker saves nothing of its own, and who takes from it would hold what it made."""
    model = nn.Sequential(*(nn.Sequential(Scaled(), Shifted()) for _ in range(4)))
    x = torch.randn(256, 256, requires_grad=True)
    profile = ps.profile(model, x, repeats=1)
    # As long as each other: on a busy machine layers that are alike are not, and are in groups of their own.
    even = [replace(segment, seconds=1e-3) for segment in profile.segments]
    regions = [replace(region, forward_seconds=1e-3, backward_seconds=1e-3) for region in profile.regions]
    step = MeasuredStep(replace(profile, segments=even, regions=regions))
    (group,) = find_groups(step, host=False, least_bytes=1)
    both = (("0", "recompute", 1.0), ("1", "recompute", 1.0))
    assert both in group.choices
    assert not any((item,) in group.steps for item in both)


class Borrows(nn.Module):
    """A layer that calls a module which belongs to the model."""

    def __init__(self, lent):
        super().__init__()
        self.norm, self._lent = nn.LayerNorm(64), [lent]

    def forward(self, x):
        return x + self._lent[0](self.norm(x))


class Lends(nn.Module):
    """One MLP that runs in every layer."""

    def __init__(self, layers):
        super().__init__()
        self.lent = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.layers = nn.ModuleList(Borrows(self.lent) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("match", ["lent", "lent.1", "layers.*", "layers.2", "layers.*.norm"])
def test_a_module_that_runs_in_several_places_is_replayed_for_each_of_them(match):
    model, x = Lends(4), torch.randn(128, 64)
    profile = ps.profile(model, x, repeats=1, link=LINK)
    policy = ps.Policy([ps.Rule(match, "recompute")])
    found = predict(profile, policy)
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert found.peak_bytes == pytest.approx(peak, rel=0.02)


@pytest.mark.parametrize("lent", ["lent", "lent.0", "lent.2"])
def test_a_lent_module_inside_regions_that_move_is_predicted_roughly(lent):
    """Its inputs wait in the home of the region around it, which is another in every place."""
    model, x = Lends(4), torch.randn(128, 64)
    profile = ps.profile(model, x, repeats=1, link=LINK)
    moved = ps.Rule("layers.{1-3}", "offload", min_bytes=0, prefetch_bytes=0)
    policy = ps.Policy([ps.Rule(lent, "recompute"), moved])
    found = predict(profile, policy)
    peak, stats = step_under(model, policy, lambda: model(x).sum().backward())
    assert found.peak_bytes == pytest.approx(peak, rel=0.25)
    assert 0 < found.host_bytes <= stats.homes["offload"].peak


def test_a_module_that_runs_in_several_places_can_be_planned_for():
    model, x = Lends(4), torch.randn(128, 64)
    profile = ps.profile(model, x, repeats=1, link=LINK)
    for host in (0, "1GiB"):
        found = plan_profile(profile, budget=0.6, host=host)
        assert found.policy.rules
        peak, _ = step_under(model, found.policy, lambda: model(x).sum().backward())
        held = 2 * sum(parameter.nbytes for parameter in model.parameters())
        assert found.predicted.peak_bytes == pytest.approx(peak + held, rel=0.02)


def test_a_profile_without_memory_still_predicts_the_saved_bytes(tmp_path):
    """A compiled model's profile has none."""
    _, profile = decoder()
    segments = [replace(segment, end_bytes=None, peak_bytes=None) for segment in profile.segments]
    regions = [replace(region, unsaved_inputs=(), unsaved_outputs=()) for region in profile.regions]
    found = replace(profile, segments=segments, regions=regions)
    found.save(tmp_path / "profile.json")
    assert ps.Profile.load(tmp_path / "profile.json") == found
    assert predict(found, ps.Policy()).peak_bytes == profile.total_bytes


def small_qwen(attention, experts):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        use_cache=False,
    )
    config._attn_implementation, config._experts_implementation = attention, experts
    model = transformers.Qwen3MoeForCausalLM(config)
    ids, labels = batch(96, 32)
    return model, {"input_ids": ids, "labels": labels}


def test_what_a_router_decides_once_is_held_for_a_layer_around_it_and_not_for_a_norm_before_it():
    pytest.importorskip("transformers")
    import pagestash.hf

    model, given = small_qwen("sdpa", "pagestash")
    pagestash.hf.optimize(model)
    profile = ps.profile(model, given, repeats=1, link=LINK)
    assert any(tensor.once for tensor in profile.tensors)
    layers = ("model.layers.{0-1}", "model.layers.2", "model.layers.*")
    for match in (*layers, "model.layers.*.*_layernorm", "model.layers.*.self_attn"):
        policy = ps.Policy([ps.Rule(match, "recompute")])
        peak, _ = step_under(model, policy, lambda: model(**given).loss.backward())
        assert abs(predict(profile, policy).peak_bytes - peak) < 256


EXPERTS, ACTIVATION = "model.layers.*.mlp.experts", "model.layers.*.mlp.experts.moe_act"


@pytest.mark.parametrize(
    "homes",
    [
        {EXPERTS: "stash"},
        *slow(
            {ACTIVATION: "recompute"},
            {EXPERTS: "stash", "model.layers.*": "recompute"},
            {ACTIVATION: "stash", "model.layers.*": "recompute"},
        ),
    ],
    ids=str,
)
def test_a_fused_layer_without_its_projection_holds_the_rows_that_it_permutes(homes):
    pytest.importorskip("transformers")
    import pagestash.hf

    model, _ = small_qwen("sdpa", "pagestash")
    ids, labels = batch(96, 128)
    pagestash.hf.optimize(model)
    profile = ps.profile(model, {"input_ids": ids, "labels": labels}, repeats=1, link=LINK)
    rules = [
        ps.Rule(match, home, min_bytes=1024 if home == "stash" else None) for match, home in homes.items()
    ]
    policy = ps.Policy(rules, ps.PoolConfig(page=1024))
    found = predict(profile, policy)
    peak, stats = step_under(model, policy, lambda: model(ids, labels=labels).loss.backward())
    pool = 0 if stats.pool is None else stats.pool.device.pages * 1024
    assert found.pool.bytes == pool
    # The replay of a layer has some of the rows anyway.
    both = EXPERTS in homes and len(homes) > 1
    assert -0.01 < found.peak_bytes / (peak + pool) - 1 < (0.04 if both else 0.01)


def test_tensors_without_rows_are_no_tokens_of_a_fused_layer():
    def saved(region, *shape):
        size = 4 * shape[0] * shape[1]
        return SimpleNamespace(
            kind="activation", region=region, dtype="torch.float32", shape=shape, bytes=size
        )

    layer = [SimpleNamespace(name=f"experts.{part}", within="experts") for part in ("fc1", "act")]
    tensors = [saved("experts.fc1", 16, 8), saved("experts.act", 32, 24)]
    wanted = permuted_bytes(SimpleNamespace(regions=layer, tensors=tensors))
    empty = [saved("experts.fc1", 0, 8), saved("experts.act", 0, 24)]
    assert wanted == {"experts.act": 32 * 8 * 4}
    assert permuted_bytes(SimpleNamespace(regions=layer, tensors=[*tensors, *empty])) == wanted


@pytest.mark.slow
def test_a_small_hugging_face_model_is_predicted_as_its_keeper_steps():
    model, given = small_qwen("eager", "eager")
    profile = ps.profile(model, given, repeats=1, link=LINK)
    for match in ("model.layers.*.*_layernorm", "model.layers.*.self_attn", "model.layers.*"):
        policy = ps.Policy([ps.Rule(match, "recompute")])
        found = predict(profile, policy)
        peak, _ = step_under(model, policy, lambda: model(**given).loss.backward())
        assert found.peak_bytes == pytest.approx(peak, rel=0.02)


class FusedCore(nn.Module):
    def forward(self, qkv):
        query, key, value = qkv.unflatten(-1, (3, -1, 8)).transpose(1, -2).unbind(2)
        return (query.sin() + key.sin() * value.cos()).transpose(1, 2).flatten(-2)


def test_slices_that_are_together_all_of_a_projection_move_as_one_range():
    layers = (nn.Sequential(nn.Linear(32, 96), FusedCore(), nn.Linear(32, 32)) for _ in range(6))
    model = nn.Sequential(*layers)
    given = torch.randn(2, 24, 32)
    policy = ps.Policy([offload("*.1", prefetch_bytes=0)])
    profile = ps.profile(model, (given,), loss=lambda output: output.square().sum(), repeats=1, link=LINK)
    found = predict(profile, policy)
    peak, stats = step_under(model, policy, lambda: model(given).square().sum().backward())
    assert found.host_bytes == stats.homes["offload"].peak
    assert 0 <= found.peak_bytes - peak <= 3 * given.nbytes  # copies would take that three times


class SavesInVain(torch.autograd.Function):
    """Its backward asks for nothing."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.clone())
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class InVain(nn.Module):
    def forward(self, x):
        return SavesInVain.apply(x)


def saving_in_vain():
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), InVain(), nn.Tanh()) for _ in range(6)))


def test_a_tensor_that_backward_never_asks_for_is_freed_when_its_node_is_done():
    model, x = saving_in_vain(), torch.randn(64, 64, requires_grad=True)
    profile = ps.profile(model, x, repeats=1, link=LINK)
    policy = ps.Policy([offload("*")])
    peak, _ = step_under(model, policy, lambda: model(x).sum().backward())
    assert abs(predict(profile, policy).peak_bytes - peak) < 256


def test_a_group_that_is_dropped_while_it_leaves_counts_until_it_has_left():
    x = torch.randn(64, 64, requires_grad=True)
    profile = ps.profile(saving_in_vain(), x, repeats=1, link=LINK)
    profile = replace(profile, segments=[replace(segment, seconds=1e-3) for segment in profile.segments])
    policy = ps.Policy([offload(match, prefetch_bytes=1 << 20) for match in ("*.1", "*.0", "*.2")])
    for copies in range(1, 40):  # of a tensor, while two segments run
        slow = replace(profile, link=Link(out=copies * x.nbytes / 2e-3, back=1e15))
        memory = predict(slow, policy).memory["offload"]
        assert min(memory) >= 0
        assert memory[-1] <= x.nbytes
