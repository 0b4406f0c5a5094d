"""Rewrite the table of families and the page of models from a run of every family.

python tests/models/generate.py
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # pytest adds this folder as well

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
# (reason, types, pattern of the error without the table). The first row that matches a family gives
# the reason.
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
    ("BYPASSED", None, "TypeError|KeyError|AttributeError|ValueError|got distca's mask"),
)


# The rest of the page, from this heading on, is written by hand.
NOTES = "\n## Models outside the table\n"


def find_reason(result: Result) -> str:
    """Find the name of the reason in families.py."""
    seen = f"{result.status} {result.reason}"
    for name, types, pattern in REASONS:
        if result.model_type in (types or ()) or (pattern and re.search(pattern, seen)):
            return name
    raise ValueError(f"{result.model_type} does not work and no reason fits: {seen}")


def make_table(results: list[Result]) -> dict[str, str]:
    """Map every type to its status or reason."""
    return {
        result.model_type: WORKING.get(result.status) or find_reason(result) for result in results
    }


def write(results: list[Result], cuts: dict[str, str]) -> None:
    groups: dict[str, list[str]] = {}
    for model_type, group in make_table(results).items():
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
    PAGE.write_text(make_page(results, cuts))


def make_page(results: list[Result], cuts: dict[str, str]) -> str:
    """Make docs/models.md from the results, and keep the notes at the end."""
    table = make_table(results)
    by_group = {
        group: [result for result in results if table[result.model_type] == group]
        for group in (*families.PROVEN_GROUPS, *families.REFUSAL_REASONS)
    }
    counts = {group: len(found) for group, found in by_group.items()}
    packed = counts["PROVEN"] + counts["PACKED"]
    rows = counts["CARRIES_STATE"] + counts["NO_POSITIONS"]
    working = [result for result in results if table[result.model_type] in families.PROVEN_GROUPS]
    whole = [result.model_type for result in working if not result.halves]
    over_ranks = sum(found == "OVER_RANKS" for found in cuts.values())
    lines = [
        *_paragraph(
            "# Models",
            f"Of the {len(table)} causal-LM types of transformers 5.23.0, {packed} work with packed"
            f" documents, {rows} more with one document a row, and {len(table) - packed - rows} are"
            " refused. A tiny random model of each type ran under distca and, one document at a"
            " time, under transformers' own attention. The loss, the logits of every token and the"
            " gradient of every parameter agree between the two runs.",
            "`python tests/models/generate.py` writes this page from a run of all types, and"
            " `pytest tests/models` fails if the page differs from a run.",
            "## Which types work with packed documents?",
            "The table lists types by the features that the comparison covered:",
        ),
        *_list_features(by_group["PROVEN"]),
        *_paragraph(
            "",
            f"In {counts['PACKED']} more types, recurrent layers (state space, convolution, linear"
            " attention) would carry state from one document to the next, but under distca [each"
            " document starts without a state](hybrid_models.md):",
        ),
        *_list_features(by_group["PACKED"]),
        *_paragraph(
            "",
            "## Which types need one document a row?",
            f"{rows} types need one document a row: their attention keeps packed documents apart,"
            " but the rest of the model does not.",
            "- These types have recurrent layers that distca does not reset at each document:"
            f" {_join_names(by_group['CARRIES_STATE'])}.",
            "- These types take no position ids, and count positions through the whole row:"
            f" {_join_names(by_group['NO_POSITIONS'])}. Their attention for packed documents was"
            " compared with attention under a dense mask.",
            "## Which types are refused?",
        ),
        "| reason | types |",
        "|---|---|",
        *(
            f"| {families.REFUSAL_REASONS[group]} | {_join_names(by_group[group])} |"
            for group in families.REFUSAL_REASONS
        ),
        *_paragraph(
            "",
            "## Documents over ranks",
            f"For {over_ranks} types, documents cut over two ranks have the same loss, logits and"
            " gradients as whole documents. All other types refuse cut documents:",
            *(
                "- "
                + ", ".join(name for name, found in cuts.items() if found == reason)
                + f" models: {text}."
                for reason, text in families.WHOLE_DOCUMENT_REASONS.items()
            ),
            "## Ping-pong",
            f"In ping-pong, layers of {len(working) - len(whole)} types run as two halves."
            f" Layers of {len(whole)} types stay whole, because something other than attention"
            " mixes their tokens, or because the model is not built of decoder layers that"
            f" transformers can checkpoint: {', '.join(whole)}.",
        ),
    ]
    return "\n".join(lines).rstrip("\n") + "\n" + "".join(PAGE.read_text().partition(NOTES)[1:])


def _paragraph(*texts: str) -> list[str]:
    """Wrap paragraphs with empty lines after them; list items have no empty lines between them."""
    lines: list[str] = []
    for text in texts:
        is_item = text.startswith("- ")
        if is_item and len(lines) > 1 and lines[-2].startswith(("- ", "  ")):
            lines.pop()
        indent = "  " * is_item
        lines += textwrap.wrap(
            text, 128, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False
        )
        lines.append("")
    return lines


def _join_names(results: list[Result]) -> str:
    return ", ".join(result.model_type for result in results)


def _list_features(results: list[Result]) -> list[str]:
    """Make a table of types by the features that a run showed."""
    groups: dict[str, list[Result]] = {}
    for result in results:
        groups.setdefault(", ".join(result.variants) or "none of these", []).append(result)
    return [
        "| features | types |",
        "|---|---|",
        *(f"| {features} | {_join_names(found)} |" for features, found in sorted(groups.items())),
    ]


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
    print(json.dumps(Counter(result.status for result in results)))


if __name__ == "__main__":
    main()
