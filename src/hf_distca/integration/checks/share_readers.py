"""Checks of loaders and Trainers: errors for those that give ranks wrong batches, or compute
another loss of them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import distca_configs
from hf_distca.integration.checks.reading_order import (
    Wrong,
    check_reader,
    shares_of,
    wrong_epochs,
    wrong_reading,
)
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import why_whole

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments


__all__ = ["check_dealing", "check_evaluation", "check_loader", "check_sharing"]

_log = logging.getLogger("hf_distca")


def check_loader(
    loader: object,
    *,
    model: torch.nn.Module | None = None,
    args: TrainingArguments | None = None,
    trainer: Trainer | None = None,
    evaluating: bool = False,
) -> None:
    """Raise if a loader does not give every rank its own batches and shares, or training on shares
    would differ from one process.

    Args:
        loader: prepared by accelerate or a plain one of torch; None passes.
        model: the model that trains or evaluates, if it is known.
        args: arguments of the Trainer, if there is one.
        trainer: the Trainer, if it was found.
        evaluating: whether the loader is for evaluation.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    shares = None if loader is None else shares_of(loader)
    check_reader(loader, shares is not None)
    if shares is None:
        return
    ranks = shares.deal_settings.ranks
    wrong = (
        *wrong_reading(loader, shares),
        *(() if evaluating else wrong_epochs(loader, shares)),
        *_wrong_loss(args, trainer, ranks),
        *_wrong_model(
            model,
            ranks,
            "make the shares for one rank",
            "Pack whole documents with PackingCollator instead",
        ),
        *(_wrong_evaluation(trainer) if evaluating and ranks > 1 else ()),
    )
    _refuse(f"a data set of shares for {ranks} {'ranks' if ranks > 1 else 'rank'}", wrong)


def check_evaluation(trainer: Trainer) -> None:
    """Raise before training if a Trainer would not evaluate its evaluation sets of shares as one
    process does.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    given = trainer.eval_dataset
    for dataset in given.values() if isinstance(given, dict) else (given,):
        shares = shares_of(dataset)
        if shares is None:
            continue
        rows, ranks = trainer.args.per_device_eval_batch_size, shares.deal_settings.ranks
        wrong = (
            []
            if rows == 1
            else [f"evaluation would take batches of {rows}. Set per_device_eval_batch_size=1."]
        )
        wrong += _wrong_evaluation(trainer) if ranks > 1 else ()
        _refuse(f"an eval_dataset of shares for {ranks} {'ranks' if ranks > 1 else 'rank'}", wrong)


def check_sharing(trainer: Trainer, ranks: int) -> None:
    """Raise if a Trainer would train differently on micro-batches that `share_tokens` deals than on
    those its ranks drew.

    Args:
        trainer: the Trainer, before it trains.
        ranks: number of ranks of the attention group; a single one keeps its own batches.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    whole = "leave shares_tokens out"
    wrong = (
        *_wrong_loss(trainer.args, trainer, ranks),
        *_wrong_model(trainer.model, ranks, whole, f"To keep them whole, {whole}"),
    )
    _refuse(f"shares_tokens = True, which deals what {ranks} ranks have drawn among them", wrong)


def check_dealing(trainer: Trainer, ranks: int, evaluating: bool) -> None:
    """Raise if a Trainer would not train, or evaluate, on documents dealt to `ranks` ranks as one
    process would.

    Raises:
        UnsupportedError: names the cause, and the setting to change.
    """
    whole = "Train without hf_distca.deal, which keeps documents whole"
    wrong = (
        *_wrong_loss(trainer.args, trainer, ranks),
        *_wrong_model(trainer.model, ranks, "train without hf_distca.deal", whole),
        *(_wrong_evaluation(trainer) if evaluating and ranks > 1 else ()),
    )
    _refuse(f"hf_distca.deal for {ranks} ranks", wrong)


def _refuse(what: str, wrong: Sequence[str]) -> None:
    if wrong:
        raise UnsupportedError(f"{what}, and {wrong[0]}")


def _wrong_loss(args: TrainingArguments | None, trainer: Trainer | None, ranks: int) -> Wrong:
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


def _wrong_model(model: torch.nn.Module | None, ranks: int, alone: str, whole: str) -> Wrong:
    """Yield reasons why a model would compute a cut document differently; `alone` and `whole` are
    remedies.
    """
    if model is None or ranks == 1:
        return
    configs = distca_configs(model)
    if not configs:
        yield (
            f'no part of {type(model).__name__} has attn_implementation="distca": other attention'
            f" sees no more than one rank. Load the model with it, or {alone}."
        )
    for config in configs:
        if (why := why_whole(config.model_type)) is not None:
            yield f"{config.model_type} models need whole documents: {why}. {whole}."
    for part in model.modules():
        adapters = getattr(part, "peft_config", None)
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            if getattr(adapter, "is_prompt_learning", False):
                name = getattr(adapter.peft_type, "value", adapter.peft_type)
                yield (
                    f"{name} puts virtual tokens in front of the tokens of every rank. Use another"
                    " adapter, such as LoRA."
                )


def _wrong_evaluation(trainer: Trainer | None) -> Wrong:
    if not current_session().config.balance_evaluation:
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
