"""Models with random weights from their configs, sharded over the ranks, and their batches."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import hf_distca
from eight_arms import Arm, Rows, make_tokens, place_documents
from eight_attention import make_dense_masks
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost

MODELS = Path(__file__).with_name("models")
_LOSS_TOKENS = 4096  # whose logits exist at a time
# Sizes of every model in a dry run, then those of single types.
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
}
_TINY_OF = {
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "qwen3_5_text": {
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "layer_types": ["linear_attention", "full_attention"],
    },
}


def read_model(name: str, *, tiny: bool, layers: int | None) -> Any:
    """Read a model's config; `tiny` for a dry run, `layers` for fewer layers and words."""
    config = AutoConfig.from_pretrained(MODELS / f"{name}.json")
    # A shallow model with its full vocabulary would be mostly vocabulary.
    changes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": 8192} if layers else {}
    if tiny:
        changes |= {**_TINY, "num_hidden_layers": 2, **_TINY_OF.get(config.model_type, {})}
    count = changes.get("num_hidden_layers", config.num_hidden_layers)
    if getattr(config, "layer_types", None) and "layer_types" not in changes:
        changes["layer_types"] = config.layer_types[:count]
    return type(config)(**{**config.to_dict(), **changes})


class Trained(torch.nn.Module):
    """A model whose loss is computed in chunks of tokens, so that logits fit in memory."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, targets: torch.Tensor, **batch: Any) -> torch.Tensor:
        """Sum the losses of this rank's tokens."""
        hidden = self.model.model(**batch, use_cache=False).last_hidden_state[0]
        total = hidden.new_zeros((), dtype=torch.float32)
        for rows, right in zip(
            hidden.split(_LOSS_TOKENS), targets.split(_LOSS_TOKENS), strict=True
        ):
            total = total + checkpoint(self._loss, rows, right, use_reentrant=False)
        return total

    def _loss(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.model.lm_head(rows).float(), targets, reduction="sum")


def build(config: Any, device: torch.device, dtype: torch.dtype) -> Trained:
    """Build a model with the same random weights on every rank, with checkpointing, under FSDP2."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(Trained(model), mp_policy=policy)


@dataclass(frozen=True)
class Batches:
    """Makes the batch of a rank, for an arm and a step.

    Attributes:
        config: config of the model.
        dtype: dtype of attention.
        device: device of the batches.
        ranks, tokens: number of ranks, and tokens of a row.
        operations_a_token: floating-point operations per token outside attention, for loaders.
    """

    config: Any
    dtype: torch.dtype
    device: torch.device
    ranks: int
    tokens: int
    operations_a_token: float

    def cost(self, lengths: np.ndarray) -> np.ndarray:
        """Estimate the forward operations of documents, as a loader does."""
        width = self.config.num_attention_heads * self.config.head_dim
        attending = sum(
            kind == "full_attention"
            for kind in getattr(self.config, "layer_types", None)
            or ["full_attention"] * self.config.num_hidden_layers
        )
        return lengths * self.operations_a_token + 2.0 * attending * width * lengths**2.0

    def dealing(self, settings: hf_distca.DistCAConfig) -> Dealing:
        keys = list_layer_keys(self.config, self.dtype, self.device.type)
        costs = {key: make_initial_cost(key, settings) for key in keys}
        return Dealing(self.ranks, self.tokens, costs, settings, self.ranks)

    def share(
        self, arm: Arm, rows: Rows, step: int, rank: int, settings: hf_distca.DistCAConfig
    ) -> tuple[list[tuple[int, int, int]], PackedDocuments]:
        """Return a rank's runs of tokens, as (document number, first position, length)."""
        lengths = np.concatenate(rows).astype(np.int64)
        if arm.place == "dealt":
            packed = self.dealing(settings).make_share(lengths, (0, step), rank)
            starts = packed.starts or (0,) * len(packed.lengths)
            return list(zip(packed.documents or (), starts, packed.lengths, strict=True)), packed
        placed = place_documents(rows, arm.place, self.tokens, self.cost)[rank]
        runs = [(number, 0, int(lengths[number])) for number in placed]
        return runs, PackedDocuments([length for *_, length in runs])

    def make(
        self, arm: Arm, rows: Rows, step: int, rank: int, settings: hf_distca.DistCAConfig
    ) -> dict[str, torch.Tensor | Any]:
        """Make the arguments of `Trained` for a rank."""
        lengths = np.concatenate(rows).astype(np.int64)
        runs, packed = self.share(arm, rows, step, rank, settings)
        ids, targets, positions = [], [], []
        for number, start, length in runs:
            document = make_tokens(number, int(lengths[number]), step, self.config.vocab_size)
            following = torch.cat([document[1:], torch.tensor([-100])])
            ids.append(document[start : start + length])
            targets.append(following[start : start + length])
            positions.append(torch.arange(start, start + length))
        batch: dict[str, Any] = {
            "input_ids": torch.cat(ids)[None].to(self.device),
            "targets": torch.cat(targets).to(self.device),
            "position_ids": torch.cat(positions)[None].to(self.device),
        }
        if arm.attention == "distca":
            return {**batch, "distca_documents": packed}
        everywhere = arm.attention in ("ulysses", "ring")
        own = lengths.tolist() if everywhere else [length for *_, length in runs]
        bounds = torch.tensor([0, *accumulate(own)], dtype=torch.int32, device=self.device)
        if self.config.model_type == "gpt_oss" and self.device.type == "cpu":
            batch["attention_mask"] = make_dense_masks(bounds, self.config.sliding_window)
        return {
            **batch,
            **dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds),
            **dict.fromkeys(("max_length_q", "max_length_k"), max(own)),
        }


def count_targets(rows: Rows) -> int:
    """Count the tokens that have a next token in their document."""
    return sum(length - 1 for row in rows for length in row)
