"""Decoder language models with published shapes."""

from pagestash.models.config import PRESETS, DecoderConfig, preset
from pagestash.models.decoder import Block, Decoder, count_parameters

__all__ = ["PRESETS", "Block", "Decoder", "DecoderConfig", "count_parameters", "preset"]
