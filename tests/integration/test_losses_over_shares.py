"""Losses over shares: what one process trains on whole documents, or a refusal by name; with
`DistCACallback` and without.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import Trainer, default_data_collator
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_distca
from checkpointed import ARGUMENT
from hf_distca.data.global_batches import GlobalBatches
from ranks import RankPool
from tiny_runs import PAIRS, documents, losses, make_trainer, settings, tiny_llama

LENGTHS = (200, 7, 1, 33, 90, 64, 12, 150, 5, 80)
TOKENS = 96  # of a global batch, on any number of ranks: two documents are longer
STEPS = 3


class Plain(Trainer):
    pass


class OfLabels(Trainer):
    """The commonest loss of one's own: it shifts `labels` by itself, and has many forms."""

    form = "after the model"

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels, outputs = inputs["labels"], None
        bare = {
            name: inputs[name]
            for name in ("input_ids", "position_ids", "distca_documents")
            if name in inputs
        }
        if self.form == "popped":
            labels = inputs.pop("labels")
            inputs.pop("shift_labels", None)
        if self.form == "base model, then head":
            whole = self.accelerator.unwrap_model(model)
            logits = whole.lm_head(whole.model(**bare)[0])
        elif self.form == "tuple":
            logits = model(**bare, return_dict=False)[0]
        else:
            outputs = (
                model(**inputs, num_items_in_batch=num_items_in_batch)
                if self.form == "logs"
                else model(**inputs)
            )
            logits = outputs.logits
        loss = self.loss_of(logits, labels) * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def loss_of(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        return loss + 1e-3 * logits.logsumexp(-1).square().sum() if self.form == "z-loss" else loss


def form_of(name: str) -> type[Trainer]:
    return type("OfLabels", (OfLabels,), {"form": name})


class MeanOfLabels(Trainer):
    """A mean over each rank's own targets; it takes `labels` out of what the model gets."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        return cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class OwnMean(Trainer):
    """As in half of all scripts: what the model returns, without the number of targets."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class OwnMeanOfShifted(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        targets = targets_in(inputs)
        return cross_entropy(
            model(**inputs, num_items_in_batch=num_items_in_batch).logits.flatten(0, 1),
            targets.flatten(),
        )


class LogsTheNumber(Trainer):
    """It reads the number of targets, and does not divide by it."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        assert int(num_items_in_batch)
        return model(**inputs).loss


class Undone(Trainer):
    """It forgets that gradients are averaged over ranks."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


class ShiftedTwice(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        inputs["labels"] = inputs.pop("shift_labels", inputs["labels"])
        return super().compute_loss(
            model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
        )


class ReadsShiftLabels(Trainer):
    """As the documentation says."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        targets = targets_in(inputs).view(-1)
        outputs = model(**inputs)
        loss = cross_entropy(
            outputs.logits.flatten(0, 1).float(), targets, reduction="none"
        ) * self.weights(targets)
        loss = loss.sum() * self.accelerator.num_processes / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def weights(self, targets: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(targets)


class GivesWeightZero(ReadsShiftLabels):
    """Advantages, or weights of samples, that are 0 in a whole share."""

    def weights(self, targets: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(targets)


class MeanByWeights(ReadsShiftLabels):
    """Divided by the weights of all ranks, in the way that a refusal names."""

    def weights(self, targets: torch.Tensor) -> torch.Tensor:
        is_target = targets != -100
        weights = (1.0 + targets % 3) * is_target
        sums = self.accelerator.reduce(torch.stack([weights.sum(), is_target.sum()]), "sum")
        return weights * sums[1] / sums[0]


class WithAnotherTerm(Trainer):
    """The model's loss, and a z-loss of its logits, which is a sum over the tokens of all ranks,
    too.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        loss, outputs = super().compute_loss(
            model, inputs, True, num_items_in_batch=num_items_in_batch
        )
        more = outputs.logits.float().logsumexp(-1).square()[targets_in(inputs) != -100].sum()
        loss = loss + 1e-3 * more * self.accelerator.num_processes / num_items_in_batch.item()
        return (loss, outputs) if return_outputs else loss


class TwoAhead(Trainer):
    """A head for the token after the next: it shifts once more."""

    roll = False

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        targets, logits = targets_in(inputs), model(**inputs).logits
        if self.roll:
            loss = cross_entropy(logits.flatten(0, 1), targets.roll(-1, -1).flatten())
        else:
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[..., 1:].flatten())
        return loss * self.accelerator.num_processes / num_items_in_batch


class TwoAheadByRoll(TwoAhead):
    roll = True


class DividesByItself(Trainer):
    """The model's sum, made of its mean."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        own = (targets_in(inputs) != -100).sum()
        loss = model(**inputs).loss
        loss = loss.nan_to_num() * own  # a share without targets has none
        return loss / int(num_items_in_batch) * self.accelerator.num_processes


class OfNoTargets(Trainer):
    """As distillation does, here from a teacher who knows nothing; means over tokens, of which
    ranks have equally many.
    """

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any
    ) -> Any:
        with torch.no_grad():
            assert self.accelerator.unwrap_model(model)(**inputs).loss is not None
        inputs.pop("labels")
        return -model(**inputs).logits.float().log_softmax(-1).mean()


class NamedArguments(Trainer):
    """It hands on what it knows of a batch."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits
        loss = cross_entropy(
            logits.flatten(0, 1).float(), targets_in(inputs).flatten(), reduction="sum"
        )
        return loss * self.accelerator.num_processes / num_items_in_batch


def targets_in(inputs: Any) -> torch.Tensor:
    targets = inputs.get("shift_labels")
    if targets is None:  # of one process that has whole documents
        targets = torch.nn.functional.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    return targets


def loss_function(
    outputs: CausalLMOutputWithPast, labels: torch.Tensor, num_items_in_batch: Any = None
) -> torch.Tensor:
    assert outputs.logits is not None
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, targets, reduction="sum") / num_items_in_batch


FORMS = ("after the model", "popped", "z-loss", "tuple", "base model, then head", "logs")
NOT_OF_TARGETS = "OfLabels.compute_loss is not made of `shift_labels`: it reads `labels`"
# A Trainer, what it is told, and what a refusal on several ranks must name; None where the loss is
# that of one process.
CASES: dict[str, tuple[type[Trainer], dict[str, Any], str | None]] = {
    "model's loss": (Plain, {}, None),
    "compute_loss of shift_labels": (ReadsShiftLabels, {}, None),
    "compute_loss of weight 0": (GivesWeightZero, {}, None),
    "compute_loss by weights": (MeanByWeights, {}, None),
    "compute_loss with another term": (WithAnotherTerm, {}, None),
    "compute_loss of the model's mean": (DividesByItself, {}, None),
    "compute_loss of no targets": (OfNoTargets, {}, None),
    "activation checkpointing": (WithAnotherTerm, {ARGUMENT: True}, None),
    "accumulation": (Plain, {"gradient_accumulation_steps": 2}, None),
    "label smoothing": (
        Plain,
        {"label_smoothing_factor": 0.1},
        "label_smoothing_factor=0.1 shifts `labels`",
    ),
    "mean on each rank": (
        Plain,
        {"average_tokens_across_devices": False},
        "average_tokens_across_devices=False",
    ),
    "compute_loss_func": (
        Plain,
        {"compute_loss_func": loss_function},
        "compute_loss_func=loss_function gets `labels`",
    ),
    **{f"compute_loss of labels, {form}": (form_of(form), {}, NOT_OF_TARGETS) for form in FORMS},
    "mean of labels": (MeanOfLabels, {}, "MeanOfLabels.compute_loss is not made of `shift_labels`"),
    "shift_labels for labels": (
        ShiftedTwice,
        {},
        "ShiftedTwice.compute_loss is not made of `shift_labels`",
    ),
    "the model's mean": (
        OwnMean,
        {},
        "OwnMean.compute_loss is not divided by `num_items_in_batch`",
    ),
    "the model's mean, number read": (
        LogsTheNumber,
        {},
        "LogsTheNumber.compute_loss is not divided by `num_items_in_batch`",
    ),
    "mean of shift_labels": (
        OwnMeanOfShifted,
        {},
        "OwnMeanOfShifted.compute_loss is not divided by `num_items_in_batch`",
    ),
    "named arguments": (
        NamedArguments,
        {},
        "called with input_ids and position_ids, but without distca_documents",
    ),
    "two tokens ahead": (TwoAhead, {}, "the loss shifts `shift_labels`"),
    "two tokens ahead, roll": (TwoAheadByRoll, {}, "the loss shifts `shift_labels`"),
    "the model's part": (Undone, {}, "Undone.compute_loss is the model's loss, unchanged"),
}
# Autocast to bfloat16 is what users have, and DDP as the Trainer sets it up.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True, "ddp_find_unused_parameters": None},
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-3}
Case = tuple[str, str, bool]  # name, precision, with the callback
ALL: list[Case] = list(product(CASES, PRECISIONS, (True, False)))
# In every run those that people write have the callback and have it not, and of each reason for a
# refusal there is one.
COMMON_ONES = (
    "compute_loss of labels, after the model",
    "compute_loss of labels, popped",
    "the model's mean",
)
OTHER_FORMS = [f"compute_loss of labels, {form}" for form in FORMS[2:]]
FEW = [
    (name, "bfloat16", watched)
    for name in CASES
    for watched in (True, False)
    if name in COMMON_ONES or (CASES[name][2] and not watched and name not in OTHER_FORMS)
]
RIGHT = (
    "model's loss",
    "compute_loss of weight 0",
    "compute_loss by weights",
    "compute_loss with another term",
    "compute_loss of no targets",
)
FEW += [(name, "bfloat16", True) for name in RIGHT]
Outcome = list[float] | str


def run(rank: int, ranks: int, cases: list[Case]) -> dict[Case, Outcome]:
    """Losses and norms of gradients, or the refusal, of each case."""
    return {case: train(ranks, *case) for case in cases}


def train(ranks: int, name: str, precision: str, watched: bool) -> Outcome:
    kind, changes, _ = CASES[name]
    hf_distca.configure(settings())
    shares = hf_distca.document_shares(
        [{"input_ids": ids} for ids in documents(*LENGTHS)],
        TOKENS // ranks,
        fill="cut",
        shapes=[(PAIRS.shape, None)],
        ranks=ranks,
        device="cpu",
        config=settings(),
    )
    return outcome(kind, "distca", shares, changes | PRECISIONS[precision], watched)


def outcome(
    kind: type[Trainer], implementation: str, data: Any, changes: dict[str, Any], watched: bool
) -> Outcome:
    arguments = {"bf16": False, **changes}
    function = arguments.pop("compute_loss_func", None)
    trainer = make_trainer(
        implementation,
        data,
        kind=kind,
        config=settings(),
        max_steps=STEPS,
        train_sampling_strategy="sequential",
        **arguments,
    )
    trainer.compute_loss_func = function
    if not watched:
        trainer.remove_callback(hf_distca.DistCACallback)
    try:
        trainer.train()
    except hf_distca.UnsupportedError as error:
        assert not trainer.state.global_step, "before a step is taken"
        assert not losses(trainer), "and before a row is logged"
        return str(error)
    assert "compute_loss" not in vars(trainer), "nothing stays"
    return losses(trainer)


@cache
def one_process(name: str, precision: str) -> Outcome:
    """The same global batches as whole documents, under transformers' own attention."""
    kind, changes, _ = CASES[name]
    steps = STEPS * changes.get("gradient_accumulation_steps", 1)
    batches, texts = GlobalBatches(LENGTHS, TOKENS, quiet=True), documents(*LENGTHS)
    rows = []
    for number in range(steps):
        pieces = batches.get_pieces(0, number)
        columns = np.stack([pieces.documents, pieces.starts, pieces.ends], axis=1).tolist()
        rows.append({"documents": [texts[document][start:end] for document, start, end in columns]})
    return outcome(kind, "sdpa", rows, changes | PRECISIONS[precision], watched=False)


def told(found: Outcome, case: Case) -> str:
    """Whether a loss is that of one process."""
    name, precision, _ = case
    if isinstance(found, str):
        return "refused"
    expected, every = one_process(name, precision), 2 if precision == "bfloat16" else 1
    # AdamW makes steps of equal size of gradients that are rounding: in half precision, norms are
    # far apart after one of them.
    equal = found[::every] == pytest.approx(expected[::every], rel=TOLERANCE[precision])
    return "equal" if equal else f"DIFFERS: {found}, not {expected}"


@pytest.mark.parametrize(
    ("counts", "cases"),
    [
        pytest.param([2], FEW, id="two ranks"),
        pytest.param([1, 2, 3], ALL, id="all", marks=pytest.mark.slow),
    ],
)
def test_a_loss_over_shares_is_that_of_one_process_or_refused(
    rank_pool: Callable[[int], RankPool], counts: list[int], cases: list[Case]
) -> None:
    by_ranks = {
        ranks: run(0, 1, cases) if ranks == 1 else rank_pool(ranks)(run, ranks, cases)[0]
        for ranks in counts
    }
    wrong = []
    for case in cases:
        name = case[0]
        found = {ranks: outcomes[case] for ranks, outcomes in by_ranks.items()}
        cells = {ranks: told(value, case) for ranks, value in found.items()}
        for ranks, cell in cells.items():
            if ranks == 1 and issubclass(CASES[name][0], (ShiftedTwice, TwoAhead)):
                continue  # it does something else with whole documents
            named = CASES[name][2] if ranks > 1 else None
            if cell != ("refused" if named else "equal") or (named and named not in found[ranks]):
                wrong.append((case, ranks, found[ranks]))
    assert not wrong


@pytest.mark.parametrize("watched", [True, False])
def test_evaluation_of_shares_is_checked_before_training(watched: bool) -> None:
    """With the callback as soon as the Trainer is made, else before its first step."""
    hf_distca.configure(settings())
    shares = hf_distca.document_shares(
        documents(*LENGTHS), TOKENS, shapes=[(PAIRS.shape, None)], ranks=1, device="cpu"
    )
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 8,
        "train_sampling_strategy": "sequential",
    }
    make = partial(
        make_trainer,
        "distca",
        shares,
        config=settings(),
        eval_dataset={"some": shares},
        max_steps=4,
    )
    refused = pytest.raises(
        hf_distca.UnsupportedError, match=r"batches of 8\. Set per_device_eval_batch_size=1\."
    )
    if watched:
        with refused:
            make(**changes)
        return
    trainer = make(**{**changes, "per_device_eval_batch_size": 1})
    trainer.remove_callback(hf_distca.DistCACallback)
    trainer.args.per_device_eval_batch_size = 8
    with refused:
        trainer.train()
    assert not trainer.state.global_step


def test_shares_without_their_collator_are_refused_by_name() -> None:
    hf_distca.configure(settings())
    shares = hf_distca.document_shares(
        documents(*LENGTHS), TOKENS, shapes=[(PAIRS.shape, None)], ranks=1, device="cpu"
    )
    trainer = make_trainer(
        "distca", shares, config=settings(), max_steps=1, train_sampling_strategy="sequential"
    )
    trainer.data_collator = default_data_collator
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"default_data_collator cannot make batches .*PackingCollator",
    ):
        trainer.train()


class Loop:
    """A loop of one's own on two ranks, whose loss has a form."""

    def __init__(self, form: str) -> None:
        self.form = form

    def loss(self, model: Any, batch: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
        outputs = model(**batch, num_items_in_batch=items, use_cache=False)
        if self.form == "the model's":
            return outputs.loss
        if self.form == "of weight 0":
            losses = cross_entropy(
                outputs.logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="none"
            )
            return (losses * 0).sum() / items
        logits, targets = outputs.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten()
        return cross_entropy(logits, targets, reduction="sum") / items


def run_loop(rank: int, ranks: int, form: str, half: bool) -> str:
    hf_distca.configure(settings())
    shares = hf_distca.document_shares(
        documents(*LENGTHS),
        TOKENS // ranks,
        shapes=[(PAIRS.shape, None)],
        ranks=ranks,
        device="cpu",
        config=settings(),
    )
    model = tiny_llama("distca")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(2):
        batch = hf_distca.PackingCollator()([shares[ranks * step + rank]])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = Loop(form).loss(wrapped, batch, torch.tensor(90))
        try:
            loss.backward()
        except hf_distca.UnsupportedError as error:
            return str(error)
        assert type(batch["shift_labels"]) is torch.Tensor, "nothing stays"
    return "trained"


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["the model's", "of weight 0", "of labels"])
def test_losses_of_loops_of_ones_own(
    rank_pool: Callable[[int], RankPool], form: str, half: bool
) -> None:
    for found in rank_pool(2)(run_loop, 2, form, half):
        assert (
            ("gives its logits no gradient" in found) if form == "of labels" else found == "trained"
        )


def metrics(prediction: Any) -> dict[str, float]:
    logits, targets = prediction.predictions, prediction.label_ids
    kept = targets != -100
    return {
        "right": float(((logits.argmax(-1) == targets) & kept).sum()),
        "targets": float(kept.sum()),
    }


def evaluate(rank: int, ranks: int, names: list[str] | None) -> dict[str, float] | str:
    config = settings(balance_evaluation=True)
    hf_distca.configure(config)
    shares = hf_distca.document_shares(
        documents(*LENGTHS),
        TOKENS // ranks,
        shapes=[(PAIRS.shape, None)],
        ranks=ranks,
        device="cpu",
        config=config,
        seed=None,
    )
    trainer = make_trainer("distca", shares, config=config, eval_dataset=shares, label_names=names)
    trainer.compute_metrics = metrics
    try:
        found = trainer.evaluate()
    except hf_distca.UnsupportedError as error:
        return str(error)
    return {name: found[f"eval_{name}"] for name in ("loss", "right", "targets")}


def test_metrics_see_the_targets_of_shares_under_their_name(
    rank_pool: Callable[[int], RankPool],
) -> None:
    alone = evaluate(0, 1, ["shift_labels"])
    assert isinstance(alone, dict)
    assert alone["targets"] > 5 * TOKENS  # but for the last token of each document
    for found in rank_pool(2)(evaluate, 2, ["shift_labels"]):
        assert found == pytest.approx(alone, rel=1e-5)
    for found in rank_pool(2)(evaluate, 2, None):
        assert 'label_names=["shift_labels"]' in found
