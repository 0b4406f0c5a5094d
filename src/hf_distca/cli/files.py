"""What the verbs read and write: files, or ``-`` for standard input and output, and figures as JSON."""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EISDIR, ENOENT
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["NAME_OF_INPUT", "InJson", "check_place", "errors_in_one_line", "fail", "name_of", "read", "write"]

InJson = Annotated[bool, typer.Option("--json", help="Write everything as JSON.")]
NAME_OF_INPUT = "standard input"
_STANDARD = Path("-")


def name_of(path: Path) -> str:
    """What errors call it."""
    return NAME_OF_INPUT if path == _STANDARD else str(path)


def read(path: Path) -> bytes:
    """All of a file, without the mark that some editors put before the first character."""
    text = sys.stdin.buffer.read() if path == _STANDARD else path.read_bytes()
    return text.removeprefix(BOM_UTF8)


def check_place(path: Path | None) -> None:
    """Refuse a place where nothing can be written, before what goes there is made.

    Raises:
        OSError: if it is a folder, or in none.
    """
    if path is None or path == _STANDARD:
        return
    if path.is_dir():
        raise IsADirectoryError(EISDIR, "Is a directory", str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(ENOENT, f"there is no folder {path.parent}", str(path))


def write(result: str, summary: str, path: Path | None) -> None:
    """Write a result, and what there is to say about it to where the result does not go: standard output, or else error."""
    standard = path is None or path == _STANDARD
    if path is None or path == _STANDARD:
        typer.echo(result)
    else:
        path.write_text(result + "\n", encoding="utf-8")
    typer.echo(summary, err=standard)


def fail(message: str) -> None:
    """Say what is wrong in one line and end."""
    typer.echo(f"hf-distca: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """What goes wrong inside, in the input or with a file, ends the command with one line."""
    from hf_distca.errors import DistCAError

    try:
        yield
    except DistCAError as error:
        fail(str(error))
    except BrokenPipeError:  # of `hf-distca ... | head`: who reads has seen enough, and typer ends in silence
        raise
    except OSError as error:
        fail(f"{error.filename or 'output'}: {error.strerror or error}.")
    except RecursionError:
        fail("the input is nested too deeply: give a list of numbers, or what --help says.")
