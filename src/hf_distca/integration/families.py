"""Which model types of transformers run under distca, found out by running each of them.

`tests/models/generate.py` builds a tiny model of every causal-LM type, compares it with transformers' own attention and
writes the names below and ``docs/models.md``; the tests fail where the table and the outcome differ.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hf_distca.errors import UnsupportedError

__all__ = ["FAMILIES", "Family", "Status", "check_family"]

_log = logging.getLogger("hf_distca")

Status = Literal["proven", "unpacked", "refused"]


@dataclass(frozen=True, slots=True)
class Family:
    """What is known about one model type.

    Attributes:
        status: "proven" equals transformers' attention for packed documents; "unpacked" does for one document a row;
            "refused" would be wrong, or never calls distca.
        reason: why, if not proven.
        leaks: whether layers other than attention carry state from one packed document to the next.
    """

    status: Status
    reason: str = ""
    leaks: bool = False


_PROVEN = Family("proven")

_STATE = Family(
    "unpacked",
    "its layers other than attention (state space, convolution, linear attention or token shift) carry state from one packed "
    "document to the next, as they do without distca; give each document a row of its own",
    leaks=True,
)
_NO_POSITIONS = Family("unpacked", "takes no position_ids, so documents cannot be packed into a row; give each a row of its own")

_OWN_ATTENTION = Family("refused", "it computes its attention itself, whatever attn_implementation says")
_NO_ATTENTION = Family("refused", "it has no attention to balance")
_SPARSE = Family("refused", "it chooses the keys of each query as it goes (sparse or compressed attention), from a dense mask")
_POSITION_BIAS = Family("refused", "it adds a learned position bias to the scores, or gates them with a mask of its own")
_CROSS = Family("refused", "its attention is not causal attention among the tokens of one sequence")
_DRAFT = Family("refused", "it drafts for another model and attends to that model's keys and values")

# What a name stands for is decided by hand only among the refused; proven and unpacked ones are written from measurements.
_NAMES: dict[Family, str] = {
    # <names>
    _PROVEN: "",
    _STATE: "",
    _NO_POSITIONS: "",
    _OWN_ATTENTION: """
        big_bird bloom codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj megatron-bert mpt mvp openai-gpt prophetnet
        reformer rembert roformer trocr xglm xlm xlnet
    """,
    _NO_ATTENTION: "falcon_mamba mamba mamba2 rwkv xlstm",
    _SPARSE: """
        axk2 deepseek_v32 deepseek_v4 dots3_note dots3_note_text glm_moe_dsa hy_v4 minimax_m3_vl_text qwen4_exp qwen4_exp_text
    """,
    _POSITION_BIAS: "doge inkling2_text inkling_text",
    _CROSS: """
        bart bigbird_pegasus blenderbot blenderbot-small blt gemma4_unified marian mbart musicgen pegasus plbart
    """,
    _DRAFT: "gemma4_assistant gemma4_unified_assistant",
    # </names>
}

FAMILIES: dict[str, Family] = {name: family for family, names in _NAMES.items() for name in names.split()}


def check_family(model_type: str | None) -> None:
    """Refuse a model type that distca would get wrong, warn once of one whose other layers leak.

    Types that are not in the table pass: what they hand to attention is checked there.

    Raises:
        UnsupportedError: names the type, the reason, and the way out.
    """
    if model_type is None:
        return
    family = FAMILIES.get(model_type)
    if family is not None and family.status == "refused":
        raise UnsupportedError(
            f"{model_type} models do not run under distca: {family.reason}. "
            'Use attn_implementation="sdpa" (or "eager", where the model has no "sdpa").'
        )
    _tell(model_type, family)


@cache
def _tell(model_type: str, family: Family | None) -> None:
    """Say once what a user should know about a type that passes."""
    if family is None:
        _log.info("%s is not in hf_distca's table of tested models: only its calls of attention are checked.", model_type)
    elif family.leaks:
        _log.warning("%s: %s.", model_type, family.reason)
