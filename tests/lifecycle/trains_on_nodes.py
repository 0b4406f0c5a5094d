"""A user's script that trains a tiny model on dealt documents: `train.py` of the page on clusters.

Arguments are settings as NAME=VALUE, max_steps, and ddp_timeout, which the Trainer itself would
ignore on CPUs.
"""

from __future__ import annotations

import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from datasets import Dataset, disable_progress_bars
from transformers import Trainer, TrainingArguments

import hf_distca
from tiny_runs import COMMON, documents, losses, settings, tiny_llama

TOKENS = 192  # tokens of a global batch, on any number of ranks
LENGTHS = (200, 7, 1, 33, 90, 64, 12, 150, 5, 80)


def main() -> None:
    given: dict[str, Any] = {
        name: int(value) for name, value in (word.split("=") for word in sys.argv[1:])
    }
    disable_progress_bars()
    if "ddp_timeout" in given:
        dist.init_process_group("gloo", timeout=timedelta(seconds=given.pop("ddp_timeout")))
    options = {
        "output_dir": tempfile.gettempdir(),
        "max_steps": given.pop("max_steps", 4),
        "learning_rate": 1e-2,
        "bf16": False,
    }
    args = TrainingArguments(**{**COMMON, **options})
    rows = Dataset.from_dict({"input_ids": documents(*LENGTHS)})
    callback = hf_distca.DistCACallback(
        settings(**{"cost_model": "analytic", "timeout_seconds": None, **given}), record=False
    )
    trainer = Trainer(tiny_llama("distca"), args, train_dataset=rows, callbacks=[callback])
    hf_distca.deal(trainer, tokens_per_rank=TOKENS // args.world_size)
    trainer.train()
    if trainer.is_world_process_zero():
        print("LOSSES", losses(trainer))  # noqa: T201


if __name__ == "__main__":
    main()
