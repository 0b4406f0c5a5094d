"""``hf-distca run``: runs a training script or a command under distca."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from signal import SIGINT
from typing import Annotated, Literal

import typer

from hf_distca.errors import DistCAError
from hf_distca.tools.cli.files import exit_with_error

_option = partial(typer.Option, show_default=False)


def run(
    script: Annotated[
        str, typer.Argument(help="A Python script, a command such as `trl`, or with -m a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of SCRIPT.", show_default=False)
    ] = None,
    module: Annotated[
        bool, _option("-m", "--module", help="SCRIPT is the name of a module, as for `python -m`.")
    ] = False,
    config: Annotated[
        Path | None, _option(help="YAML or JSON file with settings and these options.")
    ] = None,
    changes: Annotated[
        list[str] | None,
        _option("--set", metavar="NAME=VALUE", help="A setting or option that overrides the file."),
    ] = None,
    attn_implementation: Annotated[
        Literal["distca"] | None,
        _option(help="Attention of models that name no attention."),
    ] = None,
    instead_of: Annotated[
        str | None, _option(metavar="NAME", help="Attention that distca replaces, such as sdpa.")
    ] = None,
    tokens_per_rank: Annotated[
        int | None, _option(min=1, help="Deal documents, this many tokens to each rank.")
    ] = None,
    observe: Annotated[
        bool | None,
        _option("--observe", help="Measure the imbalance of attention, and change nothing."),
    ] = None,
    servers: Annotated[
        int | None,
        _option(min=1, help="Use this many processes of each node as attention servers."),
    ] = None,
    server_wait: Annotated[
        float | None,
        _option(min=1.0, help="Seconds that servers may take to start.", show_default="300"),
    ] = None,
    summary: Annotated[
        bool | None, typer.Option(help="Print the balance at the end.", show_default="summary")
    ] = None,
) -> None:
    """Run a training script or command that does not import hf_distca, with "distca" registered.

    The options also apply to Python processes that the command starts. For example, trl, swift and
    llamafactory-cli start a launcher, which starts the ranks. Write options of hf-distca before the
    script. If you start a launcher yourself, write: accelerate launch -m hf_distca.tools.run
    train.py --attn_implementation distca
    """
    given = dict(locals())
    from hf_distca.tools.run import (
        Options,
        find_command,
        find_module,
        read_options,
        run_command,
        run_module,
    )

    path = None
    try:
        named = {name: given[name] for name in Options._fields if name in given}
        run_options = read_options(config, changes or [], **named)
        if module:
            find_module(script)
        else:
            path = find_command(script)
    except (DistCAError, FileNotFoundError) as error:
        exit_with_error(str(error))
    if (
        run_options.tokens_per_rank is not None
        and not (run_options.attn_implementation or run_options.instead_of)
        and not any("distca" in word for word in arguments or [])
    ):
        typer.echo(
            "hf-distca: --tokens-per-rank deals documents to models that have attention"
            f' "distca". Unless {script} asks for it, give --attn-implementation distca for models'
            " that name no attention, or --instead-of sdpa for models that name sdpa.",
            err=True,
        )
    try:
        if path is None:
            run_module(script, arguments or [], run_options)
        else:
            run_command(path, arguments or [], run_options)
    except (
        EOFError,
        KeyboardInterrupt,
        OSError,
    ) as error:  # an error of the script, which typer might hide
        sys.last_value = error  # as the interpreter would do
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(128 + SIGINT if isinstance(error, KeyboardInterrupt) else 1) from None
