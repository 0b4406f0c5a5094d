"""`trl sft` without a changed line, on documents longer than a rank: the processes that the command
starts deal them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from test_first_script import write_model_and_documents, write_rows

from pages import words_of
from test_example import run_program

SETTINGS = """
model_name_or_path: model
dataset_name: data
max_length: null  # TRL would cut documents to 1,024 tokens
max_steps: 4
logging_steps: 1
learning_rate: 0.01
use_cpu: true
bf16: false
report_to: none
save_steps: 4
output_dir: out
"""


def run_training(command: list[str], folder: Path) -> tuple[list[float], str]:
    """Run the command, and return the loss and gradient norm of each step and the printed text."""
    said = run_program(command, folder, timeout=140)
    state = folder / "out/checkpoint-4/trainer_state.json"
    history = json.loads(state.read_text())["log_history"]
    state.unlink()  # the next run writes its own
    return [row[name] for row in history if "loss" in row for name in ("loss", "grad_norm")], said


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("prompts", [False, True], ids=["text", "prompts and completions"])
def test_trl_sft_on_two_ranks_trains_like_one_process(prompts: bool, tmp_path: Path) -> None:
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    write_model_and_documents(tmp_path)
    (tmp_path / "data").mkdir()
    write_rows(tmp_path / "data" / "train.jsonl", prompts)
    (tmp_path / "sft.yaml").write_text(SETTINGS)
    words = words_of(
        "hf-distca run --attn-implementation distca --tokens-per-rank 16384 "
        "trl sft --accelerate_config configs/accelerate/cpu_2_processes.yaml --config sft.yaml"
    )
    ours, said = run_training(["48" if word == "16384" else word for word in words], tmp_path)
    assert "to 2 ranks with 48 tokens each" in said
    alone = ["--num_processes", "1", "--attn_implementation", "sdpa", "--config", "sft.yaml"]
    theirs, said = run_training(
        ["hf-distca", "run", "--tokens-per-rank", "96", "trl", "sft", *alone], tmp_path
    )
    assert "to 1 rank with 96 tokens" in said
    assert len(theirs) == 8
    assert ours == pytest.approx(theirs, rel=1e-5)
