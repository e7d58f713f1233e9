"""Models to simulate: from a preset, a Hugging Face configuration, or a table of one's own."""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from pagestash.models.config import PRESETS, DecoderConfig, shortened
from pagestash.toml import read_toml

Key = str | tuple[str, int]
"""A name in a `config.json`, or one that may be missing, with its default."""
_COMMON: dict[str, Key] = {
    "vocab": "vocab_size",
    "width": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "top_k": "num_experts_per_tok",
}
_GROUPED: dict[str, Key] = {"kv_heads": ("num_key_value_heads", 0), "head_dim": ("head_dim", 0)}
_QWEN3: dict[str, Key] = _GROUPED | {"experts": "num_experts", "expert_width": "moe_intermediate_size"}
_MIXTRAL: dict[str, Key] = _GROUPED | {"experts": "num_local_experts", "expert_width": "intermediate_size"}
_DEEPSEEK: dict[str, Key] = {
    "q_rank": ("q_lora_rank", 0),
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
    "dense_layers": ("first_k_dense_replace", 0),
    "dense_width": ("intermediate_size", 0),
    "experts": "n_routed_experts",
    "expert_width": "moe_intermediate_size",
    "shared_experts": ("n_shared_experts", 0),
    "groups": ("n_group", 1),
    "group_limit": ("topk_group", 1),
    "mtp_layers": ("num_nextn_predict_layers", 0),
}
_LATENT = {"attention": "mla"}
_KINDS: dict[str, tuple[dict[str, Key], dict[str, Any]]] = {
    "qwen3_moe": (_QWEN3, {"qk_norm": True}),
    "mixtral": (_MIXTRAL, {}),
    "deepseek_v2": (_DEEPSEEK, _LATENT),
    "deepseek_v3": (_DEEPSEEK, _LATENT),
    "kimi_k2": (_DEEPSEEK, _LATENT),
    "gpt_oss": (_MIXTRAL, {"attention_bias": True, "expert_bias": True, "activation": "clamped"}),
}
"""By `model_type`: where its numbers are, and what holds for all models of this kind."""


def read_model(text: str | Path | Mapping[str, Any], *, layers: int | None = None) -> DecoderConfig:
    """The model of a preset's name, a `config.json` (its path or content), or a TOML file of `DecoderConfig` keys.

    >>> read_model("qwen3-30b-a3b").experts
    128
    """
    if isinstance(text, Mapping):
        return shortened(_from_mapping(text, "the configuration"), layers)
    if str(text) in PRESETS:
        return shortened(PRESETS[str(text)], layers)
    path = Path(text)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix not in (".toml", ".json"):
        raise ValueError(
            f"model {str(text)!r}: expected one of {', '.join(PRESETS)}, a config.json, or a TOML file"
        )
    found = read_toml(path) if path.suffix == ".toml" else _read_json(path)
    return shortened(_from_mapping(found, str(path)), layers)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected the table of a model's configuration")
    return found


def _from_mapping(table: Mapping[str, Any], where: str) -> DecoderConfig:
    values = dict(table)
    if "model_type" in table or "hidden_size" in table:
        values = _from_huggingface(table, where)
    known = {field.name for field in fields(DecoderConfig)}
    for key in values:
        if key not in known:
            raise ValueError(
                f"{where}: unknown key {key!r}; expected those of DecoderConfig, like width or layers"
            )
    try:
        return DecoderConfig(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{where}: {error}") from error


def _from_huggingface(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The shapes of a `config.json` of Qwen3-MoE, Mixtral, DeepSeek-V3 (and V2, Moonlight, Kimi) or gpt-oss."""
    kind = config.get("model_type")
    if kind not in _KINDS:
        raise ValueError(f"{where}: model_type={kind!r}: expected one of {', '.join(sorted(_KINDS))}")

    def number(key: Key) -> int:
        name, default = (key, None) if isinstance(key, str) else key
        value = default if config.get(name) is None else config[name]
        if value is None:
            raise ValueError(f"{where}: {name} is missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{where}: {name}={value!r}: expected a whole number")
        return value

    every = number(("decoder_sparse_step", 1)), number(("moe_layer_freq", 1))
    if every != (1, 1) or config.get("mlp_only_layers"):
        raise ValueError(f"{where}: layers with and without experts alternate, which is not supported")
    names, fixed = _KINDS[kind]
    values: dict[str, Any] = {name: number(key) for name, key in (_COMMON | names).items()}
    values |= fixed | {"tied": bool(config.get("tie_word_embeddings"))}
    if config.get("scoring_func") == "sigmoid":
        values |= {"score": "sigmoid", "correction_bias": True}
    window, kinds = number(("sliding_window", 0)), config.get("layer_types") or []
    if (
        window
        and config.get("use_sliding_window") is not False
        and (not kinds or "sliding_attention" in kinds)
    ):
        values |= {"window": window, "full_every": _full_every(kinds, where)}
    return values


def _full_every(kinds: list[str], where: str) -> int:
    """Every how many layers one has no window; 0: none."""
    full = [at for at, kind in enumerate(kinds, start=1) if kind == "full_attention"]
    every = full[0] if full else 0
    if full != (list(range(every, len(kinds) + 1, every)) if every else []):
        raise ValueError(f"{where}: layer_types: expected full attention in every n-th layer")
    return every
