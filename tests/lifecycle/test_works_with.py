"""Trainers of other people: TRL's script for SFT with packing, under distca and under sdpa."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import scripts
from pages import words_of
from tiny_runs import VOCABULARY, tiny_llama

SMALL = "--max_length 256 --max_steps 3 --logging_steps 1 --per_device_train_batch_size 1 --report_to none --save_strategy no"
CPU = "--use_cpu --bf16 false --output_dir out"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model with a tokenizer of whole words, and texts of uneven lengths."""
    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(3, VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>").save_pretrained(
        tmp_path / "model"
    )
    tiny_llama("sdpa").save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    texts = [
        " ".join(f"w{3 + (row * word) % (VOCABULARY - 3)}" for word in range(length))
        for row, length in enumerate([200, 9, 60] * 9)
    ]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


@pytest.mark.timeout(400)
def test_trl_trains_packed_documents_as_with_sdpa(folder: Path) -> None:
    sft = pytest.importorskip("trl.scripts.sft", reason="needs the extra 'trl'")
    command = words_of(
        "accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml -m hf_distca.run "
        """"$(python -c 'import trl.scripts.sft as sft; print(sft.__file__)')" --attn_implementation distca --packing """
        "--model_name_or_path model --dataset_name data"
    )
    words = [sft.__file__ if word.startswith("$(") else word for word in command]
    logged = {}
    for name in ("sdpa", "distca"):
        command = [name if word == "distca" else word for word in words]
        output = scripts.run([*command, *SMALL.split(), *CPU.split()], folder)
        logged[name] = re.findall(r"'(?:loss|grad_norm)': '?([\d.e-]+)", output)
    assert len(logged["sdpa"]) == 6
    assert logged["distca"] == logged["sdpa"]
