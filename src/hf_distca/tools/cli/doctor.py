"""``hf-distca doctor``: checks whether a model is supported, which kernels would run, and whether
ranks can connect.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hf_distca.errors import DistCAError
from hf_distca.tools.cli.files import exit_with_error

if TYPE_CHECKING:
    from hf_distca.tools.doctor import Finding

_WIDTH = 26
_MARKS = {"good": " ", "note": "-", "bad": "!"}


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Folder of a model, its config.json, or a name on the Hub.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        Literal["bf16", "fp16", "fp32", "fp64", "bfloat16", "float16", "float32", "float64"] | None,
        typer.Option(
            help="Dtype of attention, such as bf16; by default the dtype of the model.",
            show_default=False,
        ),
    ] = None,
    timeout: Annotated[
        float,
        typer.Option(help="Seconds that an exchange between ranks may take.", min=1.0, max=86400.0),
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check whether a model is supported and which kernels would run, and give advice.

    Under a launcher, the command also tries an exchange between the ranks and compares their
    versions. The exit status is 1 if training would fail.
    """
    from hf_distca.tools.doctor.diagnosis import diagnose, is_reporting_rank

    def log(text: str) -> None:
        if is_reporting_rank():
            typer.echo(f"hf-distca: {text}", err=True)

    try:
        findings = diagnose(model, dtype, timeout_seconds=timeout, log=log)
    except DistCAError as error:
        if is_reporting_rank():
            exit_with_error(str(error))
        raise typer.Exit(2) from None
    if not is_reporting_rank():
        return
    todo = [finding.todo for finding in findings if finding.todo is not None]
    if as_json:
        typer.echo(
            json.dumps({"findings": [asdict(finding) for finding in findings], "to_do": todo})
        )
    else:
        typer.echo(_as_text(findings, todo))
    if any(finding.state == "bad" for finding in findings):
        raise typer.Exit(1)


def _as_text(findings: list[Finding], todo: list[str]) -> str:
    lines = []
    for section, group in groupby(findings, key=lambda finding: finding.section):
        lines.append(section)
        lines += [
            f"{_MARKS[finding.state]} {finding.name:<{_WIDTH}} {finding.value}" for finding in group
        ]
        lines.append("")
    lines.append("what to do" if todo else "nothing to do")
    return "\n".join([*lines, *(f"  {number}. {action}" for number, action in enumerate(todo, 1))])
