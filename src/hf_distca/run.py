"""``hf-distca run train.py ...`` or ``python -m hf_distca.run``: run a script that does not import hf_distca, under distca.

What holds for the script holds for Python processes that it starts, such as those of accelerate's launcher: each of them runs a
``sitecustomize`` module that is in front of their ``PYTHONPATH`` while the script runs. No other way reaches them all: launchers
write their own command lines, and packages of others call launchers in more ways than could be rewritten.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

from hf_distca.errors import UnsupportedError
from hf_distca.register import check_stand_in, when_models_load

__all__ = ["Options", "begin", "main", "run_command"]

_PYTHONPATH = "PYTHONPATH"
# Each Python process runs this at its start; an interpreter of another environment may lack hf_distca, and then has no models.
_AT_THE_START = '''\
"""Written by `hf-distca run`, which deletes it at its end."""

import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != {folder!r}])
if hidden is not None and hidden.loader is not None:
    hidden.loader.exec_module(module_from_spec(hidden))
try:
    from hf_distca.run import Options, begin
except ImportError:
    pass
else:
    begin(Options{options!r})
'''


class Options(NamedTuple):
    """What holds for a script and all that it starts.

    Attributes:
        attn_implementation: "distca" for models that are loaded without naming one, None to leave that to transformers.
        summary: whether to print the balance at the end.
        instead_of: the attention that distca stands in for, None for none.
    """

    attn_implementation: Literal["distca"] | None = None
    summary: bool = True
    instead_of: str | None = None


def begin(options: Options) -> None:
    """Set up this process."""
    if options.attn_implementation is not None:
        when_models_load(_make_default)
    if options.instead_of is not None:
        when_models_load(partial(_stand_in, options.instead_of))
    if options.summary:
        import atexit

        atexit.register(_sum_up)


def run_command(command: str, arguments: Sequence[str], options: Options) -> None:
    """Run a Python script in this process as ``__main__``, any other command in one of its own.

    Args:
        command: path of a script, or the name of a command on the PATH.
        arguments: what it gets as its arguments.
        options: what holds for it.

    Raises:
        FileNotFoundError: if there is neither.
        UnsupportedError: if distca can stand in for no attention of that name.
        SystemExit: with the exit status of a command that is no Python script, unless that is 0.
    """
    path = _find(command)
    if options.instead_of is not None:
        check_stand_in(options.instead_of)
    begin(options)
    with _for_children(options):
        if not _is_python(path):
            import subprocess

            if status := subprocess.run([path, *arguments], check=False).returncode:
                raise SystemExit(status)
            return
        import runpy

        sys.argv = [str(path), *arguments]
        if not sys.flags.safe_path:  # as Python does for a script: what lies beside it can be imported
            sys.path[0] = str(path.resolve().parent)
        runpy.run_path(str(path), run_name="__main__")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script named in the arguments, those of the command line by default."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="python -m hf_distca.run",
        description='Run a Python script with attn_implementation="distca" registered.',
        epilog="Under a launcher: accelerate launch -m hf_distca.run train.py --attn_implementation distca",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--attn-implementation", choices=["distca"], help="attention of models that are loaded without naming one"
    )
    parser.add_argument(
        "--instead-of",
        metavar="NAME",
        help='the attention that distca stands in for, like "flash_attention_2", for scripts with a closed list of names',
    )
    parser.add_argument("--no-summary", dest="summary", action="store_false", help="do not print the balance at the end")
    parser.add_argument("script", help="the script, or a command such as trl")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets as its arguments")
    parsed = parser.parse_args(arguments)
    try:
        run_command(parsed.script, parsed.arguments, Options(parsed.attn_implementation, parsed.summary, parsed.instead_of))
    except (FileNotFoundError, UnsupportedError) as error:
        parser.error(str(error))


def _find(command: str) -> Path:
    """The file of a command.

    Raises:
        FileNotFoundError: if there is none.
    """
    if Path(command).is_file():
        return Path(command)
    from shutil import which

    found = which(command)
    if found is None:
        raise FileNotFoundError(
            f"there is no file {command!r} in {Path.cwd()}, and no such command on the PATH: the first argument is what to run."
        )
    return Path(found)


def _is_python(path: Path) -> bool:
    if path.suffix == ".py":
        return True
    with path.open("rb") as file:
        first = file.readline(256)
    return first.startswith(b"#!") and b"python" in first


@contextmanager
def _for_children(options: Options) -> Iterator[None]:
    """Let Python processes that start inside begin as this one did."""
    from tempfile import TemporaryDirectory

    with TemporaryDirectory(prefix="hf-distca-") as folder:
        module = _AT_THE_START.format(folder=folder, options=tuple(options))
        Path(folder, "sitecustomize.py").write_text(module, encoding="utf-8")
        before = os.environ.get(_PYTHONPATH)
        os.environ[_PYTHONPATH] = folder if not before else os.pathsep.join([folder, before])
        try:
            yield
        finally:
            if before is None:
                del os.environ[_PYTHONPATH]
            else:
                os.environ[_PYTHONPATH] = before


def _stand_in(name: str) -> None:
    from hf_distca.integration.loading import stand_in

    stand_in(name)


def _make_default() -> None:
    from hf_distca.integration.loading import make_default

    make_default()


def _sum_up() -> None:
    """Print the balance, on the first rank of a process that balanced anything, unless that was done."""
    if "hf_distca.integration.session" in sys.modules:
        from hf_distca.integration.reports import sum_up
        from hf_distca.integration.session import current_session

        session = current_session()
        if not session.summarized:
            sum_up(session.planner.history.total, session)


if __name__ == "__main__":
    main()
