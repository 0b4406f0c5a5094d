"""The plugin for axolotl. To use it, write ``plugins: [hf_distca.plugins.axolotl.DistCAPlugin]``
and ``attn_implementation: distca`` in axolotl's configuration.
"""

from __future__ import annotations

from typing import Any

from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_distca.config import REPLACEABLE_ATTENTION, split_settings
from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import replace_attention
from hf_distca.integration.training.callback import DistCACallback
from hf_distca.integration.training.deal_trainer import deal

_FLASH = tuple(name for name in REPLACEABLE_ATTENTION if name != "sdpa")


class DistCAInput(BaseModel):
    """The key that the plugin adds to axolotl's configuration.

    Attributes:
        distca: fields of `DistCAConfig`, and ``tokens_per_rank``.
    """

    distca: dict[str, Any] | None = None


class DistCAPlugin(BasePlugin):  # type: ignore[misc]  # Any if axolotl is not installed
    """Runs axolotl's models with distca, also with sample packing, and logs the balance.

    axolotl accepts only attention implementations that it knows, and sample packing only with some
    of them. The plugin therefore replaces all versions of flash attention that axolotl may choose.
    With ``distca: {tokens_per_rank: ...}``, the plugin also deals the training set.
    """

    def get_input_args(self) -> str:
        """Return the import path of the class that describes the plugin's key."""
        return f"{__name__}.{DistCAInput.__name__}"

    def register(self, cfg: dict[str, Any]) -> None:
        """Read and change the configuration before axolotl checks it.

        Raises:
            ConfigError: if a name or value under ``distca`` is wrong.
            UnsupportedError: if the configuration names an attention that distca cannot replace, or
                asks for context parallelism or for two ways of packing.
        """
        self.config, others = split_settings(cfg.get("distca"), "distca")
        self.tokens_per_rank = others.get("tokens_per_rank")
        if self.tokens_per_rank is not None and cfg.get("sample_packing"):
            raise UnsupportedError(
                "sample_packing: true packs samples of up to sequence_len tokens, but distca:"
                f" {{tokens_per_rank: {self.tokens_per_rank}}} fills ranks with documents of any"
                " length. Remove one of the two settings."
            )
        if (cfg.get("context_parallel_size") or 1) > 1:
            raise UnsupportedError(
                f"context_parallel_size: {cfg['context_parallel_size']} cuts sequences into parts,"
                " which distca would treat as documents. Set context_parallel_size to 1: distca"
                " shares the attention of long documents between data-parallel ranks."
            )
        asked = cfg.get("attn_implementation") or (
            "flash_attention_2" if cfg.get("flash_attention") else None
        )
        if asked not in ("distca", *_FLASH):
            raise UnsupportedError(
                f"The plugin of distca cannot replace attn_implementation: {asked}. Write"
                " attn_implementation: distca, or remove the plugin."
            )
        cfg["attn_implementation"] = "flash_attention_2" if asked == "distca" else asked
        for name in _FLASH:
            if name in ALL_ATTENTION_FUNCTIONS:
                replace_attention(name)

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[DistCACallback]:
        """Return the callback that sets distca up, prepares the model and logs the balance."""
        return [DistCACallback(self.config)]

    def post_trainer_create(self, cfg: Any, trainer: Trainer) -> None:
        """Deal the training set if ``tokens_per_rank`` is given.

        Raises:
            UnsupportedError: see `hf_distca.deal`.
        """
        if self.tokens_per_rank is None:
            return
        # axolotl averages the loss on each rank separately, and computes max_steps from its own
        # batches, not from the dealt ones.
        trainer.args.average_tokens_across_devices = True
        trainer.model_accepts_loss_kwargs = getattr(
            trainer.accelerator.unwrap_model(trainer.model), "accepts_loss_kwargs", True
        )
        if cfg.get("max_steps") is None:
            trainer.args.max_steps = -1
        deal(trainer, self.tokens_per_rank)
