"""The command line ``hf-distca``, with a file for each verb.

Modules that a verb needs are imported when the verb runs.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from hf_distca.tools.cli.advise import advise
from hf_distca.tools.cli.doctor import doctor
from hf_distca.tools.cli.files import exit_with_error
from hf_distca.tools.cli.plan import plan
from hf_distca.tools.cli.report import report
from hf_distca.tools.cli.run import run

# The error of typer for wrong arguments. It is found as a base class, because releases of typer
# have it in different modules.
_UsageError: type[Any] = typer.BadParameter.__mro__[1]

# Verbs that earlier versions had, and their replacements.
_REMOVED = {
    "deal": "deal is an option of plan now: hf-distca plan LENGTHS --deal TOKENS_PER_RANK. The"
    " number of ranks follows from the lengths.",
    "profile": "profile is gone: ranks correct the rates of their GPU as they train. For rates of"
    " your own, write a CostModel to a file (CostModel.to_json), and name the file in cost_model or"
    " --cost-model.",
    "serve": "serve is gone: servers start with the ranks that train. Write hf-distca run --servers"
    " N torchrun ..., and the last N processes of each node serve.",
    "simulate": "simulate is a script of the repository now: python"
    " benchmarks/simulated/simulate.py, with the same options. `hf-distca advise` estimates what"
    " you would gain.",
}


class _Verbs(TyperGroup):
    """A group of verbs that reports a wrong option in one line, like every other error."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in _REMOVED:
            exit_with_error(_REMOVED[cmd_name])
        return super().get_command(ctx, cmd_name)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            where = ctx if error.ctx is None else error.ctx
            exit_with_error(
                f"{error.format_message().rstrip('.')}. See {where.command_path} --help."
            )


app = typer.Typer(
    name="hf-distca",
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"hf-distca {version('hf-distca')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Core attention disaggregation for Hugging Face."""


for verb in (plan, advise, report, doctor):
    app.command()(verb)
# All words after the script belong to the script, even if they look like options of this verb.
app.command(context_settings={"allow_interspersed_args": False})(run)
