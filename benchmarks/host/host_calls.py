"""Python calls and processor time that attention adds to a step of a small Llama on one rank, per
layer and per step.

    python benchmarks/host/host_calls.py --documents 1 8 --json

Forward and backward run in one thread, with distca and with a bare call of torch's attention that
treats all tokens as one document. Calls are those of functions and built-ins (`cProfile`).
Microseconds are medians and include kernels of 64 tokens. The script uses only library names that
earlier commits also have, so that it can measure them: `host_time.py --before`.
"""

from __future__ import annotations

import cProfile
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, LlamaModel

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

import hf_distca
from hf_distca.agreement.documents import PackedDocuments
from models import make_llama_config
from script import add_option, make_parser, output_result

HERE = Path(__file__).resolve()
TOKENS = 64  # few, so that kernels take very little time, but one for each document
FEW, MANY = 2, 6  # layers of two models, whose difference is the cost of later layers
REPEATS = 40


def bare(
    _module: torch.nn.Module, *states: torch.Tensor, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Call torch's attention with no other code around it."""
    output = scaled_dot_product_attention(
        *states[:3], is_causal=True, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


AttentionInterface.register("bare", bare)
AttentionMaskInterface.register("bare", lambda **_: None)


def make_step(attention_name: str, layers: int, documents: int) -> Callable[[], None]:
    """Make the function that runs forward and backward of a Llama on documents of equal length."""
    config = make_llama_config((64, 64, layers), (4, 2), 8, attn_implementation=attention_name)
    model = LlamaModel(config).train()
    lengths = (max(TOKENS // documents, 1),) * documents
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    batch: dict[str, Any] = {
        "input_ids": torch.zeros_like(positions),
        "position_ids": positions,
        "use_cache": False,
    }
    if attention_name == "distca":
        batch["distca_documents"] = PackedDocuments(lengths)
    return lambda: model(**batch).last_hidden_state.sum().backward()


def count_calls(step: Callable[[], None]) -> float:
    for _ in range(3):  # the first ones fill caches
        profile = cProfile.Profile()
        profile.enable()
        step()
        profile.disable()
    return float(pstats.Stats(profile).total_calls)  # type: ignore[attr-defined]


def measure_microseconds(step: Callable[[], None]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        started = time.thread_time()
        step()
        seconds.append(time.thread_time() - started)
    return statistics.median(seconds[1:]) * 1e6


def measure(figure: Callable[[Callable[[], None]], float], documents: int) -> dict[str, float]:
    """Compute a figure of a step, of one more layer, and of the rest of the step."""
    found: dict[str, float] = {}
    with torch.autograd.set_multithreading_enabled(False):
        for name in ("distca", "bare"):
            one, few, many = (
                figure(make_step(name, layers, documents)) for layers in (1, FEW, MANY)
            )
            found[f"{name}: a layer"] = (many - few) / (MANY - FEW)
            found[f"{name}: a step besides"] = one - found[f"{name}: a layer"]
    for part in ("a layer", "a step besides"):
        found[f"beyond bare: {part}"] = found[f"distca: {part}"] - found[f"bare: {part}"]
    return found


def measure_calls(documents: int) -> dict[str, float]:
    return measure(count_calls, documents)


def compare(before: Path, documents: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """Return the figures beyond a bare function for an earlier checkout and this one: medians over
    alternating rounds.
    """
    results: dict[str, list[dict[str, Any]]] = {"before": [], "after": []}
    command = [sys.executable, str(HERE), "--json", "-", "--documents", *map(str, documents)]
    for _ in range(rounds):
        for name, folder in (("before", before.resolve()), ("after", HERE.parents[2])):
            environment = {**os.environ, "PYTHONPATH": str(folder / "src")}
            printed = subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True
            ).stdout
            results[name].append(json.loads(printed))
    return {
        f"{number} documents, {figure}": {
            f"{part}: {name}": statistics.median(
                found[figure][str(number)][f"beyond bare: {part}"] for found in results[name]
            )
            for part in ("a layer", "a step besides")
            for name in results
        }
        for number in documents
        for figure in ("calls", "us")
    }


def main() -> None:
    parser = make_parser(__doc__)
    add_option(parser, "--documents", [1, 8], "numbers of documents in 64 tokens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    hf_distca.configure()
    figures = {"calls": count_calls, "us": measure_microseconds}
    result = {
        name: {str(n): measure(figure, n) for n in arguments.documents}
        for name, figure in figures.items()
    }
    output_result(arguments, result, lambda found: print(json.dumps(found, indent=1)))


if __name__ == "__main__":
    main()
