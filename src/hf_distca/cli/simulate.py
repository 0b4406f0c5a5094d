"""``hf-distca simulate`` and ``advise``: predicted step time, waiting and memory of every strategy,
and advice.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_distca.cli.files import InJson, exit_on_error
from hf_distca.cli.options import with_options
from hf_distca.cli.scale import Scale

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from hf_distca.simulate.document_lengths import DocumentSource
    from hf_distca.simulate.longest import LongestDocument
    from hf_distca.simulate.predict import Prediction
    from hf_distca.simulate.setting import Setting

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
# How to choose them for a script that trains today.
_ABOUT_TOKENS = (
    "tokens_per_rank: of packed rows, per_device_train_batch_size x max_length of today, and steps"
    " of an epoch, warm-up and learning rate stay as they are. Of padded rows, batch size x mean"
    " length keeps them, too; batch size x max_length fills the memory of today: an epoch then has"
    " fewer steps of more tokens each, so lower warmup_steps as the steps, and choose the learning"
    " rate as for larger batches. hf_distca.deal prints the steps before and after."
)


@with_options(Scale)
@exit_on_error()
def simulate(
    scale: Scale,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="Strategies by name, as --json has them; all if left out.", show_default=False
        ),
    ] = None,
    as_json: InJson = False,
    assumptions: Annotated[
        bool, typer.Option(help="Print what is assumed, and where it comes from.")
    ] = True,
) -> None:
    """Predict the step time of a training run under every strategy, with the scheduler and cost
    model that train.

    Nothing is run and no GPU is needed. Strategies are compared on the same documents: packed rows,
    balancing in the loader, context parallelism, Ulysses, WLB-LLM, and hf-distca.
    """
    from hf_distca.simulate.advice import list_assumptions as assumed
    from hf_distca.simulate.strategies import STRATEGIES

    names = strategy or list(STRATEGIES)
    setting, documents, predictions = scale.predict(names)
    facts = assumed(setting, documents, names)
    if as_json:
        typer.echo(
            json.dumps(_collect_report(setting, documents, predictions, facts, scale), indent=1)
        )
        return
    _show_predictions(setting, documents, predictions, scale.batches)
    if assumptions:
        typer.echo("Assumptions")
        for what, text in facts:
            typer.echo(
                fill(f"{what}: {text}", _WIDTH, initial_indent="  ", subsequent_indent="    ")
            )


@with_options(Scale)
@exit_on_error()
def advise(
    scale: Scale,
    longest: Annotated[
        bool,
        typer.Option(
            "--longest",
            help=(
                "Say instead how long a document may be, which all ranks hold together. It needs no"
                " --lengths, and "
                "--tokens-per-rank, --checkpointing, --batches and --seed do not count."
            ),
        ),
    ] = False,
    as_json: InJson = False,
) -> None:
    """Say what hf-distca would gain on your documents over the best alternative, or that it would
    gain nothing.

    The figures are predictions: `hf-distca simulate` with the same options prints what they assume.
    """
    if longest:
        _advise_longest(scale, as_json)
        return
    from hf_distca.simulate import advice as advising
    from hf_distca.simulate.strategies import STRATEGIES

    setting, documents, predictions = scale.predict(list(STRATEGIES))
    advice = advising.advise(setting, predictions)
    if as_json:
        facts = advising.list_assumptions(setting, documents)
        report = _collect_report(setting, documents, predictions, facts, scale)
        typer.echo(json.dumps({"advice": asdict(advice), **report}, indent=1))
        return
    typer.echo(fill(advice.text, _WIDTH) + "\n")
    _show_predictions(setting, documents, predictions, scale.batches)
    if any("tokens_per_rank" in line for line in advice.settings):
        typer.echo("\n" + fill(_ABOUT_TOKENS, _WIDTH))
    if advice.settings:
        typer.echo("\nSettings\n" + "\n".join(f"  {line}" for line in advice.settings))


def _advise_longest(scale: Scale, as_json: bool) -> None:
    from hf_distca.simulate.longest import find_longest_documents

    setting = scale.make_setting()
    documents = find_longest_documents(setting)
    if not as_json:
        _show_longest(setting, documents)
        return
    named = _name_setting(setting)
    del named["tokens_per_rank"], named["checkpointing"]
    report = {"setting": named, "longest": [asdict(document) for document in documents]}
    typer.echo(json.dumps(report, indent=1))


def _show_longest(setting: Setting, documents: list[LongestDocument]) -> None:
    """Print a table with a column for each way to save memory."""
    from hf_distca.simulate.longest import WAYS
    from hf_distca.simulate.memory import TERMS

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
    from hf_distca.simulate.predict import find_best_alternative

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
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

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
