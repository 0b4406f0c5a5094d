"""Items of TRL's Trainers, which stay whole: pairs of DPO and of reward models, completions of KTO.

The items of an optimizer step may go to any rank if the loss is a mean over them: ranks have
equally many, so the mean over ranks is that of one process. Read against TRL 1.16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from transformers import Trainer

from hf_distca.data.reading import read_document_lengths
from hf_distca.errors import UnsupportedError
from hf_distca.schedule.layout import IntArray

# Columns that follow each other in a document, for each document of an item. KTO reads a prompt
# again with an answer to another one, for losses that compare the two.
_DOCUMENTS = {
    "DPOTrainer": (("prompt_ids", "chosen_ids"), ("prompt_ids", "rejected_ids")),
    "KTOTrainer": (("prompt_ids", "completion_ids"), ("prompt_ids", "KL_completion_ids")),
    "RewardTrainer": (("chosen_ids",), ("rejected_ids",)),
}
# Losses of DPO that sort the pairs of a rank's batch, or are a mean over its tokens.
_LOSSES_OF_RANKS = {"aot", "aot_unpaired", "sft"}
_AS_THEY_ARE = 'attn_implementation="distca" balances its batches as they are.'


@dataclass(frozen=True)
class ItemRules:
    """Places that the items of a Trainer may have, and the documents they consist of.

    Attributes:
        documents: columns of token ids that make up each document of an item.
        max_length: number of tokens at which the collator cuts documents; None if it does not.
        in_micro_batches: whether items stay in their micro-batch, rather than in their step.
    """

    documents: tuple[tuple[str, ...], ...]
    max_length: int | None
    in_micro_batches: bool

    @classmethod
    def read(cls, trainer: Trainer) -> Self | None:
        """Read the rules of one of TRL's Trainers; None for those that train on documents.

        Raises:
            UnsupportedError: if its loss would change with the ranks of items, or its items have no
                lengths yet; names the Trainer and a remedy.
        """
        name = _find_trl_name(trainer)
        if name is None:
            return None
        if name not in _DOCUMENTS:
            raise UnsupportedError(_explain_unknown_items(name, "hf_distca.place_rows"))
        _check_loss(trainer, name)
        columns = getattr(trainer.train_dataset, "column_names", None) or []
        documents = tuple(parts for parts in _DOCUMENTS[name] if set(parts) <= set(columns))
        if not documents:
            raise UnsupportedError(
                f"place_rows weighs the items of {name} by their token ids, in"
                f" {' and '.join(_DOCUMENTS[name][0])}, and its rows have the columns"
                f" {', '.join(columns) or 'none'}, as where images are read in the collator or rows"
                f" are a stream. Leave place_rows out: {_AS_THEY_ARE}"
            )
        return cls(
            documents,
            # A reward Trainer drops longer pairs, and cuts none.
            None if name == "RewardTrainer" else getattr(trainer.args, "max_length", None),
            # KTO compares each item of a micro-batch with the KL of them all.
            bool(getattr(trainer, "calculate_KL", False)),
        )

    def find_documents(self, rows: Any, *, quiet: bool) -> tuple[IntArray, IntArray]:
        """Find the documents of all items, as `find_row_documents` does for packed rows.

        Returns:
            The number of tokens of each document, and the number of its item: (documents,) int64
            each.
        """
        counts = {
            column: read_document_lengths(rows, column, quiet=quiet)
            for column in {part for parts in self.documents for part in parts}
        }
        lengths: IntArray = np.concatenate(
            [sum((counts[part] for part in parts), np.int64(0)) for parts in self.documents]
        )
        if self.max_length is not None:
            lengths = np.minimum(lengths, self.max_length)
        return lengths, np.tile(np.arange(len(rows)), len(self.documents))


def check_deals_documents(trainer: Trainer) -> None:
    """Raise for TRL's Trainers that do not train on documents.

    Raises:
        UnsupportedError: names the Trainer, and the call to make instead.
    """
    name = _find_trl_name(trainer)
    if name in _DOCUMENTS:
        items = "completions" if name == "KTOTrainer" else "pairs"
        raise UnsupportedError(
            f"{name} trains on {items}, which stay whole on one rank, and hf_distca.deal and"
            " --tokens-per-rank cut documents. Call hf_distca.place_rows(trainer) instead, which"
            f" gives nodes {items} of equal attention and keeps the loss. Inside a node nothing has"
            f" to be called: {_AS_THEY_ARE}"
        )
    if name is not None:
        raise UnsupportedError(_explain_unknown_items(name, "hf_distca.deal or --tokens-per-rank"))


def _find_trl_name(trainer: Trainer) -> str | None:
    """Find the name of TRL's own class that a Trainer is of; None for one of documents."""
    names = [
        base.__name__
        for base in type(trainer).__mro__
        if base.__module__.partition(".")[0] == "trl"
    ]
    return None if not names or "SFTTrainer" in names else names[0]


def _explain_unknown_items(name: str, call: str) -> str:
    reason = (
        "groups of completions that are written in the step: their lengths are not known when rows"
        " are read, and TRL's sampler repeats each prompt for the ranks of its group"
        if name in {"GRPOTrainer", "RLOOTrainer"}
        else "items that hf_distca does not know, with a loss that may not be a mean over them"
    )
    return f"{name} trains on {reason}. Train without {call}: {_AS_THEY_ARE}"


def _check_loss(trainer: Any, name: str) -> None:
    """Raise for losses that depend on the items that share a rank."""
    size = trainer.args.per_device_train_batch_size
    losses = [
        *sorted(_LOSSES_OF_RANKS & set(getattr(trainer, "loss_types", ()))),
        *(["router_aux_loss_coef"] if getattr(trainer, "aux_loss_enabled", False) else []),
    ]
    if losses and size > 1:
        raise UnsupportedError(
            f"{name} with {' and '.join(losses)} and per_device_train_batch_size={size} has a loss"
            " of the items that share a rank, not a mean over items, and place_rows puts others"
            f" together. Set per_device_train_batch_size=1, or leave place_rows out: {_AS_THEY_ARE}"
        )
