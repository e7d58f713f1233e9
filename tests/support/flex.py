"""Flex attention of transformers without a GPU, where torch has no backward for it and transformers no sinks."""

from typing import Any

import torch
import transformers.masking_utils as masks
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: BlockMask, **options: Any
) -> tuple[torch.Tensor, None]:
    """gpt-oss's own attention with the mask that blocks were made of, which must be flex attention's."""
    shape = (1, 1, query.shape[2], key.shape[2])
    seen = create_mask(mask.mask_mod, *shape, device=query.device.type)
    added = torch.where(seen, 0.0, torch.finfo(query.dtype).min)
    y, _ = eager_attention_forward(module, query, key, value, added, **options)
    return y, None


def stand_in(monkeypatch: Any) -> None:
    """Let `attn_implementation="flex_attention"` run on a CPU."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flex_attention", attend)
    # (Compiled, it would take a C++ compiler half a minute.)
    monkeypatch.setattr(
        masks, "create_block_mask", lambda **given: create_block_mask(**(given | {"_compile": False}))
    )
