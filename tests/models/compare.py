"""Compares a tiny model under distca with each document alone under transformers' own attention.

A document that runs alone needs no mask against other documents, so the reference has no masking
mistakes. Tolerances are relative to norms: in float64, models still differ because they round
parts of their layers to float32. A leaked document, a wrong window or scale, or a dropped sink
changes the logits by more than 1e-3.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import transformers
from tiny import FIRST_ORDINARY_TOKEN, VOCABULARY, build
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, PreTrainedModel

from hf_distca import PackingCollator
from hf_distca.integration import attention_names, families
from hf_distca.integration.hooks.positions import find_first_position

PACKED = (23, 1, 40, 9)  # tokens of the documents of a packed row
ROWS = (24, 24, 24)  # tokens of the documents of a batch of full rows
TOLERANCE = {torch.float64: 1e-5, torch.float32: 2e-4}


@dataclass
class Calls:
    """The calls of an attention function."""

    count: int = 0
    variants: set[str] = field(default_factory=set)
    modules: set[torch.nn.Module] = field(default_factory=set)

    def idle(self, model: PreTrainedModel) -> list[str]:
        """List modules that did not call, although modules of the same type did."""
        kinds = {type(module) for module in self.modules}
        modules = [
            (name, module) for name, module in model.named_modules() if "encoder_attn" not in name
        ]
        return [
            name for name, module in modules if type(module) in kinds and module not in self.modules
        ]


@dataclass
class Outcome:
    """The results of forward and backward with several documents."""

    loss: float
    logits: list[torch.Tensor]
    grads: dict[str, torch.Tensor | None]


def documents(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Make documents of random tokens, always with the same seed."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(FIRST_ORDINARY_TOKEN, VOCABULARY, (n,), generator=generator) for n in lengths
    ]


@contextmanager
def spy_on(name: str) -> Iterator[Calls]:
    """Count the calls of an attention function while the block runs."""
    calls, known = Calls(), AttentionInterface._global_mapping
    original = known[name]

    def spy(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.count += 1
        calls.modules.add(module)
        given = dict(zip(("query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
        calls.variants |= _find_variants(
            given["query"], given["key"], given["value"], given.get("attention_mask"), kwargs
        )
        return original(module, *args, **kwargs)

    # Without this entry, distca would refuse its replaced function.
    ours = {name: spy} if name in attention_names._registered else {}
    with patch.dict(known, {name: spy}), patch.dict(attention_names._registered, ours):
        yield calls


def _find_variants(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, kwargs: dict[str, Any]
) -> set[str]:
    found = {
        "window": (
            kwargs.get("sliding_window") is not None or getattr(mask, "window", None) is not None
        ),
        "chunks": getattr(mask, "chunk", None) is not None,
        "softcap": kwargs.get("softcap") is not None,
        "sinks": kwargs.get("s_aux") is not None,
        "k and v widths differ": k.shape[-1] != v.shape[-1],
        "GQA": 1 < k.shape[1] < q.shape[1],
        "MQA": k.shape[1] == 1 < q.shape[1],
        "own scale": (
            kwargs.get("scaling") is not None
            and abs(kwargs["scaling"] - q.shape[-1] ** -0.5) > 1e-9
        ),
    }
    return {name for name, present in found.items() if present}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers and distca, because many models log warnings."""
    level, ours = transformers.logging.get_verbosity(), logging.getLogger("hf_distca")
    our_level = ours.level
    transformers.logging.set_verbosity_error()
    ours.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        transformers.logging.set_verbosity(level)
        ours.setLevel(our_level)


@contextmanager
def without_table() -> Iterator[None]:
    """Let refused families run, so that results do not depend on the table."""
    with (
        patch.object(families, "FAMILIES", {}),
        patch.object(families, "WHOLE_DOCUMENT_FAMILIES", {}),
    ):
        yield


def takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model takes position ids, by name or as further keyword arguments."""
    parameters = inspect.signature(model.forward).parameters.values()
    return takes(model, "position_ids") or any(p.kind == p.VAR_KEYWORD for p in parameters)


def forward(
    model: PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor | None, **extra: Any
) -> torch.Tensor:
    """Run the model, and return logits (batch, length, vocabulary)."""
    if positions is not None and takes_positions(model):
        extra["position_ids"] = positions
    if takes(model, "use_cache"):
        extra["use_cache"] = False
    out = model(input_ids=ids, **extra)
    logits = out.logits if hasattr(out, "logits") else out[0]
    if logits.shape[:2] != ids.shape:
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for ids of shape {tuple(ids.shape)}"
        )
    return logits


def summed_loss(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Sum the next-token losses of a document."""
    return cross_entropy(logits[:-1].double(), tokens[1:], reduction="sum")


def finish(model: PreTrainedModel, docs: list[torch.Tensor], pieces: list[torch.Tensor]) -> Outcome:
    loss = torch.stack(
        [summed_loss(piece, doc) for piece, doc in zip(pieces, docs, strict=True)]
    ).sum()
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return Outcome(float(loss.detach()), [piece.detach() for piece in pieces], grads)


def alone(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    """Run each document alone, with the default positions of the model."""
    return finish(model, docs, [forward(model, d[None], None)[0] for d in docs])


def count_positions(model: PreTrainedModel, length: int) -> torch.Tensor:
    """Count the positions of a document from the first position of the model."""
    return torch.arange(length) + find_first_position(model)


def packed(model: PreTrainedModel, docs: list[torch.Tensor], **extra: Any) -> Outcome:
    positions = torch.cat([count_positions(model, len(d)) for d in docs])[None]
    logits = forward(model, torch.cat(docs)[None], positions, **extra)[0]
    return finish(model, docs, list(logits.split([len(d) for d in docs])))


def packed_with_mask_of_ones(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    """Run with a mask of ones, which keeps transformers from detecting packed documents."""
    return packed(model, docs, attention_mask=torch.ones(1, sum(map(len, docs)), dtype=torch.long))


def packed_by_collator(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    """Run the batch of `PackingCollator`, which does not know the first position of the model."""
    batch = PackingCollator()([{"input_ids": d} for d in docs])
    logits = forward(
        model, batch["input_ids"], batch["position_ids"], distca_documents=batch["distca_documents"]
    )[0]
    return finish(model, docs, list(logits.split([len(d) for d in docs])))


def packed_with_numbered_mask(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    """Run with a mask that numbers documents, as some packing loaders make it."""
    numbers = torch.repeat_interleave(
        torch.arange(1, len(docs) + 1), torch.tensor([len(d) for d in docs])
    )
    return packed(model, docs, attention_mask=numbers[None])


def packed_with_dense_mask(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    """Run transformers' own attention with a dense mask, so that documents stay apart."""
    document = torch.repeat_interleave(
        torch.arange(len(docs)), torch.tensor([len(d) for d in docs])
    )
    seen = (document[:, None] == document).tril()
    mask = torch.zeros(seen.shape, dtype=model.dtype).masked_fill_(
        ~seen, torch.finfo(model.dtype).min
    )
    return packed(model, docs, attention_mask=mask[None, None])


def rows(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    positions = count_positions(model, len(docs[0])).expand(len(docs), -1)
    return finish(model, docs, list(forward(model, torch.stack(docs), positions)))


def padded(model: PreTrainedModel, docs: list[torch.Tensor]) -> Outcome:
    length = max(map(len, docs))
    ids = torch.stack(
        [torch.nn.functional.pad(d, (0, length - len(d)), value=FIRST_ORDINARY_TOKEN) for d in docs]
    )
    mask = torch.stack([(torch.arange(length) < len(d)).long() for d in docs])
    positions = count_positions(model, length).expand(len(docs), -1)
    logits = forward(model, ids, positions, attention_mask=mask)
    return finish(model, docs, [row[: len(d)] for row, d in zip(logits, docs, strict=True)])


def difference(got: Outcome, want: Outcome) -> tuple[float, str]:
    """Find the largest relative difference, and the name of the tensor."""
    worst = (abs(got.loss - want.loss) / max(abs(want.loss), 1e-9), "loss")
    for number, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        worst = max(worst, (_relative(a, b, 1e-9), f"logits of document {number}"))
    total = (
        sum(float(g.double().square().sum()) for g in want.grads.values() if g is not None) ** 0.5
    )
    for name, b in want.grads.items():
        a = got.grads[name]
        if a is None and b is None:
            continue
        a, b = (torch.zeros(1) if g is None else g for g in (a, b))
        worst = max(worst, (_relative(a, b, 1e-4 * total), f"gradient of {name}"))
    return worst


def _relative(got: torch.Tensor, want: torch.Tensor, floor: float) -> float:
    value = float((got.double() - want.double()).norm()) / max(float(want.double().norm()), floor)
    return value if value == value else float("inf")


Mode = Callable[[PreTrainedModel, list[torch.Tensor]], Outcome]


def run(
    model_type: str, implementation: str, dtype: torch.dtype, mode: Mode, lengths: tuple[int, ...]
) -> tuple[Outcome, Calls]:
    """Build the model, run documents, and check which modules call attention."""
    model = build(model_type, implementation, dtype)
    if implementation == "eager":
        return mode(model, documents(lengths)), Calls()
    with spy_on(implementation) as calls:
        outcome = mode(model, documents(lengths))
    if idle := calls.idle(model):
        raise RuntimeError(
            f"{len(calls.modules)} attention modules called {implementation}, but not"
            f" {', '.join(idle)}"
        )
    return outcome, calls
