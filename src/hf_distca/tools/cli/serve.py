"""``hf-distca serve``: runs an attention server for training that runs elsewhere."""

from __future__ import annotations

from typing import Annotated

import typer

from hf_distca.errors import DistCAError
from hf_distca.tools.cli.files import exit_with_error


def serve(
    address: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Where to listen; ranks that train name it.",
            show_default=False,
        ),
    ],
    device: Annotated[
        str | None,
        typer.Option(
            help="Device that computes, such as cuda:1; by default the first GPU, or else the CPU.",
            show_default=False,
        ),
    ] = None,
    wait: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="Seconds that ranks may take to connect; by default there is no limit.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compute slices of core attention for training that names this server by --server-address.

    The server ends when the training ends, and prints how much work it did.
    """
    from hf_distca.pool.addresses import parse_address
    from hf_distca.pool.launch import listen_at, serve_alone

    try:
        raise SystemExit(serve_alone(listen_at(*parse_address(address)), device, wait))
    except DistCAError as error:
        exit_with_error(str(error))
