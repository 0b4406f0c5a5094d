"""Which model families distca is proven for, which it refuses, and why.

The lists are written by `tests/models/generate.py`, which runs a tiny model of every causal-LM type of transformers and
compares it with transformers' own attention; a test fails where the lists and a new run differ.
"""

from __future__ import annotations

import logging
from functools import cache

from transformers import PreTrainedConfig

from hf_distca.errors import UnsupportedError

__all__ = [
    "EQUAL",
    "FAMILIES",
    "OVER_RANKS",
    "PING_PONG",
    "REASONS",
    "WHOLE",
    "WHOLE_REASONS",
    "check_family",
    "check_layerdrop",
    "warn_of_family",
    "warn_of_packing",
    "warn_of_parts",
    "why_whole",
]

_log = logging.getLogger("hf_distca")

# Loss, logits and gradients equal, with packed documents.
_PROVEN = """
    afmoe apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet camembert cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama dots1 electra emu3 ernie
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
    gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2
    gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4
    llama4_text longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma whisper xlm-roberta xlm-roberta-xl xmod youtu
"""

# Equal with one document a row. The model's layers other than attention carry state from one packed document to the next.
_CARRIES_STATE = """
    bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 minimax nemotron_h
    olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next recurrent_gemma zamba zamba2 zaya
"""

# Equal with one document a row. The model takes no position ids and counts positions on through packed documents.
_NO_POSITIONS = """
    bart blenderbot blenderbot-small marian mbart musicgen musicgen_melody pegasus plbart
"""

# Of those above, the ones whose layers may run as two nano-batches: attention is all that mixes their tokens.
_PING_PONG = """
    afmoe apertus arcee aria_text axk1 bailing_hybrid bamba bart bert bert-generation biogpt bitnet blenderbot
    blenderbot-small camembert cohere cohere2 cohere2_moe cohere_compass_text cwm data2vec-text dbrx deepseek_v2
    deepseek_v3 diffllama dots1 electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma
    gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite
    got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid
    granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2
    jamba jetmoe kimi_linear kolibri1 laguna lfm2 lfm2_moe lfm3 llama llama4 llama4_text longcat_flash marian mbart
    mellum mimo_v2_flash minicpm3 minimax minimax_m2 ministral ministral3 mistral mixtral modernbert-decoder moshi
    moss_transcribe_diarize nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe opt pegasus persimmon phi
    phi3 phi4_multimodal phimoe plbart qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open stablelm starcoder2
    vaultgemma whisper xlm-roberta xlm-roberta-xl youtu
"""

# Of those that are proven, the ones whose documents may be cut over ranks: loss, logits and gradients are those of whole ones.
_OVER_RANKS = """
    afmoe apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet camembert cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama dots1 electra emu3 ernie
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
    gemma4 gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2
    gpt_bigcode gpt_neox gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
    hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama
    longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3
    phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3
    solar_open stablelm starcoder2 vaultgemma xlm-roberta xlm-roberta-xl xmod youtu
"""

# Proven, but not with documents over ranks: their loss reads labels that are not shifted.
_OWN_LOSS = """
    whisper
"""

# Proven, but not with documents over ranks: their layers attend in chunks.
_CHUNKS = """
    llama4 llama4_text
"""

_NO_ATTENTION = """
    falcon_mamba mamba mamba2 rwkv xlstm
"""

_BYPASSED = """
    big_bird bloom codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj megatron-bert mpt mvp openai-gpt
    prophetnet reformer rembert roformer trocr xglm xlm xlnet
"""

_SPARSE = """
    axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text
"""

_OWN_MASK = """
    doge qwen4_exp qwen4_exp_text
"""

_POSITION_BIAS = """
    inkling2_text inkling_text
"""

_BIDIRECTIONAL = """
    bigbird_pegasus blt
"""

_UNBUILT = """
    gemma4_assistant gemma4_unified_assistant
"""

EQUAL = {
    "PROVEN": "proven",
    "CARRIES_STATE": "proven, one document a row: its other layers carry state over packed documents",
    "NO_POSITIONS": "proven, one document a row: it takes no position ids",
}

REASONS = {
    "NO_ATTENTION": "it has no attention to balance",
    "BYPASSED": "it computes attention by itself, not through transformers' attention interface",
    "SPARSE": "its attention selects or compresses keys, so which keys a query needs is not known before the layer runs",
    "OWN_MASK": "it computes with the mask itself, and distca has no dense mask",
    "POSITION_BIAS": "it adds a learned bias to the scores",
    "BIDIRECTIONAL": "it has an encoder, cross attention or bidirectional masks",
    "UNBUILT": "no small model of it could be built, so nothing is proven",
}

# Why documents of a family must be whole. The others are in `OVER_RANKS` or were never tried.
WHOLE_REASONS = {
    "CARRIES_STATE": "their other layers carry state from token to token, which stays on its rank",
    "NO_POSITIONS": "they take no position ids, and count each rank's tokens from 0",
    "OWN_LOSS": "their loss reads only `labels`, and the next token of a part that ends within a document is on another rank",
    "CHUNKS": "they attend in chunks, which are cut only where a document lies on one rank, and scale queries by the place in "
    "the row",
}

# Language towers of composite models that are compared in tests/models/test_vision_language.py.
_TRIED_PARTS = frozenset({"qwen2_vl_text"})

_ENCODER_DECODER = "this one is an encoder with a decoder, which has cross attention and bidirectional masks"

FAMILIES: dict[str, str] = {
    name: group
    for group, names in {
        "PROVEN": _PROVEN,
        "CARRIES_STATE": _CARRIES_STATE,
        "NO_POSITIONS": _NO_POSITIONS,
        "NO_ATTENTION": _NO_ATTENTION,
        "BYPASSED": _BYPASSED,
        "SPARSE": _SPARSE,
        "OWN_MASK": _OWN_MASK,
        "POSITION_BIAS": _POSITION_BIAS,
        "BIDIRECTIONAL": _BIDIRECTIONAL,
        "UNBUILT": _UNBUILT,
    }.items()
    for name in names.split()
}
PING_PONG = frozenset(_PING_PONG.split())
OVER_RANKS = frozenset(_OVER_RANKS.split())
WHOLE = {name: group for name, group in FAMILIES.items() if group in WHOLE_REASONS}
WHOLE |= dict.fromkeys(_OWN_LOSS.split(), "OWN_LOSS") | dict.fromkeys(_CHUNKS.split(), "CHUNKS")


def check_family(model_type: str | None, *, encoder_decoder: bool = False) -> None:
    """Refuse a family that distca does not compute exactly.

    Families that are not in the table (models outside transformers, parts of larger models, newer releases) pass: the arguments
    of every attention call are checked too.

    Args:
        model_type: of the model's config.
        encoder_decoder: whether the model is an encoder with a decoder; the table is about causal language models alone.

    Raises:
        UnsupportedError: says why, and what to use.
    """
    group = FAMILIES.get(model_type or "")
    reason = _ENCODER_DECODER if encoder_decoder else REASONS.get(str(group))
    if reason is not None:
        raise UnsupportedError(
            f'distca does not support {model_type} models: {reason}. Use attn_implementation="sdpa" or "eager".'
        )


def why_whole(model_type: str | None) -> str | None:
    """Why each document of a family must lie in one piece on one rank; None if it need not, or the family is not in the table."""
    return WHOLE_REASONS.get(WHOLE.get(model_type or "", ""))


# LayerDrop's names in the configs of transformers.
_LAYERDROP = ("layerdrop", "layer_drop", "decoder_layerdrop", "encoder_layerdrop")


def check_layerdrop(config: PreTrainedConfig | None) -> None:
    """Refuse a model that is to train with LayerDrop: ranks share the attention of each layer, and each would skip others.

    Raises:
        UnsupportedError: names the attribute of the config and its value.
    """
    for name in _LAYERDROP:
        value = getattr(config, name, None)
        if isinstance(value, (int, float)) and value > 0:
            raise UnsupportedError(
                f"the config of this {getattr(config, 'model_type', None)} model has {name}={value}: in training each rank would "
                f"skip layers at random, and ranks share the attention of every layer. Set {name}=0.0 in the model's config."
            )


@cache
def warn_of_family(model_type: str | None) -> None:
    """Warn, once a family, that nobody has compared it with another attention."""
    if model_type not in FAMILIES and model_type not in _TRIED_PARTS:
        _log.warning(
            "%s models were never compared under distca with another attention. The arguments of every attention call are "
            "checked, but compare a few losses with those of sdpa before you rely on it.",
            model_type,
        )


@cache
def warn_of_packing(model_type: str | None) -> None:
    """Warn, once a family, that attention keeps packed documents apart and the rest of the model does not."""
    group = FAMILIES.get(model_type or "")
    if group == "CARRIES_STATE":
        _log.warning(
            "this batch has packed documents, and %s models have layers (state space, convolution, linear attention) that carry "
            "state from one to the next, with any attention. Attention itself keeps them apart. Give these models one document "
            "a row.",
            model_type,
        )
    elif group == "NO_POSITIONS":
        _log.warning(
            "this batch has packed documents, and %s models take no position ids: attention keeps documents apart, but positions "
            "count on from one to the next. Give these models one document a row.",
            model_type,
        )


@cache
def warn_of_parts(model_type: str | None) -> None:
    """Say, once a family, that nobody has compared it with documents in several parts."""
    _log.warning(
        "documents of this batch are in several parts, and %s models were never tried so: attention is exact, but whatever else "
        "mixes tokens would not see those of other parts. Compare with one process before you rely on it.",
        model_type,
    )
