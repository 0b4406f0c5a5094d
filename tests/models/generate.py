"""Rewrite the table of families and its page from what running every family shows.

python tests/models/generate.py
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # pytest has it there, too

import torch
from cut import over_ranks
from measure import WORKING, Result, measure
from tiny import MODEL_TYPES
from tqdm import tqdm

from hf_distca.integration import families
from ranks import RankPool

ROOT = Path(__file__).parents[2]
TABLE = Path(families.__file__).with_suffix(".txt")
PAGE = ROOT / "docs" / "models.md"
# Why a family cannot work, by what was seen when it ran without the table. The first that fits is
# taken.
REASONS = (
    ("NO_ATTENTION", {"falcon_mamba", "mamba", "mamba2", "rwkv", "xlstm"}, None),
    (
        "SPARSE",
        {
            "axk2",
            "deepseek_v32",
            "deepseek_v4",
            "dots3_note",
            "dots3_note_text",
            "glm_moe_dsa",
            "hy_v4",
        },
        "block_indices",
    ),
    ("OWN_MASK", {"doge", "qwen4_exp", "qwen4_exp_text"}, None),
    ("UNBUILT", None, "^unbuilt"),
    ("BYPASSED", None, "^silent"),
    ("BIDIRECTIONAL", None, "bidirectional|not causal"),
    ("POSITION_BIAS", None, "position_bias"),
    ("BYPASSED", None, "TypeError|KeyError|AttributeError|ValueError"),
)


# What stands behind the table.
NOTES = """
Nobody has tried models that are not in the table. They pass with a warning, once a type: the
arguments of every attention call are checked, and it is for you to compare a few losses with those
of sdpa, and with one process where documents lie on several ranks.

Rotary embeddings that depend on the longest document in a batch (`rope_type` "dynamic" and
"longrope", as in Phi-3) are made for the longest document of all ranks. Only the shares of
`document_shares` know it; other batches with a document in several parts are refused, and so is
Moshi with such an embedding, whose layers make it one by one.

In Llama 4, layers without rotary embedding scale queries by the place of a token in its row, not in
its document. In rows of fewer than 8,192 tokens (`floor_scale`) this changes nothing. In longer
packed rows it does, under any attention.

## Positions and decoders

Position ids may be an argument of the model or one that it hands on in its keyword arguments
(Whisper, Moss).

RoBERTa and its kin (CamemBERT, Data2Vec, XLM-RoBERTa, X-MOD) count learned positions from
`pad_token_id + 1`. Positions of `PackingCollator` and of shares, which count from 0, are moved
there when the model is called. In other batches positions from 0 are refused:
`DataCollatorWithFlattening(position_ids_start=2)` makes the right ones.

Encoder-decoders are refused, also those whose decoder alone is in the table.

## Vision-language models

Vision towers are bidirectional: give distca to the language tower alone.

```python
attention = {"text_config": "distca", "vision_config": "sdpa"}
model = AutoModelForImageTextToText.from_pretrained(name, attn_implementation=attention)
```

The keys are the names of the parts in the model's config. LLaVA and Qwen2-VL are compared with sdpa
so, with images in packed rows, on one rank and on two (`tests/models/test_vision_language.py`). For
M-RoPE give position ids of four rows, those of the text first, or of three: a document begins where
all three axes are 0. Models whose image tokens see each other both ways (Gemma 3) are refused when
a batch has images.
"""


def reason_of(result: Result) -> str:
    """The name of the reason in families.py."""
    seen = f"{result.status} {result.reason}"
    for name, types, pattern in REASONS:
        if result.model_type in (types or ()) or (pattern and re.search(pattern, seen)):
            return name
    raise ValueError(f"{result.model_type} does not work and no reason fits: {seen}")


def table_of(results: list[Result]) -> dict[str, str]:
    """Status or reason of every type."""
    return {
        result.model_type: WORKING.get(result.status) or reason_of(result) for result in results
    }


def write(results: list[Result], cuts: dict[str, str]) -> None:
    groups: dict[str, list[str]] = {}
    for model_type, group in table_of(results).items():
        groups.setdefault(group, []).append(model_type)
    for group in ("OVER_RANKS", "OWN_LOSS", "CHUNKS"):
        groups[group] = [model_type for model_type, found in cuts.items() if found == group]
    groups["PING_PONG"] = [result.model_type for result in results if result.halves]
    source = TABLE.read_text()
    for group in re.findall(r"^([A-Z_]+)$", source, re.MULTILINE):
        names = " ".join(sorted(groups.pop(group, [])))
        names = textwrap.fill(
            names, 118, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
        source = re.sub(
            rf"^{group}\n(    .*\n)*", f"{group}\n{names}\n", source, flags=re.MULTILINE
        )
    if groups:
        raise ValueError(f"families.txt has no place for {groups}")
    TABLE.write_text(source)
    PAGE.write_text(page(results, cuts))


def page(results: list[Result], cuts: dict[str, str]) -> str:
    """docs/models.md, with what each type showed, and its documents over ranks."""
    table = table_of(results)
    counts = {
        status: sum(entry == status for entry in table.values())
        for status in families.PROVEN_GROUPS
    }
    refused = len(table) - sum(counts.values())
    halves = sum(result.halves for result in results)
    lines = [
        "# Models",
        "",
        (
            "Every causal-LM type of transformers 5.23.0, as a tiny random model under distca"
            " against the same weights under"
        ),
        (
            "transformers' own attention, one document at a time: loss, logits of every token,"
            " gradient of every parameter."
        ),
        (
            "Written by `python tests/models/generate.py` from what that run showed; `pytest"
            " tests/models` fails where they differ."
        ),
        "",
        (
            f"{counts['PROVEN'] + counts['PACKED']} types are proven with packed documents. In"
            f" {counts['PACKED']} of them, recurrent layers (state space, convolution, linear"
        ),
        (
            "attention) would carry state from one document to the next: under distca [each begins"
            " anew](hybrid_models.md)."
        ),
        (
            f"{counts['CARRIES_STATE'] + counts['NO_POSITIONS']} more are proven with one document"
            " a row. Packed, documents stay apart in attention, and not in the rest"
        ),
        (
            f"of the model: {counts['CARRIES_STATE']} have recurrent layers that distca leaves as"
            f" they are; {counts['NO_POSITIONS']} take no position ids and count"
        ),
        (
            "positions on (their attention of packed documents is proven against a dense mask)."
            f" {refused} are refused."
        ),
        "",
        (
            f"In ping-pong, the attention layers of {halves} types run as halves. Those of the"
            " others are left whole: something else"
        ),
        (
            "than attention mixes their tokens, or they are not built of decoder layers that"
            " transformers can checkpoint."
        ),
        "",
        (
            f"{sum(found == 'OVER_RANKS' for found in cuts.values())} types are also proven with"
            " documents over ranks: their heads, middles and tails, on two ranks, give the loss,"
        ),
        (
            "logits and gradients of whole documents. The others refuse a document that is in"
            " several parts, for a reason that"
        ),
        "stands [below](#documents-over-ranks).",
        "",
        "| type | status | variants met in the proof | ping-pong | documents over ranks |",
        "|---|---|---|---|---|",
    ]
    for result in results:
        entry = table[result.model_type]
        if entry in families.PROVEN_GROUPS:
            status, variants = families.PROVEN_GROUPS[entry], ", ".join(result.variants)
            layers = "halves" if result.halves else "whole"
            cut = "exact" if cuts[result.model_type] == "OVER_RANKS" else "refused"
        else:
            status, variants, layers, cut = (
                f"refused: {families.REFUSAL_REASONS[entry]}",
                "",
                "",
                "",
            )
        lines.append(f"| {result.model_type} | {status} | {variants} | {layers} | {cut} |")
    return "\n".join([*lines, *_whole(cuts)]) + "\n" + NOTES


def _whole(cuts: dict[str, str]) -> list[str]:
    """Why types refuse documents over ranks."""
    lines = [
        "",
        "## Documents over ranks",
        "",
        "These types refuse a document in several parts:",
        "",
    ]
    for reason, text in families.WHOLE_DOCUMENT_REASONS.items():
        names = ", ".join(model_type for model_type, found in cuts.items() if found == reason)
        lines += textwrap.wrap(
            f"- {text}: {names}.", 128, subsequent_indent="  ", break_on_hyphens=False
        )
    return lines


def main() -> None:
    torch.set_num_threads(1)
    results = [measure(model_type) for model_type in tqdm(MODEL_TYPES, file=sys.stderr)]
    pool = RankPool(2)
    working = [result for result in results if result.status in WORKING]
    cuts = {
        result.model_type: over_ranks(pool, result) for result in tqdm(working, file=sys.stderr)
    }
    pool.close()
    write(results, cuts)
    print(
        json.dumps(
            {
                status: sum(r.status == status for r in results)
                for status in sorted({r.status for r in results})
            }
        )
    )


if __name__ == "__main__":
    main()
