"""How processes end that never close their process groups, as most scripts do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# A thread that is late, as one of gloo's may be that has to let go of the last collective's tensors. The interpreter does not
# wait for it, and what a late thread of gloo does while the interpreter ends aborts the process.
RANK = """
import sys, threading, time
from pathlib import Path
import numpy as np
import torch.distributed as dist
from hf_distca.runtime.group import AttentionGroup

rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
last = threading.Event()

def let_go():
    last.wait()
    time.sleep(0.05)
    (folder / f"{rank} let go").touch()

threading.Thread(target=let_go, daemon=True).start()
AttentionGroup.of().gather(np.arange(5), doing="a test")
last.set()
"""


def test_threads_that_are_late_come_before_the_end(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, str(rank), str(tmp_path)], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        ends = [(rank.communicate(timeout=120)[1], rank.returncode) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [code for _, code in ends] == [0, 0], ends
    assert sorted(path.name for path in tmp_path.glob("*let go")) == ["0 let go", "1 let go"]
