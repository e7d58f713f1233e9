"""Offload mixed with recompute, at random: the predicted peak is that of a keeper's step."""

from functools import cache
from random import Random

import pytest
from support.tiers import slow
from test_predict import batch, step_under

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.planning import predict
from pagestash.profiling import Link

ATTENTION = ("qkv_linear", "q_norm", "k_norm", "rope", "core_attn", "attn_proj")
KINDS = ("attn_norm", "mlp_norm", "moe", "moe.router", "attn", *(f"attn.{name}" for name in ATTENTION))
"""Modules, and a `ps.region` (`attn.core_attn`, which cannot be recomputed), also inside modules that no rule
names. (Not what a fused layer recomputes by itself: tests/planning/test_predict.py has that.)"""


@cache
def profiled():
    model = Decoder(preset("tiny", layers=4))
    model.initialise(0)
    given = batch(length=128)
    return model, given, ps.profile(model, given, repeats=1, link=Link(out=1e15, back=1e15))


def policy(seed):
    """Rules for two to six kinds of regions, each of all layers from some one on; none inside a recomputed one."""
    random, rules, names = Random(seed), [], []
    _, _, profile = profiled()
    can = {region.name: region.homes for region in profile.regions}
    for kind in random.sample(KINDS, random.randint(2, 6)):
        if any(kind.startswith(f"{other}.") or other.startswith(f"{kind}.") for other in names):
            continue
        homes = [home for home in ("offload", "recompute") if home in can[f"layers.3.{kind}"]]
        layers = f"{{{random.randint(1, 2)}-3}}" if random.random() < 0.5 or kind.startswith("moe") else "*"
        least = random.choice([1, None])
        names.append(kind)
        rules.append(ps.Rule(f"layers.{layers}.{kind}", random.choice(homes), min_bytes=least))
    return ps.Policy(rules)


@pytest.mark.parametrize("seed", [*range(3), 48, *slow(*(at for at in range(3, 60) if at != 48))])
def test_the_peak_of_a_random_mix_is_predicted_to_a_hundredth(seed):
    """In 48 a region whose rule offloads saves a thin slice twice."""
    model, given, profile = profiled()
    rules = policy(seed)
    peak, _ = step_under(model, rules, lambda: sum(model(*given)).backward())
    assert predict(profile, rules).peak_bytes == pytest.approx(peak, rel=0.01)


def test_the_mixes_have_both_homes():
    homes = [{rule.home for rule in policy(seed).rules} for seed in range(8)]
    assert sum(found == {"offload", "recompute"} for found in homes) >= 4
