"""Model families with which distca is proven to work, and families that it refuses, with reasons.

`tests/models/generate.py` writes the lists in families.txt. The script runs a tiny model of every
causal-LM type of transformers, and compares distca with transformers' own attention. A test fails
if the lists and a new run differ.
"""

from __future__ import annotations

from importlib.resources import files

from transformers import PreTrainedConfig

from hf_distca.errors import UnsupportedError
from hf_distca.integration.processes import warn_once


def _read_table() -> dict[str, list[str]]:
    """Read the model types of each group from families.txt."""
    table: dict[str, list[str]] = {}
    model_types: list[str] = []
    for line in (files(__package__) / "families.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            model_types += line.split()
        elif line and not line.startswith("#"):
            model_types = table[line] = []
    return table


_TABLE = _read_table()

PROVEN_GROUPS = {
    "PROVEN": "proven",
    "PACKED": "proven: its recurrent layers are reset at each document",
    "CARRIES_STATE": (
        "proven, one document a row: its other layers carry state over packed documents"
    ),
    "NO_POSITIONS": "proven, one document a row: it takes no position ids",
}

REFUSAL_REASONS = {
    "NO_ATTENTION": "it has no attention to balance",
    "BYPASSED": "it computes attention by itself, not through transformers' attention interface",
    "SPARSE": (
        "its attention selects or compresses keys, so which keys a query needs is not known before"
        " the layer runs"
    ),
    "OWN_MASK": "it computes with the mask itself, and distca has no dense mask",
    "POSITION_BIAS": "it adds a learned bias to the scores",
    "BIDIRECTIONAL": "it has an encoder, cross attention or bidirectional masks",
    "UNBUILT": "no small model of it could be built, so nothing is proven",
}

# Why some families need whole documents. All other families are in `CUT_DOCUMENT_FAMILIES`, or were
# never tried with cut documents.
WHOLE_DOCUMENT_REASONS = {
    "CARRIES_STATE": "their other layers pass state from token to token, but not from rank to rank",
    "NO_POSITIONS": "they take no position ids, and count each rank's tokens from 0",
    "OWN_LOSS": (
        "their loss reads only `labels`, and the next token of a part that ends within a document"
        " is on another rank"
    ),
    "CHUNKS": (
        "they attend in chunks, which work only in documents on one rank, and scale queries by the"
        " place in the row"
    ),
}

# Model types that tests compare with another attention although they are not causal language
# models: language towers of composite models (tests/models/test_vision_language.py) and text
# encoders (tests/models/test_both_ways.py).
_COMPARED_OTHERS = frozenset(
    {
        *("llava", "molmo2", "molmo2_text", "paligemma", "qwen2_vl_text"),
        *("esm", "esmc", "eurobert", "gte", "jina_embeddings_v3", "modernbert", "neomme"),
        *("nomic_bert", "ultrabert"),
    }
)

_ENCODER_DECODER_REASON = (
    "this one is an encoder with a decoder, which has cross attention and bidirectional masks"
)

FAMILIES = {name: group for group in (*PROVEN_GROUPS, *REFUSAL_REASONS) for name in _TABLE[group]}
PING_PONG_FAMILIES = frozenset(_TABLE["PING_PONG"])
CUT_DOCUMENT_FAMILIES = frozenset(_TABLE["OVER_RANKS"])
WHOLE_DOCUMENT_FAMILIES = {
    name: group for group in WHOLE_DOCUMENT_REASONS for name in _TABLE[group]
}


def check_family(model_type: str | None, *, encoder_decoder: bool = False) -> None:
    """Check that distca does not refuse a family.

    Families that are not in the table pass: models outside transformers, parts of larger models,
    and models of newer releases. The arguments of every attention call are checked as well.

    Args:
        model_type: type in the model's config.
        encoder_decoder: whether the model is an encoder with a decoder. The table lists only causal
            language models.

    Raises:
        UnsupportedError: with the reason and a remedy, if distca refuses the family.
    """
    group = FAMILIES.get(model_type or "")
    reason = _ENCODER_DECODER_REASON if encoder_decoder else REFUSAL_REASONS.get(str(group))
    if reason is not None:
        raise UnsupportedError(
            f'distca does not support {model_type} models: {reason}. Use attn_implementation="sdpa"'
            ' or "eager".'
        )


def whole_document_reason(model_type: str | None) -> str | None:
    """Return why each document of a family must lie on one rank, in one piece; None if documents
    may be cut, or the family is unknown.
    """
    return WHOLE_DOCUMENT_REASONS.get(WHOLE_DOCUMENT_FAMILIES.get(model_type or "", ""))


# Model types that read the mask outside attention.
_MASK_READERS = ("biogpt", "opt")


def check_mask_numbers(config: PreTrainedConfig | None) -> None:
    """Check that models of this config accept an attention mask that numbers documents. Only
    attention may read such a mask, and attention must keep documents apart.

    Raises:
        UnsupportedError: with the reason and a remedy.
    """
    model_type = getattr(config, "model_type", None)
    if FAMILIES.get(model_type or "") != "PROVEN":
        reason = "it is not proven that only attention reads the mask"
    elif getattr(config, "output_router_logits", False):
        reason = "the loss of their routers (output_router_logits=True) weighs tokens by the mask"
    elif model_type in _MASK_READERS:
        reason = "they count positions by the mask"
    else:
        return
    raise UnsupportedError(
        f"attention_mask numbers the documents of a row, but {model_type} models need a mask of 1"
        f" and 0: {reason}. Give such a mask, and position_ids that begin again with each"
        " document; or use PackingCollator, which accepts masks that number documents."
    )


# Names of the LayerDrop probability in the configs of transformers.
_LAYERDROP_FIELDS = ("layerdrop", "layer_drop", "decoder_layerdrop", "encoder_layerdrop")


def check_layerdrop(config: PreTrainedConfig | None) -> None:
    """Raise for a model with LayerDrop. Ranks share the attention of each layer, but each rank
    would skip different layers.

    Raises:
        UnsupportedError: names the attribute of the config and its value.
    """
    for name in _LAYERDROP_FIELDS:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            raise UnsupportedError(
                f"the config of this {getattr(config, 'model_type', None)} model has"
                f" {name}={value}: in training each rank would skip layers at random, and ranks"
                f" share the attention of every layer. Set {name}=0.0 in the model's config."
            )


def warn_of_unproven_family(model_type: str | None) -> None:
    """Warn, once for each family, if no test has compared models of the family under distca and
    under another attention.
    """
    if model_type is not None and model_type not in FAMILIES and model_type not in _COMPARED_OTHERS:
        warn_once(
            "%s models were never compared under distca and under another attention. distca checks"
            " the arguments of every attention call. To check the results, train a few steps with"
            ' distca, and with attn_implementation="sdpa" and the same seed, and compare losses and'
            " gradient norms.",
            model_type or "unnamed",
        )


_PACKING_WARNINGS = {
    "PACKED": (
        "this batch has packed documents, and layers of this %s model (state space, convolution,"
        " linear attention) carry state from one document to the next. distca resets the layers of"
        " transformers 5.23 at each document, but not these layers. Upgrade transformers,"
        " load the model without its own code, or give it one document a row."
    ),
    "CARRIES_STATE": (
        "this batch has packed documents, and %s models have layers (state space, convolution,"
        " linear attention) that carry state from one document to the next, with any attention."
        " Attention itself keeps documents apart. Give these models one document a row."
    ),
    "NO_POSITIONS": (
        "this batch has packed documents, and %s models take no position ids: attention keeps"
        " documents apart, but positions count on from one document to the next. Give these models"
        " one document a row."
    ),
}


def warn_of_packing(model_type: str | None) -> None:
    """Warn, once for each family, that attention keeps packed documents apart but the rest of the
    model does not.

    Call it only if the recurrent layers of the model got no document boundaries.
    """
    text = _PACKING_WARNINGS.get(FAMILIES.get(model_type or "", ""))
    if text is not None:
        warn_once(text, model_type)


def check_cut_documents(
    model_type: str | None, rotary_reason: str | None = None, *, has_segments: bool
) -> None:
    """Check that a model can compute documents that lie in several parts. distca's attention can
    compute them, but the rest of the model may need whole documents.

    Args:
        model_type: type of the model. Families that were never tried with such documents get a
            warning, once.
        rotary_reason: why the rotary embedding of this model cannot compute such documents; None if
            it can.
        has_segments: whether recurrent layers of the model, if there are any, got document
            boundaries.

    Raises:
        UnsupportedError: with the reason, if the model needs whole documents.
    """
    whole = whole_document_reason(model_type) or rotary_reason
    if FAMILIES.get(model_type or "") == "PACKED" and not has_segments:
        whole = WHOLE_DOCUMENT_REASONS["CARRIES_STATE"]
    if whole is not None:
        raise UnsupportedError(
            f"a document of this batch is in several parts, and {model_type} models need whole"
            f" documents: {whole}. Give each document to one rank, in one piece."
        )
    if model_type not in CUT_DOCUMENT_FAMILIES:
        warn_once(
            "documents of this batch are in several parts, and %s models were never tried with such"
            " documents. Attention is exact, but any other layer that mixes tokens would see only"
            " one part of a document. Compare the losses with those of one process.",
            model_type,
        )
