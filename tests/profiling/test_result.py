"""What a profile is good for afterwards: JSON, tables, a picture; and what it refuses to measure."""

import copy
import io
import json
import sys
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

import pagestash as ps
from pagestash.models import Decoder, preset
from pagestash.moe import MoE, MoEConfig
from pagestash.profiling.plot import waiting
from pagestash.profiling.table import LARGEST, LEAST_SECONDS, groups, label
from pagestash.sizes import format_bytes

POLICY = ps.Policy(
    [
        ps.Rule("layers.*.moe.experts", "stash", min_bytes=256),
        ps.Rule("layers.*.attn.core_attn", "offload", min_bytes=256, fraction=0.5),
        ps.Rule("layers.*.*_norm", "recompute"),
    ]
)


@pytest.fixture(scope="module")
def found():
    return measured()


def measured():
    model = Decoder(preset("tiny", layers=3))
    model.initialise(0)
    tokens = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(0))
    return ps.profile(model, (tokens[:, :-1], tokens[:, 1:]), policy=POLICY, repeats=1)


def shown(table, width=250):
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(table)
    return console.export_text()


def test_json_reads_back_to_an_equal_profile(found, tmp_path):
    found.save(tmp_path / "p.json")
    again = ps.Profile.load(tmp_path / "p.json")
    assert again == found
    assert again.fits("layers.*.attn.**", min_bytes=1) == found.fits("layers.*.attn.**", min_bytes=1)
    data = json.loads((tmp_path / "p.json").read_text())
    assert data["total_bytes"] == found.total_bytes == sum(data["home_bytes"].values())
    assert {item["region"] for item in data["tensors"]} >= {"layers.0.mlp", "layers.2.moe.experts"}
    assert {item["home"] for item in data["tensors"]} == {"keep", "stash", "offload", "recompute"}


@pytest.mark.parametrize(
    "text", ["", "[]", '{"format": 1}', '{"format": 2}', '{"format": 2, "policy": null}']
)
def test_what_is_no_profile_is_refused_by_name(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(ValueError, match=r"p\.json: "):
        ps.Profile.load(tmp_path / "p.json")
    with pytest.raises(ValueError, match="No such file"):
        ps.Profile.load(tmp_path / "none.json")


def test_the_table_has_layers_together_and_adds_up(found):
    assert label("layers.10.attn") == "layers.*.attn"
    assert label("") == "(model)"
    rows = groups(found)
    assert sum(group.bytes for group in rows) == found.total_bytes
    norm = next(group for group in rows if group.name == "layers.*.attn_norm")
    assert len(norm.regions) == 3
    assert norm.bytes == sum(found.region(f"layers.{layer}.attn_norm").bytes for layer in range(3))
    text = shown(found.table())
    assert "layers.*.attn_norm  ×3" in text
    assert "layers.0" not in text
    assert "Under the policy" in text
    assert "50.0 GB/s out" in text
    apart = shown(found.table(layers=True))
    assert "layers.2.attn_norm" in apart
    assert "layers.*" not in apart
    assert [group.name for group in groups(found, depth=2)] == ["(model)", "embed", "layers.*", "norm"]
    narrow = shown(found.table(narrow=True), width=80)
    assert "…" not in narrow
    assert format_bytes(norm.bytes) in narrow
    with pytest.raises(ValueError, match="depth=0"):
        found.table(depth=0)


@pytest.mark.parametrize("policy", [None, POLICY], ids=["all homes", "under a policy"])
def test_a_narrow_table_has_one_line_a_region_and_marks_the_largest(found, policy):
    narrow = shown(replace(found, policy=policy).table(narrow=True), width=80)
    assert max(map(len, narrow.splitlines())) <= 80
    rows = [line.split()[0] for line in narrow.splitlines() if line[1:2].strip()]
    for group in groups(found):
        assert rows.count(group.name) == (group.bytes > 0 or sum(group.seconds) >= LEAST_SECONDS)
    (largest,) = (line for line in narrow.splitlines() if f"iB {LARGEST}" in line)
    assert largest.split()[0] == max(groups(found), key=lambda group: group.bytes).name


def test_a_row_of_whole_layers_makes_them_again_whole(found):
    row = next(line for line in shown(found.table(depth=2)).splitlines() if "layers.*" in line)
    each = [found.region(f"layers.{layer}").homes["recompute"] for layer in range(3)]
    assert format_bytes(sum(item.saved_bytes for item in each)) in row
    assert "layers.*  ×3" in row


def test_the_tensors_are_listed_by_pattern(found):
    text = shown(found.tensor_table("layers.1.moe.*"))
    lines = [line for line in text.splitlines() if "layers.1.moe" in line]
    assert len(lines) == sum(tensor.region.startswith("layers.1.moe.") for tensor in found.tensors)
    assert "layers.1.attn_norm" not in text
    assert "32 × 128" in text
    assert "weight" in text
    assert "stash" in text
    assert len(shown(found.tensor_table()).splitlines()) >= len(found.tensors)
    with pytest.raises(ValueError, match="matches no region"):
        found.tensor_table("layers.9.*")


def test_bytes_over_the_step_rise_to_the_sum_and_fall_to_nothing(found):
    over = waiting(found, range(len(found.tensors)))
    turn = sum(segment.way == "forward" for segment in found.segments)
    assert over[turn - 1] == max(over) == found.total_bytes
    assert over[:turn] == sorted(over[:turn])
    assert over[turn:] == sorted(over[turn:], reverse=True)
    assert over[-1] == 0
    # A layer's bytes are gone when backward leaves it.
    last = max(i for i, segment in enumerate(found.segments) if "layers.2" in segment.path)
    places = [i for i, tensor in enumerate(found.tensors) if tensor.region.startswith("layers.2.")]
    assert waiting(found, places)[last] == 0 < waiting(found, places)[turn]


def test_the_picture_is_drawn(found, tmp_path):
    pytest.importorskip("matplotlib")
    found.plot(tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_a_picture_without_matplotlib_says_what_to_install(found, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'pagestash\[plot\]'"):
        found.plot(tmp_path / "p.png")


# --- what goes in ---


def test_batches_and_losses_of_every_form():
    class Model(nn.Module):
        def __init__(self, form):
            super().__init__()
            self.layer, self.form = nn.Linear(4, 4), form

        def forward(self, x, scale):
            y = self.layer(x).tanh() * scale
            loss = y.sum()
            return {
                "scalar": loss,
                "losses": (loss, loss * 2, y),
                "tensor": y,
                "first": (y, loss),
                "named": {"logits": y, "loss": loss},
                "list": [y],
            }[self.form]

    x, scale = torch.randn(3, 4), torch.tensor(2.0)
    for form in ("scalar", "losses", "tensor", "first", "named", "list"):
        for batch in ((x, scale), [x, scale], {"scale": scale, "x": x}):
            assert ps.profile(Model(form), batch, repeats=1).total_bytes == 48, form
    assert ps.profile(nn.Tanh(), x.requires_grad_(), loss=lambda y: y.square().mean(), repeats=1).tensors
    assert x.grad is None


def test_losses_are_added_up():
    from pagestash.profiling.measure import default_loss

    parts = (torch.tensor(1.0), torch.tensor(2.0), torch.ones(3), torch.tensor(9.0))
    assert default_loss(parts) == 3.0
    assert default_loss(parts[2]) == 3.0
    with pytest.raises(ValueError, match="returned str: pass loss="):
        default_loss("text")


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((), "batch is empty"),
        ({}, "batch is empty"),
        (torch.empty(0, 4), "batch is empty"),
        (7, "batch is a int"),
    ],
)
def test_an_empty_batch_is_refused(batch, message):
    with pytest.raises(ValueError, match=message):
        ps.profile(nn.Linear(4, 4), batch)


def test_what_cannot_be_profiled_is_refused_by_name():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    with pytest.raises(ValueError, match=r"expected an nn\.Module"):
        ps.profile(model.forward, x)
    with pytest.raises(ValueError, match="repeats=0"):
        ps.profile(model, x, repeats=0)
    with pytest.raises(ValueError, match="one element"):
        ps.profile(model, x, loss=lambda y: y)
    with pytest.raises(ValueError, match="no graph"):
        ps.profile(nn.Tanh(), x)
    with pytest.raises(ValueError, match="link out=0"):
        ps.profile(model, x, link=0.0)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        ps.profile(model, x)


def test_a_keeper_in_its_step_or_with_its_pool_in_the_model_is_refused():
    model = nn.Sequential(MoE(MoEConfig(width=16, expert_width=16, experts=4, top_k=2)))
    x = torch.randn(8, 16)
    policy = ps.Policy(
        [ps.Rule("0.experts", "stash", min_bytes=1)], ps.PoolConfig(device="64KiB", page="1KiB")
    )
    keeper = ps.Keeper(policy).attach(model)
    with pytest.raises(RuntimeError, match=r"0\.\w+ stores its tensors for a keeper.*detach"):
        ps.profile(model, x)
    keeper.detach()
    model[0].moe_act.use_recompute(True)
    with pytest.raises(RuntimeError, match=r"0\.moe_act stores its tensors"):
        ps.profile(model, x)
    model[0].moe_act.use_recompute(False)
    with keeper.step(), pytest.raises(RuntimeError, match="inside a keeper's step"):
        ps.profile(model, x)
    assert ps.profile(model, x, repeats=1, loss=lambda output: output[0].sum()).total_bytes > 0


def test_progress_is_told():
    told = []
    ps.profile(nn.Linear(2, 2), torch.ones(1, 2), repeats=2, progress=lambda *said: told.append(said))
    assert [number for _, number, _ in told] == list(range(8))
    assert {steps for _, _, steps in told} == {7}
    assert told[0][0] == "warming up"
    assert told[-1][0] == "done"


JUNK = (None, -1, 10**9, 10**400, "x", [], [[]], {}, True, 1.5, float("nan"), float("inf"), ["x"], [1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda data: data.pop("link"), "this profile has no 'link'"),
        (lambda data: data["link"].update(out=[]), r"link\.out: expected a number, found \[\]"),
        (lambda data: data.update(model_bytes="x"), "model_bytes: expected a whole number, found 'x'"),
        (lambda data: data.update(model_bytes=-1), "model_bytes=-1: expected 0 or more"),
        (lambda data: data.update(plain_seconds=-5), "plain_seconds=-5: expected 0 or more"),
        (lambda data: data.update(gradients="some"), "gradients: expected one of held, fresh, found 'some'"),
        (lambda data: data.update(tensors=5), "tensors: expected a list, found 5"),
        (lambda data: data["tensors"].insert(0, 5), r"tensors\[0\]: expected its fields by name, found 5"),
        (lambda data: data["tensors"][1].pop("bytes"), r"tensors\[1\] has no 'bytes'"),
        (lambda data: data["tensors"][1].update(colour=1), r"tensors\[1\] has an unknown field 'colour'"),
        (
            lambda data: data["tensors"][0].update(needed_at=None),
            r"tensors\[0\]\.needed_at: expected a whole",
        ),
        (lambda data: data["segments"][1].update(seconds="x"), r"segments\[1\]\.seconds: expected a number"),
        (lambda data: data["regions"][1]["homes"].clear(), r"regions\[1\]\.homes has no 'keep'"),
    ],
)
def test_a_field_that_is_none_is_named(found, tmp_path, change, says):
    data = json.loads(found.to_json())
    change(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"p\.json: {says}"):
        ps.Profile.load(tmp_path / "p.json")


@pytest.mark.parametrize(
    "where", [(), ("link",), ("tensors", 1), ("segments", 1), ("regions", 1), ("regions", 1, "homes")]
)
def test_whatever_is_wrong_with_a_file_is_a_value_error(found, tmp_path, where):
    """A profile is read, or refused in a sentence: nothing else is raised."""
    data = json.loads(found.to_json())
    data |= {name: data[name][:2] for name in ("tensors", "segments", "regions")}
    path, refused = tmp_path / "p.json", 0
    for key in _at(data, where):
        for value in JUNK:
            changed = copy.deepcopy(data)
            _at(changed, where)[key] = value
            path.write_text(json.dumps(changed))
            try:
                ps.Profile.load(path)
            except ValueError:
                refused += 1
    assert refused > len(_at(data, where))


def _at(data, where):
    for step in where:
        data = data[step]
    return data
