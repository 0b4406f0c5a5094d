"""The machine and the versions that a measurement ran on."""

from __future__ import annotations

import datetime
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("hf-distca", "torch", "transformers", "accelerate", "deepspeed", "numpy")


def describe(*more: str) -> dict[str, str | int]:
    """Return the machine, the versions of packages (also of those passed in) and the date."""
    cpu = Path("/proc/cpuinfo")
    models = (
        [line for line in cpu.read_text().splitlines() if line.startswith("model name")]
        if cpu.exists()
        else []
    )
    return {
        "processor": models[0].split(":", 1)[1].strip() if models else platform.processor(),
        "cores": os.cpu_count() or 0,
        "system": platform.platform(),
        "python": platform.python_version(),
        **{name: _version(name) for name in (*PACKAGES, *more)},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:  # used from a clone, or not needed
        return "not installed"
