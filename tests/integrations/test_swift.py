"""ms-swift's own command with the plugin of `docs/huggingface.md`: weights are those without a policy."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("swift", reason="ms-swift is not installed")
transformers = pytest.importorskip("transformers", minversion="5.7")

from safetensors.torch import load_file  # noqa: E402
from support.compare import same  # noqa: E402
from support.pages import ROOT, blocks  # noqa: E402
from tiny import tiny  # noqa: E402

POLICY = """
[pool]
page = "4KiB"

[[rule]]
match = "model.layers.*.mlp.experts"
home = "stash"
min_bytes = 0

[[rule]]
match = "model.layers.*.self_attn"
home = "offload"
min_bytes = 0
prefetch_bytes = 0

[[rule]]
match = "model.layers.*.*_layernorm"
home = "recompute"
"""
CHAT = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
TELL = """
_wrap = pagestash.hf.wrap


def wrap(trainer, policy):
    keeper = _wrap(trainer, policy)
    atexit.register(lambda: print("MOVED", *(home for home, held in keeper.stats().homes.items() if held.peak)))
    return keeper


pagestash.hf.wrap = wrap
"""


def assets(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, 96)}}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="</s>", chat_template=CHAT
    )
    tokenizer.save_pretrained(folder / "model")
    tiny("Qwen3-MoE").save_pretrained(folder / "model")
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"w{3 + row} w{4 + row}"},
                {"role": "assistant", "content": f"w{5 + row} w{6 + row} w{7 + row}"},
            ]
        }
        for row in range(8)
    ]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (plugin,) = (text for _, text in blocks("docs/huggingface.md") if "swift.callbacks" in text)
    (folder / "pagestash_plugin.py").write_text(f"import atexit\n{plugin}{TELL}")


def train(folder, name, policy):
    """The weights at the end, and the homes that anything moved to."""
    (folder / "policy.toml").write_text(policy)
    (command,) = (text for _, text in blocks("docs/huggingface.md", "bash") if "swift sft" in text)
    _, *arguments = shlex.split(command.replace("\\\n", " "))
    arguments[arguments.index("--model") + 1] = "model"
    more = (
        "--model_type qwen3_moe --template qwen3 --tuner_type full --dataset data.jsonl --split_dataset_ratio 0 "
        "--torch_dtype float32 --max_steps 3 --per_device_train_batch_size 2 --save_only_model true --seed 1 "
        f"--report_to none --dataloader_num_workers 0 --add_version false --output_dir {name} --use_hf true"
    )
    done = subprocess.run(
        [str(Path(sys.executable).parent / "swift"), *arguments, *more.split()],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-6000:]
    moved = [line.split()[1:] for line in said.splitlines() if line.startswith("MOVED")]
    return load_file(folder / name / "checkpoint-3" / "model.safetensors"), set(moved[0])


def test_weights_are_those_without_a_policy(tmp_path):
    assets(tmp_path)
    start = load_file(tmp_path / "model" / "model.safetensors")
    (plain, _), (kept, moved) = train(tmp_path, "plain", ""), train(tmp_path, "kept", POLICY)
    assert same(kept, plain)
    assert not any(plain[name].equal(start[name]) for name in start if "proj" in name)
    assert moved >= {"stash", "offload", "recompute"}
