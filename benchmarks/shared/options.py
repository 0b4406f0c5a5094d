"""Options of scripts."""

from __future__ import annotations

import argparse


def add_option(parser: argparse.ArgumentParser, name: str, default: float, text: str) -> None:
    """Add an option that takes a number like its default."""
    text = f"{text} (default: %(default)s)"
    parser.add_argument(name, type=type(default), default=default, help=text)
