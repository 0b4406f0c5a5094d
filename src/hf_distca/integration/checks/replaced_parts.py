"""Checks of the parts of a Trainer that `deal` replaces or reads: a collator that may define other
targets, the order of rows, and documents that may have no targets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hf_distca.data.collator import IGNORED_LABEL
from hf_distca.data.reading import DocumentPiece, DocumentReader
from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.integration.attention_names import find_distca_configs, iterate_models
from hf_distca.integration.families import FAMILIES
from hf_distca.integration.processes import LOG, warn_once

if TYPE_CHECKING:
    import torch
    from transformers import Trainer  # only for types, because this import loads peft

CollatorRule = Literal["check", "replace"]
# Remedies for recurrent layers that carry states from document to document, by group of model
# families.
_STATE_REMEDIES = {
    "PACKED": (
        'Under attn_implementation="distca" they do not: compare with one process under distca.'
    ),
    "CARRIES_STATE": "Train without hf_distca.deal, on one document a row.",
}
_SAMPLE_SIZE = 256  # number of documents in the sample; reading all documents could take long

# Collators that `deal` can replace, by package. They read the same columns as `deal`: ids, labels,
# masks, lengths and positions.
_KNOWN_COLLATORS = {
    "transformers": {
        "DataCollatorForLanguageModeling",
        "DataCollatorForSeq2Seq",
        "DataCollatorWithFlattening",
        "DataCollatorWithPadding",
        "DefaultDataCollator",
        "default_data_collator",
    },
    "trl": {"DataCollatorForLanguageModeling", "DataCollatorForVisionLanguageModeling"},
    "llamafactory": {"MultiModalDataCollatorForSeq2Seq", "SFTDataCollatorWith4DAttentionMask"},
    "axolotl": {
        "BatchSamplerDataCollatorForSeq2Seq",
        "DataCollatorForSeq2Seq",
        "V2BatchSamplerDataCollatorForSeq2Seq",
    },
    "hf_distca": {"PackingCollator"},
}


def check_collator(trainer: Trainer, collator: CollatorRule) -> None:
    """Check that the collator of a Trainer can be replaced.

    Args:
        trainer: the Trainer whose ``data_collator`` is to be replaced.
        collator: ``"replace"`` to allow any collator, with a warning.

    Raises:
        UnsupportedError: if the collator may define, drop or change targets. The error names the
            collator and a remedy.
    """
    data_collator: Any = trainer.data_collator
    package, name = get_collator_origin(data_collator)
    masks_at_random = getattr(data_collator, "mlm", False)
    if name in _KNOWN_COLLATORS.get(package, ()) and not masks_at_random:
        tokenizer = getattr(data_collator, "tokenizer", None)
        pad = getattr(tokenizer, "pad_token_id", None)
        # This collator masks the padding token everywhere, even where the same token ends a
        # document.
        if (
            (package, name) == ("transformers", "DataCollatorForLanguageModeling")
            and pad is not None
            and pad == getattr(tokenizer, "eos_token_id", None)
        ):
            warn_once(
                "%s does not train on token %d, which both pads and ends documents, but"
                " hf_distca.deal makes it a target where it ends a document. To prevent this, give"
                " the rows labels, with -100 for this token.",
                *(name, pad),
            )
        return
    shown = f"{name}(mlm=True)" if masks_at_random else name
    if collator == "replace":
        warn_once(
            "hf_distca.deal replaces %s with PackingCollator.",
            shown,
        )
        return
    raise UnsupportedError(
        f"hf_distca.deal replaces the data_collator, but does not know {shown}: whatever the"
        " collator masks, drops or changes would be lost. Make these changes in the data set:"
        " rows may have labels with -100, completion_mask or assistant_masks. If nothing is lost,"
        ' call hf_distca.deal(..., collator="replace"), or use hf-distca run --set'
        " collator=replace."
    )


def warn_of_row_order(trainer: Trainer) -> None:
    """Warn if `deal` replaces an order of rows that is neither random nor sequential."""
    strategy = trainer.args.train_sampling_strategy
    if strategy not in {"random", "sequential"}:
        warn_once(
            "hf_distca.deal replaces train_sampling_strategy=%r: documents are shuffled by seed and"
            " epoch, and every rank gets the same number of tokens.",
            strategy,
        )


def warn_of_carried_states(model: torch.nn.Module | None) -> None:
    """Warn if a model with recurrent layers does not run distca. These layers carry states from one
    document of a row to the next, so the run is no baseline for a run under distca.
    """
    for kind in sorted({part.config.model_type for part in iterate_models(model)}):
        remedy = _STATE_REMEDIES.get(FAMILIES.get(kind, ""))
        if remedy is not None and not find_distca_configs(model):
            warn_once(
                "recurrent layers of this %s model carry states from one document of a share to the"
                " next. %s",
                *(kind, remedy),
            )


def describe_targets(documents: Any, count: int) -> str:
    """Count the targets in a sample of the `count` documents, and describe the result. The first
    token of a document is never a target.

    Raises:
        ConfigError: if all documents were counted, and have no targets.
    """
    numbers = np.unique(np.linspace(0, count - 1, min(count, _SAMPLE_SIZE)).astype(np.int64))
    labels = [
        DocumentPiece(row, 0, len(row["input_ids"])).read_labels(0, len(row["input_ids"]))
        for row in DocumentReader(documents, "input_ids").read_rows(numbers)
    ]
    counts = [int((row_labels[1:] != IGNORED_LABEL).sum()) for row_labels in labels]
    tokens = sum(map(len, labels))
    targets = sum(counts)
    is_sample = len(numbers) < count
    if labels and not targets:
        finding = f"none of the {tokens:,} tokens of {len(numbers):,} documents is a target"
        cause = (
            "labels are -100 throughout, or completion_mask or assistant_masks are 0, for example"
            " because a template marks no answers"
        )
        if not is_sample:
            raise ConfigError(
                f"{finding}: {cause}. Training would learn nothing; look at the rows of"
                " train_dataset."
            )
        LOG.warning("%s, in a sample of the %d documents: %s.", finding, count, cause)
    share = f"{targets / max(1, tokens):.0%} of the tokens"
    amount = f"{share}, in a sample of {len(numbers):,} documents" if is_sample else f"{targets:,}"
    empty = f"; {counts.count(0):,} of {'them' if is_sample else 'the documents'} have none"
    return f"Targets: {amount}{empty if 0 in counts else ''}"


def get_collator_origin(collator: Any) -> tuple[str, str]:
    """Return the package and the name of a collator, which is a function, a partial of a function,
    or an object. For an object, return the package and the name of its class. If a user subclasses
    a collator of transformers, for example, the package is the user's.
    """
    owner = collator if hasattr(collator, "__name__") else type(collator)
    name = getattr(getattr(collator, "func", collator), "__name__", type(collator).__name__)
    return str(owner.__module__).partition(".")[0], str(name)
