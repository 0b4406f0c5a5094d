"""Timelines of core attention, written for Perfetto."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from hf_distca.integration.session import current_session
from hf_distca.runtime.trace import Trace

__all__ = ["profile", "write_trace"]


@contextmanager
def profile(folder: str | Path | None = None) -> Iterator[Trace]:
    """Record what core attention does inside: linear, dispatch, server and return spans of both nano-batches and directions.

    Open the files at ui.perfetto.dev or chrome://tracing. On CUDA, recording puts events on the stream and stops nothing; writing
    waits for the device.

    Args:
        folder: where each rank writes ``rank_<number>.json`` at the end; None to write nothing.

    Yields:
        The trace; ``spans`` and ``hidden`` (the part of the messages' time that was computed in) can be read at any time.
    """
    session = current_session()
    before, session.trace = session.trace, Trace()
    trace = session.trace
    try:
        yield trace
    finally:
        session.trace = before
    if folder is not None:
        write_trace(trace, folder)


def write_trace(trace: Trace, folder: str | Path) -> None:
    """Write this rank's file."""
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    trace.write(Path(folder) / f"rank_{rank}.json", rank)
