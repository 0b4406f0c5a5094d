"""The plugin for axolotl: ``plugins: [hf_distca.plugins.axolotl.DistCAPlugin]`` and ``attn_implementation: distca``."""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_distca.errors import UnsupportedError
from hf_distca.integration.callback import DistCACallback
from hf_distca.integration.loading import STAND_INS, stand_in

__all__ = ["DistCAPlugin"]

_FLASH = tuple(name for name in STAND_INS if name != "sdpa")


class DistCAPlugin(BasePlugin):  # type: ignore[misc]  # Any, where axolotl is not installed
    """Makes distca the attention of axolotl's models, sample packing included, and logs the balance.

    Names of attention, and which of them sample packing works with, are closed lists in axolotl: distca stands in there for
    flash_attention_2, and for the versions that axolotl puts in its place by itself.
    """

    def register(self, cfg: dict[str, Any]) -> None:
        """Take the configuration before axolotl checks it.

        Raises:
            UnsupportedError: if it names an attention that distca does not stand in for, or a sequence is cut over ranks.
        """
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise UnsupportedError(
                "context_parallel_size cuts sequences over ranks, and distca would take the parts for documents: make "
                "it 1. distca shares the attention of long documents between data-parallel ranks."
            )
        asked = cfg.get("attn_implementation") or ("flash_attention_2" if cfg.get("flash_attention") else None)
        if asked not in ("distca", *_FLASH):
            raise UnsupportedError(
                f"attn_implementation: {asked} is not distca's: with its plugin, write attn_implementation: distca."
            )
        cfg["attn_implementation"] = "flash_attention_2" if asked == "distca" else asked
        for name in _FLASH:
            if name in ALL_ATTENTION_FUNCTIONS:
                stand_in(name)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[DistCACallback]:
        """The callback that prepares the model and logs the balance."""
        return [DistCACallback()]
