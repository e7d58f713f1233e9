"""Models to simulate: from a preset, a Hugging Face configuration, or a table of one's own."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagestash.models.config import PRESETS, DecoderConfig, preset
from pagestash.toml import read_toml


def read_model(text: str | Path | Mapping[str, Any], *, layers: int | None = None) -> DecoderConfig:
    """The model of a preset's name, a `config.json` (its path or content), or a TOML file of `DecoderConfig` keys.

    >>> read_model("qwen3-30b-a3b").experts
    128
    """
    if isinstance(text, Mapping):
        return _shortened(_from_mapping(text, "the configuration"), layers)
    if str(text) in PRESETS:
        return preset(str(text), layers)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".toml":
        return _shortened(_from_mapping(read_toml(path), str(path)), layers)
    if path.suffix != ".json":
        raise ValueError(
            f"model {str(text)!r}: expected one of {', '.join(PRESETS)}, a config.json, or a TOML file"
        )
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected the table of a model's configuration")
    return _shortened(_from_mapping(found, str(path)), layers)


def _shortened(config: DecoderConfig, layers: int | None) -> DecoderConfig:
    if layers is None:
        return config
    if layers < 1:
        raise ValueError(f"layers={layers}: expected at least 1")
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return DecoderConfig(**values | {"layers": layers, "dense_layers": min(config.dense_layers, layers - 1)})


def _from_mapping(table: Mapping[str, Any], where: str) -> DecoderConfig:
    if "model_type" in table or "hidden_size" in table:
        return from_huggingface(table, where)
    known = {field.name for field in fields(DecoderConfig)}
    for key in table:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {key!r}; expected those of DecoderConfig, like width or layers"
            )
    try:
        return DecoderConfig(**table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def from_huggingface(config: Mapping[str, Any], where: str = "the configuration") -> DecoderConfig:
    """The shapes of a `config.json` of Qwen3-MoE, Mixtral, DeepSeek-V3 (and V2, Moonlight, Kimi) or gpt-oss."""
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise ValueError(f"{where}: model_type={kind!r}: expected one of {', '.join(sorted(_KINDS))}")
    read = _Reader(config, where)
    values: dict[str, Any] = {
        "vocab": read("vocab_size"),
        "width": read("hidden_size"),
        "layers": read("num_hidden_layers"),
        "heads": read("num_attention_heads"),
        "top_k": read("num_experts_per_tok"),
        "tied": bool(config.get("tie_word_embeddings")),
    }
    values |= _KINDS[kind](read) | read.windows()
    try:
        return DecoderConfig(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


class _Reader:
    """Whole numbers of a configuration."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self.config.get(name)
        if value is None:
            if default is None:
                raise ValueError(f"{self.where}: {name} is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{self.where}: {name}={value!r}: expected a whole number")
        return value

    def windows(self) -> dict[str, int]:
        """The sliding window, and every how many layers one has none."""
        window = self("sliding_window", 0)
        kinds = self.config.get("layer_types") or []
        if not window or self.config.get("use_sliding_window") is False:
            return {}
        if kinds and "sliding_attention" not in kinds:
            return {}
        full = [number for number, kind in enumerate(kinds, start=1) if kind == "full_attention"]
        every = full[0] if full else 0
        if full != (list(range(every, len(kinds) + 1, every)) if every else []):
            raise ValueError(f"{self.where}: layer_types: expected full attention in every n-th layer")
        return {"window": window, "full_every": every}

    def grouped(self) -> dict[str, Any]:
        return {"kv_heads": self("num_key_value_heads", 0), "head_dim": self("head_dim", 0)}


def _qwen3(read: _Reader) -> dict[str, Any]:
    if read("decoder_sparse_step", 1) != 1 or read.config.get("mlp_only_layers"):
        raise ValueError(f"{read.where}: layers with and without experts alternate, which is not supported")
    return read.grouped() | {
        "qk_norm": True,
        "experts": read("num_experts"),
        "expert_width": read("moe_intermediate_size"),
    }


def _mixtral(read: _Reader) -> dict[str, Any]:
    return read.grouped() | {"experts": read("num_local_experts"), "expert_width": read("intermediate_size")}


def _gpt_oss(read: _Reader) -> dict[str, Any]:
    return _mixtral(read) | {"attention_bias": True, "expert_bias": True, "activation": "clamped"}


def _deepseek(read: _Reader) -> dict[str, Any]:
    if read("moe_layer_freq", 1) != 1:
        raise ValueError(f"{read.where}: layers with and without experts alternate, which is not supported")
    values = {
        "attention": "mla",
        "q_rank": read("q_lora_rank", 0),
        "kv_rank": read("kv_lora_rank"),
        "nope_dim": read("qk_nope_head_dim"),
        "rope_dim": read("qk_rope_head_dim"),
        "v_dim": read("v_head_dim"),
        "dense_layers": read("first_k_dense_replace", 0),
        "dense_width": read("intermediate_size", 0),
        "experts": read("n_routed_experts"),
        "expert_width": read("moe_intermediate_size"),
        "shared_experts": read("n_shared_experts", 0),
        "groups": read("n_group", 1),
        "group_limit": read("topk_group", 1),
        "mtp_layers": read("num_nextn_predict_layers", 0),
    }
    if read.config.get("scoring_func") == "sigmoid":
        values |= {"score": "sigmoid", "correction_bias": True}
    return values


_KINDS = {
    "qwen3_moe": _qwen3,
    "mixtral": _mixtral,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "gpt_oss": _gpt_oss,
}
