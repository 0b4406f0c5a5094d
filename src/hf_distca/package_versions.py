"""Versions of the packages that results depend on. Ranks compare them, and records store them."""

from __future__ import annotations

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version

_PACKAGES = (
    "hf-distca",
    "torch",
    "transformers",
    "accelerate",
    "numpy",
    "numba",
    "flash-attn",
    "flash-attn-4",
    "deepspeed",
    "peft",
    "trl",
)


def list_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed packages in `_PACKAGES`, by name."""
    installed = {"python": platform.python_version()}
    for package in _PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return installed
