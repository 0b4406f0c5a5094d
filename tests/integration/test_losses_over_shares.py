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
from ranks import RankPools
from tiny_runs import documents, losses, make_trainer, settings, share_documents, tiny_llama

LENGTHS = (200, 7, 1, 33, 90, 64, 12, 150, 5, 80)
TOKENS = 96  # of a global batch, on any number of ranks: two documents are longer
STEPS = 3


class Plain(Trainer):
    pass


def trainer_of(loss: Callable[[Any, Any, Any, Any], Any]) -> type[Trainer]:
    """A Trainer whose `compute_loss` is this function of it, a model, inputs and the number of
    targets.
    """

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = 0,
    ) -> Any:
        return loss(self, model, inputs, num_items_in_batch)

    return type(loss.__name__, (Trainer,), {"compute_loss": compute_loss})


def of_labels(form: str) -> type[Trainer]:
    """The commonest loss of one's own: it shifts `labels` by itself, and has many forms."""

    @trainer_of
    def shifts_labels(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
        labels = inputs["labels"]
        names = ("input_ids", "position_ids", "distca_documents")
        bare = {name: inputs[name] for name in names if name in inputs}
        if form == "popped":
            labels = inputs.pop("labels")
            inputs.pop("shift_labels", None)
        if form == "base model, then head":
            whole = trainer.accelerator.unwrap_model(model)
            logits = whole.lm_head(whole.model(**bare)[0])
        elif form == "tuple":
            logits = model(**bare, return_dict=False)[0]
        elif form == "logs":
            logits = model(**inputs, num_items_in_batch=items).logits
        else:
            logits = model(**inputs).logits
        loss = cross_entropy(
            logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
        )
        if form == "z-loss":
            loss = loss + 1e-3 * logits.logsumexp(-1).square().sum()
        return loss * trainer.accelerator.num_processes / items

    return shifts_labels


@trainer_of
def mean_of_labels(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """A mean over each rank's own targets; it takes `labels` out of what the model gets."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@trainer_of
def own_mean(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """As in half of all scripts: what the model returns, without the number of targets."""
    return model(**inputs).loss


@trainer_of
def own_mean_of_shifted(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    targets = targets_in(inputs)
    logits = model(**inputs, num_items_in_batch=items).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@trainer_of
def logs_the_number(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """It reads the number of targets, and does not divide by it."""
    assert int(items)
    return model(**inputs).loss


@trainer_of
def undone(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """It forgets that gradients are averaged over ranks."""
    return model(**inputs, num_items_in_batch=items).loss


@trainer_of
def shifted_twice(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    inputs["labels"] = inputs.pop("shift_labels", inputs["labels"])
    return Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=items)


def weighted(trainer: Any, model: Any, inputs: Any, items: Any, weights: Any) -> Any:
    """The loss that the documentation shows, each target weighted."""
    targets = targets_in(inputs).view(-1)
    logits = model(**inputs).logits.flatten(0, 1).float()
    loss = (cross_entropy(logits, targets, reduction="none") * weights(targets)).sum()
    return loss * trainer.accelerator.num_processes / items


@trainer_of
def reads_shift_labels(*given: Any) -> Any:
    return weighted(*given, torch.ones_like)


@trainer_of
def gives_weight_zero(*given: Any) -> Any:
    """Advantages, or weights of samples, that are 0 in a whole share."""
    return weighted(*given, torch.zeros_like)


@trainer_of
def mean_by_weights(trainer: Any, *given: Any) -> Any:
    """Divided by the weights of all ranks, in the way that a refusal names."""

    def weights(targets: torch.Tensor) -> torch.Tensor:
        is_target = targets != -100
        weights = (1.0 + targets % 3) * is_target
        sums = trainer.accelerator.reduce(torch.stack([weights.sum(), is_target.sum()]), "sum")
        return weights * sums[1] / sums[0]

    return weighted(trainer, *given, weights)


@trainer_of
def with_another_term(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """The model's loss, and a z-loss of its logits, which is a sum over the tokens of all ranks,
    too.
    """
    loss, outputs = Trainer.compute_loss(trainer, model, inputs, True, num_items_in_batch=items)
    more = outputs.logits.float().logsumexp(-1).square()[targets_in(inputs) != -100].sum()
    return loss + 1e-3 * more * trainer.accelerator.num_processes / items.item()


@trainer_of
def two_ahead(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """A head for the token after the next: it shifts once more."""
    targets, logits = targets_in(inputs), model(**inputs).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[..., 1:].flatten())
    return loss * trainer.accelerator.num_processes / items


@trainer_of
def two_ahead_by_roll(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    targets, logits = targets_in(inputs), model(**inputs).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.roll(-1, -1).flatten())
    return loss * trainer.accelerator.num_processes / items


@trainer_of
def divides_by_itself(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """The model's sum, made of its mean."""
    own = (targets_in(inputs) != -100).sum()
    loss = model(**inputs).loss
    loss = loss.nan_to_num() * own  # a share without targets has none
    return loss / int(items) * trainer.accelerator.num_processes


@trainer_of
def of_no_targets(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """As distillation does, here from a teacher who knows nothing; means over tokens, of which
    ranks have equally many.
    """
    with torch.no_grad():
        assert trainer.accelerator.unwrap_model(model)(**inputs).loss is not None
    inputs.pop("labels")
    return -model(**inputs).logits.float().log_softmax(-1).mean()


@trainer_of
def named_arguments(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """It hands on what it knows of a batch."""
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits
    targets = targets_in(inputs).flatten()
    loss = cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
    return loss * trainer.accelerator.num_processes / items


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
OF_LABELS = "not made of `shift_labels`: it reads `labels`"
UNDIVIDED = "not divided by `num_items_in_batch`"


def refused(kind: type[Trainer], why: str) -> tuple[type[Trainer], dict[str, Any], str]:
    """A case whose loss is refused on several ranks."""
    return kind, {}, f"{kind.__name__}.compute_loss is {why}"


# A Trainer, what it is told, and what a refusal on several ranks must name; None where the loss is
# that of one process.
CASES: dict[str, tuple[type[Trainer], dict[str, Any], str | None]] = {
    "model's loss": (Plain, {}, None),
    "compute_loss of shift_labels": (reads_shift_labels, {}, None),
    "compute_loss of weight 0": (gives_weight_zero, {}, None),
    "compute_loss by weights": (mean_by_weights, {}, None),
    "compute_loss with another term": (with_another_term, {}, None),
    "compute_loss of the model's mean": (divides_by_itself, {}, None),
    "compute_loss of no targets": (of_no_targets, {}, None),
    "activation checkpointing": (with_another_term, {ARGUMENT: True}, None),
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
    **{f"compute_loss of labels, {form}": refused(of_labels(form), OF_LABELS) for form in FORMS},
    "mean of labels": refused(mean_of_labels, "not made of `shift_labels`"),
    "shift_labels for labels": refused(shifted_twice, "not made of `shift_labels`"),
    "the model's mean": refused(own_mean, UNDIVIDED),
    "the model's mean, number read": refused(logs_the_number, UNDIVIDED),
    "mean of shift_labels": refused(own_mean_of_shifted, UNDIVIDED),
    "named arguments": (
        named_arguments,
        {},
        "called with input_ids and position_ids, but without distca_documents",
    ),
    "two tokens ahead": (two_ahead, {}, "the loss shifts `shift_labels`"),
    "two tokens ahead, roll": (two_ahead_by_roll, {}, "the loss shifts `shift_labels`"),
    "the model's part": refused(undone, "the model's loss, unchanged"),
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
    shares = share_documents(LENGTHS, TOKENS, ranks, fill="cut")
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
    rank_pool: RankPools, counts: list[int], cases: list[Case]
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
            if ranks == 1 and CASES[name][0] in (shifted_twice, two_ahead, two_ahead_by_roll):
                continue  # it does something else with whole documents
            named = CASES[name][2] if ranks > 1 else None
            if cell != ("refused" if named else "equal") or (named and named not in found[ranks]):
                wrong.append((case, ranks, found[ranks]))
    assert not wrong


@pytest.mark.parametrize("watched", [True, False])
def test_evaluation_of_shares_is_checked_before_training(watched: bool) -> None:
    """With the callback as soon as the Trainer is made, else before its first step."""
    hf_distca.configure(settings())
    shares = share_documents(LENGTHS, TOKENS)
    changes = {
        "eval_strategy": "steps",
        "eval_steps": 3,
        "per_device_eval_batch_size": 8,
        "train_sampling_strategy": "sequential",
    }
    make = partial(make_trainer, "distca", shares, eval_dataset={"some": shares}, max_steps=4)
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
    shares = share_documents(LENGTHS, TOKENS)
    trainer = make_trainer("distca", shares, max_steps=1, train_sampling_strategy="sequential")
    trainer.data_collator = default_data_collator
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"default_data_collator cannot make batches .*PackingCollator",
    ):
        trainer.train()


def loss_of_loop(form: str, model: Any, batch: dict[str, Any], items: torch.Tensor) -> torch.Tensor:
    """The loss of a loop of one's own."""
    outputs = model(**batch, num_items_in_batch=items, use_cache=False)
    if form == "the model's":
        return outputs.loss
    if form == "of weight 0":
        losses = cross_entropy(
            outputs.logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="none"
        )
        return (losses * 0).sum() / items
    return loss_function(outputs, batch["labels"], items)


def run_loop(rank: int, ranks: int, form: str, half: bool) -> str:
    hf_distca.configure(settings())
    shares = share_documents(LENGTHS, TOKENS, ranks)
    model = tiny_llama("distca")
    wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(2):
        batch = hf_distca.PackingCollator()([shares[ranks * step + rank]])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = loss_of_loop(form, wrapped, batch, torch.tensor(90))
        try:
            loss.backward()
        except hf_distca.UnsupportedError as error:
            return str(error)
        assert type(batch["shift_labels"]) is torch.Tensor, "nothing stays"
    return "trained"


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["the model's", "of weight 0", "of labels"])
def test_losses_of_loops_of_ones_own(rank_pool: RankPools, form: str, half: bool) -> None:
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
    shares = share_documents(LENGTHS, TOKENS, ranks, config=config, seed=None)
    trainer = make_trainer("distca", shares, config=config, eval_dataset=shares, label_names=names)
    trainer.compute_metrics = metrics
    try:
        found = trainer.evaluate()
    except hf_distca.UnsupportedError as error:
        return str(error)
    return {name: found[f"eval_{name}"] for name in ("loss", "right", "targets")}


def test_metrics_see_the_targets_of_shares_under_their_name(rank_pool: RankPools) -> None:
    alone = evaluate(0, 1, ["shift_labels"])
    assert isinstance(alone, dict)
    assert alone["targets"] > 5 * TOKENS  # but for the last token of each document
    for found in rank_pool(2)(evaluate, 2, ["shift_labels"]):
        assert found == pytest.approx(alone, rel=1e-5)
    for found in rank_pool(2)(evaluate, 2, None):
        assert 'label_names=["shift_labels"]' in found
