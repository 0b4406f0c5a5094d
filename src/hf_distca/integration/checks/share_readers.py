"""Checks of loaders and Trainers: errors for those that give ranks wrong batches, or compute
another loss of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.checks.reading_order import (
    Reasons,
    check_dispatch,
    find_epoch_reasons,
    find_reading_reasons,
    find_shares,
)
from hf_distca.integration.families import whole_document_reason

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

    from hf_distca.config import DistCAConfig

__all__ = ["check_dealing", "check_evaluation", "check_loader", "check_sharing"]


def check_loader(
    loader: object,
    *,
    model: torch.nn.Module | None = None,
    args: TrainingArguments | None = None,
    trainer: Trainer | None = None,
    evaluation: DistCAConfig | None = None,
) -> None:
    """Raise if a loader does not give every rank its own batches and shares, or training on shares
    would differ from one process.

    Args:
        loader: prepared by accelerate or a plain one of torch; None passes.
        model: the model that trains or evaluates, if it is known.
        args: arguments of the Trainer, if there is one.
        trainer: the Trainer, if it was found.
        evaluation: settings in use, if the loader is for evaluation; None for training.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    shares = None if loader is None else find_shares(loader)
    check_dispatch(loader, shares is not None)
    if shares is None:
        return
    ranks = shares.deal_settings.ranks
    reasons = (
        *find_reading_reasons(loader, shares),
        *(find_epoch_reasons(loader, shares) if evaluation is None else ()),
        *_find_loss_reasons(args, trainer, ranks),
        *_find_model_reasons(
            model,
            ranks,
            "make the shares for one rank",
            "Pack whole documents with PackingCollator instead",
        ),
        *_find_evaluation_reasons(trainer, ranks, evaluation),
    )
    _raise_first_reason(
        f"a data set of shares for {ranks} {'ranks' if ranks > 1 else 'rank'}", reasons
    )


def check_evaluation(trainer: Trainer, config: DistCAConfig) -> None:
    """Raise before training if a Trainer would not evaluate its evaluation sets of shares as one
    process does.

    Args:
        trainer: the Trainer.
        config: settings in use.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    rows = trainer.args.per_device_eval_batch_size
    batches = f"evaluation would take batches of {rows}. Set per_device_eval_batch_size=1."
    data = trainer.eval_dataset
    for dataset in data.values() if isinstance(data, dict) else (data,):
        if (shares := find_shares(dataset)) is not None:
            ranks = shares.deal_settings.ranks
            reasons = [batches] if rows != 1 else []
            _raise_first_reason(
                f"an eval_dataset of shares for {ranks} {'ranks' if ranks > 1 else 'rank'}",
                [*reasons, *_find_evaluation_reasons(trainer, ranks, config)],
            )


def check_sharing(trainer: Trainer, ranks: int) -> None:
    """Raise if a Trainer would train differently on micro-batches that `share_tokens` deals than on
    those its ranks drew.

    Args:
        trainer: the Trainer, before it trains.
        ranks: number of ranks of the attention group; a single one keeps its own batches.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    remedy = "leave shares_tokens out"
    reasons = (
        *_find_loss_reasons(trainer.args, trainer, ranks),
        *_find_model_reasons(trainer.model, ranks, remedy, f"To keep them whole, {remedy}"),
    )
    _raise_first_reason(
        f"shares_tokens = True, which deals what {ranks} ranks have drawn among them", reasons
    )


def check_dealing(trainer: Trainer, ranks: int, evaluation: DistCAConfig | None) -> None:
    """Raise if a Trainer would not train, or evaluate, on documents dealt to `ranks` ranks as one
    process would.

    Args:
        trainer: the Trainer.
        ranks: number of ranks that share documents.
        evaluation: settings in use, if evaluation sets are dealt, too.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    whole_remedy = "Train without hf_distca.deal, which keeps documents whole"
    reasons = (
        *_find_loss_reasons(trainer.args, trainer, ranks),
        *_find_model_reasons(trainer.model, ranks, "train without hf_distca.deal", whole_remedy),
        *_find_evaluation_reasons(trainer, ranks, evaluation),
    )
    _raise_first_reason(f"hf_distca.deal for {ranks} ranks", reasons)


def _raise_first_reason(subject: str, reasons: Sequence[str]) -> None:
    if reasons:
        raise UnsupportedError(f"{subject}, and {reasons[0]}")


def _find_loss_reasons(
    args: TrainingArguments | None, trainer: Trainer | None, ranks: int
) -> Reasons:
    """Yield reasons why the loss of shares would differ from that of whole documents.

    On one rank, nothing is cut.
    """
    if ranks == 1:
        return
    missing = "`labels`, which lack the targets where documents are cut"
    if args is not None and args.label_smoothing_factor > 0:
        yield (
            f"label_smoothing_factor={args.label_smoothing_factor} shifts {missing}. Set"
            " label_smoothing_factor=0.0."
        )
    if args is not None and not args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False: each rank would divide its loss by its own number"
            " of targets, and ranks differ. Set average_tokens_across_devices=True."
        )
    if trainer is None:
        return
    if (function := trainer.compute_loss_func) is not None:
        name = getattr(function, "__name__", type(function).__name__)
        yield (
            f"compute_loss_func={name} gets {missing}. Leave it out, or override"
            " Trainer.compute_loss, which gets `shift_labels`."
        )
    if not trainer.model_accepts_loss_kwargs:
        name = type(trainer.accelerator.unwrap_model(trainer.model)).__name__
        yield (
            f"the loss of {name} is a mean over each rank's own targets"
            " (accepts_loss_kwargs=False), and ranks differ. Train its text model; or set"
            " model.accepts_loss_kwargs = True before the Trainer is made, if its loss takes"
            " num_items_in_batch."
        )


def _find_model_reasons(
    model: torch.nn.Module | None, ranks: int, local_remedy: str, whole_remedy: str
) -> Reasons:
    """Yield reasons why a model would compute a cut document differently.

    Args:
        model, ranks: the model, if it is known, and the ranks that documents are cut for.
        local_remedy, whole_remedy: how to train on one rank, and how to keep documents whole.
    """
    if model is None or ranks == 1:
        return
    configs = find_distca_configs(model)
    if not configs:
        yield (
            f'no part of {type(model).__name__} has attn_implementation="distca": other attention'
            f" sees no more than one rank. Load the model with it, or {local_remedy}."
        )
    for config in configs:
        if (reason := whole_document_reason(config.model_type)) is not None:
            yield f"{config.model_type} models need whole documents: {reason}. {whole_remedy}."
    for part in model.modules():
        adapters = getattr(part, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "is_prompt_learning", False):
                name = getattr(adapter.peft_type, "value", adapter.peft_type)
                yield (
                    f"{name} puts virtual tokens in front of the tokens of every rank. Use another"
                    " adapter, such as LoRA."
                )


def _find_evaluation_reasons(
    trainer: Trainer | None, ranks: int, config: DistCAConfig | None
) -> Reasons:
    """Yield reasons why ranks would not evaluate as one process does; none without settings."""
    if config is None or ranks == 1:
        return
    if not config.balance_evaluation:
        yield (
            "each rank evaluates alone, and has only parts of documents. Set"
            " DistCAConfig(balance_evaluation=True) if all ranks evaluate together."
        )
    if (
        trainer is not None
        and trainer.compute_metrics is not None
        and "shift_labels" not in trainer.label_names
    ):
        yield (
            f"compute_metrics gets {', '.join(trainer.label_names)}, and in shares only"
            " shift_labels hold the targets. Set"
            ' TrainingArguments(label_names=["shift_labels"]); they are shifted already.'
        )
