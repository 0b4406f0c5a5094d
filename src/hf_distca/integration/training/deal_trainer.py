"""`deal`, which makes an existing Trainer train on documents of any length that are dealt to its
ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast, get_args

import numpy as np
import torch
from transformers import (
    DataCollatorWithPadding,
    DefaultDataCollator,
    Trainer,
    default_data_collator,
)
from transformers.integrations.deepspeed import propagate_args_to_deepspeed

from hf_distca.agreement.dealt_share import Dealing
from hf_distca.borrowed import set_batch_size
from hf_distca.data.collator import PackingCollator, ShareCollator, read_feature_documents
from hf_distca.data.columns import InputNames, read_input_names
from hf_distca.data.global_batches import FillRule, LongerRule
from hf_distca.data.reading import read_document_lengths
from hf_distca.data.row_placement import find_row_documents
from hf_distca.data.shares import Shares, StreamedShares
from hf_distca.errors import ConfigError
from hf_distca.integration.checks.reading_order import find_shares
from hf_distca.integration.checks.replaced_parts import (
    CollatorRule,
    check_collator,
    describe_targets,
    warn_of_carried_states,
    warn_of_row_order,
)
from hf_distca.integration.checks.share_readers import check_trainer
from hf_distca.integration.processes import LOG, print_lines
from hf_distca.integration.training.callback import (
    call_before_training,
    find_or_add_callback,
    find_session,
)
from hf_distca.integration.training.document_shares import document_shares
from hf_distca.integration.training.place_rows import check_deals_documents
from hf_distca.schedule.layout import IntArray, Layout

_COMPARED_BATCHES = 4  # number of global batches for which placements are compared
_COLLATORS_OF_EQUAL_ROWS = (DataCollatorWithPadding, DefaultDataCollator)
_REPLACED_BATCHES = 64  # number of replaced batches whose imbalance is estimated
# Remedies for errors: how to train on one rank, and how to keep documents whole.
_REMEDIES = (
    "train without hf_distca.deal",
    "Train without hf_distca.deal, which keeps documents whole",
)
# Attribute in which `deal` keeps the train_sampling_strategy that it replaces in the arguments.
_STRATEGY_BEFORE = "distca_strategy_before"
_PACKED_COLUMNS = {"seq_lengths", "position_ids"}  # columns that mark the documents of a row

AnyTrainer = TypeVar("AnyTrainer", bound=Trainer)


def deal(
    trainer: AnyTrainer,
    tokens_per_rank: int,
    *,
    evaluation: bool = False,
    fill: FillRule | None = None,
    longer: LongerRule = "cut",
    collator: CollatorRule = "check",
) -> AnyTrainer:
    """Deal the documents of a Trainer to its ranks, so that a document may be longer than one rank
    holds.

    Call it after the Trainer is made and before its ``train()``, on every rank, with the same
    arguments. All ranks together then train on global batches of ``ranks * tokens_per_rank``
    tokens, as `document_shares` describes them. The Trainer keeps its model, seed, dtype,
    accumulation, epochs and workers. Its data set, collator, batch size (one share) and order of
    reading change, and `DistCACallback` is added if it is missing. The settings are those of the
    callback, or of `hf_distca.configure`.

    Each row with ``input_ids`` is a document. ``labels``, ``completion_mask`` and
    ``assistant_masks`` define its targets, as before. Rows that are already packed (they have
    ``seq_lengths`` or ``position_ids``) are unpacked first.

    Args:
        trainer: a Trainer of transformers, TRL's `SFTTrainer`, or a subclass.
        tokens_per_rank: tokens of each rank in a micro-batch. It replaces the batch size.
        evaluation: whether to deal the evaluation set as well. The set keeps its order, and all
            ranks evaluate together.
        fill: ``"whole"`` for whole documents and some padding, ``"cut"`` to fill global batches to
            the token. By default shuffled documents stay whole, and documents that are read in
            order or from a stream are cut.
        longer: whether documents that are longer than a global batch are cut (``"cut"``) or refused
            (``"refuse"``).
        collator: ``"replace"`` to replace any collator. By default `deal` refuses a collator that
            it does not know, because the collator may decide which tokens are targets. The usual
            collators of transformers and TRL are always replaced, because `deal` reads rows in the
            same way.

    Returns:
        The same Trainer.

    Raises:
        ConfigError: if an argument is out of its range, if the Trainer has no documents to deal, or
            if they are dealt already.
        UnsupportedError: if the result would differ from training in one process. The error names
            a remedy.
        LayoutError: if rows are not documents.
    """
    check_deals_documents(trainer)
    args, rows = trainer.args, trainer.train_dataset
    if rows is None or find_shares(rows) is not None:
        raise ConfigError(
            f"the train_dataset of this {type(trainer).__name__} is"
            f" {'dealt already' if rows is not None else None}: call hf_distca.deal once, on a"
            " Trainer with documents."
        )
    if collator not in get_args(CollatorRule):
        raise ConfigError(
            f"collator={collator!r} must be {' or '.join(map(repr, get_args(CollatorRule)))}."
        )
    check_collator(trainer, collator)
    config = find_session(trainer).config
    if evaluation:
        config = replace(config, balance_evaluation=True)
    make = partial(
        document_shares,
        tokens_per_rank=tokens_per_rank,
        model=trainer.model,
        dtype=torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None,
        config=config,
    )
    documents = _read_documents(trainer, rows)
    facts: dict[str, Any] = {}  # stays empty for a stream, whose documents are not known
    if hasattr(documents, "__len__"):
        facts = {
            "seed": _choose_seed(args),
            "lengths": read_document_lengths(documents, quiet=not trainer.is_world_process_zero()),
        }
    dataset = make(documents, fill=fill, longer=longer, **facts)
    shares = cast("Shares | StreamedShares", find_shares(dataset))
    ranks = shares.deal_settings.ranks
    check_trainer(
        trainer,
        ranks,
        f"hf_distca.deal for {ranks} ranks",
        remedies=_REMEDIES,
        evaluation=config if evaluation else None,
    )
    eval_dataset = (
        _deal_evaluation(trainer, partial(make, seed=None, fill="whole", longer=longer))
        if evaluation
        else None
    )
    targets = describe_targets(documents, len(facts["lengths"])) if facts else ""
    # All checks have passed. Nothing was changed until here, so an error leaves the Trainer as it
    # was.
    warn_of_row_order(trainer)
    warn_of_carried_states(trainer.model)
    steps_before = _count_steps(trainer, rows) if facts else 0
    imbalance = (
        _estimate_batches(
            args, rows, facts["lengths"] if documents is rows else None, shares.deal_settings
        )
        if facts
        else None
    )
    _replace_data(trainer, dataset, eval_dataset)
    callback = find_or_add_callback(trainer)
    callback.apply_settings(balance_evaluation=evaluation)
    callback.replaced_imbalance = imbalance
    if trainer.is_world_process_zero():
        print_lines(
            _describe_shares(
                shares, facts.get("lengths"), targets, args.gradient_accumulation_steps
            )
        )
        if isinstance(shares, Shares):
            steps = f"{steps_before:,} before, {_count_steps(trainer, dataset):,} dealt"
            print_lines(_compare_orders(shares, imbalance, steps))
            _warn_of_cut(int(facts["lengths"].max()), args)
    return trainer


def _choose_seed(args: Any) -> int | None:
    """Choose the seed by which documents are shuffled; None if rows are read in their given order.

    `deal` sets the sampling strategy in the Trainer's arguments to "sequential", and stores the
    user's own strategy in the attribute `_STRATEGY_BEFORE`. Several Trainers may share the
    arguments, so the attribute is read first.
    """
    strategy = getattr(args, _STRATEGY_BEFORE, args.train_sampling_strategy)
    if strategy == "sequential":
        return None
    seed: int = args.seed if args.data_seed is None else args.data_seed
    return seed


def _deal_evaluation(trainer: Trainer, make: Callable[[Any], Any]) -> Any:
    """Deal the evaluation set, or each set of a dictionary, and return the result."""

    def deal_rows(rows: Any) -> Any:
        documents = _read_documents(trainer, rows)
        if not hasattr(documents, "__len__"):
            raise ConfigError(
                f"evaluation=True, but the eval_dataset is a stream ({type(documents).__name__}),"
                " so ranks would not know where it ends: give a data set with a length, such as a"
                " datasets.Dataset, or leave evaluation=True out."
            )
        return make(documents)

    data = trainer.eval_dataset
    if isinstance(data, dict):
        return {name: deal_rows(rows) for name, rows in data.items()}
    return deal_rows(data)


def deal_before_training(tokens_per_rank: int, collator: CollatorRule = "check") -> None:
    """Make every Trainer of this process deal its documents when its training begins, if they are
    not dealt yet.
    """

    def deal_documents(trainer: Trainer) -> None:
        if find_shares(trainer.train_dataset) is None:
            deal(trainer, tokens_per_rank, collator=collator)

    call_before_training(deal_documents)


def _read_documents(trainer: Trainer, rows: Any) -> Any:
    """Return rows that hold one document each."""
    if rows is None:
        raise ConfigError(
            f"evaluation=True, but this {type(trainer).__name__} has no eval_dataset: give it one."
        )
    names = getattr(rows, "column_names", None) or []
    if not _PACKED_COLUMNS & set(names):
        return rows
    unpack = partial(_unpack_rows, inputs=read_input_names(trainer.model))
    with trainer.args.main_process_first(desc="taking packed rows apart"):
        return rows.map(unpack, batched=True, remove_columns=list(names))


def _unpack_rows(rows: Mapping[str, list[Any]], inputs: InputNames) -> dict[str, list[Any]]:
    """Split a batch of packed rows into a batch of documents."""
    features = [dict(zip(rows, values, strict=True)) for values in zip(*rows.values(), strict=True)]
    documents = [
        document for feature in features for document in read_feature_documents(feature, inputs)
    ]
    for document in documents:
        document.check_positions()
    return {
        "input_ids": [document.tokens for document in documents],
        "labels": [document.labels for document in documents],
    }


def _replace_data(trainer: Trainer, shares: Any, eval_dataset: Any) -> None:
    """Make each rank of the Trainer read its own shares in order, one share in each batch.

    Args:
        trainer: the Trainer.
        shares: the data set of shares to train on.
        eval_dataset: the dealt evaluation sets; None to leave evaluation as it is.
    """
    args = trainer.args
    trainer.train_dataset = shares
    if eval_dataset is not None:
        trainer.eval_dataset = eval_dataset
        args.per_device_eval_batch_size = 1
    trainer.data_collator = _keep_collator(trainer)
    args.per_device_train_batch_size = 1
    set_batch_size(trainer, 1)
    setattr(args, _STRATEGY_BEFORE, getattr(args, _STRATEGY_BEFORE, args.train_sampling_strategy))
    args.train_sampling_strategy = "sequential"
    args.dataloader_in_order = True
    loading = trainer.accelerator.dataloader_config
    loading.split_batches = loading.dispatch_batches = False
    if not hasattr(shares, "__len__"):
        args.remove_unused_columns = False
    if trainer.is_deepspeed_enabled:  # DeepSpeed has its own copy of the batch size
        propagate_args_to_deepspeed(trainer.accelerator, args, auto_find_batch_size=True)  # type: ignore[no-untyped-call]


def _keep_collator(trainer: Trainer) -> ShareCollator:
    """Return a collator for shares, which passes other rows (of an evaluation, for example) to the
    Trainer's own collator.

    The Trainer's default collators cannot batch documents of different lengths, and are replaced by
    `PackingCollator`. It packs a batch into one row, which the Trainer counts as one sample, so
    each evaluation batch gets only one document.
    """
    collator: Any = trainer.data_collator
    if collator is default_data_collator or type(collator) in _COLLATORS_OF_EQUAL_ROWS:
        trainer.args.per_device_eval_batch_size = 1
        collator = PackingCollator()
    return ShareCollator(collator)


def _describe_shares(
    shares: Shares | StreamedShares,
    lengths: IntArray | None,
    targets: str,
    accumulation: int,
) -> str:
    """Describe the dealt documents in three lines. For a stream, only some facts are known."""
    dealing = shares.deal_settings
    ranks = (
        f"{dealing.ranks} {'ranks' if dealing.ranks > 1 else 'rank'} with"
        f" {dealing.tokens_per_rank:,} tokens each"
        f"{'' if dealing.ranks > 1 else ', which has nobody to share with'}"
    )
    accumulated = "" if accumulation == 1 else f", {accumulation} in each optimizer step"
    if isinstance(shares, Shares) and shares.batches.seed is None:
        accumulated += ", in the order of rows"
    if lengths is None or not isinstance(shares, Shares):
        return (
            f"distca deals a stream of documents to {ranks}.\n"
            f"Global batches have {dealing.tokens:,} tokens{accumulated}, and take documents as"
            " they come, unshuffled.\n"
            "Documents are cut where a global batch is full. Their number and lengths are not"
            " known: logs show what dealing gains, as distca/imbalance_estimated_in_order."
        )
    return (
        f"distca deals {len(lengths):,} documents of {lengths.sum():,} tokens, the longest of"
        f" {lengths.max():,}, to {ranks}. {targets}.\n"
        f"An epoch has {len(shares.batches):,} global batch{'es' * (len(shares.batches) != 1)} of"
        f" {dealing.tokens:,}"
        f" tokens{accumulated}.\n"
        f"Documents longer than a rank holds: {(lengths > dealing.tokens_per_rank).sum():,}."
        " Longer than a global batch, and therefore cut:"
        f" {(lengths > dealing.tokens).sum():,}."
    )


def _estimate_batches(
    args: Any, rows: Any, lengths: IntArray | None, dealing: Dealing
) -> float | None:
    """Estimate the imbalance of attention in the batches that a Trainer would have without `deal`;
    None if the rows of these batches are neither random nor in order.

    Args:
        args: arguments of the Trainer.
        rows: rows of the Trainer's data set.
        lengths: number of tokens of each row if rows are documents; None if rows are packed.
        dealing: settings for dealing.
    """
    size = args.per_device_train_batch_size
    count = min(len(rows) // (dealing.ranks * size), _REPLACED_BATCHES)
    if not count or args.train_sampling_strategy not in {"random", "sequential"}:
        return None
    order = np.arange(len(rows))
    if args.train_sampling_strategy == "random":
        order = np.random.default_rng(args.seed).permutation(order)
    order = order[: count * dealing.ranks * size]
    found, row = (
        find_row_documents(rows.select(order), quiet=True)
        if lengths is None
        else (lengths[order], np.arange(len(order)))
    )
    starts = np.searchsorted(row, np.arange(0, len(order) + 1, size))
    ranks = [[n for n in found[a:b].tolist() if n] for a, b in itertools.pairwise(starts)]
    return float(
        np.mean(
            [
                dealing.estimate_imbalance(Layout.from_lengths(ranks[i : i + dealing.ranks]))
                for i in range(0, len(ranks), dealing.ranks)
            ]
        )
    )


def _compare_orders(shares: Shares, imbalance: float | None, steps: str) -> str:
    """Compare the imbalance of dealt documents, of documents placed in order, and of the replaced
    batches.

    Args:
        shares: the shares.
        imbalance: imbalance of the replaced batches, if it is known.
        steps: text that gives the optimizer steps of an epoch, before `deal` and now.
    """
    dealing, batches = shares.deal_settings, shares.batches
    lengths = [
        batches.get_pieces(0, number).lengths
        for number in range(min(len(batches), _COMPARED_BATCHES))
    ]
    in_order = np.mean([dealing.estimate_in_order(some) for some in lengths])
    even = np.mean([dealing.estimate_dealt(some) for some in lengths])
    tokens = len(batches) * dealing.tokens
    cut = batches.count_cut_tokens() / tokens
    remedy = ' (fill="whole" cuts none that fits in a global batch)'
    replaced = "" if imbalance is None else f"{imbalance:.2f} in the batches replaced, "
    return (
        f"Attention of the slowest rank / mean, estimated: {replaced}{in_order:.2f} with documents"
        f" in their order, {even:.2f} dealt and moved.\n"
        f"Tokens that lose context by a cut: {cut:.1%}"
        f"{remedy if cut and not batches.fills_whole else ''}. Padding:"
        f" {batches.count_padding_tokens() / tokens:.1%}. Optimizer steps of an epoch: {steps}."
    )


def _count_steps(trainer: Trainer, rows: Any) -> int:
    """Count the optimizer steps of an epoch over `rows`, with the Trainer's current batch size."""
    args = trainer.args
    shared = getattr(getattr(trainer.accelerator, "parallelism_config", None), "tp_size", 1)
    ranks = max(args.world_size // shared, 1)
    batches: int = -(-len(rows) // (args.per_device_train_batch_size * ranks))
    return -(-batches // args.gradient_accumulation_steps)


def _warn_of_cut(longest: int, args: Any) -> None:
    limit = getattr(args, "max_length", None)
    if limit is not None and longest == limit:
        LOG.warning(
            "documents were cut at max_length=%d of %s before they were dealt. Set max_length=None"
            " (and packing=False) to train on whole documents.",
            limit,
            type(args).__name__,
        )
