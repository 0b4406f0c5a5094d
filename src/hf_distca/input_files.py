"""`read_file`: the only way to open a file that a user names, or a file in a folder of a user."""

from __future__ import annotations

from errno import EFBIG, EINVAL
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO

_MOST_BYTES = 2**26


def check_file(path: Path) -> None:
    """Raise if a path is a pipe, a socket or a device, which may never end or make the reader wait.

    Raises:
        OSError: if it is one of these, or nothing has this name.
    """
    kind = path.stat().st_mode
    if not S_ISREG(kind) and not S_ISDIR(kind):  # a folder fails when it is opened
        raise OSError(EINVAL, "is a pipe, a socket or a device: give a regular file", str(path))


def read_file(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read all of a regular file.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or holds more than `most_bytes`;
            names the file.
    """
    check_file(path)
    with path.open("rb") as file:
        return read_stream(file, str(path), most_bytes)


def read_stream(file: IO[bytes], name: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read all of an open file or of standard input; errors call it `name`.

    Raises:
        OSError: if it holds more than `most_bytes`.
    """
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(EFBIG, f"holds more than {most_bytes >> 20} MiB, the most that is read", name)
    return content
