"""Seconds of attention in a layer in which tokens see later tokens, on one process, compared with
causal attention and with sdpa under a dense mask.

    python benchmarks/host/block_layers.py --json

One document of 4,096 tokens, in float32 on the CPU with one thread, has four forms: causal; with
images of 256 tokens in a fifth of it; with a prefix of half of it; and with attention both ways
throughout. The attention function runs forward and backward without a model. The forms take turns
several times. Figures are medians of process times, and their ratios to causal attention. sdpa gets
the dense mask of the same tokens.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils as masks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from hf_distca.integration.hooks.attention import distca_attention
from processes import compute_medians
from script import add_option, make_parser, output_result, print_table

HEADS, KEY_HEADS, WIDTH = 8, 2, 64


def make_masks(tokens: int) -> dict[str, Any]:
    """Make the mask functions of each form as model families compose them."""
    at = torch.arange(tokens)
    images = torch.where(at % 1280 < 256, at // 1280, -1)[None]
    prefix = torch.where(at < tokens // 2, 0, -1)[None]
    past = masks.causal_mask_function
    return {
        "causal": past,
        "images": masks.or_masks(past, masks.blockwise_overlay(images)),
        "prefix": masks.or_masks(past, masks.blockwise_overlay(prefix)),
        "both ways": masks.bidirectional_mask_function,
    }


def measure(tokens: int, turns: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    hf_distca.configure()
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(1, heads, tokens, WIDTH, generator=generator).requires_grad_()
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    module, at = torch.nn.Linear(1, 1), torch.arange(tokens)
    functions = make_masks(tokens)
    seconds: dict[str, list[float]] = {}
    for _ in range(turns):
        for form, function in functions.items():
            module.is_causal = form == "causal"
            handle = ALL_MASK_ATTENTION_FUNCTIONS["distca"](
                batch_size=1, q_length=tokens, kv_length=tokens, mask_function=function
            )
            for way in ("first layer", "layer"):
                begin = time.process_time()
                distca_attention(module, *states, handle)[0].sum().backward()
                seconds.setdefault(f"{form}, {way}", []).append(time.process_time() - begin)
            seen = torch.broadcast_to(function(0, 0, at[:, None], at[None]), (tokens, tokens))
            begin = time.process_time()
            query, key, value = states
            scaled_dot_product_attention(
                query, key, value, seen[None, None], enable_gqa=True
            ).sum().backward()
            seconds.setdefault(f"{form}, sdpa", []).append(time.process_time() - begin)
    middle = compute_medians(seconds)
    forms = []
    for form in functions:
        ours, dense = middle[f"{form}, layer"], middle[f"{form}, sdpa"]
        ratios = {"to causal": ours / middle["causal, layer"], "sdpa to ours": dense / ours}
        first = middle[f"{form}, first layer"]
        forms.append({"form": form, "first": first, "layer": ours, "sdpa": dense, **ratios})
    return {"forms": forms}


def show(found: dict[str, Any]) -> None:
    names = "first", "layer", "sdpa", "to causal", "sdpa to ours"
    rows = ((row["form"], *(f"{row[name]:.2f}" for name in names)) for row in found["forms"])
    columns = "form", "first layer, s", "layer, s", "sdpa, s", "to causal", "sdpa to ours"
    print_table("", columns, rows)


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--tokens", 4096, "tokens of the document")
    add_option(parser, "--turns", 5, "turns of each form")
    arguments = parser.parse_args()
    output_result(arguments, measure(arguments.tokens, arguments.turns), show)


if __name__ == "__main__":
    main()
