"""``hf-distca advise``: estimates what hf-distca would gain on a user's documents."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_distca.errors import ConfigError
from hf_distca.tools.cli.files import exit_on_error
from hf_distca.tools.cli.options import Column, InJson, Tokenizer, read_rate, with_options

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hf_distca.tools.advise.known_models import Model
    from hf_distca.tools.advise.ways import Run, Way

_WIDTH = 120  # columns of the output
# Floating-point operations per second of large matrix products in bfloat16. These are the largest
# measured rates (ml-engineering, "Maximum Achievable Matmul FLOPS").
_PRODUCT_RATES = {
    "a100": 2.679e14,
    "h100": 7.945e14,
    "h200": 7.945e14,
    "b200": 1.745e15,
    "gb200": 1.745e15,
}
# How to choose tokens_per_rank for a script that trains today.
_ABOUT_TOKENS = (
    "tokens_per_rank: per_device_train_batch_size x the mean length of a row keeps the steps of an"
    " epoch, the warm-up and the learning rate. The mean length is max_length if packing fills all"
    " rows. With per_device_train_batch_size x max_length, memory stays the same; if rows are"
    " shorter, an epoch then has fewer, larger steps: lower warmup_steps in proportion, and choose"
    " the learning rate for larger batches. hf_distca.deal prints the steps before and after."
)


@dataclass(frozen=True, slots=True)
class Options:
    """Documents, a model, and the ranks that train it."""

    lengths: Annotated[
        str,
        typer.Option(
            help=(
                "Document lengths: a JSON file with a list, '-' for standard input, a .jsonl or"
                " .parquet file, the folder of a saved data set, or a distribution: pretrain,"
                " prolong, equal:TOKENS or lognormal:MEDIAN:SIGMA."
            ),
            show_default=False,
        ),
    ]
    ranks: Annotated[
        int, typer.Option(help="Number of GPUs.", min=1, max=65536, show_default=False)
    ]
    tokens_per_rank: Annotated[
        int, typer.Option(help="Tokens per rank and micro-batch.", min=1, max=2**28)
    ] = 65536
    model: Annotated[
        str, typer.Option(help="Name of a known model, or a config.json or its folder.")
    ] = "llama-3-8b"
    hardware: Annotated[
        Literal["a100", "h100", "h200", "b200", "gb200"], typer.Option(help="Type of GPU.")
    ] = "h100"
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Attention kernel, such as flash_attn_3 on h100.",
            show_default="flash_attn, on b200 flash_attn_4",
        ),
    ] = None
    ranks_per_node: Annotated[
        int, typer.Option(help="GPUs per node. Links inside a node are faster.", min=1)
    ] = 8
    link_gigabytes: Annotated[
        float | None,
        typer.Option(
            help="GB/s that a rank sends to other nodes.",
            show_default="depends on the hardware",
        ),
    ] = None
    checkpointing: Annotated[
        bool, typer.Option(help="Whether the run has activation checkpointing.")
    ] = True
    column: Column = "input_ids"
    tokenizer: Tokenizer = None
    max_length: Annotated[
        int | None, typer.Option(help="Documents are cut off at this length.", min=1, max=2**32)
    ] = None
    batches: Annotated[
        int, typer.Option(help="Number of global batches to average over.", min=1, max=1000)
    ] = 10
    as_json: InJson = False

    def make_run(self) -> Run:
        """Make the run that the options describe."""
        from hf_distca.schedule.gpus import find_factor, make_gpu_cost
        from hf_distca.tools.advise.ways import Run

        kernel = self.kernel or ("flash_attn_4" if "b200" in self.hardware else "flash_attn")
        device = self.hardware.upper()
        if find_factor(device, kernel) is None:
            raise ConfigError(
                f"kernel {kernel!r} has no published timings on {self.hardware}: omit --kernel."
            )
        model = _find_model(self.model)
        link = read_rate("--link-gigabytes", self.link_gigabytes)
        changes: dict[str, Any] = {} if link is None else {"exchange_bytes_per_second": link}
        costs = [
            (replace(make_gpu_cost(shape, device, kernel), window=window, **changes), layers)
            for shape, window, layers in model.layers
        ]
        return Run(
            model,
            tuple(costs),
            _PRODUCT_RATES[self.hardware],
            self.ranks,
            self.tokens_per_rank,
            self.ranks_per_node,
            self.checkpointing,
        )


@with_options(Options)
@exit_on_error()
def advise(options: Options) -> None:
    """Estimate what hf-distca would gain on your documents, if anything.

    Estimates use the scheduler and cost model of training. Nothing is run, and no GPU is needed.
    The command compares five ways to train: packed rows as they are, whole documents balanced over
    ranks, context parallelism, hf-distca on the packed rows, and hf-distca on dealt documents.
    """
    from hf_distca.tools.advise.advice import advise as advise_by
    from hf_distca.tools.advise.ways import estimate_ways
    from hf_distca.tools.cli.lengths import open_documents

    run = options.make_run()
    documents = open_documents(
        options.lengths, options.column, options.max_length, options.tokenizer
    )
    ways = estimate_ways(run, documents.draw_batches(run.ranks * run.tokens, options.batches))
    advice = advise_by(run, ways)
    about = (
        f"{run.model.name} on {run.ranks} {options.hardware}, {run.tokens} tokens a rank\n"
        f"{documents.name}, {options.batches} batch{'es' * (options.batches > 1)}, checkpointing"
        f" {'on' if run.checkpointing else 'off'}"
    )
    if options.as_json:
        report = {
            "about": about.splitlines(),
            "lengths": documents.source,
            "advice": advice._asdict(),
            "ways": [way._asdict() for way in ways],
        }
        typer.echo(json.dumps(report, indent=1))
        return
    typer.echo(fill(advice.text, _WIDTH) + "\n")
    _show_ways(about, ways)
    if len(advice.settings) > 2:
        typer.echo("\n" + fill(_ABOUT_TOKENS, _WIDTH))
    if advice.settings:
        typer.echo("\nSettings\n" + "\n".join(f"  {line}" for line in advice.settings))


def _show_ways(about: str, ways: Sequence[Way]) -> None:
    """Print a table with one line per way."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if Console().is_terminal else _WIDTH)
    table = Table(title=about, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("way")
    for column in ("slowest / mean", "step, s", "speed", "waits", "most tokens", "attention"):
        table.add_column(column, justify="right", no_wrap=True)
    for way in ways:
        table.add_row(
            *(way.title, f"{way.attention:.2f}", f"{way.seconds:.3g}"),
            f"{ways[0].seconds / way.seconds:.2f} x",
            *(f"{way.waiting:.0%}", f"{way.most_tokens:,}", f"{way.kept:.1%}"),
        )
    console.print(table)
    console.print(
        "slowest / mean: seconds of attention and its messages on the slowest rank, divided by mean"
        " attention seconds. speed: relative to the run as it is. waits: mean fraction of a"
        " step in which a rank computes nothing. most tokens: on one rank. attention: fraction left"
        " when documents are cut. Exchanges of weights are left out, and matrix products run at the"
        " best rate of the GPU.",
        style="dim",
    )


def _find_model(name: str) -> Model:
    """Return the known model with this name, or the model that a config.json describes. `name` may
    be this file or its folder.
    """
    from hf_distca.tools.advise.known_models import KNOWN_MODELS

    if (known := KNOWN_MODELS.get(name.lower())) is not None:
        return known
    path = Path(name)
    if not (path.is_file() or (path / "config.json").is_file()):
        raise ConfigError(
            f"model {name!r} is neither a config.json nor one of {', '.join(KNOWN_MODELS)}."
        )
    from hf_distca.tools.advise.counting import count_model  # takes seconds to import

    return count_model(path)
