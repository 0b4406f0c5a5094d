"""The README's script in bfloat16: documents dealt to two ranks of one card over NCCL, compared
with one process that has as many tokens, under distca and under `sdpa`.

Model, tokenizer and texts are made up. Only the sizes of the script change, and its losses are
recorded.
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from gpu_ranks import find_port, make_environment
from gpu_setting import Setting
from models import make_llama_config

README = Path(__file__).parents[2] / "README.md"
# bfloat16 has a precision of 8 bits; losses of correct runs differ by less over ten steps.
BOUND = 4e-3
KEEP = """
import json, os
if os.environ.get("RANK", "0") == "0":
    rows = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    open(os.environ["LOSSES"], "w").write(json.dumps([float(loss) for loss in rows]))
import torch.distributed as dist
if dist.is_initialized():
    dist.destroy_process_group()
"""


def write_inputs(setting: Setting, folder: Path) -> None:
    """Write a model, a tokenizer of words, and texts of very unequal lengths."""
    words, hidden, layers = setting.size(quick=(64, 64, 1), cpu=(512, 64, 2), gpu=(8192, 1024, 8))
    config = make_llama_config((hidden, 3 * hidden, layers), (8, 2), words)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    known = models.WordLevel({str(word): word for word in range(words)}, unk_token="0")
    tokenizer = Tokenizer(known)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0").save_pretrained(
        folder / "model"
    )
    draw, longest = random.Random(0), setting.size(quick=150, cpu=400, gpu=24000)
    lines = []
    for _ in range(setting.size(quick=30, cpu=60, gpu=200)):
        phrase = [draw.randrange(5, words) for _ in range(50)]
        length = min(longest, int(20 + draw.lognormvariate(0, 1.5) * longest / 16))
        text = " ".join(str(phrase[(i * 7 + i // 50) % 50]) for i in range(length))
        lines.append(json.dumps({"text": text}))
    (folder / "documents.jsonl").write_text("\n".join(lines))


def write_script(setting: Setting, tokens: int, attention: str, path: Path) -> None:
    """Write the first Python block of the README with small sizes, and code to record losses."""
    found = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    script, steps = found[1], setting.size(quick=2, cpu=4, gpu=10)
    device = "" if setting.device.type == "cuda" else "use_cpu=True, "
    options = f'{device}report_to="none", save_strategy="no", logging_steps=1'
    for before, after in (
        ("max_steps=100, bf16=True", f"max_steps={steps}, bf16=True, {options}"),
        ("tokens_per_rank=16384", f"tokens_per_rank={tokens}"),
        ("from_pretrained(name", "from_pretrained('model'"),
        ('"distca")', f'"{attention}")'),
    ):
        if before not in script:
            raise ValueError(f"the README's first script no longer has {before!r}.")
        script = script.replace(before, after)
    path.write_text(script + KEEP)


def train(path: Path, ranks: int, seconds: float) -> dict[str, Any]:
    """Run a script on ranks of one device; return its losses, or its error."""
    losses = path.with_suffix(".json")
    port, started = find_port(), []
    for rank in range(ranks):
        environment = {**os.environ, "LOSSES": str(losses)}
        if ranks > 1:
            environment |= make_environment(rank, ranks, port)
        output = path.with_suffix(f".{rank}.txt").open("w")
        command, shown = [sys.executable, path.name], {"stdout": output, "stderr": output}
        started.append(subprocess.Popen(command, cwd=path.parent, env=environment, **shown))
    try:
        for process in started:
            process.wait(max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {seconds:.0f} s"}
    finally:
        for process in started:
            process.kill()
    if any(process.returncode for process in started):
        return {"failed": path.with_suffix(".0.txt").read_text()[-2000:]}
    return {"losses": json.loads(losses.read_text())}


def run(setting: Setting) -> None:
    """Record the losses of each case, and how far the dealt ones are from the others."""
    tokens = setting.size(quick=48, cpu=128, gpu=8192)
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        write_inputs(setting, Path(name))
        for case, ranks, attention in (
            ("dealt, two ranks", 2, "distca"),
            ("one process", 1, "distca"),
            ("one process, sdpa", 1, "sdpa"),
        ):
            if not setting.has_time_for(case, cpu=20.0, gpu=20.0):
                continue
            path = Path(name) / f"{len(cases)}.py"
            write_script(setting, tokens * (3 - ranks), attention, path)
            cases[case] = train(path, ranks, setting.left())
            setting.put(cases=cases, bound=BOUND)
    dealt = cases.get("dealt, two ranks", {}).get("losses", [])
    for found in cases.values():
        if dealt and found.get("losses"):
            pairs = zip(dealt, found["losses"], strict=True)
            found["off"] = max(abs(a - b) / b for a, b in pairs)
    setting.put(passed=all(found.get("off", 1.0) <= BOUND for found in cases.values()))
