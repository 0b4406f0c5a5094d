"""Versions and devices: what is there, and what that means for core attention."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement

from hf_distca.doctor.findings import Finding, State

__all__ = ["Devices", "devices", "installed", "versions"]

_EXTRA = ("flash-attn", "deepspeed", "peft", "trl")
_NVIDIA = (Path("/proc/driver/nvidia/version"), Path("/dev/nvidiactl"))


def installed() -> dict[str, str]:
    """Versions of what hf_distca requires and works with."""
    required = [Requirement(line).name for line in requires("hf-distca") or [] if "extra ==" not in line]
    found = {"hf-distca": version("hf-distca"), "python": platform.python_version()}
    for name in (*required, *_EXTRA):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def versions(found: Mapping[str, str], required: list[str] | None = None) -> Iterator[Finding]:
    """Versions, compared with what hf_distca requires.

    Args:
        found: version by package.
        required: requirements as in a package's metadata, those of hf-distca if None.
    """
    lines = (requires("hf-distca") or []) if required is None else required
    wanted = {one.name: one for one in map(Requirement, (line for line in lines if "extra ==" not in line))}
    for name in dict.fromkeys([*found, *wanted]):
        requirement, has = wanted.get(name), found.get(name)
        if requirement is None or (has is not None and requirement.specifier.contains(has, prereleases=True)):
            yield Finding("versions", name, str(has))
        else:
            value = "missing" if has is None else f"{has}, hf-distca needs {requirement.specifier}"
            yield Finding("versions", name, value, State.bad, f"pip install '{name}{requirement.specifier}'")


@dataclass(frozen=True)
class Devices:
    """What torch finds.

    Attributes:
        torch_version: of torch.
        built_for: the CUDA or ROCm that torch was built for, None for a build for the CPU.
        names: of the GPUs that torch can use, with compute capability and memory.
        driver: whether the machine has the driver of NVIDIA.
        cores: of the CPU that this process may use.
    """

    torch_version: str
    built_for: str | None
    names: tuple[str, ...]
    driver: bool
    cores: int

    @classmethod
    def here(cls) -> Devices:
        """Those of this machine."""
        names = []
        for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            properties = torch.cuda.get_device_properties(number)
            gigabytes = properties.total_memory / 2**30
            names.append(f"{properties.name}, compute capability {properties.major}.{properties.minor}, {gigabytes:.0f} GiB")
        built_for = (
            f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else None
        )
        return cls(torch.__version__, built_for, tuple(names), any(path.exists() for path in _NVIDIA), torch.get_num_threads())


def devices(found: Devices) -> Iterator[Finding]:
    """Devices, and whether torch can use them."""
    for name in dict.fromkeys(found.names):
        count = found.names.count(name)
        yield Finding("devices", "GPU", name if count == 1 else f"{count} x {name}")
    if not found.names and found.driver and found.built_for is None:
        yield Finding(
            "devices",
            "GPU",
            f"there is one, and torch {found.torch_version} is built without CUDA",
            State.bad,
            "install a build of torch with CUDA: pip uninstall torch, then pip install torch as pytorch.org says for your CUDA",
        )
    elif not found.names and found.driver:
        yield Finding(
            "devices",
            "GPU",
            f"torch, built for {found.built_for}, can use none",
            State.bad,
            "let nvidia-smi list the GPUs: if it fails, mend the driver; if it lists them, look at CUDA_VISIBLE_DEVICES, and at "
            f"whether the driver is new enough for {found.built_for}",
        )
    elif not found.names:
        yield Finding("devices", "GPU", "none", State.note)
    yield Finding("devices", "CPU", f"{platform.machine()}, {found.cores} thread{'' if found.cores == 1 else 's'} of torch")
    build = "a build for the CPU" if found.built_for is None else f"built for {found.built_for}"
    yield Finding("devices", "torch", f"{found.torch_version}, {build}")
