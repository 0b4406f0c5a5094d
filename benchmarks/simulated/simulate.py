"""Predicted step time, waiting and memory of a training run under eleven strategies, and the
longest document that all ranks hold together.

    python benchmarks/simulated/simulate.py --lengths prolong --ranks 64
    python benchmarks/simulated/simulate.py --longest --model qwen3-8b --ranks 8

Nothing is run, and no GPU is needed. All strategies get the same documents: packed rows, balancing
in the loader, context parallelism, Ulysses, WLB-LLM, and hf-distca.

speed: relative to the fastest strategy that does not disaggregate attention; empty if memory is
exceeded or cut documents lose attention. idle: waiting for slower ranks. waits: for messages of
attention; hidden: messages during compute.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.errors import DistCAError
from hf_distca.tools.cli.lengths import open_documents
from script import add_option, make_parser, output_result, print_table
from simulator.hardware import DEVICES, find_hardware
from simulator.longest import WAYS, LongestDocument, find_longest_documents
from simulator.memory import TERMS, find_fullest_moment
from simulator.model_shape import KNOWN_MODELS, ModelShape, count_shape, find_model
from simulator.predict import Prediction, find_best_alternative, simulate
from simulator.setting import Setting
from simulator.strategies import STRATEGIES

_STYLE: dict[str, Any] = {
    "title_justify": "left",
    "box": SIMPLE_HEAD,
    "pad_edge": False,
    "width": 120,
}


def make_setting(given: argparse.Namespace) -> Setting:
    """Make the setting of the options; raise an error for options out of range."""
    device = find_hardware(given.hardware, given.kernel)
    degrees = "fsdp" if given.tp == given.pp == 1 else "zero1"
    setting = Setting(
        find_shape(given.model),
        device,
        given.ranks,
        given.tokens_per_rank,
        given.tp,
        given.pp,
        given.micro_batches,
        given.ranks_per_node or device.ranks_per_node,
        given.sharding or degrees,
        given.checkpointing or "none",
    )
    fullest = find_fullest_moment(setting, given.tokens_per_rank).total
    if given.checkpointing is None and fullest > device.memory_bytes:
        return replace(setting, checkpointing="full")
    return setting


def find_shape(model: str) -> ModelShape:
    """Return a known shape by name, or the shape of a config.json given as a file or folder."""
    path = Path(model)
    if model.lower() in KNOWN_MODELS or not (path.is_file() or (path / "config.json").is_file()):
        return find_model(model)
    return count_shape(path)


def predict(given: argparse.Namespace, setting: Setting) -> tuple[list[Prediction], str]:
    """Predict the strategies, with a progress bar; also return a description of documents."""
    names = given.strategy or list(STRATEGIES)
    documents = open_documents(given.lengths, "input_ids", given.max_length)
    documents = replace(documents, seed=given.seed)
    total = max(given.batches, 0) * len(names)
    with tqdm(total=total, desc="predicting", unit=" steps", delay=1.0, leave=False) as bar:
        steps = simulate(setting, documents, names, batches=given.batches, told=bar.update)
    return steps, f"{documents.name}: {documents.source}"


def show_predictions(steps: list[Prediction], result: dict[str, Any]) -> None:
    """Print a table with one line per strategy."""
    given, best = result["setting"], find_best_alternative(steps)
    print_table(
        f"{given['model']} on {given['ranks']} {given['hardware']}, {given['tokens_per_rank']}"
        f" tokens a rank\ncheckpointing {result['checkpointing']}, batches: {given['batches']}",
        (
            *("strategy", "shared by", "step, s", "speed", "idle", "waits", "hidden, s"),
            *("memory, GB", "attention"),
        ),
        (format_cells(step, best) for step in steps),
        **_STYLE,
    )
    print(result["lengths"])


def format_cells(step: Prediction, best: Prediction | None) -> list[str]:
    """Format a prediction and its speed relative to the best alternative."""
    degree, seconds = step.degree, step.step_seconds
    return [
        step.title,
        "" if degree is None else f"{degree} rank{'s' if degree > 1 else ''}",
        f"{seconds:{'.3f' if seconds >= 0.1 else '.3g'}}",
        "" if best is None or not step.comparable else f"{best.step_seconds / seconds:.2f} x",
        f"{step.idle_share:.1%}",
        f"{step.exposed_share:.1%}",
        f"{step.hidden_seconds:.2f}",
        f"{step.peak_bytes / 1e9:.0f}{'' if step.fits else ' (full)'}",
        f"{step.attention_share:.1%}",
    ]


def show_longest(setting: Setting, found: list[LongestDocument], _: dict[str, Any]) -> None:
    """Print a table with a column for each way to save memory."""
    hardware = setting.hardware

    def make_row(name: str, text: Callable[[Prediction], str]) -> list[str]:
        return [name, *("" if one.step is None else text(one.step) for one in found)]

    def format_term(term: str, step: Prediction) -> str:
        return f"{getattr(step.memory, term) / 1e9:.1f}"

    print_table(
        f"the longest document of {setting.model.name} on {setting.ranks} {hardware.name}, all"
        " ranks together",
        ("", *WAYS),
        [
            ["tokens", *(f"{one.tokens:,}" if one.tokens else "does not fit" for one in found)],
            make_row("tokens a rank", lambda step: f"{step.most_tokens:,}"),
            make_row("step, s", lambda step: f"{step.step_seconds:.0f}"),
            make_row("memory of a rank, GB", lambda step: f"{step.peak_bytes / 1e9:.1f}"),
            *(make_row(f"  {term}", partial(format_term, term)) for term in (*TERMS, "host")),
            ["full", *(one.limit for one in found)],
        ],
        **_STYLE,
    )
    print(
        f"Each rank has {hardware.memory_bytes / 1e9:.0f} GB, and {hardware.host_bytes / 1e9:.0f}"
        " GB of its host. Each column adds to the previous one. checkpointing: every layer, keeping"
        "\nattention outputs. offload: checkpoints wait in the host's memory. fused layers: Liger's"
        " norms and gated activation."
    )


def read_arguments(parser: argparse.ArgumentParser) -> argparse.Namespace:
    add = parser.add_argument
    add("--ranks", type=int, required=True, help="devices, 1 to 65536")
    text = "a JSON list, or pretrain, prolong, equal:TOKENS, lognormal:MEDIAN:SIGMA"
    add("--lengths", help=f"document lengths: {text}")
    add("--max-length", type=int, help="cut documents off at this length")
    add_option(parser, "--tokens-per-rank", 65536, "tokens per micro-batch and rank")
    add_option(parser, "--model", "llama-3-8b", "a known shape, a config.json, or its folder")
    add_option(parser, "--hardware", "h100", f"one of {', '.join(DEVICES)}")
    add("--kernel", help="attention kernel (default: flash_attn_2; b200: flash_attn_4)")
    add_option(parser, "--tp", 1, "tensor-parallel degree")
    add_option(parser, "--pp", 1, "pipeline stages")
    add_option(parser, "--micro-batches", 1, "micro-batches per step")
    add("--ranks-per-node", type=int, help="devices per node (default: 8; gb200: 72)")
    text = "sharding of weights and optimizer (default: fsdp; with --tp or --pp: zero1)"
    add("--sharding", choices=("fsdp", "zero1", "ddp"), help=text)
    text = "what backward repeats (default: nothing if that fits in memory, otherwise everything)"
    add("--checkpointing", choices=("none", "selective", "full"), help=text)
    add_option(parser, "--batches", 10, "global batches; figures are means")
    add_option(parser, "--seed", 0, "seed of the drawn documents")
    add("--strategy", nargs="+", choices=STRATEGIES, help="names of strategies (default: all)")
    text = "print the longest document that all ranks can hold together"
    add("--longest", action="store_true", help=text)
    given = parser.parse_args()
    if not (given.longest or given.lengths):
        parser.error("--lengths is missing: give lengths, or a distribution such as prolong")
    return given


def main() -> None:
    parser = make_parser(__doc__)
    given = read_arguments(parser)
    try:
        setting = make_setting(given)
        if given.longest:
            found = find_longest_documents(setting)
            report: dict[str, Any] = {"longest": [asdict(one) for one in found]}
            output_result(given, report, partial(show_longest, setting, found))
            return
        steps, lengths = predict(given, setting)
    except DistCAError as error:
        parser.error(str(error))
    report = {"lengths": lengths, "strategies": [asdict(step) for step in steps]}
    report["checkpointing"] = setting.checkpointing
    output_result(given, report, partial(show_predictions, steps))


if __name__ == "__main__":
    main()
