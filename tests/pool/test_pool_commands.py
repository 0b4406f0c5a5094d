"""A script that knows nothing of hf_distca, under torchrun: with a server it trains as on fewer
processes without one.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

SCRIPT = """
import json, os, sys
from pathlib import Path
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

folder = Path(sys.argv[1])
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=64, intermediate_size=48, vocab_size=61,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
)
arguments = TrainingArguments(
    str(folder), max_steps=3, per_device_train_batch_size=1, use_cpu=True,
    report_to="none", save_steps=3, logging_steps=1, learning_rate=1e-2, adam_epsilon=1e-2,
)
rows = [torch.randint(2, 61, (length,)).tolist() for length in (200, 20, 40, 30, 100, 64) * 4]
data = Dataset.from_dict({"input_ids": rows, "labels": rows})
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=data)
trainer.train()
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE")
world = [arguments.world_size, arguments.process_index, *(os.environ[name] for name in names)]
names = ("loss", "grad_norm")
losses = [row[name] for row in trainer.state.log_history for name in names if name in row]
seen = json.dumps({"world": world, "losses": losses})
(folder / f"seen_{arguments.process_index}.json").write_text(seen)
"""


def launched(folder: Path, processes: int, *options: str) -> str:
    """What a launch printed, which ended as it should and left nothing behind."""
    (folder / "train.py").write_text(SCRIPT)
    program = [
        str(Path(sys.executable).with_name("hf-distca")),
        "run",
        "--attn-implementation",
        "distca",
        *options,
    ]
    torchrun = [
        str(Path(sys.executable).with_name("torchrun")),
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(
            [*program, *torchrun, "train.py", str(folder)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        try:
            process.wait(timeout=150)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    said = (folder / "output.txt").read_text()
    assert process.returncode == 0, said
    return said


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "settings", [["--tokens-per-rank", "128"], ["--set", "ping_pong=true"]], ids=" ".join
)
def test_a_script_under_torchrun(settings: list[str], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("with", "without")]
    for folder in folders:
        folder.mkdir()
    settings = [*settings, "--set", "tile=8", "--set", "min_gain=0"]
    said = launched(folders[0], 3, "--servers", "1", *settings)
    launched(folders[1], 2, *settings)
    for rank in range(2):
        ours, theirs = (
            json.loads((folder / f"seen_{rank}.json").read_text()) for folder in folders
        )
        assert ours["world"] == theirs["world"] == [2, rank, *map(str, (rank, rank, 2, 2, rank, 2))]
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert len(ours["losses"]) == 6
    files = [{str(path.relative_to(folder)) for path in folder.rglob("*")} for folder in folders]
    assert files[0] == files[1]
    served = re.search(
        r"is rank 2 of 3, and serves the 2 that train\n(?:.*\n)*.*served (\d+) calls of attention"
        r" in (\d+) ",
        said,
    )
    assert served is not None, said
    assert int(served[2]) == 3
    assert "ended: the run is over" in said
