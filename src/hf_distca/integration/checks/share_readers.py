"""Checks that loaders give each rank its own share of a dealt batch, and that Trainers compute the
right loss from shares.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hf_distca.config import DistCAConfig
from hf_distca.data.shares import Shares
from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import find_distca_configs
from hf_distca.integration.checks.reading_order import (
    Cases,
    check_dispatch,
    find_reading_cases,
    find_shares,
)
from hf_distca.integration.families import whole_document_reason
from hf_distca.integration.processes import LOG, warn_once

if TYPE_CHECKING:
    from transformers import Trainer, TrainerState, TrainingArguments

    from hf_distca.agreement.dealt_share import DealtShare

# Models (with their wrappers) whose gradients were found to be averaged over ranks. This result is
# kept, because accelerate's `unwrap_model` later removes DDP from a compiled module, although the
# compiled forward still runs DDP.
_averaged_models: WeakSet[torch.nn.Module] = WeakSet()
# Remedies for errors: how to train on one rank, and how to keep documents whole.
_SHARE_REMEDIES = (
    "make the shares for one rank",
    "Pack whole documents with PackingCollator instead",
)


def check_loader(
    loader: object,
    *,
    model: torch.nn.Module | None = None,
    args: TrainingArguments | None = None,
    trainer: Trainer | None = None,
    evaluation: DistCAConfig | None = None,
) -> None:
    """Check that a loader gives each rank its own batches and shares, and that training on shares
    gives the same result as training in one process.

    Args:
        loader: a loader of torch, prepared by accelerate or not. If None, nothing is checked.
        model: the model that trains or evaluates, if it is known.
        args: arguments of the Trainer, if there is one.
        trainer: the Trainer, if it was found.
        evaluation: settings in use, if the loader is for evaluation; None for training.

    Raises:
        UnsupportedError: names the cause and the setting to change.
    """
    shares = find_shares(loader)
    check_dispatch(loader, shares is not None)
    if shares is None:
        return
    ranks = shares.deal_settings.ranks
    _raise_first(
        f"a data set of shares for {_count(ranks)}",
        find_reading_cases(loader, shares, training=evaluation is None),
        _find_loss_cases(args, trainer, ranks),
        _find_model_cases(model, ranks, *_SHARE_REMEDIES),
        _find_evaluation_cases(trainer, ranks, evaluation),
    )


def check_evaluation(trainer: Trainer | None, config: DistCAConfig) -> None:
    """Check before training that evaluation sets of shares will give a Trainer the same result as
    in one process.

    Args:
        trainer: the Trainer. If None, nothing is checked.
        config: settings in use.

    Raises:
        UnsupportedError: names the cause and the setting to change.
    """
    for dataset in _list_evaluation_sets(trainer):
        if trainer is not None and (shares := find_shares(dataset)) is not None:
            rows, ranks = trainer.args.per_device_eval_batch_size, shares.deal_settings.ranks
            _raise_first(
                f"an eval_dataset of shares for {_count(ranks)}",
                [
                    (
                        rows != 1,
                        f"evaluation would take batches of {rows}. Set"
                        " per_device_eval_batch_size=1.",
                    )
                ],
                _find_evaluation_cases(trainer, ranks, config),
            )


def warn_of_rows_not_dealt(trainer: Trainer) -> None:
    """Warn if an evaluation reads rows that are not dealt, although the Trainer has an evaluation
    set that is dealt.
    """
    if any(find_shares(rows) is not None for rows in _list_evaluation_sets(trainer)):
        warn_once(
            "this evaluation reads rows that are not dealt, though eval_dataset is dealt. The loss"
            " of this evaluation is the Trainer's mean over batches, which depends on the batch"
            " size and on the number of ranks. For the mean over all targets, evaluate"
            ' hf_distca.document_shares(rows, ..., seed=None, fill="whole").'
        )


def _list_evaluation_sets(trainer: Trainer | None) -> list[Any]:
    """List the evaluation sets of a Trainer: its single set, or all sets of a dictionary."""
    data: Any = getattr(trainer, "eval_dataset", None)
    return list(data.values()) if isinstance(data, dict) else [data]


def warn_of_other_epochs(loader: object, args: TrainingArguments, state: TrainerState) -> None:
    """Warn if a resumed training has different global batches than before. Resuming skips as many
    batches as were read before, so documents would be repeated or left out.

    The facts that determine global batches are kept in checkpoints.
    """
    shares = find_shares(loader)
    if not isinstance(shares, Shares):
        return
    saved: Any = state.stateful_callbacks
    facts: Any = {
        "seed": shares.batches.seed,
        "batches": len(loader),  # type: ignore[arg-type]  # those of one group of ranks
        "tokens": shares.deal_settings.tokens,
        "gradient_accumulation_steps": args.gradient_accumulation_steps,
    }
    before: Any = saved.get("distca_shares", "not known")
    if state.global_step and state.is_world_process_zero and before != facts:
        LOG.warning(
            "this training resumes after step %d with other global batches (before: %s, now: %s)."
            " Some documents will be repeated or skipped. Resume with the same seed (data_seed),"
            " tokens_per_rank, number of ranks, fill, gradient_accumulation_steps and documents as"
            " before.",
            *(state.global_step, before, facts),
        )
    saved["distca_shares"] = facts


def check_step(trainer: Trainer, model: torch.nn.Module, share: DealtShare | None) -> None:
    """Check that a Trainer with a data set of shares trains on shares, and that the gradients of
    ranks that share documents are averaged.

    Args:
        trainer, model: the Trainer, and its model.
        share: share of the micro-batch; None if its documents are not dealt.

    Raises:
        UnsupportedError: names the Trainer and a remedy.
    """
    if share is None and find_shares(trainer.train_dataset) is not None:
        raise UnsupportedError(
            f"the train_dataset of this {type(trainer).__name__} is dealt, but its batches are not"
            " shares: get_train_dataloader reads other rows, or a collator drops distca_documents."
            " Make get_train_dataloader read self.train_dataset with PackingCollator, or train"
            " without dealing."
        )
    if (
        share is not None
        and share.ranks > 1
        and trainer.accelerator.distributed_type.value.startswith("MULTI")
        and model not in _averaged_models
    ):
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()) or any(
            isinstance(part, DistributedDataParallel) for part in model.modules()
        ):
            _averaged_models.add(model)
            return
        raise UnsupportedError(
            f"nothing averages the gradients of {share.ranks} ranks, which share documents: the"
            f" model of this {type(trainer).__name__} is not in DistributedDataParallel. After"
            " evaluate() or predict(), transformers does not wrap it: call train() first, or"
            " evaluate with another Trainer."
        )


def check_trainer(
    trainer: Trainer,
    ranks: int,
    subject: str,
    *,
    remedies: tuple[str, str] = _SHARE_REMEDIES,
    evaluation: DistCAConfig | None = None,
) -> None:
    """Check that training and evaluation on documents dealt to ranks will give the same result as
    in one process.

    Args:
        trainer: the Trainer.
        ranks: number of ranks that share documents.
        subject: beginning of the error, which names the data.
        remedies: how to train on one rank, and how to keep documents whole.
        evaluation: settings in use, if evaluation sets are dealt as well; else None.

    Raises:
        UnsupportedError: names the cause and the setting to change.
    """
    _raise_first(
        subject,
        _find_loss_cases(trainer.args, trainer, ranks),
        _find_model_cases(trainer.model, ranks, *remedies),
        _find_evaluation_cases(trainer, ranks, evaluation),
    )


def _raise_first(subject: str, *cases: Cases) -> None:
    for is_wrong, reason in chain(*cases):
        if is_wrong:
            raise UnsupportedError(f"{subject}, and {reason}")


def _count(ranks: int) -> str:
    return f"{ranks} {'ranks' if ranks > 1 else 'rank'}"


def _find_loss_cases(args: TrainingArguments | None, trainer: Trainer | None, ranks: int) -> Cases:
    """Yield the cases in which the loss of shares would differ from the loss of whole documents. On
    one rank there are no such cases, because no document is cut.
    """
    if ranks == 1:
        return
    missing = "`labels`, which lack the targets where documents are cut"
    if args is not None:
        yield (
            args.label_smoothing_factor > 0,
            f"label_smoothing_factor={args.label_smoothing_factor} shifts {missing}. Set"
            " label_smoothing_factor=0.0.",
        )
        yield (
            not args.average_tokens_across_devices,
            "average_tokens_across_devices=False: each rank would divide its loss by its own number"
            " of targets, and ranks differ. Set average_tokens_across_devices=True.",
        )
    if trainer is not None:
        function = trainer.compute_loss_func
        yield (
            function is not None,
            f"compute_loss_func={getattr(function, '__name__', type(function).__name__)} gets"
            f" {missing}. Leave it out, or override Trainer.compute_loss, which gets"
            " `shift_labels`.",
        )
        yield (
            not trainer.model_accepts_loss_kwargs,
            f"the loss of {type(trainer.accelerator.unwrap_model(trainer.model)).__name__} is a"
            " mean over each rank's own targets (accepts_loss_kwargs=False), and ranks differ."
            " Train its text model; or set model.accepts_loss_kwargs = True before the Trainer is"
            " made, if its loss takes num_items_in_batch.",
        )


def _find_model_cases(
    model: torch.nn.Module | None, ranks: int, local_remedy: str, whole_remedy: str
) -> Cases:
    """Yield the cases in which a model would compute a cut document wrongly.

    Args:
        model: the model, if it is known.
        ranks: number of ranks to which documents are dealt.
        local_remedy, whole_remedy: how to train on one rank, and how to keep documents whole.
    """
    if model is None:
        return
    for adapters in (getattr(part, "peft_config", None) for part in model.modules()):
        for adapter in adapters.values() if isinstance(adapters, dict) else ():
            kind = getattr(adapter, "peft_type", None)
            yield (
                getattr(adapter, "is_prompt_learning", False),
                f"{getattr(kind, 'value', kind)} puts virtual tokens in front of a row, and rows"
                " hold parts of several documents. Use another adapter, such as LoRA.",
            )
    if ranks == 1:
        return
    configs = find_distca_configs(model)
    yield (
        not configs,
        f'no part of {type(model).__name__} has attn_implementation="distca": other attention'
        " sees only the tokens of one rank. Load the model with"
        f' attn_implementation="distca", or {local_remedy}.',
    )
    for config in configs:
        reason = whole_document_reason(config.model_type)
        yield reason, f"{config.model_type} models need whole documents: {reason}. {whole_remedy}."


def _find_evaluation_cases(
    trainer: Trainer | None, ranks: int, config: DistCAConfig | None
) -> Cases:
    """Yield the cases in which evaluation would differ from evaluation in one process. On one rank,
    or with None as `config`, there are no such cases.
    """
    if config is None or ranks == 1:
        return
    yield (
        not config.balance_evaluation,
        "each rank evaluates alone, and has only parts of documents. Set"
        " DistCAConfig(balance_evaluation=True) if all ranks evaluate together.",
    )
    if trainer is not None and trainer.compute_metrics is not None:
        yield (
            "shift_labels" not in trainer.label_names,
            f"compute_metrics gets {', '.join(trainer.label_names)}, and in shares only"
            " shift_labels hold the targets. Set"
            ' TrainingArguments(label_names=["shift_labels"]); they are shifted already.',
        )
