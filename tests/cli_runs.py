"""Runs command lines in this process and checks how they end."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner, Result

from hf_distca.tools.cli import app


def run(*arguments: str | Path | float, given: str | bytes | None = None) -> Result:
    """Run `hf-distca` with these words. `given` is its standard input."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=given)


def run_well(*arguments: str | Path | float, given: str | bytes | None = None) -> Result:
    """Run `hf-distca` with these words, and check that it succeeds."""
    result = run(*arguments, given=given)
    assert result.exit_code == 0, result.output
    return result


def check_one_line(result: Result, message: str = "") -> None:
    """Check that a command ended with status 2 and one line that contains this message."""
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert message in result.stderr
    assert len(result.stderr) < 700
    assert "Traceback" not in result.output


def write(path: Path, content: object) -> Path:
    """Write text, or a value as JSON, to a file."""
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
