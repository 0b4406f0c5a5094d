"""The scripts of the page "Your SFT script, before and after": before the change, after it on two
processes, and after it on one process under sdpa.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from test_first_script import (
    LAUNCH,
    PRECISIONS,
    REPORT,
    train,
    write_model_and_documents,
    write_rows,
)

from pages import ROOT

PAGE = ROOT / "docs" / "sft_before_after.md"
_BLOCK = re.compile(r"## ([^\n]+)\n\n```python\n(.*?)```\n\n```diff\n(.*?)```", re.DOTALL)
CHANGES = {
    heading: (script, change) for heading, script, change in _BLOCK.findall(PAGE.read_text())
}
SMALL = (
    'max_steps=4, use_cpu=True, report_to="none", save_strategy="no", logging_steps=1,'
    " dataloader_pin_memory=False, bf16={bf16}"
)


def apply_diff(script: str, change: str) -> str:
    """Apply a diff to a script. Lines that the diff omits stay as they are."""
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


def test_page_has_four_scripts_that_change_in_at_most_six_lines() -> None:
    assert list(CHANGES) == ["transformers: Trainer", "TRL: SFTTrainer", "LoRA", "Evaluation"]
    for script, change in CHANGES.values():
        after = apply_diff(script, change)
        compile(after, "page", "exec")
        assert len([line for line in change.splitlines() if line[:1] in "+-"]) <= 6
        assert after.index("import hf_distca") == 0
        assert after.index("hf_distca.deal(") < after.index("\ntrainer.train()")


def make_small(script: str, bf16: bool) -> str:
    """Give a script small sizes, and let it write the values that it logged."""
    few = script.replace(", bf16=True", "").replace("max_steps=100", SMALL.format(bf16=bf16))
    return f"name = 'model'\n{few}{REPORT}"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("heading", "precision"),
    [*((heading, "float32") for heading in CHANGES), ("TRL: SFTTrainer", "bfloat16")],
)
def test_scripts_of_the_page_train_like_one_process(
    heading: str, precision: str, tmp_path: Path
) -> None:
    pytest.importorskip("trl", reason='needs pip install -e ".[trl]"')
    pytest.importorskip("peft", reason='needs pip install -e ".[peft]"')
    write_model_and_documents(tmp_path)
    write_rows(tmp_path / "chats.jsonl", prompts=True)
    script, change = CHANGES[heading]
    bf16, bound = precision == "bfloat16", PRECISIONS[precision][1]
    assert np.isfinite(train(make_small(script, bf16), tmp_path, ["python"])["loss"]).all()
    after = make_small(apply_diff(script, change), bf16)
    ours = train(after.replace("16384", "48"), tmp_path, LAUNCH)
    alone = after.replace("16384", "96").replace('"distca"', '"sdpa"')
    theirs = train(alone, tmp_path, ["python"])
    assert len(theirs["loss"]) == 4
    assert len(theirs["eval_loss"]) == (2 if heading == "Evaluation" else 0)
    for name in ours:
        norms = bf16 and name == "grad_norm"
        assert ours[name] == pytest.approx(theirs[name], rel=2e-2 if norms else bound), name
