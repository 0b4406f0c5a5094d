"""``hf-distca report``: makes one page about a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from hf_distca.tools.cli.files import exit_on_error


@exit_on_error()
def report(
    run_dir: Annotated[
        Path,
        typer.Argument(help="The output_dir of a run with DistCACallback.", show_default=False),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where the page goes.")] = Path(
        "report.html"
    ),
    step: Annotated[
        int | None,
        typer.Option(
            help="Step whose plan is drawn; by default, the step of the most uneven plan.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the figures as JSON, and write no page.")
    ] = False,
) -> None:
    """Make one HTML page about a run, with its balance, the work of each rank, a plan, settings,
    versions and warnings.

    The page is a single file that opens without a network.
    """
    from dataclasses import asdict

    from hf_distca.tools.report.folder import RunFolder
    from hf_distca.tools.report.page import render
    from hf_distca.tools.report.run_figures import collect

    figures = collect(RunFolder.read(run_dir), step)
    if as_json:
        typer.echo(json.dumps(asdict(figures)))
        return
    output.write_text(render(figures), encoding="utf-8")
    for value, meaning in figures.cards:
        typer.echo(f"{value} {meaning}")
    for missing in figures.missing:
        typer.echo(f"Not on the page: {missing}")
    typer.echo(os.fsencode(f"The page: {output}"))  # a path may not be valid text
