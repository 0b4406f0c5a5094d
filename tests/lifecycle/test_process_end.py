"""How processes end that never close their process groups, as most scripts do."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np

import forks
from hf_distca.runtime import watch
from hf_distca.runtime.group import AttentionGroup
from ranks import join_world


def ends_with_a_late_thread(rank: int, folder: Path) -> None:
    """A thread is late, as one of gloo's may be that has to let go of the last collective's tensors.

    The interpreter does not wait for it, and what a late thread of gloo does while the interpreter ends aborts the process.
    """
    patch.object(watch, "_LATE_SECONDS", 1.0).start()  # the end of a fork takes a moment by itself
    join_world(rank, 2, folder / "store")
    last = threading.Event()

    def let_go() -> None:
        last.wait()
        time.sleep(0.7)
        (folder / f"{rank} let go").touch()

    threading.Thread(target=let_go, daemon=True).start()
    AttentionGroup.of().gather(np.arange(5), doing="a test")
    last.set()


def test_threads_that_are_late_come_before_the_end(tmp_path: Path) -> None:
    ranks = [forks.start(ends_with_a_late_thread, rank, tmp_path) for rank in range(2)]
    try:
        for rank in ranks:
            rank.join(60)
        codes = [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert codes == [0, 0]
    assert sorted(path.name for path in tmp_path.glob("*let go")) == ["0 let go", "1 let go"]
