"""``hf-distca run``: a training script or command of somebody else's, under distca."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

__all__ = ["run"]


class Attention(StrEnum):
    """What can be made the default."""

    distca = "distca"


def run(
    script: Annotated[str, typer.Argument(help="A Python script, or a command such as `trl`.", show_default=False)],
    arguments: Annotated[list[str] | None, typer.Argument(help="What it gets as its arguments.", show_default=False)] = None,
    attn_implementation: Annotated[
        Attention | None, typer.Option(help="Attention of models that are loaded without naming one.", show_default=False)
    ] = None,
    instead_of: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Attention that distca stands in for, for scripts with a closed list.", show_default=False
        ),
    ] = None,
    summary: Annotated[bool, typer.Option(help="Print the balance at the end.")] = True,
) -> None:
    """Run a training script or command that does not import hf_distca, with "distca" registered.

    It holds for Python processes that the command starts, too, such as those of accelerate's launcher: trl, swift and
    llamafactory-cli start one. Options of hf-distca stand before the script.
    """
    from hf_distca.errors import UnsupportedError
    from hf_distca.run import Options, run_command

    try:
        run_command(script, arguments or [], Options("distca" if attn_implementation else None, summary, instead_of))
    except (FileNotFoundError, UnsupportedError) as error:
        typer.echo(f"hf-distca: {error}", err=True)
        raise typer.Exit(2) from None
