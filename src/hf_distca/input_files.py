"""`read_file`: reads any file that a user names, and any file in a user's folder."""

from __future__ import annotations

from errno import EFBIG, EINVAL
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO

_MOST_BYTES = 2**26


def check_file(path: Path) -> None:
    """Raise if a path is a pipe, a socket or a device, because reading it might never end.

    Raises:
        OSError: if the path is one of these, or does not exist.
    """
    kind = path.stat().st_mode
    if not S_ISREG(kind) and not S_ISDIR(kind):  # opening a folder fails anyway
        raise OSError(EINVAL, "is a pipe, a socket or a device: give a regular file", str(path))


def read_file(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read all of a regular file.

    Raises:
        OSError: if the file cannot be read, is not a regular file, or has more than `most_bytes`.
            The error names the file.
    """
    check_file(path)
    with path.open("rb") as file:
        return read_stream(file, str(path), most_bytes)


def read_stream(file: IO[bytes], name: str, most_bytes: int = _MOST_BYTES) -> bytes:
    """Read all of an open file or of standard input. Errors call the file `name`.

    Raises:
        OSError: if the file has more than `most_bytes`.
    """
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(EFBIG, f"holds more than {most_bytes >> 20} MiB, the most that is read", name)
    return content
