"""``python -m hf_distca.run train.py ...``: run a script that does not import hf_distca, with "distca" registered.

For scripts that take the name of an attention implementation from their arguments. Processes that the script itself starts
afresh import the script, not this module: there the script has to ``import hf_distca``.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

import hf_distca

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the script named in the arguments, those of the command line by default, as ``__main__``."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_distca.run",
        description='Run a Python script with attn_implementation="distca" registered.',
        epilog="Under a launcher: accelerate launch -m hf_distca.run train.py --attn_implementation distca",
    )
    parser.add_argument(
        "--instead-of",
        metavar="NAME",
        help='the attention that distca stands in for, like "flash_attention_2", for scripts with a closed list of names',
    )
    parser.add_argument("script", help="the script to run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets as its arguments")
    parsed = parser.parse_args(arguments)
    script = Path(parsed.script)
    if not script.is_file():
        parser.error(f"there is no file {parsed.script!r} in {Path.cwd()}: the first argument is the script to run.")
    if parsed.instead_of is not None:
        try:
            hf_distca.stand_in(parsed.instead_of)
        except hf_distca.UnsupportedError as error:
            parser.error(str(error))
    sys.argv = [parsed.script, *parsed.arguments]
    if not sys.flags.safe_path:  # as Python does for a script: what lies beside it can be imported
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(parsed.script, run_name="__main__")


if __name__ == "__main__":
    main()
