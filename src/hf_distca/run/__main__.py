"""``python -m hf_distca.run``: ``hf-distca run``, for launchers that start modules."""

from __future__ import annotations

import sys

from hf_distca.cli import app

__all__ = ["main"]


def main() -> None:
    """Run ``hf-distca run`` with the arguments of the command line."""
    app(["run", *sys.argv[1:]], prog_name="hf-distca")


if __name__ == "__main__":
    main()
