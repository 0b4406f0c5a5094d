"""The code of docs/pipelines.md trains as one process would."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from staged import Case, check_near, configure, make_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import hf_distca
from pages import ROOT
from ranks import RankPools

LENGTHS = [150, 20, 22, 64, 64, 64, 100, 90, 2, 192, 30, 30, 36, 96]
TOKENS, RATE = 96, 0.5


def read_blocks() -> list[str]:
    """Read the page's code, changed for a CPU and small batches."""
    text = (ROOT / "docs" / "pipelines.md").read_text()
    return [
        block.replace('"cuda"', '"cpu"').replace(
            "tokens_per_rank=16384", f"tokens_per_rank={TOKENS}, seed=None, device='cpu'"
        )
        for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    ]


def draw_documents() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        {"input_ids": torch.randint(40, 90, (length,), generator=generator)} for length in LENGTHS
    ]


def train_stage(rank: int, case: Case, folder: str) -> dict[str, torch.Tensor]:
    """Run the page's code and return the weights of this stage."""
    configure(case)
    first, dealt = read_blocks()
    positions = torch.arange(case.tokens).expand(case.micro_batches, -1)
    names: dict[str, Any] = {
        "torch": torch,
        "dist": dist,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "cross_entropy": cross_entropy,
        "copies": case.copies,
        "stages": case.stages,
        "n_microbatches": case.micro_batches,
        "name": folder,
        "losses": [],
    }
    names |= dict.fromkeys(("input_ids", "position_ids", "shift_labels"), positions)
    names["loss_fn"] = lambda logits, targets: cross_entropy(
        logits.flatten(0, 1), targets.flatten()
    )
    exec(compile(first, "docs/pipelines.md", "exec"), names)  # the project's own code
    stage = names["stage"]
    if case.copies > 1:
        stage.submod = DistributedDataParallel(
            stage.submod, process_group=names["mesh"]["dp_replicate"].get_group()
        )
    # Undo the step of the first block.
    weights = make_model(case, "sdpa").state_dict()
    module = stage.submod.module if case.copies > 1 else stage.submod
    with torch.no_grad():
        for name, weight in module.model.named_parameters():
            weight.copy_(weights[name])
    names["optimizer"] = torch.optim.SGD(stage.submod.parameters(), lr=RATE)
    names["documents"] = draw_documents()
    exec(compile(dealt, "docs/pipelines.md", "exec"), names)
    return {name: weight.detach() for name, weight in module.model.named_parameters()}


def train_in_one_process(case: Case) -> dict[str, torch.Tensor]:
    """Run the same steps on the mean over the targets of all copies, with clipped gradients."""
    hf_distca.configure()
    model = make_model(case, "distca")
    shares = hf_distca.document_shares(
        draw_documents(), TOKENS * case.copies, model=model, ranks=1, seed=None, device="cpu"
    )
    optimizer, collate = torch.optim.SGD(model.parameters(), lr=RATE), hf_distca.PackingCollator()
    for first in range(0, len(shares) - case.micro_batches + 1, case.micro_batches):
        items = [collate([shares[first + number]]) for number in range(case.micro_batches)]
        count = sum((item["shift_labels"] != -100).sum() for item in items)
        for item in items:
            targets = item.pop("shift_labels").flatten()
            item.pop("labels")
            logits = model(**item, use_cache=False).logits.flatten(0, 1)
            (cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("copies", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_code_of_the_page_trains_on_the_global_mean(
    rank_pool: RankPools, tmp_path: Path, copies: int
) -> None:
    case = Case(micro_batches=2, layers=2, tied=True, copies=copies)
    make_model(case, "sdpa").save_pretrained(tmp_path)
    wanted = train_in_one_process(case)
    for weights in rank_pool(2 * copies)(train_stage, case, str(tmp_path)):
        check_near(weights, wanted, 1e-6)
