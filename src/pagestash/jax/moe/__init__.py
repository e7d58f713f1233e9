"""Ring-of-experts layers to run `stash_scan` on; the Flax version is in `pagestash.jax.moe.nnx`."""

from .decoder import DecoderConfig, decoder_loss, init_decoder, plain_scan, stashed_scan
from .ring import STASHED, X_SORTED, ExpertWeights, RingConfig, init_experts, ring_moe, ring_moe_over

__all__ = [
    "STASHED",
    "X_SORTED",
    "DecoderConfig",
    "ExpertWeights",
    "RingConfig",
    "decoder_loss",
    "init_decoder",
    "init_experts",
    "plain_scan",
    "ring_moe",
    "ring_moe_over",
    "stashed_scan",
]
