"""``hf-distca run``: a training script or command of somebody else's, under distca."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from hf_distca.cli.files import fail

__all__ = ["run"]


def run(
    script: Annotated[
        str, typer.Argument(help="A Python script, a command such as `trl`, or with -m a module.", show_default=False)
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="What it gets as its arguments.", show_default=False)] = None,
    module: Annotated[bool, typer.Option("-m", "--module", help="SCRIPT is the name of a module, as for `python -m`.")] = False,
    attn_implementation: Annotated[
        Literal["distca"] | None, typer.Option(help="Attention of models that are loaded without naming one.", show_default=False)
    ] = None,
    instead_of: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Attention that distca stands in for, for scripts with a closed list.", show_default=False
        ),
    ] = None,
    tokens_per_rank: Annotated[
        int | None,
        typer.Option(min=1, help="Deal the documents of a Trainer, so many tokens to each rank.", show_default=False),
    ] = None,
    summary: Annotated[bool, typer.Option(help="Print the balance at the end.")] = True,
) -> None:
    """Run a training script or command that does not import hf_distca, with "distca" registered.

    It holds for Python processes that the command starts, too, such as those of accelerate's launcher: trl, swift and
    llamafactory-cli start one. Options of hf-distca stand before the script. Under a launcher of your own:
    accelerate launch -m hf_distca.run train.py --attn_implementation distca
    """
    from hf_distca.errors import UnsupportedError
    from hf_distca.register import check_stand_in
    from hf_distca.run import Options, find_command, find_module, run_command, run_module

    options = Options(attn_implementation, summary, instead_of, tokens_per_rank)
    path = None
    try:
        if instead_of is not None:
            check_stand_in(instead_of)
        if module:
            find_module(script)
        else:
            path = find_command(script)
    except (FileNotFoundError, UnsupportedError) as error:
        fail(str(error))
    if path is None:
        run_module(script, arguments or [], options)
    else:
        run_command(path, arguments or [], options)
