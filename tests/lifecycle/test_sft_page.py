"""The scripts of the page "Your SFT script, before and after": before, after on two processes, and
after on one process under sdpa.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from test_first_script import LAUNCH, LENGTHS, PRECISIONS

import scripts
from pages import ROOT, words_of
from tiny_runs import VOCABULARY, documents, tiny_llama

PAGE = ROOT / "docs" / "sft_before_after.md"
_BLOCK = re.compile(r"## ([^\n]+)\n\n```python\n(.*?)```\n\n```diff\n(.*?)```", re.DOTALL)
CHANGES = {
    heading: (script, change) for heading, script, change in _BLOCK.findall(PAGE.read_text())
}
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
SMALL = (
    'max_steps=4, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,'
    " dataloader_pin_memory=False, bf16={bf16}"
)


def changed(script: str, change: str) -> str:
    """The script after a change; lines that the change leaves out stay as they are."""
    rest, written = script.splitlines(), []
    for line in change.splitlines():
        sign, text = line[:1], line[1:]
        if sign != "+":
            place = rest.index(text)
            written += rest[:place] + ([] if sign == "-" else [text])
            rest = rest[place + 1 :]
        elif text.startswith("hf_distca.deal("):
            place = rest.index("trainer.train()")
            written += [*rest[:place], text]
            rest = rest[place:]
        else:
            written.append(text)
    return "\n".join([*written, *rest]) + "\n"


def test_the_page_has_four_scripts_and_few_lines_change() -> None:
    assert list(CHANGES) == ["transformers: Trainer", "TRL: SFTTrainer", "LoRA", "Evaluation"]
    for script, change in CHANGES.values():
        after = changed(script, change)
        compile(after, "page", "exec")
        assert len([line for line in change.splitlines() if line[:1] in "+-"]) <= 6
        assert after.index("import hf_distca") == 0
        assert after.index("hf_distca.deal(") < after.index("\ntrainer.train()")


def write_model_and_chats(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({str(number): number for number in range(VOCABULARY)}, unk_token="0")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_llama(None).save_pretrained(folder / "model")
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="1").save_pretrained(
        folder / "model"
    )
    lines = []
    for ids in documents(*LENGTHS):
        cut = len(ids) // 3 + 1
        prompt, answer = (" ".join(map(str, part)) for part in (ids[:cut], ids[cut:]))
        lines.append(json.dumps({"prompt": prompt, "completion": " " + answer}))
    (folder / "chats.jsonl").write_text("\n".join(lines))


def logged(script: str, folder: Path, launch: list[str], bf16: bool) -> dict[str, list[float]]:
    """Losses, gradient norms and losses of evaluation of a run of a script."""
    small = script.replace(", bf16=True", "").replace("max_steps=100", SMALL.format(bf16=bf16))
    (folder / "train.py").write_text(f"name = 'model'\n{small}{REPORT}")
    scripts.run([*launch, str(folder / "train.py")], folder)
    found: dict[str, list[float]] = json.loads((folder / "logged.json").read_text())
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("heading", "precision"),
    [*((heading, "float32") for heading in CHANGES), ("TRL: SFTTrainer", "bfloat16")],
)
def test_scripts_of_the_page_train_as_one_process_does(
    heading: str, precision: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    pytest.importorskip("peft", reason='needs pip install -e ".[peft]"')
    write_model_and_chats(tmp_path)
    script, change = CHANGES[heading]
    *launch, _ = words_of(LAUNCH)
    bf16, bound = precision == "bfloat16", PRECISIONS[precision][1]
    assert np.isfinite(logged(script, tmp_path, ["python"], bf16)["loss"]).all()
    after = changed(script, change)
    ours = logged(after.replace("16384", "48"), tmp_path, launch, bf16)
    alone = after.replace("16384", "96").replace('"distca"', '"sdpa"')
    theirs = logged(alone, tmp_path, ["python"], bf16)
    assert len(theirs["loss"]) == 4
    assert len(theirs["eval_loss"]) == (2 if heading == "Evaluation" else 0)
    for name in ours:
        norms = bf16 and name == "grad_norm"
        assert ours[name] == pytest.approx(theirs[name], rel=2e-2 if norms else bound), name
