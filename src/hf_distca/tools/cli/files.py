"""Reads and writes the files of the verbs, where ``-`` is standard input or output."""

from __future__ import annotations

import sys
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer

from hf_distca.errors import DistCAError, LayoutError, make_printable
from hf_distca.input_files import read_file, read_stream

_STANDARD = Path("-")
_MOST_BYTES = 2**24  # limit of an input; a placement on 4,096 ranks has 7 MB
_MOST_DOCUMENTS = 2**18  # limit of a micro-batch; planning so many takes minutes
_MOST_CHARACTERS = 600


def get_input_name(path: Path) -> str:
    """Return the name that errors use for a file."""
    return "standard input" if path == _STANDARD else str(path)


def read(path: Path) -> bytes:
    """Read all of a file, without the byte order mark that some editors write at its beginning."""
    content = (
        read_stream(sys.stdin.buffer, get_input_name(path), _MOST_BYTES)
        if path == _STANDARD
        else read_file(path, _MOST_BYTES)
    )
    return content.removeprefix(BOM_UTF8)


def check_documents(count: int, path: Path) -> None:
    """Raise if there are too many documents to plan within minutes."""
    if count > _MOST_DOCUMENTS:
        raise LayoutError(
            f"{get_input_name(path)} has {count} documents or parts of documents: at most"
            f" {_MOST_DOCUMENTS} can be planned as one micro-batch."
        )


def write(result: str, summary: str, path: Path | None) -> None:
    """Write a result to a file or to standard output, and print its summary. If the result goes to
    standard output, the summary goes to standard error.
    """
    if path is None or path == _STANDARD:
        typer.echo(result)
        typer.echo(summary, err=True)
    else:
        path.write_text(result + "\n", encoding="utf-8")
        typer.echo(summary)


def exit_with_error(message: str) -> None:
    """Print an error in one line and exit. If the message is long, for example because it quotes a
    file, its middle is left out.
    """
    line = make_printable(" ".join(message.split()))
    if len(line) > _MOST_CHARACTERS:
        line = f"{line[: 2 * _MOST_CHARACTERS // 3]} ... {line[-_MOST_CHARACTERS // 3 :]}"
    typer.echo(f"hf-distca: {line}", err=True)
    raise typer.Exit(2)


@contextmanager
def exit_on_error() -> Iterator[None]:
    """End the command with a one-line error if the input is wrong or a file cannot be used."""
    try:
        yield
    except DistCAError as error:
        exit_with_error(str(error))
    except BrokenPipeError:  # such as in `hf-distca ... | head`; typer prints nothing
        raise
    except OSError as error:
        exit_with_error(f"{error.filename or 'output'}: {error.strerror or error}.")
    except RecursionError:
        exit_with_error("the input is nested too deeply: give the input that --help describes.")
