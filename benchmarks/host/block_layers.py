"""Seconds of attention of a layer in which tokens see others behind them, on one process, next to
causal attention and to sdpa with a dense mask.

    python benchmarks/host/block_layers.py --json

One document of 4,096 tokens, in float32 on the CPU with one thread: causal alone; with images of
256 tokens in a fifth of it; with a prefix of half of it; and all of it both ways. Forward and
backward of the attention function, without a model. Each is timed in turn, several times; figures
are the medians of process times, and their ratios to causal attention. sdpa gets the dense mask of
the same tokens.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.nn.functional import scaled_dot_product_attention
from transformers import masking_utils as masks
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from hf_distca.integration.hooks.attention import distca_attention
from machine import describe
from output import add_json_option, put_out

HEADS, KEY_HEADS, WIDTH = 8, 2, 64


def make_masks(tokens: int) -> dict[str, Any]:
    """Mask functions as the families compose them, by form."""
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
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    forms = []
    for form in functions:
        ours, dense = medians[f"{form}, layer"], medians[f"{form}, sdpa"]
        ratios = {"to causal": ours / medians["causal, layer"], "sdpa to ours": dense / ours}
        first = medians[f"{form}, first layer"]
        forms.append({"form": form, "first": first, "layer": ours, "sdpa": dense, **ratios})
    return {"machine": describe(), "tokens": tokens, "turns": turns, "forms": forms}


def show(found: dict[str, Any]) -> None:
    table = Table("form", "first layer, s", "layer, s", "sdpa, s", "to causal", "sdpa to ours")
    for row in found["forms"]:
        names = ("first", "layer", "sdpa", "to causal", "sdpa to ours")
        table.add_row(row["form"], *(f"{row[name]:.2f}" for name in names))
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    add_json_option(parser)
    arguments = parser.parse_args()
    put_out(measure(arguments.tokens, arguments.turns), arguments.json, show)


if __name__ == "__main__":
    main()
