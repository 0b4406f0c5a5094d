"""Losses over shares: what one process trains on whole documents, or a refusal by name; with `DistCACallback` and without.

`pytest -s -m slow` on this file prints the table of all cases.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_distca
from hf_distca.data.global_batches import GlobalBatches
from ranks import RankPool
from tiny_runs import PAIRS, documents, losses, make_trainer, settings

LENGTHS = (200, 7, 1, 33, 90, 64, 12, 150, 5, 80)
TOKENS = 96  # of a global batch, on any number of ranks: two documents are longer
STEPS = 3


class Plain(Trainer):
    pass


class ReadsLabels(Trainer):
    """The commonest loss of one's own: it shifts `labels` by itself."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs["labels"]
        outputs = model(**inputs)
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        loss = cross_entropy(logits, targets, reduction="sum") * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class MeanOfLabels(ReadsLabels):
    """The same, as a mean over each rank's own targets; it takes `labels` out of what the model gets."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class ReadsShiftLabels(Trainer):
    """As the documentation says."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(**inputs)
        targets = inputs.get("shift_labels")
        if targets is None:  # of one process that has whole documents
            targets = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        loss = cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss = loss * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def loss_function(outputs: CausalLMOutputWithPast, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    assert outputs.logits is not None
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


# A Trainer, what it is told, and what a refusal on several ranks must name; None where the loss is that of one process.
CASES: dict[str, tuple[type[Trainer], dict[str, Any], str | None]] = {
    "model's loss": (Plain, {}, None),
    "compute_loss of shift_labels": (ReadsShiftLabels, {}, None),
    "label smoothing": (Plain, {"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 shifts `labels`"),
    "mean on each rank": (Plain, {"average_tokens_across_devices": False}, "average_tokens_across_devices=False"),
    "compute_loss_func": (Plain, {"compute_loss_func": loss_function}, "compute_loss_func=loss_function gets `labels`"),
    "compute_loss of labels": (ReadsLabels, {}, "gives its logits no gradient"),
    "mean of labels": (MeanOfLabels, {}, "gives its logits no gradient"),
}
Outcome = list[float] | str


def run(rank: int, ranks: int, names: list[str]) -> dict[tuple[str, bool], Outcome]:
    """Losses and norms of gradients, or the refusal, of each case with and without the callback."""
    return {(name, watched): train(ranks, name, watched) for name, watched in product(names, (True, False))}


def train(ranks: int, name: str, watched: bool) -> Outcome:
    kind, changes, _ = CASES[name]
    hf_distca.configure(settings())
    shares = hf_distca.document_shares(
        [{"input_ids": ids} for ids in documents(*LENGTHS)],
        TOKENS // ranks,
        shapes=[(PAIRS.shape, None)],
        ranks=ranks,
        device="cpu",
        config=settings(),
    )
    return outcome(kind, "distca", shares, changes, watched)


def outcome(kind: type[Trainer], implementation: str, data: Any, changes: dict[str, Any], watched: bool) -> Outcome:
    arguments = {"bf16": False, **changes}
    function = arguments.pop("compute_loss_func", None)
    trainer = make_trainer(
        implementation, data, kind=kind, config=settings(), max_steps=STEPS, train_sampling_strategy="sequential", **arguments
    )
    trainer.compute_loss_func = function
    if not watched:
        trainer.remove_callback(hf_distca.DistCACallback)
    try:
        trainer.train()
    except hf_distca.UnsupportedError as error:
        return str(error)
    return losses(trainer)


@cache
def one_process(name: str) -> Outcome:
    """The same global batches as whole documents, under transformers' own attention."""
    kind, changes, _ = CASES[name]
    batches, texts = GlobalBatches(LENGTHS, TOKENS, quiet=True), documents(*LENGTHS)
    rows = []
    for number in range(STEPS):
        pieces = batches.pieces(0, number)
        columns = np.stack([pieces.documents, pieces.starts, pieces.ends], axis=1).tolist()
        rows.append({"documents": [texts[document][start:end] for document, start, end in columns]})
    return outcome(kind, "sdpa", rows, changes, watched=False)


def told(found: Outcome, expected: Outcome) -> str:
    """A cell of the table."""
    if isinstance(found, str):
        return "refused"
    return "equal" if found == pytest.approx(expected, rel=1e-4) else f"DIFFERS: {found}, not {expected}"


@pytest.mark.parametrize(
    ("counts", "names"),
    [
        pytest.param([2], ["model's loss", "label smoothing", "mean on each rank", "compute_loss of labels"], id="two ranks"),
        pytest.param([1, 2, 3], list(CASES), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_loss_over_shares_is_that_of_one_process_or_refused(
    rank_pool: Callable[[int], RankPool], counts: list[int], names: list[str]
) -> None:
    by_ranks = {ranks: run(0, 1, names) if ranks == 1 else rank_pool(ranks)(run, ranks, names)[0] for ranks in counts}
    print("", f"{'loss':<30}{'callback':<10}" + "".join(f"{f'{ranks} ranks':<10}" for ranks in counts), sep="\n")  # noqa: T201
    wrong = []
    for name, watched in product(names, (True, False)):
        found = {ranks: outcomes[name, watched] for ranks, outcomes in by_ranks.items()}
        cells = {ranks: told(value, one_process(name)) for ranks, value in found.items()}
        print(f"{name:<30}{'yes' if watched else 'no':<10}" + "".join(f"{cell:<10}" for cell in cells.values()))  # noqa: T201
        for ranks, cell in cells.items():
            named = CASES[name][2] if ranks > 1 else None
            if cell != ("refused" if named else "equal") or (named and named not in found[ranks]):
                wrong.append((name, watched, ranks, found[ranks]))
    assert not wrong


def metrics(prediction: Any) -> dict[str, float]:
    logits, targets = prediction.predictions, prediction.label_ids
    kept = targets != -100
    return {"right": float(((logits.argmax(-1) == targets) & kept).sum()), "targets": float(kept.sum())}


def evaluate(rank: int, ranks: int, names: list[str] | None) -> dict[str, float] | str:
    config = settings(balance_evaluation=True)
    hf_distca.configure(config)
    shares = hf_distca.document_shares(
        documents(*LENGTHS), TOKENS // ranks, shapes=[(PAIRS.shape, None)], ranks=ranks, device="cpu", config=config, seed=None
    )
    trainer = make_trainer("distca", shares, config=config, eval_dataset=shares, label_names=names)
    trainer.compute_metrics = metrics
    try:
        found = trainer.evaluate()
    except hf_distca.UnsupportedError as error:
        return str(error)
    return {name: found[f"eval_{name}"] for name in ("loss", "right", "targets")}


def test_metrics_see_the_targets_of_shares_under_their_name(rank_pool: Callable[[int], RankPool]) -> None:
    alone = evaluate(0, 1, ["shift_labels"])
    assert isinstance(alone, dict)
    assert alone["targets"] > 5 * TOKENS  # but for the last token of each document
    for found in rank_pool(2)(evaluate, 2, ["shift_labels"]):
        assert found == pytest.approx(alone, rel=1e-5)
    for found in rank_pool(2)(evaluate, 2, None):
        assert 'label_names=["shift_labels"]' in found
