"""The command line ``hf-distca``, one file a verb."""

from __future__ import annotations

import typer

from hf_distca.cli.deal import deal
from hf_distca.cli.plan import plan

__all__ = ["app"]

app = typer.Typer(name="hf-distca", no_args_is_help=True, add_completion=False, rich_markup_mode=None)


@app.callback()
def main() -> None:
    """Core attention disaggregation for Hugging Face."""


app.command()(plan)
app.command()(deal)
