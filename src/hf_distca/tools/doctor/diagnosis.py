"""`diagnose`, which makes all checks and returns their findings in the order of the report."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from hf_distca.errors import DistCAError
from hf_distca.package_versions import list_versions
from hf_distca.tools.doctor import Finding
from hf_distca.tools.doctor.exchange import is_launched, try_launched
from hf_distca.tools.doctor.model import (
    check_model_family,
    check_model_kernels,
    find_dtype,
    read_config,
)


def is_reporting_rank() -> bool:
    """Return whether this process reports the findings. Rank 0 does, and so does a process that is
    alone.
    """
    return not is_launched() or os.environ["RANK"] == "0"


def diagnose(
    model: str | None,
    dtype: str | None,
    *,
    timeout_seconds: float,
    log: Callable[[str], None] = lambda text: None,
) -> list[Finding]:
    """Check everything. Under a launcher, all ranks must call it.

    Args:
        model: folder of a model, its config.json, or a name on the Hub; None for no model.
        dtype: dtype in which attention computes. If None, it is the dtype of the model or, if there
            is none, the usual dtype of the device.
        timeout_seconds: how long an exchange between ranks may take.
        log: called with a message before a step that takes a while.

    Raises:
        ConfigError: if there is no such model or dtype.
    """
    config = None if model is None else read_config(model, log)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    findings = [] if config is None else list(check_model_family(config))
    findings += check_model_kernels(config, find_dtype(dtype, config, device), device)
    backends = [
        name
        for name in ("nccl", "gloo", "mpi")
        if dist.is_available() and dist.is_backend_available(name)
    ]
    findings.append(Finding("ranks", "backends of torch", ", ".join(backends) or "none"))
    if not is_launched():
        alone = Finding(
            "ranks",
            "attention group",
            "this process alone: no launcher started it",
            "note",
            "start training with a launcher, so that ranks can share attention; to check the ranks,"
            " run accelerate launch -m hf_distca.tools.cli doctor",
        )
        return [*findings, alone]
    try:
        return [*findings, *try_launched(list_versions(), timeout_seconds)]
    except (DistCAError, RuntimeError) as error:
        failed = Finding(
            "ranks",
            "exchange",
            f"failed: {' '.join(str(error).split())}",
            "bad",
            "look at the logs of the other ranks; check that all nodes reach MASTER_ADDR, and each"
            " other over the interface that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names",
        )
        return [*findings, failed]
