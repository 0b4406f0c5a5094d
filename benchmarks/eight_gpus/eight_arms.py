"""Arms: ways to place the same documents on ranks and to compute their attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.utils import is_flash_attn_3_available

from hf_distca.data.row_placement import StepPlaces
from simulator.loader_rules import assign_longest_first

Rows = list[list[int]]
# Largest share of a rank under a token cap, relative to the tokens of a row.
CAP = 1.25


@dataclass(frozen=True)
class Arm:
    """A way to run a step.

    Attributes:
        title: name in tables.
        attention: "packed" (varlen attention called by transformers), "distca", "ulysses" or
            "ring".
        place: where documents lie: "in order", "placed", "rebalanced", "capped" or "dealt".
        settings: arguments of `DistCAConfig`.
    """

    title: str
    attention: str
    place: str = "in order"
    settings: Mapping[str, Any] = field(default_factory=dict)


# The most important arm comes first.
ARMS = {
    "packed": Arm("packed varlen attention", "packed"),
    "own": Arm("kernel of hf-distca, nothing moved", "distca", settings={"balance": False}),
    "given": Arm("hf-distca, as given", "distca"),
    "dealt": Arm("hf-distca, dealt", "distca", "dealt"),
    "ping-pong": Arm("hf-distca, dealt, ping-pong", "distca", "dealt", {"ping_pong": True}),
    "nodes": Arm("hf-distca, rows placed, by half of the node", "distca", "placed"),
    "rebalance": Arm("batch_rebalance, packed", "packed", "rebalanced"),
    "capped": Arm(f"longest first, at most {CAP:g} of the tokens", "packed", "capped"),
    "ulysses": Arm("Ulysses over all ranks", "ulysses"),
    "ring": Arm("ring varlen (llama3 of ring-flash-attn)", "ring"),
}


def list_references(model_type: str) -> tuple[str, ...]:
    """List the arms that may serve as reference, the best one first.

    A hybrid needs flash-linear-attention for packed rows. hf-distca runs document by document
    without it.
    """
    return ("own",) if model_type == "qwen3_5_text" else ("packed", "own")


def find_obstacle(arm: str, config: Any, ranks: int, device: str) -> str | None:
    """Return the reason why an arm cannot be started for a model; None if it can."""
    attention, windowed = ARMS[arm].attention, config.model_type == "gpt_oss"
    hybrid = "linear_attention" in (getattr(config, "layer_types", None) or ())
    if windowed and arm == "packed" and device == "cuda" and not is_flash_attn_3_available():
        return "sinks need flash_attn_3, which is not installed"
    if hybrid and arm == "packed" and find_spec("fla") is None:
        return "packed rows need flash-linear-attention, which is not installed"
    if attention not in ("ulysses", "ring"):
        return None
    if hybrid:
        return f"{attention} gives linear attention a part of a document without its state"
    if attention == "ring":
        missing = [name for name in ("flash_attn", "ring_flash_attn") if find_spec(name) is None]
        if missing or device != "cuda":
            return f"not installed: {', '.join(missing)}" if missing else "needs a GPU"
        return "ring-flash-attn has no sinks" if windowed else None
    if windowed:
        return "each rank computes other heads, and sinks are not cut with them"
    if config.num_attention_heads % ranks:
        return f"{ranks} ranks do not divide {config.num_attention_heads} heads"
    return None


def resolve(arm: str, config: Any, ranks: int, device: str) -> Arm:
    """Return the arm as it runs for a model. Where packed attention would be wrong, the placements
    of loaders run in hf-distca's kernel, with nothing moved.
    """
    found = ARMS[arm]
    if found.attention != "packed" or arm == "packed":
        return found
    right = list_references(config.model_type)[0] == "packed"
    if right and find_obstacle("packed", config, ranks, device) is None:
        return found
    return replace(found, attention="distca", settings={"balance": False})


def count_half_node(ranks: int) -> int:
    """Return the ranks of half a node; 2 for a node of two."""
    return max(ranks // 2, 2) if ranks % 2 == 0 else ranks


def place_documents(
    rows: Rows, place: str, tokens: int, cost: Callable[[np.ndarray], np.ndarray]
) -> Rows:
    """Assign whole documents to ranks.

    Args:
        rows: lengths of the documents in each row.
        place: as `Arm.place`, except "dealt".
        tokens: tokens of a row.
        cost: maps document lengths to work, in any unit.

    Returns:
        The document numbers of each rank, counted across all rows.
    """
    ranks, numbers, lengths = (
        len(rows),
        number_documents(rows),
        np.concatenate(rows).astype(np.int64),
    )
    if place == "in order":
        return numbers
    if place == "placed":
        work = np.array([int((np.array(row, dtype=np.int64) ** 2).sum()) for row in rows])
        node = count_half_node(ranks)
        return [numbers[row] for row in StepPlaces(ranks // node, node).place(work)]
    if place == "rebalanced":
        sampler = (
            BatchRebalanceSampler(
                lengths.tolist(), len(lengths), ranks, 1, shuffle=False, rank=rank
            )
            for rank in range(ranks)
        )
        return [list(next(iter(of_rank))) for of_rank in sampler]
    bins = assign_longest_first(cost(lengths), lengths, ranks, int(CAP * tokens))
    return [np.flatnonzero(bins == rank).tolist() for rank in range(ranks)]


def number_documents(rows: Rows) -> Rows:
    """Number the documents across all rows."""
    ends = np.cumsum([len(row) for row in rows])
    return [list(range(end - len(row), end)) for row, end in zip(rows, ends.tolist(), strict=True)]


def make_tokens(number: int, length: int, step: int, vocabulary: int) -> torch.Tensor:
    """Make the tokens of a document, (length,) int64, equal on every rank."""
    generator = torch.Generator().manual_seed(1_000_003 * step + number)
    return torch.randint(0, vocabulary, (length,), generator=generator)
