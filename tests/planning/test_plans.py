"""`ps.plan`: the fastest policy that fits, or a sentence that says why there is none."""

import json
import tomllib
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import example
from hypothesis import strategies as st
from support.tiers import slow, sweep

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import NothingFits, plan_profile, predict
from pagestash.planning.alternatives import alternatives
from pagestash.planning.budget import optimizer_state, parse_budget, parse_host
from pagestash.planning.candidates import Problem
from pagestash.planning.lifetimes import MeasuredStep
from pagestash.planning.predict import Predictor
from pagestash.planning.prediction import RuleTable
from pagestash.planning.result import rows_of
from pagestash.profiling import HomeEstimate, Link, Region, SavedTensor, Segment
from pagestash.sizes import format_bytes

MB, MS = 10**6, 1e-3


# --- a profile that is made up: layers of two regions, which save a tensor each ---


def made_up(layers, first, second, *, head=5 * MB, link=1e9, workspace=0):
    """Layers of two regions, `a` and `b`, of (bytes saved, forward ms) each; backward takes twice as long."""
    forward, backward = [], []
    names = [(f"layers.{n}", part, own) for n in range(layers) for part, own in (("a", first), ("b", second))]
    for layer, part, (_, ms) in names:
        forward.append(Segment(("", layer, f"{layer}.{part}"), "forward", ms * MS))
        backward.insert(0, Segment(("", layer, f"{layer}.{part}"), "backward", 2 * ms * MS))
    segments = [
        *forward,
        Segment(("", "head"), "forward", MS),
        Segment(("", "head"), "backward", MS),
        *backward,
    ]
    last = len(segments) - 1
    tensors, regions = [], [region("", ("",), 0, 0.0)]
    for at, (layer, part, (size, ms)) in enumerate(names):
        path = ("", layer, f"{layer}.{part}")
        tensors.append(saved(path, at, size, at, last - at))
        if part == "a":
            regions.append(region(layer, path[:2], 0, 0.0, first[0] + second[0], (first[1] + second[1]) * MS))
        regions.append(region(path[-1], path, size, ms * MS, size, ms * MS))
    tensors.append(saved(("", "head"), len(names), head, len(forward), len(forward) + 1))
    regions.append(region("head", ("", "head"), head, MS))
    alive = [[t for t in tensors if t.saved_at <= at <= t.freed_at] for at in range(last + 1)]
    segments = [
        replace(
            segment,
            end_bytes=sum(t.counted for t in there if t.freed_at > at),
            peak_bytes=sum(t.counted for t in there) + workspace,
        )
        for at, (segment, there) in enumerate(zip(segments, alive))
    ]
    return ps.Profile(
        device="cpu",
        link=Link(out=link, back=link),
        tensors=tensors,
        regions=regions,
        segments=segments,
        plain_seconds=sum(segment.seconds for segment in segments),
        model_bytes=0,
        gradient_bytes=0,
    )


def saved(path, storage, size, at, needed):
    return SavedTensor(
        region=path[-1],
        path=path,
        shape=(size,),
        dtype="float32",
        device="cpu",
        kind="activation",
        bytes=size,
        storage=storage,
        storage_bytes=size,
        counted=size,
        valid_bytes=size,
        held_by=(),
        saved_at=at,
        needed_at=needed,
        freed_at=needed,
        request=0,
        span=(0, size),
        asked=(needed, 0),
        done_at=needed,
    )


def region(name, path, size, seconds, freed=0, cost=0.0):
    homes = {
        home: HomeEstimate(size if home == "offload" else 0, 0.0) for home in ("keep", "stash", "offload")
    }
    if freed:
        homes["recompute"] = HomeEstimate(freed, cost)
    return Region(
        name=name,
        path=path,
        calls=1,
        within=name,
        tensors=int(size > 0),
        bytes=size,
        forward_seconds=seconds,
        backward_seconds=2 * seconds,
        total_bytes=size,
        total_forward_seconds=seconds,
        total_backward_seconds=2 * seconds,
        hidden_bytes=0,
        homes=homes,
    )


def in_halves(profile):
    """The same with two tensors where there was one."""
    tensors = [
        replace(tensor, storage=2 * tensor.storage + half, span=(0, size), **dict.fromkeys(SIZES, size))
        for tensor in profile.tensors
        for size in [tensor.counted // 2]
        for half in (0, 1)
    ]
    return replace(profile, tensors=tensors)


SIZES = ("bytes", "storage_bytes", "counted", "valid_bytes")
HOMES = (("keep", 1.0), ("offload", 1.0), ("recompute", 1.0))


def all_policies(profile, layers, homes=HOMES):
    """Every way to give each region of each layer a home, and to recompute whole layers."""
    found = [{}]
    for number in range(layers):
        layer = f"layers.{number}"
        ways = [{layer: ("recompute", 1.0)}]
        for a in homes:
            ways += [{f"{layer}.a": a, f"{layer}.b": b} for b in homes]
        found = [{**before, **way} for before in found for way in ways]
    predictor = Predictor(MeasuredStep(profile))
    for chosen in found:
        rules = {
            name: ps.Rule(name, home, min_bytes=0, fraction=part)
            for name, (home, part) in chosen.items()
            if home != "keep"
        }
        yield predictor.predict(RuleTable(rules, ps.PoolConfig()))


sizes = st.tuples(st.integers(1, 20).map(lambda n: n * MB), st.integers(1, 12))


@pytest.mark.whole_search
@sweep(
    5,
    30,
    sizes,
    sizes,
    st.integers(2, 3),
    st.sampled_from([2e8, 1e9, 2e10]),
    st.sampled_from([0.35, 0.6, 0.7, 0.8]),
)
@example((10 * MB, 8), (6 * MB, 12), 3, 2e8, 0.7)  # a search that is not exhaustive finds one 2 % slower
def test_a_plan_is_as_good_as_the_best_of_all_policies(first, second, layers, link, part):
    profile = made_up(layers, first, second, link=link)
    fastest = fastest_of_all(profile, layers, part)
    if fastest is None:
        with pytest.raises(NothingFits):
            plan_profile(profile, budget=part)
    else:
        assert plan_profile(profile, budget=part).predicted.mean_seconds <= fastest * (1 + 1e-9)


def fastest_of_all(profile, layers, part):
    """What plans are compared by, of the best policy that fits; None if none does."""
    budget = parse_budget(part, predict(profile, ps.Policy()), "cpu")
    every = all_policies(profile, layers)
    return min((item.mean_seconds for item in every if item.peak_bytes <= budget), default=None)


@pytest.mark.slow
@pytest.mark.whole_search
def test_where_not_all_are_tried_most_plans_are_the_best_and_none_is_far_from_it(monkeypatch):
    """Mixes and the search alone, as in a step of more layers.

    Of 263 plans of random profiles one was slower than the best, by 7 %.
    """
    monkeypatch.setattr("pagestash.planning.candidates.EXHAUSTIVE", 0)
    random = Random(0)
    slower = [
        plan_profile(made_up(3, (10 * MB, 8), (6 * MB, 12), link=2e8), budget=0.7).predicted.mean_seconds
        / fastest_of_all(made_up(3, (10 * MB, 8), (6 * MB, 12), link=2e8), 3, 0.7)
    ]
    for link in (2e8, 1e9, 2e10):
        first, second = ((random.randint(1, 20) * MB, random.randint(1, 12)) for _ in range(2))
        profile = made_up(3, first, second, link=link)
        for part in (0.6, 0.8):
            found = plan_profile(profile, budget=part).predicted.mean_seconds
            slower.append(found / fastest_of_all(profile, 3, part))
    assert sum(part > 1 + 1e-9 for part in slower) <= 1
    assert max(slower) < 1.03


@pytest.mark.slow
@pytest.mark.whole_search
@sweep(3, 30, sizes, sizes, st.sampled_from([2e8, 1e9, 2e10]), st.sampled_from([0.35, 0.6, 0.8]))
def test_a_plan_is_as_good_as_the_best_of_all_policies_with_fractions(first, second, link, part):
    profile = in_halves(made_up(2, first, second, link=link))
    homes = (*HOMES, ("offload", 0.5))
    budget = parse_budget(part, predict(profile, ps.Policy()), "cpu")
    every = all_policies(profile, 2, homes)
    fastest = min((item.seconds for item in every if item.peak_bytes <= budget), default=None)
    if fastest is None:
        with pytest.raises(NothingFits):
            plan_profile(profile, budget=part)
    else:
        found = plan_profile(profile, budget=part)
        assert found.predicted.seconds <= fastest * (1 + 1e-9)
        assert predict(profile, found.policy) == found.predicted


@pytest.mark.whole_search
def test_half_of_a_region_leaves_where_a_plan_is_faster_for_it():
    profile = in_halves(made_up(3, (20 * MB, 10), (1 * MB, 10), head=MB, link=1e9))
    found = plan_profile(profile, budget=0.75)
    assert 0.5 in [rule.fraction for rule in found.policy.rules]
    assert predict(profile, found.policy) == found.predicted


@sweep(3, 30, sizes, sizes, st.integers(2, 9), st.sampled_from([2e8, 1e9, 2e10]))
def test_more_memory_is_never_slower(first, second, layers, link):
    profile = made_up(layers, first, second, link=link)
    times = []
    for part in (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        try:
            found = plan_profile(profile, budget=part)
        except NothingFits:
            assert not times
            continue
        assert found.predicted.peak_bytes <= found.budget_bytes
        times.append(found.predicted.seconds)
    assert times == sorted(times, reverse=True)


@sweep(3, 30, sizes, sizes, st.integers(3, 9), st.sampled_from([2e8, 1e9]))
@example((1 * MB, 1), (1 * MB, 1), 9, 2e8)
def test_a_search_beats_or_equals_what_it_begins_from(first, second, layers, link):
    profile = in_halves(made_up(layers, first, second, link=link))
    with pytest.MonkeyPatch.context() as without:
        without.setattr("pagestash.planning.search.MOST", 0)
        proposed = Problem(MeasuredStep(profile), 1 << 40).candidates()
    found = Problem(MeasuredStep(profile), 1 << 40).candidates()
    for item in proposed:
        fits = [other.predicted for other in found if other.predicted.peak_bytes <= item.predicted.peak_bytes]
        assert min(other.seconds for other in fits) <= item.predicted.seconds


def test_the_policy_of_a_plan_is_predicted_as_the_plan_says():
    """Patterns with numbers name the same regions as the rules they stand for."""
    profile = made_up(12, (8 * MB, 2), (5 * MB, 6), link=5e8)
    for part in (0.3, 0.5, 0.8):
        found = plan_profile(profile, budget=part)
        again = predict(profile, found.policy)
        assert again == found.predicted
        assert ps.Policy.from_dict(tomllib.loads(found.policy.to_toml())) == found.policy


def test_the_rows_of_a_plan_have_the_bytes_that_leave():
    """Not what a rule names and the window keeps on the device."""
    profile = made_up(12, (8 * MB, 20), (5 * MB, 20), link=1e9)
    rules = ps.Policy([ps.Rule("layers.*.*", "offload", min_bytes=0)])
    predicted = predict(profile, rules)
    assert predicted.staying
    assert 0 < predicted.moved_bytes < 12 * 13 * MB
    (row,) = rows_of(rules, profile, 1.0, predicted.leaving)
    assert row.bytes == predicted.moved_bytes
    for part in (0.3, 0.5, 0.8):
        found = plan_profile(profile, budget=part)
        leaves = sum(row.bytes for row in found.rows if row.home == "offload")
        assert leaves == found.predicted.moved_bytes


def test_a_plan_is_the_same_each_time_also_from_a_file(tmp_path):
    profile = made_up(10, (8 * MB, 2), (5 * MB, 6), link=5e8)
    profile.save(tmp_path / "profile.json")
    plans = [
        plan_profile(one, budget=0.5)
        for one in (profile, profile, ps.Profile.load(tmp_path / "profile.json"))
    ]
    assert plans[0] == plans[1] == plans[2]
    assert str(plans[0]) == str(plans[2])


def test_early_layers_move_and_late_ones_keep():
    found = plan_profile(made_up(12, (8 * MB, 20), (5 * MB, 20), link=1e9), budget=0.7)
    offload = [rule for rule in found.policy.rules if rule.home == "offload"]
    names = {number: (f"layers.{number}.a", f"layers.{number}.b") for number in range(12)}
    moved = {
        number for number in names if any(rule.matches(name) for rule in offload for name in names[number])
    }
    assert moved
    assert moved == set(range(len(moved)))


@sweep(
    5,
    30,
    sizes,
    sizes,
    st.integers(3, 20),
    st.sampled_from([2e8, 1e9, 2e10]),
    st.sampled_from([0.3, 0.5, 0.8]),
)
def test_no_plan_is_slower_than_what_one_would_write_by_hand(first, second, count, link, part):
    profile = made_up(count, first, second, link=link)
    try:
        found = plan_profile(profile, budget=part)
    except NothingFits as error:
        limit = error.budget_bytes
        assert all(other.peak_bytes > limit for other in hand(profile).values())
        return
    for other in hand(profile).values():
        assert other.peak_bytes > found.budget_bytes or other.seconds >= found.predicted.seconds - 1e-12


def hand(profile):
    return alternatives(Predictor(MeasuredStep(profile)), parse_host("auto"))


def test_a_step_that_fits_needs_no_policy():
    profile = made_up(4, (8 * MB, 2), (5 * MB, 6))
    found = plan_profile(profile, budget="1GiB")
    assert found.is_empty
    assert found.predicted == found.unplanned
    assert str(found).startswith("The step fits without a policy: ")
    assert plan_profile(profile, budget=1.0).is_empty


def test_if_nothing_fits_the_error_says_by_how_much_and_what_holds_the_memory():
    profile = made_up(4, (8 * MB, 2), (5 * MB, 6), workspace=50 * MB)
    with pytest.raises(NothingFits) as refused:
        plan_profile(profile, budget=50 * MB)
    text = str(refused.value)
    assert text.startswith("nothing fits 47.7 MiB: the smallest plan takes ")
    assert "workspace and new gradients 47.7 MiB" in text
    assert refused.value.smallest.peak_bytes > 50 * MB


def test_if_nothing_fits_a_large_tensor_that_no_rule_reaches_is_named():
    profile = made_up(4, (8 * MB, 2), (5 * MB, 6))
    head = len([segment for segment in profile.segments if segment.way == "forward"])
    first = profile.tensors[0]
    outside = replace(
        first,
        region="",
        path=("",),
        shape=(5000, 1000),
        storage=10**6,
        storage_bytes=20 * MB,
        bytes=20 * MB,
        counted=20 * MB,
        valid_bytes=20 * MB,
        saved_at=head - 1,
        needed_at=head,
        freed_at=head,
        span=(0, 20 * MB),
        asked=(head, 0),
        done_at=head,
    )
    large = replace(profile, tensors=[*profile.tensors, outside])
    with pytest.raises(NothingFits) as refused:
        plan_profile(large, budget=20 * MB)
    assert refused.value.largest.storage == 10**6
    assert (
        "The largest kept tensor has 19.1 MiB (5000 × 1000, float32) and was saved outside all modules, where no "
        "rule reaches it."
    ) in str(refused.value)
    assert f"(without a policy {format_bytes(refused.value.unplanned_bytes)})" in str(refused.value)
    assert str(refused.value).endswith("What would help: a smaller batch")


@pytest.mark.parametrize(("columns", "also"), [(1000, ", or a head that is fused with its loss"), (10, "")])
def test_if_nothing_fits_a_fused_head_is_advised_only_where_logits_are_saved(columns, also):
    """They are wider than what layers save."""
    profile = made_up(4, (8 * MB, 2), (5 * MB, 6), workspace=50 * MB)
    widths = {"head": columns}
    tensors = [
        replace(tensor, shape=(tensor.bytes // width, width))
        for tensor in profile.tensors
        for width in [widths.get(tensor.region, 100)]
    ]
    with pytest.raises(NothingFits) as refused:
        plan_profile(replace(profile, tensors=tensors), budget=50 * MB)
    assert str(refused.value).endswith(f"What would help: a smaller batch{also}")


def test_without_host_memory_nothing_is_offloaded():
    profile = made_up(6, (8 * MB, 2), (5 * MB, 6), link=1e12)
    assert plan_profile(profile, budget=0.6).predicted.host_bytes > 0
    found = plan_profile(profile, budget=0.6, host=0)
    assert found.predicted.host_bytes == 0
    assert {rule.home for rule in found.policy.rules} == {"recompute"}
    little = plan_profile(profile, budget=0.6, host=9 * MB)
    assert little.predicted.host_bytes <= 9 * MB
    with pytest.raises(NothingFits, match="Offload had no host memory"):
        plan_profile(profile, budget=2 * MB, host=0)


@pytest.mark.parametrize(
    ("budget", "says"),
    [
        (-1, "budget=-1: expected 0 or more"),
        (0, "a step takes more"),
        (40, "budget=40 is in bytes, and a step takes more; expected .* bytes like '40GiB'"),
        (0.0, "expected a part from 0 to 1"),
        (-0.5, "expected a part from 0 to 1"),
        (1.5, "expected a part from 0 to 1"),
        (40.0, "budget=40.0 is in bytes, and a step takes more"),
        (float("nan"), "expected a part from 0 to 1"),
        (True, "expected a part from 0 to 1"),
        ("much", "expected a part from 0 to 1"),
        ("-0.5", "expected a part from 0 to 1"),
        ("1.5", "expected a part from 0 to 1"),
        ("150%", "expected a part from 0 to 1"),
        ("40gibs", "bytes like '40GiB'"),
        (torch.tensor(0.5), "expected a part from 0 to 1"),
        ("99999999999TiB", "expected less than"),
        ("auto", "has no memory of its own"),
    ],
)
def test_a_budget_that_means_nothing_is_refused(budget, says):
    with pytest.raises(ValueError, match=says):
        plan_profile(made_up(2, (8 * MB, 2), (5 * MB, 6)), budget=budget)


@pytest.mark.parametrize("budget", ["80GB", "80gb", "80e9", 80e9, 80 * 10**9])
def test_a_budget_in_bytes(budget):
    assert parse_budget(budget, None, "cpu") == 80 * 10**9


def test_a_model_that_a_keeper_is_attached_to_is_not_planned_for():
    model, batch = decoder()
    keeper = ps.Keeper([ps.Rule("layers.*.attn", "offload")]).attach(model)
    with pytest.raises(ValueError, match=r"with a rule for 'layers.0.attn', .* call keeper.detach\(\) first"):
        ps.plan(model, batch, budget=0.5)
    keeper.detach()
    assert ps.plan(model, batch, budget=1.0, repeats=1).is_empty


@pytest.mark.parametrize("budget", [0.5, "0.5", "50%", " 50 % "])
def test_a_part_is_of_the_saved_bytes_at_the_peak(budget):
    profile = made_up(4, (8 * MB, 2), (5 * MB, 6), head=8 * MB, workspace=7 * MB)
    found = plan_profile(profile, budget=budget, optimizer_bytes=3 * MB)
    assert found.unplanned.peak_bytes == (4 * 13 + 8 + 7 + 3) * MB
    assert found.budget_bytes == (2 * 13 + 4 + 7 + 3) * MB


def test_a_profile_that_is_none_is_refused(tmp_path):
    profile = made_up(2, (8 * MB, 2), (5 * MB, 6))
    with pytest.raises(ValueError, match="no segment of a forward"):
        plan_profile(replace(profile, segments=[]), budget=0.5)
    late = [replace(profile.tensors[0], freed_at=10**6), *profile.tensors[1:]]
    with pytest.raises(ValueError, match="saved, needed and freed in segments"):
        plan_profile(replace(profile, tensors=late), budget=0.5)
    with pytest.raises(ValueError, match="has no such region"):
        plan_profile(replace(profile, regions=profile.regions[:1]), budget=0.5)
    (tmp_path / "none.json").write_text(json.dumps({"format": 2}))
    with pytest.raises(ValueError, match=r"none\.json: "):
        ps.Profile.load(tmp_path / "none.json")


# --- a model ---


@cache
def decoder():
    model = Decoder(preset("tiny", layers=3))
    model.initialise(0)
    tokens = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(0))
    return model, (tokens[:, :-1], tokens[:, 1:])


def test_the_fused_head_of_a_decoder_saves_no_logits():
    model, batch = decoder()
    whole = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 500))
    plain = torch.nn.ModuleDict({"layers": whole[:2], "head": whole[2]})
    plain.forward = lambda x: plain["head"](plain["layers"](x)).logsumexp(-1).mean()
    for own, inputs, saves in ((model, batch, False), (plain, torch.ones(2048, 16), True)):
        with pytest.raises(NothingFits) as refused:
            plan_profile(ps.profile(own, inputs, repeats=1), budget="1MiB")
        assert refused.value.saves_logits == saves


def trained(model, batch, policy=None):
    """Loss and gradients of the third step under a policy."""
    keeper = None if policy is None else ps.Keeper(policy, backend="torch").attach(model)
    for _ in range(1 if keeper is None else 3):
        model.zero_grad(set_to_none=True)
        if keeper is None:
            loss = sum(model(*batch))
            loss.backward()
        else:
            with keeper.step():
                loss = sum(model(*batch))
                loss.backward()
    if keeper is not None:
        keeper.detach()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("part", [*slow(0.85), 0.7])
def test_losses_and_gradients_under_a_plan_are_those_without_bit_for_bit(part):
    model, batch = decoder()
    found = ps.plan(model, batch, budget=part, repeats=1, link=1e9)
    assert not found.is_empty
    assert found.predicted.peak_bytes <= found.budget_bytes < found.unplanned.peak_bytes
    plain, planned = trained(model, batch), trained(model, batch, found.policy)
    assert len(plain) == len(planned)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned))


def test_the_state_of_an_optimizer_counts_before_its_first_step():
    model = torch.nn.Linear(100, 100)
    elements = sum(p.numel() for p in model.parameters())
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    assert optimizer_state(adam) == 2 * 4 * elements
    model(torch.ones(1, 100)).sum().backward()
    adam.step()
    assert optimizer_state(adam) == 2 * 4 * elements
    assert optimizer_state(torch.optim.SGD(model.parameters(), lr=0.1)) == 0
    x = torch.randn(64, 100)
    bare, stateful = (ps.plan(model, x, budget="1GiB", optimizer=o, repeats=1) for o in (None, adam))
    assert stateful.predicted.peak_bytes - bare.predicted.peak_bytes == 2 * 4 * elements
