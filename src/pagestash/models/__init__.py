"""Decoder language models with published shapes."""

from typing import TYPE_CHECKING

from pagestash.lazy import lazily

if TYPE_CHECKING:
    from pagestash.models.config import PRESETS as PRESETS
    from pagestash.models.config import DecoderConfig as DecoderConfig
    from pagestash.models.config import preset as preset
    from pagestash.models.decoder import Block as Block
    from pagestash.models.decoder import Decoder as Decoder
    from pagestash.models.decoder import count_parameters as count_parameters

_FOUND_IN = {
    "Block": "pagestash.models.decoder",
    "Decoder": "pagestash.models.decoder",
    "DecoderConfig": "pagestash.models.config",
    "PRESETS": "pagestash.models.config",
    "count_parameters": "pagestash.models.decoder",
    "preset": "pagestash.models.config",
}
__all__ = sorted(_FOUND_IN)
__getattr__ = lazily(__name__, _FOUND_IN)
