"""The first script of the README and of the page on long documents, run as a user copies it, and
shares that are made before accelerate starts.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

import hf_distca
import scripts
from pages import ROOT, words_of
from tiny_runs import VOCABULARY, documents, tiny_llama

LENGTHS = (200, 7, 3, 33, 90, 64, 12, 150, 5, 80)
*LAUNCH, _ = words_of(
    "accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml"
    " examples/finetune_long_documents.py"
)
CHANGED = {  # what the tests change, as a user would: sizes, and the device
    "max_steps=100, bf16=True": (
        'max_steps=6, {precision}use_cpu=True, report_to="none", save_strategy="no",'
        " logging_steps=1"
    ),
    "tokens_per_rank=16384": "tokens_per_rank={tokens_per_rank}",
    "from_pretrained(name": "from_pretrained('model'",
}
# For each precision: the argument for it, and the largest relative difference of losses
PRECISIONS = {"float32": ("", 1e-5), "bfloat16": ("bf16=True, ", 4e-3)}
REPORT = """
import json
from accelerate import PartialState
if PartialState().is_main_process:
    names = "loss", "grad_norm", "eval_loss"
    rows = trainer.state.log_history
    logged = {name: [float(row[name]) for row in rows if name in row] for name in names}
    open("logged.json", "w").write(json.dumps(logged))
PartialState().destroy_process_group()
"""
SHARES_FIRST = """
import hf_distca
from datasets import Dataset
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="distca")
lengths = (40, 3, 20, 60, 5, 30, 12, 9)
rows = Dataset.from_dict({"input_ids": [list(range(2, 2 + length)) for length in lengths]})
shares = hf_distca.document_shares(rows, 32, model=model)

from accelerate import Accelerator, PartialState
assert not PartialState._shared_state, "nothing has been started"
Accelerator(cpu=True)
dealing = shares.format["format_kwargs"]["transform"].deal_settings
words = dealing.ranks, {key.device for key in dealing.costs}, PartialState().num_processes
open(f"rank_{PartialState().process_index}.txt", "w").write(str(words))
PartialState().destroy_process_group()
"""


def write_model_and_documents(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1")
    for part in (tiny_llama(None), tokenizer):
        part.save_pretrained(folder / "model")
    write_rows(folder / "documents.jsonl", prompts=False)


def write_rows(file: Path, prompts: bool) -> None:
    """Write the documents as texts, or each as a prompt (its first third) and a completion."""
    texts = [[str(token) for token in ids] for ids in documents(*LENGTHS)]
    rows = [{"text": " ".join(words)} for words in texts]
    if prompts:
        cut = [(words, len(words) // 3 + 1) for words in texts]
        rows = [
            {"prompt": " ".join(words[:at]), "completion": " " + " ".join(words[at:])}
            for words, at in cut
        ]
    file.write_text("\n".join(map(json.dumps, rows)))


def train(script: str, folder: Path, launch: list[str]) -> dict[str, list[float]]:
    """Run a script and return its losses, gradient norms and evaluation losses."""
    (folder / "train.py").write_text(script)
    scripts.run([*launch, str(folder / "train.py")], folder)
    logged: dict[str, list[float]] = json.loads((folder / "logged.json").read_text())
    return logged


def read_script(page: str, tokens_per_rank: int, attention: str, precision: str) -> str:
    """Return the first Python block of a page, with small sizes."""
    script = read_blocks(page)[0]
    assert sum(bool(line.strip()) for line in script.splitlines()) <= 12
    for before, after in CHANGED.items():
        assert before in script, before
        script = script.replace(
            before,
            after.format(tokens_per_rank=tokens_per_rank, precision=PRECISIONS[precision][0]),
        )
    return script.replace('"distca")', f'"{attention}")') + REPORT


def read_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("page", "precision"),
    [
        ("README.md", "bfloat16"),
        pytest.param("docs/long_documents.md", "float32", marks=pytest.mark.slow),
        pytest.param("README.md", "float32", marks=pytest.mark.slow),
        pytest.param("docs/getting_started.md", "float32", marks=pytest.mark.slow),
        pytest.param("docs/long_documents.md", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_first_script_of_a_page_trains_like_one_process(
    page: str, precision: str, tmp_path: Path
) -> None:
    write_model_and_documents(tmp_path)
    ours = train(read_script(page, 48, "distca", precision), tmp_path, LAUNCH)
    theirs = train(read_script(page, 96, "sdpa", precision), tmp_path, ["python"])
    assert len(theirs["loss"]) == 6
    # In half precision, gradient norms differ by more.
    for name in ("loss", "grad_norm") if precision == "float32" else ("loss",):
        assert ours[name] == pytest.approx(theirs[name], rel=PRECISIONS[precision][1])


def test_page_on_long_documents_begins_with_the_script_of_the_readme() -> None:
    first, second = (
        ast.dump(ast.parse(read_blocks(page)[0]))
        for page in ("README.md", "docs/long_documents.md")
    )
    assert first == second


# The code that pages expect of their readers, around the block that contains each word.
GIVEN = """
import json
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
import hf_distca

name, tokens, trained = "model", 48, []
texts = [[2 + (7 * i + j * j) % 50 for j in range(length)] for i, length in enumerate({lengths})]
documents = Dataset.from_dict({{"input_ids": texts}})
args = TrainingArguments(
    "out", max_steps=4, bf16=True, use_cpu=True,
    report_to="none", save_strategy="no", logging_steps=1,
)
"""
TRAINER = """
{block}
trained.append([float(row["loss"]) for row in trainer.state.log_history if "loss" in row])
"""
CLASS = """
{block}
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="distca")
collator = hf_distca.PackingCollator()
trainer = MyTrainer(model=model, args=args, train_dataset=documents, data_collator=collator)
{deal}
trainer.train()
trained.append([float(row["loss"]) for row in trainer.state.log_history if "loss" in row])
"""
LOOP = """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="distca")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
{shares}
trained.append([])
{block}
    optimizer.step()
    optimizer.zero_grad()
    trained[-1].append(accelerator.reduce(loss.detach(), "mean").item())
"""
END = """
if torch.distributed.get_rank() == 0:
    open("logged.json", "w").write(json.dumps(trained))
torch.distributed.destroy_process_group()
"""
BLOCKS = {
    "docs/long_documents.md": {
        "def compute_loss": CLASS,
        "accelerator.prepare": LOOP,
    },
    "docs/getting_started.md": {
        "data_collator=hf_distca.PackingCollator()": TRAINER,
    },
}

STEPS = {"docs/long_documents.md": [4, 7], "docs/getting_started.md": [4]}


def join_blocks(page: str) -> str:
    """Join the blocks of a page that need code around them into one script."""
    blocks, parts = read_blocks(page), [GIVEN.format(lengths=LENGTHS)]
    shares = next((block for block in blocks if "DataLoader(" in block), "").replace(
        "16384", "tokens"
    )
    for word, around in BLOCKS[page].items():
        (block,) = (block for block in blocks if word in block)
        deal = "hf_distca.deal(trainer, tokens)" if "loss" in word else ""
        parts.append(around.format(block=block.rstrip(), deal=deal, shares=shares))
    return "".join(parts) + END


@pytest.mark.timeout(200)
@pytest.mark.parametrize("page", BLOCKS)
def test_other_code_blocks_of_pages_train_in_half_precision(page: str, tmp_path: Path) -> None:
    write_model_and_documents(tmp_path)
    trained = train(join_blocks(page), tmp_path, LAUNCH)
    assert [len(losses) for losses in trained] == STEPS[page]
    assert all(0 < loss < 10 for losses in trained for loss in losses)


def test_code_blocks_for_training_loops_run_on_one_process() -> None:
    """Run the blocks for settings, a loop with metrics, and a document in parts (here one)."""
    model, logged = tiny_llama("distca"), []
    batch = hf_distca.PackingCollator()([{"input_ids": ids} for ids in documents(20, 9)])
    (document,) = documents(30)
    names = {
        "hf_distca": hf_distca,
        "torch": torch,
        "model": model,
        "optimizer_steps": [[batch]],
        "log": logged.append,
        "parts": [(0, len(document))],
        "rank": 0,
        "world_size": 1,
        "document": document,
    }
    ran = 0
    for block in read_blocks("docs/getting_started.md"):
        if any(word in block for word in ("DistCAConfig(", "prepare(")):
            exec(compile(block, "docs/getting_started.md", "exec"), names)  # code of our own page
            ran += 1
    hf_distca.configure()
    whole = model(input_ids=torch.tensor([document]), labels=torch.tensor([document])).loss
    assert names["loss"].item() == pytest.approx(whole.item(), rel=1e-6)
    assert (ran, len(logged)) == (3, 1)


@pytest.mark.timeout(200)
def test_shares_may_be_made_before_accelerate_starts(tmp_path: Path) -> None:
    write_model_and_documents(tmp_path)
    (tmp_path / "train.py").write_text(SHARES_FIRST)
    scripts.run([*LAUNCH, str(tmp_path / "train.py")], tmp_path)
    assert [(tmp_path / f"rank_{rank}.txt").read_text() for rank in range(2)] == [
        "(2, {'cpu'}, 2)"
    ] * 2
