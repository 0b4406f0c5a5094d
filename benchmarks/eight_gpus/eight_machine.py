"""The node: versions, cards, topology, and the bandwidth of its links."""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from eight_launch import Launch
from gpu_setting import synchronize
from machine import describe
from run_all import ROOT

_OTHERS = ("ring-flash-attn", "kernels", "flash-linear-attention")
_ROUNDS = 5


def make_manifest(environment: dict[str, Any]) -> dict[str, Any]:
    """Add commit, cards and topology to the processor and the versions."""
    commit = _output("git", "-C", str(ROOT), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(ROOT), "status", "--porcelain")
    query = "name,driver_version,memory.total,power.limit,clocks.max.sm"
    cards = _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader")
    return {
        **environment,
        **describe(*_OTHERS),
        "commit": commit and commit + (" with changes" if changed else ""),
        "cards": cards.splitlines() if cards else [],
        "topology": _output("nvidia-smi", "topo", "-m"),
        "cuda": torch.version.cuda,
        "nccl": _nccl(),
    }


def _nccl() -> str | None:
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None


def _output(*command: str) -> str | None:
    """Return the output of a program; None if it is missing or fails."""
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()


def measure_links(launch: Launch) -> dict[str, Any]:
    """Measure the GB/s that a rank sends; return the reason if that fails."""
    path = launch.folder / "links.part"
    path.unlink(missing_ok=True)
    failed = launch.run(_time_links, launch.device, path)
    when = {"time": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())}
    return {**when, **({"failed": failed} if failed else json.loads(path.read_text()))}


def _time_links(rank: int, device_type: str, path: Path) -> None:
    """Time an all-to-all, and a ring in which each rank sends to the next."""
    ranks, on_gpu = dist.get_world_size(), device_type == "cuda"
    device = torch.device(device_type, torch.cuda.current_device() if on_gpu else None)
    size = 2**28 if on_gpu else 2**20  # bytes per rank
    sent = torch.zeros(size // ranks * ranks, dtype=torch.uint8, device=device)
    come = torch.empty_like(sent)

    def to_next() -> None:
        calls = [
            dist.P2POp(dist.isend, sent, (rank + 1) % ranks),
            dist.P2POp(dist.irecv, come, (rank - 1) % ranks),
        ]
        for request in dist.batch_isend_irecv(calls):
            request.wait()

    ways = {
        "all_to_all_gb_s": (lambda: dist.all_to_all_single(come, sent), (ranks - 1) / ranks),
        "to_next_gb_s": (to_next, 1.0),
    }
    found = {}
    for name, (send, share) in ways.items():
        seconds = []
        for _ in range(_ROUNDS + 1):
            synchronize(device)
            dist.barrier()
            started = time.perf_counter()
            send()
            synchronize(device)
            seconds.append(time.perf_counter() - started)
        found[name] = share * sent.numel() / statistics.median(seconds[1:]) / 1e9
    if rank == 0:
        path.write_text(json.dumps({**found, "bytes": sent.numel()}))
    dist.barrier()
