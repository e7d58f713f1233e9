"""Settings and corpora: which source wins, what a wrong one is told."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from small import settings

from pagestash.models import Decoder, preset
from pagestash.train import parse_assignments, prepare, read_toml
from pagestash.train.config import checked, merge
from pagestash.train.data import load_corpus, standard_library
from pagestash.train.parallel import World, expert_parameters, parameters_a_rank
from pagestash.train.prepare import check_graph


def test_later_sources_win_and_the_model_merges_by_key(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('steps = 5\nlr = 1\ncorpus = ["a", "b"]\n[model]\nexperts = 4\nwidth = 64\n')
    config = merge(read_toml(file), parse_assignments(["steps=7", "model.experts=2"]), {"seed": 3})
    assert (config.steps, config.seed, config.lr) == (7, 3, 1.0)
    assert config.corpus == ("a", "b")
    assert dict(config.model) == {"experts": 2, "width": 64}
    assert config.decoder().experts == 2


def test_bytes_are_the_vocabulary_unless_another_is_asked_for():
    assert merge({"preset": "qwen3-30b-a3b"}).decoder().vocab == 256
    assert merge({"preset": "qwen3-30b-a3b", "model": {"vocab": 300}}).decoder().vocab == 300


def test_words_need_no_quotes():
    given = parse_assignments(["policy=none", "corpus=src/x.py", "graph=false", "lr=1e-4", 'preset="tiny"'])
    assert given == {"policy": "none", "corpus": ("src/x.py",), "graph": False, "lr": 1e-4, "preset": "tiny"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["leyers=3"], "unknown key leyers; did you mean layers?"),
        (["model.expert=3"], "unknown key model.expert; did you mean model.experts?"),
        (["optimizer.lr=3"], "unknown key optimizer.lr"),
        (["steps"], "--set steps: expected key=value"),
        (["steps=many"], "steps='many': expected a whole number"),
        (["steps=1.5"], "steps=1.5: expected a whole number"),
        (["steps=true"], "steps=True: expected a whole number"),
        (["lr=fast"], "lr='fast': expected a number"),
        (["graph=1"], "graph=1: expected true or false"),
        (["model=3"], "model=3: expected a table"),
        (["corpus=[1]"], "expected a list of strings"),
    ],
)
def test_a_wrong_setting_is_named(words, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?").replace(".", r"\.")):
        parse_assignments(words)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"steps": 0}, "steps=0"), ({"dispatch": "mail"}, "dispatch='mail'"), ({"lr": float("nan")}, "lr=nan")],
)
def test_a_value_out_of_range_is_named(given, message):
    with pytest.raises(ValueError, match=message):
        merge(given)


def test_settings_survive_a_checkpoint():
    import json

    config = merge({"layers": 2, "corpus": ("a",), "model": {"experts": 4}})
    assert merge(checked(json.loads(json.dumps(config.to_json())))) == config


def test_the_standard_library_is_a_corpus_in_a_fixed_order():
    files = standard_library()
    assert files == sorted(files)
    assert {"argparse.py", "json/decoder.py"} <= {"/".join(f.parts[-2:]) for f in files} | {
        f.name for f in files
    }
    assert not any("site-packages" in file.parts for file in files)
    first, second = load_corpus((), 129), load_corpus((), 129)
    assert first.digest == second.digest
    assert first.data.numel() > 1_000_000


def test_folders_are_read_in_the_order_of_their_names(tmp_path):
    (tmp_path / "b").mkdir()
    for name in ("c.txt", "a.txt", "b/x.txt", ".hidden"):
        (tmp_path / name).write_text(name)
    corpus = load_corpus([tmp_path], 4)
    assert bytes(corpus.data.tolist()) == b"a.txtb/x.txtc.txt"
    assert corpus.files == 3


def test_windows_depend_on_seed_and_step_and_are_dealt_out_to_ranks(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 4)
    corpus = load_corpus([file], 9)
    every = corpus.windows(3, 0, 4, 9, 0, 4)
    assert every.shape == (4, 9)
    assert torch.equal(every.diff(dim=1) % 256, torch.ones(4, 8, dtype=torch.int64))
    parts = [corpus.windows(3, 0, 4, 9, first, first + 2) for first in (0, 2)]
    assert torch.equal(torch.cat(parts), every)
    assert not torch.equal(every, corpus.windows(4, 0, 4, 9, 0, 4))
    assert not torch.equal(every, corpus.windows(3, 1, 4, 9, 0, 4))


def test_a_window_may_be_the_whole_corpus(tmp_path):
    file = tmp_path / "text"
    file.write_text("just nine")
    corpus = load_corpus([file], 9)
    assert bytes(corpus.windows(1, 0, 1, 9, 0, 1)[0].tolist()) == b"just nine"
    with pytest.raises(ValueError, match="9 bytes are less than one window of 10"):
        load_corpus([file], 10)


def test_capacity_is_a_multiple_of_the_rows_that_arrive(tmp_path):
    plan = prepare(settings(tmp_path, capacity_factor=1.5), tmp_path / "run")
    assert plan.decoder.capacity == 1.5 * 2 * 16 * 2
    assert not (tmp_path / "run").exists()


def on_gpus(folder, ranks, **changes):
    """The plan of a rank, as on a machine that has GPUs."""
    plan = prepare(settings(folder, **changes), folder / "out")
    world = World(size=ranks, expert_parallel=ranks, pipeline=plan.config.pipeline)
    return replace(plan, device=torch.device("cuda", 0), world=world)


@pytest.mark.parametrize(
    ("ranks", "changes", "graphed"),
    [
        (1, {}, True),
        (1, {"graph": False}, False),
        (2, {}, False),
        (2, {"shard": False}, True),
        (2, {"shard": False, "graph": False}, False),
    ],
)
def test_steps_are_graphs_where_the_host_decides_nothing(tmp_path, ranks, changes, graphed):
    assert on_gpus(tmp_path, ranks, **changes).graphed == graphed
    assert not prepare(settings(tmp_path, **changes), tmp_path / "other").graphed  # on a CPU


def test_a_dispatch_that_asks_the_host_is_refused_in_a_graph(tmp_path):
    check_graph(on_gpus(tmp_path, 2, dispatch="all_to_all_exact"))
    with pytest.raises(ValueError, match=r"reads counts on the host.*graph=false"):
        check_graph(on_gpus(tmp_path, 2, dispatch="all_to_all_exact", shard=False))


def test_a_rank_without_shards_holds_its_experts_and_all_else():
    model = Decoder(preset("tiny"), device="meta")
    total, experts = (sum(p.numel() for p in each) for each in (model.parameters(), expert_parameters(model)))
    world = World(size=4, expert_parallel=2)
    assert parameters_a_rank(model, world, shard=True) == total // 4
    assert parameters_a_rank(model, world, shard=False) == total - experts // 2


def test_a_setting_may_be_a_number_or_a_word():
    given = {"layers": None, "model": {"expected_rows": "auto"}}
    assert checked(given) == given
    for wrong in ("all", None, True, 1.5):
        with pytest.raises(ValueError, match=r"model\.expected_rows=.*: expected a whole number"):
            checked({"model": {"expected_rows": wrong}})
