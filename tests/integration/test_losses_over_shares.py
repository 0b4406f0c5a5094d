"""A loss over shares is that of one process or is refused, with and without the callback."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from test_deal_trainer import LENGTHS, TOKENS
from torch.nn.functional import cross_entropy
from transformers import Trainer, default_data_collator
from transformers.modeling_outputs import CausalLMOutputWithPast

import hf_distca
from checkpointed import ARGUMENT
from hf_distca.data.global_batches import GlobalBatches
from ranks import RankPools
from tiny_runs import documents, losses, make_trainer, settings, share_documents, tiny_llama

STEPS = 3


class Plain(Trainer):
    pass


def make_trainer_class(loss: Callable[[Any, Any, Any, Any], Any]) -> type[Trainer]:
    """Make a Trainer class whose `compute_loss` calls `loss`, with the number of targets."""

    def compute_loss(
        self: Any,
        model: Any,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = 0,
    ) -> Any:
        return loss(self, model, inputs, num_items_in_batch)

    return type(loss.__name__, (Trainer,), {"compute_loss": compute_loss})


def make_labels_trainer(form: str) -> type[Trainer]:
    """Make a Trainer class with the commonest custom loss: it shifts `labels` itself, in many
    forms.
    """

    @make_trainer_class
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


@make_trainer_class
def mean_of_labels(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Compute the mean over a rank's own targets, without `labels` in the model's inputs."""
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


@make_trainer_class
def own_mean(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Return the model's loss without the number of targets, like many scripts."""
    return model(**inputs).loss


@make_trainer_class
def own_mean_of_shifted(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    targets = get_targets(inputs)
    logits = model(**inputs, num_items_in_batch=items).logits
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


@make_trainer_class
def logs_the_number(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Read the number of targets, but do not divide by it."""
    assert int(items)
    return model(**inputs).loss


@make_trainer_class
def undone(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Return the model's loss, although DDP averages gradients over ranks."""
    return model(**inputs, num_items_in_batch=items).loss


@make_trainer_class
def shifted_twice(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    inputs["labels"] = inputs.pop("shift_labels", inputs["labels"])
    return Trainer.compute_loss(trainer, model, inputs, num_items_in_batch=items)


def compute_weighted_loss(trainer: Any, model: Any, inputs: Any, items: Any, weights: Any) -> Any:
    """Compute the loss that the documentation shows, with a weight for each target."""
    targets = get_targets(inputs).view(-1)
    logits = model(**inputs).logits.flatten(0, 1).float()
    loss = (cross_entropy(logits, targets, reduction="none") * weights(targets)).sum()
    return loss * trainer.accelerator.num_processes / items


@make_trainer_class
def reads_shift_labels(*given: Any) -> Any:
    return compute_weighted_loss(*given, torch.ones_like)


@make_trainer_class
def gives_weight_zero(*given: Any) -> Any:
    """Give all targets weight 0, like advantages or sample weights that are 0 in a whole share."""
    return compute_weighted_loss(*given, torch.zeros_like)


@make_trainer_class
def mean_by_weights(trainer: Any, *given: Any) -> Any:
    """Divide by the weights of all ranks, in the way that the refusal names."""

    def weights(targets: torch.Tensor) -> torch.Tensor:
        is_target = targets != -100
        weights = (1.0 + targets % 3) * is_target
        sums = trainer.accelerator.reduce(torch.stack([weights.sum(), is_target.sum()]), "sum")
        return weights * sums[1] / sums[0]

    return compute_weighted_loss(trainer, *given, weights)


@make_trainer_class
def with_another_term(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Add a z-loss to the model's loss; both are sums over the tokens of all ranks."""
    loss, outputs = Trainer.compute_loss(trainer, model, inputs, True, num_items_in_batch=items)
    more = outputs.logits.float().logsumexp(-1).square()[get_targets(inputs) != -100].sum()
    return loss + 1e-3 * more * trainer.accelerator.num_processes / items.item()


@make_trainer_class
def two_ahead(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Predict the token after the next: the loss shifts once more."""
    targets, logits = get_targets(inputs), model(**inputs).logits
    loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets[..., 1:].flatten())
    return loss * trainer.accelerator.num_processes / items


@make_trainer_class
def two_ahead_by_roll(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    targets, logits = get_targets(inputs), model(**inputs).logits
    loss = cross_entropy(logits.flatten(0, 1), targets.roll(-1, -1).flatten())
    return loss * trainer.accelerator.num_processes / items


@make_trainer_class
def divides_by_itself(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Compute the model's sum from its mean, and divide by the number of targets."""
    own = (get_targets(inputs) != -100).sum()
    loss = model(**inputs).loss
    loss = loss.nan_to_num() * own  # a share without targets has no mean
    return loss / int(items) * trainer.accelerator.num_processes


@make_trainer_class
def of_no_targets(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Compute a mean over all tokens, like distillation; ranks have equally many tokens."""
    with torch.no_grad():
        assert trainer.accelerator.unwrap_model(model)(**inputs).loss is not None
    inputs.pop("labels")
    return -model(**inputs).logits.float().log_softmax(-1).mean()


@make_trainer_class
def named_arguments(trainer: Any, model: Any, inputs: Any, items: Any) -> Any:
    """Pass only named arguments to the model."""
    logits = model(input_ids=inputs["input_ids"], position_ids=inputs["position_ids"]).logits
    targets = get_targets(inputs).flatten()
    loss = cross_entropy(logits.flatten(0, 1).float(), targets, reduction="sum")
    return loss * trainer.accelerator.num_processes / items


def get_targets(inputs: Any) -> torch.Tensor:
    targets = inputs.get("shift_labels")
    if targets is None:  # in one process with whole documents
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


def refuse(kind: type[Trainer], why: str) -> tuple[type[Trainer], dict[str, Any], str]:
    """Make a case whose loss is refused on several ranks."""
    return kind, {}, f"{kind.__name__}.compute_loss is {why}"


# By case: a Trainer class, its arguments, and the error on several ranks; None if the loss must
# equal that of one process.
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
    **{
        f"compute_loss of labels, {form}": refuse(make_labels_trainer(form), OF_LABELS)
        for form in FORMS
    },
    "mean of labels": refuse(mean_of_labels, "not made of `shift_labels`"),
    "shift_labels for labels": refuse(shifted_twice, "not made of `shift_labels`"),
    "the model's mean": refuse(own_mean, UNDIVIDED),
    "the model's mean, number read": refuse(logs_the_number, UNDIVIDED),
    "mean of shift_labels": refuse(own_mean_of_shifted, UNDIVIDED),
    "named arguments": (
        named_arguments,
        {},
        "called with input_ids and position_ids, but without distca_documents",
    ),
    "two tokens ahead": (two_ahead, {}, "the loss shifts `shift_labels`"),
    "two tokens ahead, roll": (two_ahead_by_roll, {}, "the loss shifts `shift_labels`"),
    "the model's part": refuse(undone, "the model's loss, unchanged"),
}
# Most users have autocast to bfloat16, and the Trainer's own settings of DDP.
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": True, "ddp_find_unused_parameters": None},
}
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-3}
Case = tuple[str, str, bool]  # name, precision, with the callback
ALL: list[Case] = list(product(CASES, PRECISIONS, (True, False)))
# Each run has the common losses with and without the callback, and a loss for each reason of
# refusal.
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
    """Train each case; return losses and gradient norms, or the refusal."""
    return {case: train(ranks, *case) for case in cases}


def train(ranks: int, name: str, precision: str, watched: bool) -> Outcome:
    kind, changes, _ = CASES[name]
    hf_distca.configure(settings())
    shares = share_documents(LENGTHS, TOKENS, ranks, fill="cut")
    return train_case(kind, "distca", shares, changes | PRECISIONS[precision], watched)


def train_case(
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
    assert "compute_loss" not in vars(trainer), "compute_loss is restored"
    return losses(trainer)


@cache
def train_alone(name: str, precision: str) -> Outcome:
    """Train one process on the same global batches of whole documents, under sdpa."""
    kind, changes, _ = CASES[name]
    steps = STEPS * changes.get("gradient_accumulation_steps", 1)
    batches, texts = GlobalBatches(LENGTHS, TOKENS, quiet=True), documents(*LENGTHS)
    rows = []
    for number in range(steps):
        pieces = batches.get_pieces(0, number)
        columns = np.stack([pieces.documents, pieces.starts, pieces.ends], axis=1).tolist()
        rows.append({"documents": [texts[document][start:end] for document, start, end in columns]})
    return train_case(kind, "sdpa", rows, changes | PRECISIONS[precision], watched=False)


def compare_outcome(found: Outcome, case: Case) -> str:
    """Compare an outcome with that of one process."""
    name, precision, _ = case
    if isinstance(found, str):
        return "refused"
    expected, every = train_alone(name, precision), 2 if precision == "bfloat16" else 1
    # AdamW makes full steps from gradients that are only rounding errors, so in bfloat16 gradient
    # norms differ after one step.
    equal = found[::every] == pytest.approx(expected[::every], rel=TOLERANCE[precision])
    return "equal" if equal else f"DIFFERS: {found}, not {expected}"


@pytest.mark.parametrize(
    ("counts", "cases"),
    [
        pytest.param([2], FEW, id="two ranks"),
        pytest.param([1, 2, 3], ALL, id="all", marks=pytest.mark.slow),
    ],
)
def test_loss_over_shares_equals_that_of_one_process_or_is_refused(
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
        cells = {ranks: compare_outcome(value, case) for ranks, value in found.items()}
        for ranks, cell in cells.items():
            if ranks == 1 and CASES[name][0] in (shifted_twice, two_ahead, two_ahead_by_roll):
                continue  # this loss means something else on whole documents
            named = CASES[name][2] if ranks > 1 else None
            if cell != ("refused" if named else "equal") or (named and named not in found[ranks]):
                wrong.append((case, ranks, found[ranks]))
    assert not wrong


@pytest.mark.parametrize("watched", [True, False])
def test_evaluation_of_shares_is_checked_before_training(watched: bool) -> None:
    """The check runs when the Trainer is made with the callback, or before the first step."""
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


def test_shares_with_another_data_collator_are_refused_by_name() -> None:
    hf_distca.configure(settings())
    shares = share_documents(LENGTHS, TOKENS)
    trainer = make_trainer("distca", shares, max_steps=1, train_sampling_strategy="sequential")
    trainer.data_collator = default_data_collator
    with pytest.raises(
        hf_distca.UnsupportedError,
        match=r"default_data_collator cannot make batches .*PackingCollator",
    ):
        trainer.train()


def compute_loop_loss(
    form: str, model: Any, batch: dict[str, Any], items: torch.Tensor
) -> torch.Tensor:
    """Compute the loss of a custom training loop."""
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
            loss = compute_loop_loss(form, wrapped, batch, torch.tensor(90))
        try:
            loss.backward()
        except hf_distca.UnsupportedError as error:
            return str(error)
        assert type(batch["shift_labels"]) is torch.Tensor, "shift_labels is a plain tensor again"
    return "trained"


@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["the model's", "of weight 0", "of labels"])
def test_custom_loop_is_refused_only_if_its_loss_reads_labels(
    rank_pool: RankPools, form: str, half: bool
) -> None:
    for found in rank_pool(2)(run_loop, 2, form, half):
        assert (
            ("gives its logits no gradient" in found) if form == "of labels" else found == "trained"
        )


def compute_metrics(prediction: Any) -> dict[str, float]:
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
    trainer.compute_metrics = compute_metrics
    try:
        found = trainer.evaluate()
    except hf_distca.UnsupportedError as error:
        return str(error)
    return {name: found[f"eval_{name}"] for name in ("loss", "right", "targets")}


def test_compute_metrics_on_shares_needs_shift_labels_in_label_names(rank_pool: RankPools) -> None:
    alone = evaluate(0, 1, ["shift_labels"])
    assert isinstance(alone, dict)
    assert alone["targets"] > 5 * TOKENS  # all tokens except the last of each document
    for found in rank_pool(2)(evaluate, 2, ["shift_labels"]):
        assert found == pytest.approx(alone, rel=1e-5)
    for found in rank_pool(2)(evaluate, 2, None):
        assert 'label_names=["shift_labels"]' in found
