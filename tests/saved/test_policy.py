"""Rules and their TOML: what matches, what is refused, and how it says so."""

import dataclasses
import os
import re
import tomllib
import warnings

import pytest
import torch
from torch import nn

import pagestash as ps
from pagestash import sizes
from pagestash.planning.budget import parse_host
from pagestash.policy import _POOL_FIELDS, _RULE_FIELDS, Policy, PoolConfig, Rule
from pagestash.sizes import format_bytes, machine_memory, parse_bytes


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64KiB", 65536),
        ("1.5 GiB", 3 << 29),
        ("2GB", 2 * 10**9),
        ("0", 0),
        (4096, 4096),
        ("12B", 12),
        ("64 kib", 65536),
        ("2gB", 2 * 10**9),
        ("80e9", 80 * 10**9),
    ],
)
def test_sizes_are_read_with_their_units(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["GiB", "-1", "1e-9", "0.5", "", "4 KiB/s", "1 e9", True, None, -1])
def test_a_size_that_is_none_is_refused_with_its_name(text):
    with pytest.raises(ValueError, match="pool page="):
        parse_bytes(text, "pool page")


def test_sizes_print_for_people():
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 29)] == ["0 B", "1023 B", "1.5 KiB", "1.5 GiB"]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.experts", "layers.3.experts", True),
        ("layers.*.experts", "layers.3.experts.act", False),
        ("layers.*.experts", "layers.3.4.experts", False),
        ("layers.**", "layers.3.experts.act", True),
        ("**.experts", "model.layers.3.experts", True),
        ("layers.1", "layers.10", False),
        ("layers.1*", "layers.10", True),
        ("layers.1*", "layers.1", False),
        ("a.b", "axb", False),
    ],
)
def test_a_star_is_one_part_of_a_name_and_two_are_any_number(pattern, name, expected):
    assert Rule(pattern, "stash").matches(name) is expected


def test_the_first_matching_rule_wins():
    narrow, wide = Rule("layers.0", "keep"), Rule("layers.*", "stash")
    policy = Policy(rules=[narrow, wide])
    assert policy.rule_for("layers.0") is narrow
    assert policy.rule_for("layers.1") is wide
    assert policy.rule_for("head") is None


def test_a_rule_that_matches_nothing_lists_the_names_it_could_have_meant():
    policy = Policy(rules=[Rule("layers.*.expert", "stash")])
    with pytest.raises(ValueError, match=r"'layers\.\*\.expert' matches no region.*layers\.0\.experts"):
        policy.check(["layers.0.experts", "embedding", "head"])


@pytest.mark.parametrize(("match", "hint"), [("*.experts", "**.experts"), ("layers.*", "**.layers.*")])
def test_a_rule_that_would_match_deeper_names_is_told_how(match, hint):
    policy = Policy(rules=[Rule(match, "stash")])
    with pytest.raises(ValueError, match=rf"matches no region\. {re.escape(repr(hint))} would match"):
        policy.check(["model.layers.0", "model.layers.0.mlp.experts"])


def test_of_layers_that_differ_by_their_number_one_is_named():
    names = [f"layers.{at}.{part}" for at in range(9) for part in ("attn", "mlp")]
    with pytest.raises(ValueError, match=r"Names near it: layers\.0\.attn, layers\.0\.mlp\. "):
        Policy(rules=[Rule("layers.*.atn", "offload")]).check(names)


@pytest.mark.parametrize("part", ["core_attn", "moe_act", "expert_fc1", "expert_fc2"])
def test_parts_that_optimize_makes_are_told_how(part):
    policy = Policy(rules=[Rule(f"model.layers.*.{part}", "offload")])
    with pytest.raises(ValueError, match=r"has it after pagestash\.hf\.optimize\(model\)"):
        policy.check(["model.layers.0.self_attn", "model.layers.0.mlp.experts"])


@pytest.mark.parametrize("given", ["40GiB", "huggingface"])
def test_a_text_that_is_no_file_says_how_a_budget_is_given(given):
    with pytest.raises(ValueError, match=f"policy='{given}': no such file; .* for a keeper budget='40GiB'"):
        ps.Keeper(given)


def test_rules_and_a_file_do_for_a_policy(tmp_path):
    rules = [Rule("layers.*", "offload", min_bytes=0)]
    Policy(rules).save(tmp_path / "policy.toml")
    for given in (Policy(rules), rules, tmp_path / "policy.toml", str(tmp_path / "policy.toml")):
        assert ps.Keeper(given).policy == Policy(rules)
    with pytest.raises(ValueError, match=r"none\.toml: No such file"):
        ps.Keeper("none.toml")
    with pytest.raises(ValueError, match="expected a list of Rule"):
        ps.Keeper(Rule("layers.*", "offload"))


def test_a_rule_shadowed_by_an_earlier_one_is_refused():
    policy = Policy(rules=[Rule("layers.*", "keep"), Rule("layers.0", "stash")])
    with pytest.raises(ValueError, match=r"'layers\.0' never applies: the earlier 'layers\.\*' matches"):
        policy.check(["layers.0", "layers.1"])


def test_an_unknown_home_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"rule 'layers\.\*': home='stach'.*did you mean 'stash'"):
        Rule("layers.*", "stach")


@pytest.mark.parametrize("fraction", [-0.1, 1.1, float("nan"), "half", True])
def test_a_fraction_outside_0_to_1_is_refused_with_its_rule(fraction):
    with pytest.raises(ValueError, match=r"rule 'layers\.\*': fraction=.*0 to 1"):
        Rule("layers.*", "offload", fraction=fraction)


@pytest.mark.parametrize("home", ["keep", "recompute"])
@pytest.mark.parametrize("extra", [{"fraction": 0.5}, {"prefetch_bytes": "1GiB"}])
def test_what_only_offload_understands_is_refused_elsewhere(home, extra):
    with pytest.raises(
        ValueError, match=r"'layers\.\*': fraction and prefetch_bytes belong to home='offload' and 'stash'"
    ):
        Rule("layers.*", home, **extra)


@pytest.mark.parametrize("extra", [{}, {"fraction": 0.0}])
def test_a_stash_rule_has_a_window_only_if_something_leaves(extra):
    with pytest.raises(
        ValueError, match=r"'layers\.\*': prefetch_bytes is the window .* give a fraction, too"
    ):
        Rule("layers.*", "stash", prefetch_bytes="1GiB", **extra)


def test_a_stash_rule_offloads_expected_rows_only_if_told_to():
    plain, leaving = Rule("a", "stash"), Rule("a", "stash", fraction=0.5, prefetch_bytes="1GiB", min_bytes=7)
    assert (plain.fraction, plain.offloads, plain.for_expected_rows()) == (0.0, False, None)
    expected = Rule("a", "offload", fraction=0.5, prefetch_bytes="1GiB", min_bytes=7)
    assert leaving.for_expected_rows() == expected
    assert leaving.for_expected_rows() is Rule("a", "stash", 7, 0.5, 1 << 30).for_expected_rows()
    assert [Rule("a", home).fraction for home in ("keep", "offload", "recompute")] == [1.0] * 3
    # Pinned memory is then offload's, as with an offload rule.
    assert Policy([plain], PoolConfig(host="1MiB")).offload_bytes == 0
    assert Policy([leaving], PoolConfig(host="1MiB")).offload_bytes == 1 << 20
    assert Policy([leaving], PoolConfig(host="1MiB")).spill_bytes == 0


@pytest.mark.parametrize("home", ["keep", "stash", "offload", "recompute"])
def test_a_fraction_is_written_only_where_it_is_not_the_homes_own(home):
    for extra in ({}, {"fraction": 0.25}, {"fraction": 1.0}, {"fraction": 0.0}):
        if extra and (home in ("keep", "recompute")):
            continue
        policy = Policy([Rule("a", home, **extra)])
        own = 0.0 if home == "stash" else 1.0
        assert ("fraction" in policy.to_toml()) == (extra.get("fraction", own) != own)
        assert Policy.from_dict(tomllib.loads(policy.to_toml())) == policy


def test_a_bound_for_offload_larger_than_the_machine_is_the_default_with_a_warning():
    policy = Policy(rules=[Rule("a", "offload")], pool=PoolConfig(host="900TiB"))
    with pytest.warns(UserWarning, match=r"pool host=900\.0 TiB: this machine has .* offload takes up to"):
        policy.check(["a"])
    assert policy.offload_bytes == machine_memory() // 2
    most = Policy(rules=[Rule("a", "offload")], pool=PoolConfig(host=machine_memory()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        most.check(["a"])
    assert most.offload_bytes == machine_memory()


@pytest.mark.parametrize(
    ("home", "key"),
    [("stash", {"host": "900TiB"}), ("stash", {"spill": "900TiB"}), ("offload", {"spill": "900TiB"})],
)
def test_pages_to_spill_to_are_pinned_at_once_and_refused_on_a_smaller_machine(home, key):
    policy = Policy(rules=[Rule("a", home)], pool=PoolConfig(**key))
    with pytest.raises(ValueError, match=rf"pool {next(iter(key))}=900\.0 TiB: this machine has"):
        policy.check(["a"])


def test_pinned_memory_goes_to_offload_or_to_spilling():
    stash, offload = Rule("a", "stash"), Rule("b", "offload")
    assert Policy([stash], PoolConfig(host=1000)).spill_bytes == 1000
    assert Policy([stash], PoolConfig(host=1000)).offload_bytes == 0
    both = Policy([stash, offload], PoolConfig(host=1000))
    assert (both.spill_bytes, both.offload_bytes) == (0, 1000)
    parted = Policy([stash, offload], PoolConfig(host=1000, spill=300))
    assert (parted.spill_bytes, parted.offload_bytes) == (300, 700)
    assert Policy([stash, offload]).spill_bytes == 0
    assert Policy([stash, offload]).offload_bytes == machine_memory() // 2
    with pytest.raises(ValueError, match="pool spill=2000: more than host=1000"):
        PoolConfig(host=1000, spill=2000)


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(sizes, "machine_memory", lambda: 1 << 40)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize(
    ("torchrun", "ranks", "gpus", "share"),
    [("8", 16, 4, 8), ("", 16, 4, 4), ("", 3, 4, 3), ("", 3, 0, 3), ("", None, 4, 1)],
    ids=["told by torchrun", "as many as GPUs", "fewer than GPUs", "on CPUs", "alone"],
)
def test_pinned_memory_is_shared_by_the_ranks_of_a_machine(monkeypatch, torchrun, ranks, gpus, share):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", torchrun)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: ranks is not None)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    assert Policy([Rule("a", "offload")]).offload_bytes == parse_host("auto") == (1 << 39) // share
    assert Policy([Rule("a", "offload")], PoolConfig(host="1GiB")).offload_bytes == 1 << 30


@pytest.mark.parametrize(
    ("groups", "files", "limits"),
    [
        ("0::/a/b\n", {"memory.max": "max", "a/memory.max": "4096", "a/b/memory.max": "max"}, [4096]),
        ("0::/\n", {"memory.max": "2048"}, [2048]),
        (
            "9:name=systemd:/\n4:memory:/host/job\n3:cpu:/host/job\n0::/\n",
            {"memory/memory.limit_in_bytes": "1024"},
            [1024],
        ),
        ("4:memory:/job\n", {"memory/job/memory.limit_in_bytes": "512"}, [512]),
        ("0::/a\n", {}, []),
    ],
    ids=["of a parent", "of a container", "of a container, version 1", "version 1", "none"],
)
def test_a_cgroups_limit_is_the_memory_of_the_machine(tmp_path, groups, files, limits):
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert list(sizes._cgroup_limits(tmp_path, tmp_path / "own")) == limits
    assert list(sizes._cgroup_limits(tmp_path, tmp_path / "of no Linux")) == []


def test_the_smallest_of_all_limits_counts(monkeypatch):
    whole = machine_memory()
    monkeypatch.setattr(sizes, "_cgroup_limits", lambda: [whole // 4, whole // 2, 1 << 62])
    assert machine_memory() == whole // 4


def test_offload_has_a_least_size_of_its_own():
    assert Rule("a", "offload").min_bytes == 1 << 20
    assert Rule("a", "stash").min_bytes == 1 << 16
    assert Rule("a", "offload", min_bytes=0).min_bytes == 0


def test_a_policy_comes_back_from_its_own_toml(tmp_path):
    policy = Policy(
        rules=[
            Rule("layers.*.experts", "stash", min_bytes=4096),
            Rule("attn", "offload", fraction=0.5, prefetch_bytes="64MiB"),
            Rule('od"d\\', "keep"),
            Rule("a\nb\x7f\u00e9", "keep"),
        ],
        pool=PoolConfig(page="4KiB", device="8GiB", host="1GiB", headroom=1.25),
    )
    path = tmp_path / "policy.toml"
    path.write_text(policy.to_toml())
    assert Policy.load(path) == policy


def test_units_are_read_in_toml(tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(
        '[pool]\ndevice = "auto"\nhost = "32GiB"\n[[rule]]\nmatch = "a"\nhome = "stash"\nmin_bytes = "1MiB"\n'
    )
    policy = Policy.load(path)
    assert policy.spill_bytes == 32 << 30
    assert policy.pool.device_bytes is None
    assert policy.rules[0].min_bytes == 1 << 20


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[pools]\n", "unknown key 'pools'; did you mean 'pool'"),
        ("[pool]\npages = 3\n", r"\[pool\]: unknown key 'pages'; did you mean 'page'"),
        ("[[rule]]\nmatch = 'a'\n", r"\[\[rule\]\] 1: 'home' is missing"),
        ("[pool]\npage = '100'\n", "pool page=100: expected a positive multiple of 16"),
        ("[pool]\nheadroom = 0.9\n", "pool headroom=0.9"),
        ("[[rule\n", "policy.toml"),
        ("rule = 3\n", r"rule=3: expected tables that begin with \[\[rule\]\]"),
        ("rule = 'all'\n", r"rule='all': expected tables"),
        ("rule = [1]\n", r"\[\[rule\]\] 1: 1 is not a table"),
        ("[rule]\nmatch = 'a'\nhome = 'stash'\n", "expected tables that begin with"),
        ("pool = []\n", r"\[pool\]: \[\] is not a table"),
        ("pool = 5\n", r"\[pool\]: 5 is not a table"),
        ("[[pool]]\npage = 16\n", r"\[pool\]: .* is not a table"),
        ("a = " + "[" * 5000, "nested too deeply"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_the_key(tmp_path, toml, message):
    path = tmp_path / "policy.toml"
    path.write_text(toml)
    with pytest.raises(ValueError, match=message) as caught:
        Policy.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[pool]\n# \xe9t\xe9\n"])
def test_a_file_that_is_no_text_is_named(tmp_path, content):
    (tmp_path / "policy.toml").write_bytes(content)
    with pytest.raises(ValueError, match=r"policy\.toml: it is no UTF-8 text"):
        Policy.load(tmp_path / "policy.toml")


def test_a_folder_is_no_policy(tmp_path):
    with pytest.raises(ValueError, match=f"{tmp_path}: Is a directory"):
        Policy.load(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_named_if_root_does_not_ask(tmp_path):
    (tmp_path / "policy.toml").touch(mode=0)
    with pytest.raises(ValueError, match=r"policy\.toml: Permission denied"):
        Policy.load(tmp_path / "policy.toml")


def test_an_empty_file_keeps_everything(tmp_path):
    (tmp_path / "policy.toml").touch()
    assert Policy.load(tmp_path / "policy.toml") == Policy()


# One value of every kind that TOML and Python have; a field takes some of them.
VALUES = [
    "a lot", "", "auto", "64KiB", "-1", "9" * 400, 0, 1, -1, 5, 0.5, 1.5, -0.5, 10**400, float("nan"), float("inf"),
    True, False, None, [], [1], {}, {"a": 1}, b"64KiB", object(),
]  # fmt: skip
TAKES = {
    "match": ["a lot", "auto", "64KiB", "-1", "9" * 400],
    "home": [],
    "min_bytes": ["64KiB", 0, 1, 5, None],
    "fraction": [0, 1, 0.5, None],
    "prefetch_bytes": ["64KiB", 0, 1, 5, None],
    "page": ["64KiB"],
    "device": ["auto", "64KiB", 0, 1, 5],
    "host": ["auto", "64KiB", 0, 1, 5],
    "spill": ["auto", "64KiB", 0, 1, 5],
    "headroom": [1, 5, 1.5],
}


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:20])
@pytest.mark.parametrize("key", TAKES)
def test_a_field_takes_what_it_can_be_and_names_itself_otherwise(key, value):
    rule = {"match": "layers", "home": "offload"}
    made = Rule if key in {field.name for field in dataclasses.fields(Rule)} else PoolConfig
    given = {**rule, key: value} if made is Rule else {key: value}
    if any(type(value) is type(fine) and value == fine for fine in TAKES[key]):
        made(**given)
        return
    with pytest.raises(ValueError, match=f"(rule|pool).* {key}=.*(expected|none of)"):
        made(**given)


def test_every_field_is_checked():
    known = {field.name for kind in (Rule, PoolConfig) for field in dataclasses.fields(kind)}
    assert _RULE_FIELDS.keys() | _POOL_FIELDS.keys() == known


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rules": "x"}, "policy rules='x': expected a list of Rule"),
        ({"rules": 5}, "policy rules=5: expected a list of Rule"),
        ({"rules": None}, "policy rules=None"),
        ({"rules": [1]}, "policy rules: number 1 is 1: expected a Rule"),
        ({"rules": [Rule("a", "keep"), {"match": "b"}]}, "policy rules: number 2 is"),
        ({"rules": Rule("a", "keep")}, "policy rules=Rule"),
        ({"pool": {"page": 16}}, "policy pool={'page': 16}: expected a PoolConfig"),
        ({"pool": None}, "policy pool=None"),
    ],
)
def test_a_policy_is_made_of_rules_and_a_pool(given, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Policy(**given)


def test_rules_do_not_change_with_the_list_they_came_in():
    rules = [Rule("a", "keep")]
    policy = Policy(rules)
    rules.clear()
    assert policy.rule_for("a") is not None


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml"):
        Policy.load(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("match", "matched"),
    [
        ("layers.{0-2,5}.a", [0, 1, 2, 5]),
        ("layers.{11}.a", [11]),
        ("layers.{1,10-11}.*", [1, 10, 11]),
        ("layers.{3-1}.a", []),
    ],
)
def test_numbers_in_braces_match_these_numbers(match, matched):
    rule = Rule(match, "stash")
    assert [number for number in range(20) if rule.matches(f"layers.{number}.a")] == matched


def test_braces_without_numbers_are_plain_text():
    assert Rule("a.{x}.b", "stash").matches("a.{x}.b")
    assert not Rule("a.{x}.b", "stash").matches("a.x.b")


def test_a_range_of_too_many_numbers_is_refused():
    with pytest.raises(ValueError, match="at most 10000 numbers"):
        Rule("layers.{0-999999999}.a", "stash")


def test_a_saved_policy_is_loaded_as_it_was(tmp_path):
    policy = Policy([Rule("layers.{0-3}.a", "offload", min_bytes=7), Rule("**.b", "recompute")])
    policy.save(tmp_path / "policy.toml")
    assert Policy.load(tmp_path / "policy.toml") == policy


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_scripted_module_under_a_rule_is_refused_before_any_module_is_watched():
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4)))
    keeper = ps.Keeper([ps.Rule("*", "offload")])
    with pytest.raises(ValueError, match=r"1 is a module of torch\.jit, which takes no hooks"):
        keeper.attach(model)
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks
