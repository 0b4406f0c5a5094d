"""The example of pipeline stages trains, logs its ticks, draws them, and saves a checkpoint that
transformers loads.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import scripts
from pages import words_of
from test_example import run_program, write_corpus

SMALL = [
    "--max_steps",
    "3",
    "--tokens",
    "512",
    "--micro_batches",
    "3",
    "--output_dir",
    "out",
]


def check_run(output: str, folder: Path) -> None:
    losses = [float(loss) for loss in re.findall(r"step \d+: loss ([\d.]+)", output)]
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert "forward tick 0 (micro-batch 0 on stage 0): attention seconds of ranks" in output
    assert (folder / "out" / "ticks.png").read_bytes().startswith(b"\x89PNG")
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert torch.isfinite(model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits).all()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_trains_two_stages_with_accelerate(tmp_path: Path) -> None:
    command = words_of(
        "accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml"
        " examples/train_pipeline.py"
    )
    output = scripts.run(
        [*command, "--dataset_name", write_corpus(tmp_path / "corpus"), *SMALL],
        tmp_path,
        timeout=360,
    )
    check_run(output, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("processes", "stages"), [("2", "2"), ("4", "4"), ("4", "2")])
def test_the_example_trains_with_torchrun(tmp_path: Path, processes: str, stages: str) -> None:
    command = words_of("torchrun --nproc_per_node 2 examples/train_pipeline.py")
    command[command.index("--nproc_per_node") + 1] = processes
    data = ["--dataset_name", write_corpus(tmp_path / "corpus")]
    if processes != "2":
        data += ["--stages", stages]
    check_run(run_program([*command, *data, *SMALL], tmp_path, 360), tmp_path)
