"""Training loops in float64 with every way of giving documents to ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import datasets
import torch
import torch.distributed as dist
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

import hf_distca
from float64 import Float64Throughout
from tiny_runs import VOCABULARY, documents, settings

LAYERS = 2
TOKENS = 96  # of a rank in a micro-batch
# Document lengths of a micro-batch; ranks take the rows in turn.
LENGTHS = ([96], [24, 1, 23, 24, 24], [70, 26], [5, 91])


@dataclass(frozen=True)
class Exact:
    """A case of training.

    Attributes:
        model: "full" attention, "windows" in half of the layers, or "sinks".
        documents: "drawn" by each rank, "dealt", or "spanning" ranks.
        evaluated: after each step: "together", "alone" on rank 1, or "" for never.
        changes: settings of distca.
    """

    model: str = "full"
    documents: str = "drawn"
    checkpointing: bool = False
    accumulation: int = 2
    evaluated: str = ""
    steps: int = 2
    changes: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = [self.model, self.documents] + ["checkpointing"] * self.checkpointing
        said += [f"evaluated {self.evaluated}"] * bool(self.evaluated)
        return ", ".join([*said, *(f"{name}={value}" for name, value in self.changes.items())])

    @property
    def micro_batches(self) -> int:
        """Micro-batches of all steps."""
        return self.steps * self.accumulation

    @property
    def halves(self) -> int:
        """Calls of attention in a layer."""
        return 2 if self.changes.get("ping_pong") else 1


@dataclass(frozen=True)
class Outcome:
    """Losses of micro-batches summed over ranks, losses in evaluation, and final weights."""

    losses: list[float]
    evaluated: list[float]
    weights: dict[str, torch.Tensor]


def train(rank: int, case: Exact) -> Outcome:
    """Train on this rank; every rank of the world must call it."""
    # The mode does not reach backward, so recomputes would have another dtype.
    with nullcontext() if case.checkpointing else Float64Throughout():
        return _train(rank, case)


def _train(rank: int, case: Exact) -> Outcome:
    hf_distca.configure(settings(**case.changes))
    model = build_model(case.model)
    if case.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses, evaluated = [], list[float]()
    batches = _make_batches(rank, case, model)
    for _ in range(case.steps):
        micro_batches = [next(batches) for _ in range(case.accumulation)]
        for batch in micro_batches:
            loss = compute_loss(model, batch)
            loss.backward()
            losses.append(loss.detach())
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluated == "together" or (case.evaluated == "alone" and rank == 1):
            model.eval()
            with torch.no_grad():
                evaluated.append(float(compute_loss(model, draw_batch(rank, 1000))))
            model.train()
    total = torch.stack(losses)
    dist.all_reduce(total)
    return Outcome(
        total.tolist(),
        evaluated,
        {name: weight.detach().clone() for name, weight in model.named_parameters()},
    )


def build_model(kind: str) -> Any:
    torch.manual_seed(0)
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "head_dim": 16,
        "attn_implementation": "distca",
        "dtype": torch.float64,
    }
    windows = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
    if kind == "windows":
        return Gemma3ForCausalLM._from_config(Gemma3TextConfig(**shape, **windows)).train()
    if kind == "sinks":
        config = GptOssConfig(**shape, **windows, num_local_experts=2, num_experts_per_tok=1)
        return GptOssForCausalLM._from_config(config, experts_implementation="eager").train()
    return LlamaForCausalLM._from_config(LlamaConfig(**shape)).train()


def compute_loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """Compute the loss in float64, scaled so that the sum over ranks is the mean over tokens."""
    known = {
        name: batch[name]
        for name in ("input_ids", "position_ids", "distca_documents")
        if name in batch
    }
    targets = batch.get("shift_labels")
    if targets is None:
        targets = torch.nn.functional.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    logits = model(**known, use_cache=False).logits[0]
    summed = torch.nn.functional.cross_entropy(
        logits, targets[0], reduction="sum", ignore_index=-100
    )
    return summed / (TOKENS * dist.get_world_size())


def _make_batches(rank: int, case: Exact, model: Any) -> Iterator[dict[str, Any]]:
    if case.documents == "spanning":
        return (_make_spanning(rank, number) for number in range(case.micro_batches))
    if case.documents != "dealt":
        return (draw_batch(rank, number) for number in range(case.micro_batches))
    lengths = chain.from_iterable(
        [150, 7, 1, 33, 90, 64, 12, 250, 5, 80] for _ in range(2 * case.micro_batches)
    )
    rows = datasets.Dataset.from_dict({"input_ids": documents(*lengths)})
    config = settings(**case.changes)
    ranks = dist.get_world_size()
    shares = hf_distca.document_shares(
        rows, TOKENS, model=model, ranks=ranks, dtype=torch.float64, config=config, fill="cut"
    )
    return (
        hf_distca.PackingCollator()([shares[number * ranks + rank]])
        for number in range(case.micro_batches)
    )


def draw_batch(rank: int, number: int) -> dict[str, Any]:
    lengths = LENGTHS[(rank + number) % len(LENGTHS)]
    return hf_distca.PackingCollator()(
        [{"documents": documents(*lengths, seed=10 * number + rank)}]
    )


def _make_spanning(rank: int, number: int) -> dict[str, Any]:
    """Make a part of a document that lies on all ranks, and a short document."""
    part = TOKENS - 16
    long = documents(part * dist.get_world_size(), seed=number)[0]
    short = documents(16, seed=100 * number + rank)[0]
    here = long[rank * part : (rank + 1) * part]
    targets = [*long[rank * part + 1 :], -100][:part]
    positions = torch.cat([torch.arange(rank * part, (rank + 1) * part), torch.arange(16)])
    ids, labels = torch.tensor([[*here, *short]]), torch.tensor([[*targets, *short[1:], -100]])
    return {"input_ids": ids, "position_ids": positions[None], "shift_labels": labels}
