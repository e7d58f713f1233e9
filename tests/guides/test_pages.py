"""Every Python example of the README and the guides runs as printed, and does what its page says."""

import ast
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
import types
from functools import partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from support.pages import PAGES, ROOT, blocks, run
from support.search import search_little
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset

NOT_RUN = {"docs/maxtext.md": "lines of MaxText, which is not installed"}
BESIDE = {
    "docs/frameworks.md": "test_accelerate.py",
    "docs/lightning.md": "test_lightning.py",
    "docs/megatron.md": "test_megatron.py",
    "docs/torchtitan.md": "test_torchtitan.py",
}
"""Pages whose examples need a framework, and the file of tests of that framework that runs them."""


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    """A folder to write to, the environment of a single rank, and searches that take a second less."""
    search_little(monkeypatch)
    monkeypatch.chdir(tmp_path)
    # Port 0 is any free one: one that was looked up before could be another process's by the time it is opened.
    for key, value in {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "RANK": 0, "WORLD_SIZE": 1}.items():
        monkeypatch.setenv(key, str(value))
    torch.manual_seed(0)


def test_every_page_with_examples_has_a_test():
    tested = re.findall(r'run\("([^"]+)"', Path(__file__).read_text())
    for page, name in BESIDE.items():
        assert page in (ROOT / "tests" / "integrations" / name).read_text()
    assert {page for page in PAGES if list(blocks(page))} - {*BESIDE} == {"README.md", *tested, *NOT_RUN}


@pytest.mark.parametrize("page", NOT_RUN)
def test_what_is_not_run_is_python_all_the_same(page):
    for line, text in blocks(page):
        compile("\n" * line + text, PAGES[page], "exec")


def test_every_file_that_the_glossary_names_is_there():
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", PAGES["docs/glossary.md"].read_text()))
    assert named
    assert [path for path in sorted(named) if not (ROOT / "src" / "pagestash" / path).exists()] == []


@pytest.mark.parametrize("page", PAGES)
def test_no_line_of_code_is_wider_than_the_column_on_a_desk(page):
    fenced = re.findall(r"^( *)```.*?\n(.*?)^ *```", PAGES[page].read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for _, text in fenced for line in text.splitlines()]
    assert [line for line in lines if len(line) > 116] == []


API_NAMES = {
    name: page for page in PAGES for name in re.findall(r"^::: (\S+)", PAGES[page].read_text(), re.M)
}


@pytest.mark.parametrize("name", API_NAMES)
def test_every_name_of_the_api_pages_is_there(name):
    """`make docs` is strict, and stops at one that has moved."""
    for part, package in (("jax", "jax"), ("integrations.hf", "transformers")):
        if name.startswith(f"pagestash.{part}."):
            pytest.importorskip(package)
    assert pkgutil.resolve_name(name).__doc__, f"{API_NAMES[name]} names what has no text to show"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("**/*.svg")), ids=lambda path: path.name)
def test_a_picture_brings_its_own_white_ground(path):
    """Its text is dark, and a page may be."""
    root = ElementTree.parse(path).getroot()
    first = next(item for item in root.iter() if item.tag.rpartition("}")[2] in ("rect", "path", "text"))
    painted = first.get("fill") or first.get("style", "")
    assert re.search("#fff(fff)?$", painted)
    if first.tag.endswith("rect"):
        assert root.get("viewBox") == f"0 0 {first.get('width')} {first.get('height')}"


def test_the_readme_of_a_package_has_whole_addresses(monkeypatch):
    interface = types.SimpleNamespace(MetadataHookInterface=object)
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", interface)
    readme = runpy.run_path(str(ROOT / "hatch_build.py"))["readme"]
    text = "![Time](docs/a.svg)\n[Start](docs/b.md), [here](#here), [there](https://there)\n"
    assert readme(text, "") == "[Start](docs/b.md), [here](#here), [there](https://there)\n"
    assert readme(text, "https://at") == (
        "![Time](https://at/raw/main/docs/a.svg)\n"
        "[Start](https://at/blob/main/docs/b.md), [here](#here), [there](https://there)\n"
    )
    assert not re.search(r"\]\((?!https:|#)", readme(PAGES["README.md"].read_text(), "https://at"))


def test_the_page_of_eight_bits():
    printed, _ = run("docs/eight-bits.md")
    assert f"prints `{printed[-1].strip()}`" in PAGES["docs/eight-bits.md"].read_text()


@pytest.mark.slow
def test_the_plan_page():
    printed, names = run("docs/plan.md")
    assert "planned" in printed[0]
    plan = names["plan"]
    assert plan.predicted.peak_bytes <= plan.budget_bytes
    assert ps.Policy.load("policy.toml") == plan.policy
    assert ps.Plan.load("plan.json") == plan
    assert names["keeper"].stats().homes["keep"].bytes == 0
    assert names["for_graph"].predicted.peak_bytes <= names["for_graph"].budget_bytes
    (skew,) = (text for text in printed if "of an even load" in text)
    assert skew in PAGES["docs/plan.md"].read_text()


def test_the_simulate_page():
    printed, names = run("docs/simulate.md")
    assert printed[0].count("GiB") == 8
    assert [rank.peak for rank in names["costs"].ranks] == names["rank_peaks"](names["run"])


@pytest.mark.parametrize("number", range(len(list(blocks("README.md")))))
def test_the_readme(number, capsys):
    pytest.importorskip("peft")
    line, text = list(blocks("README.md"))[number]
    names = {}
    exec(compile("\n" * line + text, PAGES["README.md"], "exec"), names)  # alone, as somebody copies it
    printed = capsys.readouterr().out
    if number == 0:
        assert "4 × Qwen3MoeExperts: the expert block" in printed
        assert names["keeper"].plan.predicted.peak_bytes <= names["keeper"].plan.budget_bytes
    elif number == 1:
        stats = names["keeper"].stats()
        assert all(stats.homes[home].peak > 0 for home in ("stash", "offload", "recompute")), stats.homes
        assert torch.isfinite(names["loss"])
    else:
        assert printed == "62 rows of 80\n"


MODULES = {"ps", "pagestash", "torch", "nn", "jax", "jnp", "transformers"}


@pytest.mark.parametrize("page", PAGES)
def test_every_example_imports_what_it_uses(page):
    """Or an example before it on the page does."""
    bound = set()
    for line, text in blocks(page):
        tree = ast.parse("\n" * line + text)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                bound |= {(each.asname or each.name).split(".")[0] for each in node.names}
        used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & MODULES
        assert used <= bound, f"{page}:{line}"


def test_the_tutorial():
    printed, _ = run("docs/tutorial.md")
    assert printed[-1] == "True\n"


def test_the_recompute_page():
    printed, _ = run("docs/recompute.md")
    told, _, waited = printed[0].strip().partition("; ")
    assert told.startswith("equal to the last bit: ")
    assert f"; {waited}`" in PAGES["docs/recompute.md"].read_text()
    assert printed[1].startswith("False ")
    assert "1" in printed[1]


def test_the_page_for_who_is_out_of_memory():
    pytest.importorskip("transformers", minversion="5.7")
    _, names = run("docs/out-of-memory.md")
    assert names["keeper"].plan.predicted.peak_bytes <= names["keeper"].plan.budget_bytes


def test_the_troubleshooting_page():
    printed, _ = run("docs/troubleshooting.md")
    assert printed[0].startswith("equal to the last bit: ")


def test_every_text_of_the_troubleshooting_page_is_one_of_ours():
    rows = PAGES["docs/troubleshooting.md"].read_text().partition("## By the text")[2].partition("\n## ")[0]
    texts = re.findall(r"^\| `(.*?)` \| ", rows, flags=re.MULTILINE)
    assert len(texts) > 10
    # (Without the breaks between the parts of a string, and what is filled in.)
    source = "".join(path.read_text() for path in sorted((ROOT / "src").glob("**/*.py")))
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    assert [text for text in texts if text not in joined] == []


def test_offload_moves_bytes_to_the_host():
    printed, _ = run("docs/offload.md")
    moved, host = map(int, printed[-1].split())
    assert moved > 0
    assert host >= moved
    assert f"prints `{printed[-1].strip()}`" in PAGES["docs/offload.md"].read_text()


def test_rows():
    weights = nn.ParameterDict({name: torch.randn(8, 8) for name in ("gate", "up")})
    model = nn.ModuleDict({"experts": weights})
    keeper = ps.Keeper(ps.Policy([ps.Rule("experts", "stash", min_bytes=0)])).attach(model)
    names = {"ps": ps, "torch": torch, "F": nn.functional, **weights}
    names |= {"permuted": torch.randn(32, 8), "count": torch.tensor(5)}
    with keeper.step():
        with ps.region("experts"):
            run("docs/rows.md", names)
        held = int(keeper.held()["stash"])
        names["h"][:5].sum().backward()
    assert held == 4 * 5 * 8 * 4  # of x, both products and the activation: the valid rows
    assert weights["gate"].grad.abs().sum() > 0


def test_profile(tmp_path):
    printed, names = run("docs/profile.md")
    assert names["verdict"].moved_bytes > 0
    assert "saved for backward" in printed[0]
    assert (tmp_path / "profile.json").exists()


def test_expert_parallel(tmp_path):
    def begin(number, names):
        if number == 1:  # the first example ended its process group
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
            )

    printed, names = run("docs/expert-parallel.md", begin=begin)
    torch.distributed.destroy_process_group()
    assert printed[0].startswith("rank 0 of 1: 8 experts here, loss ")
    assert printed[2].startswith("ExpectedRowsStats(rows=")
    assert names["keeper"].stats().expected_rows.rows > 0


@pytest.mark.usefixtures("lone_rank")
def test_pipeline():
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import Schedule1F1B

    layers = nn.ModuleDict({"layers": nn.ModuleList([nn.Linear(8, 8)])})
    layers.forward = lambda x: layers.layers[0](x).tanh()
    stage = PipelineStage(layers, 0, 1, torch.device("cpu"))
    names = {
        "ps": ps,
        "policy": ps.Policy([ps.Rule("layers.*", "offload", min_bytes=0)]),
        "stages": [stage],
        "schedule": Schedule1F1B(stage, 4, loss_fn=lambda y, target: (y - target).square().mean()),
        "tokens": torch.randn(8, 8),
    }
    step = names["schedule"].step
    names["schedule"].step = lambda tokens: step(tokens, target=torch.zeros_like(tokens))
    run("docs/pipeline.md", names)
    assert layers.layers[0].weight.grad.abs().sum() > 0


def test_huggingface(monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="5.7")
    for needed in ("accelerate", "datasets", "peft"):
        pytest.importorskip(needed)
    trl = pytest.importorskip("trl")
    monkeypatch.setattr(trl, "SFTConfig", partial(trl.SFTConfig, use_cpu=True))  # bf16 wants that said
    from datasets import Dataset
    from support import frameworks
    from tokenizers import Tokenizer, models

    config = transformers.Qwen3MoeConfig(**TINY_QWEN)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained("tiny")
    (_, policy), *_ = blocks("docs/huggingface.md", "toml")
    Path("policy.toml").write_text(policy)
    rows = [torch.randint(0, 64, (8,)) for _ in range(8)]
    batch = {"input_ids": rows[0][None], "labels": rows[0][None]}
    words = Tokenizer(models.WordLevel({str(number): number for number in range(64)}, unk_token="0"))
    names = {
        "name": "tiny",
        "data": [{"input_ids": row, "labels": row} for row in rows],
        "dataset": Dataset.from_list([{"input_ids": row.tolist()} for row in rows]),
        "tokenizer": transformers.PreTrainedTokenizerFast(
            tokenizer_object=words, pad_token="0", eos_token="1"
        ),
        "batches": [batch] * 2,
    }
    frameworks.install(monkeypatch)
    seen = []

    def begin(number, names):
        if number in (2, 3):
            seen.append(names["keeper"].stats().homes["recompute"].peak)
            names["pagestash"].hf.unwrap(names["trainer"], names["keeper"])

    printed, names = run("docs/huggingface.md", names, begin)
    assert printed[0].split() == next(blocks("docs/huggingface.md", "text"))[1].split()
    assert all(seen)
    assert names["keeper"].stats().homes["recompute"].peak > 0
    assert {each.part for each in names["report"].replaced} == {"lora"}
    assert names["model"](**batch).loss.isfinite()


def test_the_policy_of_the_guide_is_the_one_of_the_results():
    (_, shown), *_ = blocks("docs/huggingface.md", "toml")
    assert ps.Policy.from_dict(tomllib.loads(shown)) == ps.Policy.load(ROOT / "examples" / "huggingface.toml")


def plugin_file(framework):
    """The page's plugin for it, in a file of the present folder."""
    (text,) = (text for _, text in blocks("docs/huggingface.md") if f"from {framework}" in text)
    Path("pagestash_plugin.py").write_text(text)


@pytest.mark.parametrize("framework", ["axolotl", "swift"])
def test_huggingface_plugins(monkeypatch, capsys, framework):
    """The files for axolotl and ms-swift, called as these call them; the losses are those of a run without."""
    transformers = pytest.importorskip("transformers", minversion="5.7")
    yaml = pytest.importorskip("yaml")
    from support import frameworks

    frameworks.install(monkeypatch)
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(sys.modules, "pagestash_plugin", raising=False)
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**TINY_QWEN)).save_pretrained("tiny")
    (_, policy), *_ = blocks("docs/huggingface.md", "toml")
    Path("policy.toml").write_text(policy)
    rows = [torch.randint(0, 64, (8,)) for _ in range(8)]

    def load(experts="grouped_mm"):
        return transformers.AutoModelForCausalLM.from_pretrained("tiny", experts_implementation=experts)

    def create(kind, model):
        args = transformers.TrainingArguments(
            output_dir="out", max_steps=3, logging_steps=1, report_to=[], disable_tqdm=True, use_cpu=True
        )
        data = [{"input_ids": row, "labels": row} for row in rows]
        return kind(model=model, args=args, train_dataset=data)

    def losses(trainer):
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    wanted = losses(create(transformers.Trainer, load()))
    plugin_file(framework)
    if framework == "axolotl":
        ((_, text),) = blocks("docs/huggingface.md", "yaml")
        trainer = frameworks.axolotl(yaml.safe_load(text), load, create)
    else:
        (text,) = (text for _, text in blocks("docs/huggingface.md", "bash") if text.startswith("swift sft"))
        words = shlex.split(text.replace("\\\n", ""))[2:]
        flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
        trainer = frameworks.swift(flags, load, create)
    assert "2 × Qwen3MoeExperts: the expert block" in capsys.readouterr().out
    assert "training_step" in trainer.__dict__
    assert losses(trainer) == pytest.approx(wanted, rel=1e-4)
    assert all("moe_act" in dict(layer.mlp.experts.named_children()) for layer in trainer.model.model.layers)


TINY_QWEN = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


def test_jax():
    printed, names = run("docs/jax.md")
    assert printed[0] == "369 rows wanted, room for 480, 0 recomputed\n"
    assert float(abs(names["grads"]["wi"][3]).max()) == 0  # the layer without rows
    assert printed[1].strip() in PAGES["docs/jax.md"].read_text()


POLICIES = [
    (page, text)
    for page in sorted(PAGES.keys() - BESIDE.keys())
    for _, text in blocks(page, "toml")
    if "[[rule]]" in text
] + [
    (path.name, path.read_text())
    for path in sorted(ROOT.glob("examples/*.toml"))
    if path.stem != "torchtitan"
]


def model_of(where):
    """The model that a policy is for: one of transformers, or ours."""
    if "huggingface" not in where:
        return Decoder(preset("tiny"))
    transformers = pytest.importorskip("transformers", minversion="5.7")
    import pagestash.hf

    config = transformers.Qwen3MoeConfig(**TINY_QWEN)
    model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="pagestash")
    pagestash.hf.optimize(model)
    return model


@pytest.mark.parametrize(("where", "text"), POLICIES, ids=[where for where, _ in POLICIES])
def test_every_policy_shown_is_one_and_names_parts_of_a_model(where, text):
    policy = ps.Policy.from_dict(tomllib.loads(text))
    policy.check([name for name, _ in model_of(where).named_modules() if name])
    assert policy.pool.host in (0, "auto"), f"{where}: a number of bytes that a reader's machine may not have"
