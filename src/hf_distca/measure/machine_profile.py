"""Timings of ``hf-distca profile``: the attention kernel on batches of tasks, and exchanges by
bytes and peers.

Some of the timings are held out: rates are fitted to the rest, and their errors are those on the
timings held out.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from hf_distca.errors import ConfigError
from hf_distca.kernels import Case, Scores, select_kernel
from hf_distca.measure.calibrate import BATCHES, Documents, measure_batches
from hf_distca.package_versions import list_versions
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.members import find_node_number
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost, fit_coefficients
from hf_distca.schedule.layout import FloatArray
from hf_distca.schedule.profiles import ExchangeRates, KernelRates, Profile

# Other documents, slices and numbers of heads than those that rates are fitted to.
_KEPT_ASIDE: tuple[Documents, ...] = (
    [[(0, 0.7)], [(0, 0.3)]],
    [[(0, 0.125)]] * 8,
    [[(0.25, 0.5), (0.75, 1)]],
    [[(0.5, 0.75)], [(0, 0.15)], [(0, 0.1)]],
    [[(0, share)] for share in (0.4, 0.3, 0.15, 0.1, 0.05)],
)
_FITTED_BYTES = (2**12, 2**16, 2**18, 2**20, 2**22, 2**24)
_KEPT_ASIDE_BYTES = (2**14, 3 * 2**17, 3 * 2**21)
_ROUNDS = 9  # of an exchange; the fastest counts: whatever else a machine does adds to it

LogFunction = Callable[[str], None]


@dataclass(frozen=True)
class ProfileRequest:
    """Things to time.

    Attributes:
        device: device to time on.
        dtypes: dtypes of q, k and v.
        widths: head widths; q, k and v have the same.
        heads: (query heads, key/value heads) that rates are fitted to, at least one.
        kept_aside: (query heads, key/value heads) of the timings held out.
        batch_seconds: a batch grows until it takes so long.
    """

    device: torch.device
    dtypes: tuple[torch.dtype, ...]
    widths: tuple[int, ...]
    heads: tuple[tuple[int, int], ...] = ((4, 2), (8, 1))
    kept_aside: tuple[int, int] = (6, 3)
    batch_seconds: float = 0.04

    def count_steps(self, ranks: int) -> int:
        """Return the number of progress messages, if all ranks are on one node."""
        kernels = len(self.dtypes) * len(self.widths) * (len(self.heads) + 1)
        return kernels + len(_FITTED_BYTES + _KEPT_ASIDE_BYTES) * min(ranks - 1, 2)


def count_launched_ranks() -> int:
    """Return the number of processes that a launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def find_device(name: str | None) -> torch.device:
    """Return the device of this name; without a name the GPU of this process if there is one, else
    the CPU.

    Raises:
        ConfigError: if torch knows no such device, or it is neither a CPU nor a GPU.
    """
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device {name!r}: torch knows no such device.") from error
    if device.type not in ("cpu", "cuda") or (
        device.type == "cuda" and not torch.cuda.is_available()
    ):
        raise ConfigError(
            f"device {name!r}: there is none here that can be timed; give cpu, or cuda where there"
            " is a GPU."
        )
    if device.type == "cuda" and ":" not in str(device):
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    return device


def parse_dtypes(names: Sequence[str]) -> tuple[torch.dtype, ...]:
    """Return dtypes by name.

    Raises:
        ConfigError: if attention has no such dtype.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"dtype {unknown[0]!r}: choose from {', '.join(known)}.")
    return tuple(known[name] for name in names)


def _measure(
    wanted: ProfileRequest, group: AttentionGroup, name: str, made_by: str, say: LogFunction
) -> Profile | None:
    """Time kernels on the first rank and exchanges among all.

    Args:
        wanted: things to time.
        group: the ranks; exchanges are left out if it is one.
        name, made_by: see `Profile`.
        say: called with a message after every step.

    Returns:
        The profile on the first rank; None on the others.
    """
    timed_here = wanted.dtypes if group.rank == 0 else ()
    kernels = [
        _measure_kernel(wanted, dtype, width, say)
        for dtype in timed_here
        for width in wanted.widths
    ]
    group.gather(
        np.zeros(1, dtype=np.int64), doing="waiting for rank 0 to time the attention kernel"
    )
    inside, between = _measure_links(wanted, group, say)
    if group.rank > 0:
        return None
    return Profile(
        name,
        wanted.device.type,
        _name_processor(wanted.device),
        datetime.datetime.now(datetime.UTC).date().isoformat(),
        list_versions(),
        made_by,
        tuple(kernels),
        inside,
        between,
        torch.get_num_threads() if wanted.device.type == "cpu" else None,
    )


def _measure_kernel(
    wanted: ProfileRequest, dtype: torch.dtype, width: int, say: LogFunction
) -> KernelRates:
    """Measure the rates of one dtype and width, fitted to batches with several numbers of heads."""
    kernel = select_kernel("auto", Case(wanted.device, dtype, width, width, Scores(width**-0.5)))

    def time_batches(
        heads: tuple[int, int], batches: Sequence[Documents]
    ) -> tuple[FloatArray, FloatArray]:
        shape = AttentionShape(*heads, width, width, dtype.itemsize)
        model = CostModel.make_analytic(shape, device_type=wanted.device.type)
        # With one thread, what other programs take from it does not count.
        alone = wanted.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        seconds = measure_batches(
            model, kernel, dtype, wanted.device, batches, enough=wanted.batch_seconds, clock=clock
        )
        say(f"{str(dtype).removeprefix('torch.')}, width {width}, {heads[0]} heads")
        return seconds

    fitted = [time_batches(heads, BATCHES) for heads in wanted.heads]
    counts, seconds = (np.concatenate(columns, axis=1) for columns in zip(*fitted, strict=True))
    forward, backward = map(KernelCost.fit, counts, seconds)
    others, measured = time_batches(wanted.kept_aside, _KEPT_ASIDE)
    errors = {
        **_compare_seconds("forward", others[0] @ forward.coefficients, measured[0]),
        **_compare_seconds("backward", others[1] @ backward.coefficients, measured[1]),
    }
    return KernelRates(
        kernel.name,
        dtype.itemsize,
        width,
        width,
        forward,
        backward,
        errors,
        seconds.shape[1],
        measured.shape[1],
    )


def _compare_seconds(name: str, estimated: FloatArray, measured: FloatArray) -> dict[str, float]:
    off = np.abs(estimated / measured - 1)
    return {
        f"{name}_median": round(float(np.median(off)), 4),
        f"{name}_largest": round(float(off.max()), 4),
    }


def _measure_links(
    wanted: ProfileRequest, group: AttentionGroup, say: LogFunction
) -> tuple[ExchangeRates | None, ExchangeRates | None]:
    """Measure the rates inside a node and between nodes, each None without two ranks of the
    kind.
    """
    if group.size == 1:
        return None, None
    rows = group.gather(
        np.array([find_node_number()], dtype=np.int64), doing="telling which node this is"
    )
    nodes = [int(row[0]) for row in rows]
    others = [rank for rank in range(group.size) if rank != group.rank]
    rates = []
    for same, kind in ((True, "inside"), (False, "between")):
        peers = [rank for rank in others if (nodes[rank] == nodes[group.rank]) == same]
        counts = group.gather(np.array([len(peers)], dtype=np.int64), doing="counting peers")
        # Nodes of unequal size would not send and receive alike.
        usable = bool(peers) and all(int(row[0]) == len(peers) for row in counts)
        rates.append(_measure_link(wanted, group, peers, kind, say) if usable else None)
    return rates[0], rates[1]


def _measure_link(
    wanted: ProfileRequest, group: AttentionGroup, peers: list[int], kind: str, say: LogFunction
) -> ExchangeRates:
    """Measure the rates of exchanges with these ranks: with all of them and, inside a node, with
    the next one.
    """
    patterns = [(peers, peers)]
    if kind == "inside" and len(peers) > 1:
        ring = sorted([*peers, group.rank])
        place = ring.index(group.rank)
        patterns.append(([ring[(place + 1) % len(ring)]], [ring[place - 1]]))

    def time_sizes(sizes: Sequence[int]) -> tuple[FloatArray, FloatArray]:
        cases = [(size, pattern) for size in sizes for pattern in patterns]
        taken = []
        for size, (to, from_) in cases:
            taken.append(_time_exchange(wanted.device, group, size, to, from_))
            say(
                f"{size} bytes to {len(to)} rank{'s' if len(to) > 1 else ''} {kind}"
                f" node{'s' if kind == 'between' else ''}"
            )
        return np.array([[1.0, size] for size, _ in cases]).reshape(-1, 2), np.array(taken)

    fixed, byte = fit_coefficients(*time_sizes(_FITTED_BYTES)).tolist()
    others, measured = time_sizes(_KEPT_ASIDE_BYTES)
    errors = (
        _compare_seconds("exchange", others @ np.array([fixed, byte]), measured)
        if len(others)
        else {}
    )
    return ExchangeRates(1 / byte if byte else math.inf, fixed, group.size, errors)


def _time_exchange(
    device: torch.device, group: AttentionGroup, size: int, to: list[int], from_: list[int]
) -> float:
    """Time an exchange in which every rank sends so many bytes: the slowest rank of the fastest
    round.
    """
    if group.data is None:
        raise ConfigError("a rank that is alone has nobody to exchange with.")
    share = max(size // len(to), 1)
    sent, received = (
        torch.zeros(share * len(some), dtype=torch.uint8, device=device) for some in (to, from_)
    )
    nanoseconds = []
    for _ in range(_ROUNDS):
        group.is_equal_on_all(
            np.zeros(1, dtype=np.int64), doing="timing exchanges"
        )  # all begin at once
        started = time.perf_counter()
        group.data.start(
            received, sent, dict.fromkeys(from_, share), dict.fromkeys(to, share)
        ).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        nanoseconds.append(int((time.perf_counter() - started) * 1e9))
    rows = np.stack(group.gather(np.array(nanoseconds, dtype=np.int64), doing="timing exchanges"))
    return float(rows.max(axis=0).min()) / 1e9


def _name_processor(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    models = (
        [line for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    name = models[0].split(":", 1)[1].strip() if models else platform.processor()
    return f"{name}, {os.cpu_count()} cores"


def measure_on_these_ranks(
    wanted: ProfileRequest, threads: int | None, name: str, made_by: str, say: LogFunction
) -> Profile | None:
    """Run `_measure` on the ranks that a launcher started, or on this process alone."""
    if threads is not None:
        torch.set_num_threads(threads)
    started = "WORLD_SIZE" in os.environ and not dist.is_initialized()
    if started:
        dist.init_process_group("cpu:gloo,cuda:nccl" if wanted.device.type == "cuda" else "gloo")
    try:
        return _measure(wanted, AttentionGroup.create(), name, made_by, say)
    finally:
        if started:
            dist.destroy_process_group()


def measure_on_new_ranks(
    ranks: int,
    wanted: ProfileRequest,
    threads: int | None,
    name: str,
    made_by: str,
    say: LogFunction,
) -> Profile:
    """Run `_measure` on so many new processes of this machine, which exchange over gloo."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(  # type: ignore[no-untyped-call]
            _run_rank,
            (ranks, Path(folder), wanted, threads, name, made_by, say),
            nprocs=ranks,
            start_method="spawn",
        )
        return Profile.load(Path(folder, "profile.json"))


def _run_rank(
    rank: int,
    ranks: int,
    folder: Path,
    wanted: ProfileRequest,
    threads: int | None,
    name: str,
    made_by: str,
    say: LogFunction,
) -> None:
    # They only talk to each other: by default gloo listens on the address of the host's name, which
    # others may reach.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if platform.system() == "Darwin" else "lo"
    store = dist.FileStore(str(folder / "store"), ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    try:
        profile = measure_on_these_ranks(
            wanted, threads, name, made_by, say if rank == 0 else _log_nothing
        )
        if profile is not None:
            (folder / "profile.json").write_text(profile.to_json(), encoding="utf-8")
    finally:
        dist.destroy_process_group()


def _log_nothing(_: str) -> None:
    """Say nothing, on ranks other than the first."""
