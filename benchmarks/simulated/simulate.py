"""Predicted step time, waiting and memory of a training run under eleven strategies, and the
longest document that ranks hold together.

    python benchmarks/simulated/simulate.py --lengths prolong --ranks 64
    python benchmarks/simulated/simulate.py --longest --model qwen3-8b --ranks 8

Nothing is run and no GPU is needed. Strategies are compared on the same documents: packed rows,
balancing in the loader, context parallelism, Ulysses, WLB-LLM, and hf-distca.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

sys.path.extend(map(str, Path(__file__).resolve().parents[1].glob("*/")))

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.tools.advise.document_lengths import DocumentSource
from hf_distca.tools.cli.files import exit_on_error, get_input_name, read
from hf_distca.tools.cli.lengths import open_documents
from hf_distca.tools.cli.options import Column, InJson, Tokenizer, with_options
from simulator.assumptions import list_assumptions
from simulator.hardware import find_hardware
from simulator.longest import WAYS, LongestDocument, find_longest_documents
from simulator.memory import TERMS, find_fullest_moment
from simulator.model_shape import KNOWN_MODELS, ModelShape, count_shape, find_model
from simulator.predict import Prediction, find_best_alternative, simulate
from simulator.profiles import PROFILES, find_profile
from simulator.setting import Setting
from simulator.strategies import STRATEGIES

_WIDTH = 120  # columns of what is printed
_SHOWN = (
    "ranks",
    "tokens_per_rank",
    "tensor",
    "stages",
    "micro_batches",
    "ranks_per_node",
    "sharding",
    "checkpointing",
)


@dataclass(frozen=True, slots=True)
class Scale:
    """Inputs of a prediction: documents, a model, devices and their arrangement."""

    ranks: Annotated[int, typer.Option(help="Devices, 1 to 65536.", show_default=False)]
    lengths: Annotated[
        str | None,
        typer.Option(
            help=(
                "Document lengths: a file with a JSON list, - for standard input, a .jsonl or"
                " .parquet file or saved data set, or pretrain, prolong, equal:TOKENS,"
                " lognormal:MEDIAN:SIGMA."
            ),
            show_default=False,
        ),
    ] = None
    tokens_per_rank: Annotated[
        int,
        typer.Option(help="Tokens of a micro-batch on a rank, or on its tensor-parallel group."),
    ] = 65536
    model: Annotated[
        str, typer.Option(help="A known shape by name, or a config.json or its folder.")
    ] = "llama-3-8b"
    hardware: Annotated[str, typer.Option(help="a100, h100, h200, b200, or gb200 for NVL72.")] = (
        "h100"
    )
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Attention kernel, as flash_attn_3 on h100.",
            show_default="flash_attn_2, on b200 flash_attn_4",
        ),
    ] = None
    tensor: Annotated[int, typer.Option("--tp", help="Tensor-parallel degree.")] = 1
    stages: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 1
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Devices of a node.", show_default="8, of gb200 72")
    ] = None
    link_gbps: Annotated[
        float | None,
        typer.Option(
            help="Gigabits per second of a device between nodes, instead of the hardware's."
        ),
    ] = None
    profile: Annotated[
        str | None,
        typer.Option(
            help=(
                "Rates of attention and exchange instead of the hardware's: the name of a profile,"
                " or the JSON of a CostModel."
            )
        ),
    ] = None
    sharding: Annotated[
        Literal["auto", "fsdp", "zero1", "ddp"],
        typer.Option(
            help="How weights and optimizer are kept; auto: fsdp, with --tp or --pp zero1."
        ),
    ] = "auto"
    checkpointing: Annotated[
        Literal["auto", "none", "selective", "full"],
        typer.Option(
            help="What backward repeats; auto: nothing if that fits in memory, else everything."
        ),
    ] = "auto"
    column: Column = "input_ids"
    tokenizer: Tokenizer = None
    max_length: Annotated[
        int | None, typer.Option(help="Documents are cut off at this length.")
    ] = None
    batches: Annotated[int, typer.Option(help="Global batches to predict; figures are means.")] = 10
    seed: Annotated[int, typer.Option(help="Seed of the drawn documents.")] = 0
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="Strategies by name, as --json has them; all if left out.", show_default=False
        ),
    ] = None
    as_json: InJson = False
    assumptions: Annotated[
        bool, typer.Option(help="Print what is assumed, and where it comes from.")
    ] = True
    longest: Annotated[
        bool,
        typer.Option(
            "--longest",
            help="Say instead how long a document may be, which all ranks hold together.",
        ),
    ] = False

    def make_setting(self) -> Setting:
        """Make the setting that the options describe; raise for options out of their ranges."""
        device = find_hardware(self.hardware, self.kernel)
        if self.link_gbps is not None:
            device = replace(device, link_gbps=self.link_gbps)
        by_degrees: Literal["fsdp", "zero1"] = (
            "fsdp" if self.tensor == self.stages == 1 else "zero1"
        )
        setting = Setting(
            _find_shape(self.model),
            device,
            self.ranks,
            self.tokens_per_rank,
            self.tensor,
            self.stages,
            self.micro_batches,
            device.ranks_per_node if self.ranks_per_node is None else self.ranks_per_node,
            by_degrees if self.sharding == "auto" else self.sharding,
            "none" if self.checkpointing == "auto" else self.checkpointing,
        )
        if self.profile is not None:
            setting = replace(setting, profile=_read_profile(self.profile, setting.shape))
        if self.checkpointing == "auto" and (
            find_fullest_moment(setting, self.tokens_per_rank).total > device.memory_bytes
        ):
            return replace(setting, checkpointing="full")
        return setting

    def predict(self, names: list[str]) -> tuple[Setting, DocumentSource, list[Prediction]]:
        """Predict these strategies, with a progress bar if it takes over a second.

        Return the setting and the documents, too.
        """
        if self.lengths is None:
            raise ConfigError(
                "--lengths is missing: give the lengths of your documents, or a distribution such"
                " as prolong."
            )
        setting = self.make_setting()
        documents = open_documents(self.lengths, self.column, self.max_length, self.tokenizer)
        documents = replace(documents, seed=self.seed)
        total = max(self.batches, 0) * len(names)
        with tqdm(total=total, desc="predicting", unit=" steps", delay=1.0, leave=False) as bar:
            predictions = simulate(setting, documents, names, batches=self.batches, told=bar.update)
        return setting, documents, predictions


def _find_shape(model: str) -> ModelShape:
    """Return a known shape by name, or that of a config.json, given as the file or its folder."""
    path = Path(model)
    if model.lower() in KNOWN_MODELS or not (path.is_file() or (path / "config.json").is_file()):
        return find_model(model)

    return count_shape(path)


def _read_profile(source: str, shape: AttentionShape) -> CostModel:
    """Make the cost model of a profile by its name, or read the JSON of one."""
    if source in PROFILES:
        return find_profile(source).make_cost_model(shape)
    try:
        return CostModel.from_json(read(Path(source)).decode("utf-8"))
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"{get_input_name(Path(source))}: {error}") from error


@with_options(Scale)
@exit_on_error()
def main(scale: Scale) -> None:
    """Predict the step time of a training run under every strategy, with the scheduler and cost
    model that train.
    """
    if scale.longest:
        _predict_longest(scale)
        return
    names = scale.strategy or list(STRATEGIES)
    setting, documents, predictions = scale.predict(names)
    facts = list_assumptions(setting, documents, names)
    if scale.as_json:
        report = _collect_report(setting, documents, predictions, facts, scale)
        typer.echo(json.dumps(report, indent=1))
        return
    _show_predictions(setting, documents, predictions, scale.batches)
    if scale.assumptions:
        typer.echo("Assumptions")
        for what, text in facts:
            typer.echo(
                fill(f"{what}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
            )


def _predict_longest(scale: Scale) -> None:
    setting = scale.make_setting()
    documents = find_longest_documents(setting)
    if not scale.as_json:
        _show_longest(setting, documents)
        return
    named = _name_setting(setting)
    del named["tokens_per_rank"], named["checkpointing"]
    report = {"setting": named, "longest": [asdict(document) for document in documents]}
    typer.echo(json.dumps(report, indent=1))


def _show_longest(setting: Setting, documents: list[LongestDocument]) -> None:
    """Print a table with a column for each way to save memory."""

    def add_row(name: str, text: Callable[[Prediction], str]) -> list[str]:
        steps = [document.step for document in documents]
        return [name, *("" if step is None else text(step) for step in steps)]

    hardware = setting.hardware
    tokens = [document.tokens for document in documents]
    _print_table(
        f"the longest document of {setting.model.name} on {setting.ranks} {hardware.name}, all"
        " ranks together",
        ("", *WAYS),
        [
            ["tokens", *(f"{count:,}" if count else "does not fit" for count in tokens)],
            add_row("tokens a rank", lambda step: f"{step.most_tokens:,}"),
            add_row("step, s", lambda step: f"{step.step_seconds:.0f}"),
            add_row("memory of a rank, GB", lambda step: f"{step.peak_bytes / 1e9:.1f}"),
            *(add_row(f"  {term}", partial(_format_gigabytes, term)) for term in (*TERMS, "host")),
            ["full", *(document.limit for document in documents)],
        ],
        f"A rank has {hardware.memory_bytes / 1e9:.0f} GB, and {hardware.host_bytes / 1e9:.0f} GB"
        " of its host. Each column adds to the one before. checkpointing: of every layer,"
        " attention kept. offload: checkpoints wait in the host's memory. fused layers: Liger's"
        " norms and gated activation.",
    )


def _format_gigabytes(term: str, step: Prediction) -> str:
    return f"{getattr(step.memory, term) / 1e9:.1f}"


def _show_predictions(
    setting: Setting, documents: DocumentSource, predictions: list[Prediction], batches: int
) -> None:
    """Print a table with one line per strategy."""
    best = find_best_alternative(predictions)
    _print_table(
        f"{setting.model.name} on {setting.ranks} {setting.hardware.name},"
        f" {setting.tokens_per_rank} tokens a rank\n{documents.name}, {batches}"
        f" batch{'es' if batches > 1 else ''}, checkpointing {setting.checkpointing}",
        (
            "strategy",
            "shared by",
            "step, s",
            "speed",
            "idle",
            "waits",
            "hidden, s",
            "memory, GB",
            "attention",
        ),
        (_format_cells(prediction, best) for prediction in predictions),
        "speed: against the fastest strategy that does not disaggregate attention; none where"
        " memory is full or cut documents lose attention. idle: waiting for slower ranks. waits:"
        " for messages of attention; hidden: messages beside computing.",
    )


def _format_cells(step: Prediction, best: Prediction | None) -> list[str]:
    """Format a prediction, with its speed against the best alternative."""
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


def _print_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], note: str
) -> None:
    """Print a table, its first column to the left, and a note below."""
    console = Console(width=None if Console().is_terminal else _WIDTH)
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column == columns[0] else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print(note, style="dim")


def _name_setting(setting: Setting) -> dict[str, Any]:
    """Name what a prediction is for, for `json`."""
    return {
        "model": setting.model.name,
        "hardware": setting.hardware.name,
        **{name: getattr(setting, name) for name in _SHOWN},
    }


def _collect_report(
    setting: Setting,
    documents: DocumentSource,
    predictions: list[Prediction],
    facts: list[tuple[str, str]],
    scale: Scale,
) -> dict[str, Any]:
    """Collect all predictions and assumptions, for `json`."""
    return {
        "setting": {
            **_name_setting(setting),
            "lengths": documents.name,
            "batches": scale.batches,
            "seed": scale.seed,
        },
        "strategies": [asdict(prediction) for prediction in predictions],
        "assumptions": [{"about": what, "assumed": text} for what, text in facts],
    }


if __name__ == "__main__":
    typer.run(main)
