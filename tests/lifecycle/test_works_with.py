"""Trainers of other people: TRL's own command for SFT with packing, under distca and under sdpa."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pages import words_of
from tiny_runs import VOCABULARY, tiny_llama

SMALL = (
    "--max_length 256 --max_steps 3 --logging_steps 1 --per_device_train_batch_size 1 --report_to"
    " none --save_strategy no"
)
CPU = "--use_cpu --bf16 false --output_dir out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer of whole words, and texts of uneven lengths."""
    words = {
        "<pad>": 0,
        "<s>": 1,
        "</s>": 2,
        **{f"w{number}": number for number in range(3, VOCABULARY)},
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(tmp_path / "model")
    tiny_llama("sdpa").save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    texts = [
        " ".join(f"w{3 + (row * word) % (VOCABULARY - 3)}" for word in range(length))
        for row, length in enumerate([200, 9, 60] * 9)
    ]
    (tmp_path / "data" / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_trl_trains_packed_documents_as_with_sdpa(folder: Path) -> None:
    pytest.importorskip("trl", reason="needs the extra 'trl'")
    program, *command = words_of(
        "hf-distca run trl sft --accelerate_config configs/accelerate/cpu_2_processes.yaml"
        " --attn_implementation distca --packing --model_name_or_path model --dataset_name data"
    )
    logged = {}
    for name in ("sdpa", "distca"):
        words = [name if word == "distca" else word for word in command]
        done = subprocess.run(
            [str(Path(sys.executable).with_name(program)), *words, *SMALL.split(), *CPU.split()],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        logged[name] = re.findall(r"'(?:loss|grad_norm)': '?([\d.e-]+)", done.stdout)
        assert ("micro-batches on 2 ranks" in done.stderr) == (name == "distca")
    assert len(logged["sdpa"]) == 6
    assert logged["distca"] == logged["sdpa"]
