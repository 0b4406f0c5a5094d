"""The script that README and the page on long documents begin with, as a user copies it; shares that are made first of all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import scripts
from pages import ROOT, words_of
from tiny_runs import VOCABULARY, documents, tiny_llama
from turns import in_turn

LENGTHS = (200, 7, 3, 33, 90, 64, 12, 150, 5, 80)
LAUNCH = "accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/finetune_long_documents.py"
CHANGED = {  # what a user changes: sizes, and the device
    "max_steps=100, bf16=True": 'max_steps=4, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1',
    "tokens_per_rank=16384": "tokens_per_rank={tokens_per_rank}",
    "from_pretrained(name": "from_pretrained('model'",
}
REPORT = """
import json
from accelerate import PartialState
if PartialState().is_main_process:
    logged = [(float(row["loss"]), float(row["grad_norm"])) for row in trainer.state.log_history if "loss" in row]
    open("logged.json", "w").write(json.dumps(logged))
PartialState().destroy_process_group()
"""
SHARES_FIRST = """
import hf_distca
from datasets import Dataset
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="distca")
rows = Dataset.from_dict({"input_ids": [list(range(2, 2 + length)) for length in (40, 3, 20, 60, 5, 30, 12, 9)]})
shares = hf_distca.document_shares(rows, 32, model=model)

from accelerate import Accelerator, PartialState
assert not PartialState._shared_state, "nothing has been started"
Accelerator(cpu=True)
dealing = shares.format["format_kwargs"]["transform"].dealing
words = dealing.ranks, {key.device for key in dealing.costs}, PartialState().num_processes
open(f"rank_{PartialState().process_index}.txt", "w").write(str(words))
PartialState().destroy_process_group()
"""


def write_model_and_documents(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_llama(None).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0").save_pretrained(folder / "model")
    lines = [json.dumps({"text": " ".join(map(str, ids))}) for ids in documents(*LENGTHS)]
    (folder / "documents.jsonl").write_text("\n".join(lines))


def script_of(page: str, tokens_per_rank: int, attention: str = "distca") -> str:
    """The first Python block of a page, with small sizes."""
    match = re.search(r"```python\n(import hf_distca.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert match
    script = match[1]
    assert sum(bool(line.strip()) for line in script.splitlines()) <= 12
    for before, after in CHANGED.items():
        assert before in script, before
        script = script.replace(before, after.format(tokens_per_rank=tokens_per_rank))
    return script.replace('"distca")', f'"{attention}")') + REPORT


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", in_turn(["README.md", "docs/long_documents.md"], 2))
def test_the_script_of_a_page_trains_as_one_process_does(page: str, tmp_path: Path) -> None:
    write_model_and_documents(tmp_path)
    script = tmp_path / "train.py"
    *launch, _ = words_of(LAUNCH)
    script.write_text(script_of(page, 48))
    scripts.run([*launch, str(script)], tmp_path)
    script.write_text(script_of(page, 96, "sdpa"))
    ours = json.loads((tmp_path / "logged.json").read_text())
    scripts.run(["python", str(script)], tmp_path)
    theirs = json.loads((tmp_path / "logged.json").read_text())
    assert len(theirs) == 4
    assert np.array(ours) == pytest.approx(np.array(theirs), rel=1e-5)


@pytest.mark.timeout(200)
def test_shares_are_made_before_anything_of_accelerate(tmp_path: Path) -> None:
    write_model_and_documents(tmp_path)
    (tmp_path / "train.py").write_text(SHARES_FIRST)
    *launch, _ = words_of(LAUNCH)
    scripts.run([*launch, str(tmp_path / "train.py")], tmp_path)
    assert [(tmp_path / f"rank_{rank}.txt").read_text() for rank in range(2)] == ["(2, {'cpu'}, 2)"] * 2
