"""Which model families distca is proven for, which it refuses, and why.

The lists are written by `tests/models/generate.py`, which runs a tiny model of every causal-LM type of transformers and
compares it with transformers' own attention; a test fails where the lists and a new run differ.
"""

from __future__ import annotations

import logging
from functools import cache

from hf_distca.errors import UnsupportedError

__all__ = ["FAMILIES", "REASONS", "check_family"]

_log = logging.getLogger("hf_distca")

# Loss, logits and gradients equal, with packed documents.
_PROVEN = """
    afmoe apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet camembert cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm data2vec-text dbrx deepseek_v2 deepseek_v3 diffllama dots1 electra emu3 ernie
    ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text
    gemma4 gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox
    gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
    hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna llama llama4 llama4_text
    longcat_flash mellum mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mixtral mllama
    modernbert-decoder moshi nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe
    qwen2 qwen2_moe qwen3 qwen3_moe roberta roberta-prelayernorm roc_bert seed_oss smollm3 solar_open stablelm
    starcoder2 vaultgemma xlm-roberta xlm-roberta-xl xmod youtu
"""

# Equal with one document a row. Packed, layers other than attention carry state from one document to the next, or the model
# takes no position ids to tell documents apart by.
_UNPACKED = """
    bailing_hybrid bamba falcon_h1 granitemoehybrid jamba kimi_linear lfm2 lfm2_moe lfm3 minimax
    moss_transcribe_diarize musicgen_melody nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_next recurrent_gemma whisper zamba zamba2 zaya
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
    bart bigbird_pegasus blenderbot blenderbot-small blt marian mbart musicgen pegasus plbart
"""

_OVERLAY = """
    gemma4_unified
"""

_UNBUILT = """
    gemma4_assistant gemma4_unified_assistant
"""

REASONS = {
    "NO_ATTENTION": "it has no attention to balance",
    "BYPASSED": "it computes attention by itself, not through transformers' attention interface",
    "SPARSE": "its attention selects or compresses keys, so which keys a query needs is not known before the layer runs",
    "OWN_MASK": "it computes with the mask itself, and distca has no dense mask",
    "POSITION_BIAS": "it adds a learned bias to the scores",
    "BIDIRECTIONAL": "it has an encoder, cross attention or bidirectional masks",
    "OVERLAY": "its mask lets some tokens see later ones",
    "UNBUILT": "no small model of it could be built, so nothing is proven",
}

FAMILIES: dict[str, str] = {
    name: group
    for group, names in {
        "PROVEN": _PROVEN,
        "UNPACKED": _UNPACKED,
        "NO_ATTENTION": _NO_ATTENTION,
        "BYPASSED": _BYPASSED,
        "SPARSE": _SPARSE,
        "OWN_MASK": _OWN_MASK,
        "POSITION_BIAS": _POSITION_BIAS,
        "BIDIRECTIONAL": _BIDIRECTIONAL,
        "OVERLAY": _OVERLAY,
        "UNBUILT": _UNBUILT,
    }.items()
    for name in names.split()
}

# Temporary: replaced by the generated list.
PING_PONG = frozenset(FAMILIES)


def check_family(model_type: str | None) -> None:
    """Refuse a family that distca does not compute exactly; warn once of one that leaks state over packed documents.

    Families that are not in the table (models outside transformers, parts of larger models, newer releases) pass: the arguments
    of every attention call are checked too.

    Raises:
        UnsupportedError: says why, and what to use.
    """
    group = FAMILIES.get(model_type or "")
    if group in REASONS:
        raise UnsupportedError(
            f'distca does not support {model_type} models: {REASONS[group]}. Use attn_implementation="sdpa" or "eager".'
        )
    if group == "UNPACKED":
        _warn_of_leaks(str(model_type))


@cache
def _warn_of_leaks(model_type: str) -> None:
    _log.warning(
        "%s models have layers that carry state from one packed document to the next, or take no position ids: their attention "
        "is exact under distca, but give them one document a row if documents must stay apart.",
        model_type,
    )
