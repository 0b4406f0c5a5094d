"""The Trainer on two ranks of one card over NCCL, as users start it: bf16, its own DDP, work that
moves; compared with `sdpa`.

Every case trains on the same rows from the same weights and logs each step. Rank 0 draws long
documents and rank 1 short ones. The cost model counts pairs alone, so that work moves in every
layer.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from transformers import (
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import hf_distca
from gpu_ranks import Ranks
from gpu_setting import Setting
from hf_distca.schedule.cost import AttentionShape, CostModel
from models import make_llama_config

RANKS = 2
# bfloat16 has a precision of 8 bits; losses of correct runs differ by less over ten steps.
BOUND = 4e-3
FSDP2 = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
}
CHECKPOINTED = {
    "gradient_checkpointing": True,
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
}
# Name: attention, case to compare with, settings of distca, arguments of the Trainer.
CASES: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any]]] = {
    "sdpa, DDP": ("sdpa", None, {}, {}),
    "distca, DDP": ("distca", "sdpa, DDP", {}, {}),
    "distca, DDP, balancing off": ("distca", "sdpa, DDP", {"balance": False}, {}),
    "distca, DDP, ping-pong": ("distca", "sdpa, DDP", {"ping_pong": True}, {}),
    "distca, DDP, checkpointing": ("distca", "sdpa, DDP", {}, CHECKPOINTED),
    "distca, DDP, checkpointing, ping-pong": (
        "distca",
        "sdpa, DDP",
        {"ping_pong": True},
        CHECKPOINTED,
    ),
    "sdpa, TRL": ("sdpa", None, {}, {"trl": True}),
    "distca, TRL": ("distca", "sdpa, TRL", {}, {"trl": True}),
    "sdpa, FSDP2": ("sdpa", None, {}, FSDP2),
    "distca, FSDP2": ("distca", "sdpa, FSDP2", {}, FSDP2),
    "distca, FSDP2, ping-pong": ("distca", "sdpa, FSDP2", {"ping_pong": True}, FSDP2),
    "distca, DDP, torch.compile": ("distca", "sdpa, DDP", {}, {"torch_compile": True}),
}


def count_steps(setting: Setting) -> int:
    return setting.size(quick=2, cpu=4, gpu=10)


class Losses(TrainerCallback):
    """Rows of the Trainer's log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if logs and "loss" in logs:
            self.rows.append(dict(logs))


def make_model(setting: Setting, attention: str) -> LlamaForCausalLM:
    small = (64, 96, 2, 4)
    hidden, wide, layers, heads = setting.size(quick=small, cpu=small, gpu=(1024, 2816, 6, 8))
    torch.manual_seed(0)
    config = make_llama_config((hidden, wide, layers), (heads, 2), 4096)
    return LlamaForCausalLM._from_config(config, attn_implementation=attention)  # noqa: SLF001


def make_rows(setting: Setting) -> list[dict[str, Any]]:
    """Make rows of long and short documents in turns, so that each rank draws one kind."""
    draw, tokens = random.Random(0), setting.size(quick=96, cpu=256, gpu=6144)

    def document(length: int) -> list[int]:
        phrase = [draw.randrange(5, 4096) for _ in range(50)]
        return [phrase[(i * 7 + i // 50) % 50] for i in range(length)]

    rows = []
    for number in range(RANKS * count_steps(setting)):
        lengths = [tokens] if number % 2 == 0 else [tokens // 8 - 1] * 8
        rows.append({"documents": [document(length) for length in lengths]})
    return rows


def make_settings(model: LlamaForCausalLM, changes: dict[str, Any]) -> hf_distca.DistCAConfig:
    config = model.config
    shape = AttentionShape(
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim, 2
    )
    return hf_distca.DistCAConfig(
        cost_model=CostModel.make_of_pairs(shape),
        tile=32,
        min_gain=0.0,
        timeout_seconds=60.0,
        **changes,
    )


def make_trainer(setting: Setting, name: str, folder: str) -> Trainer:
    attention, _, changes, options = CASES[name]
    model, gpu = make_model(setting, attention), setting.device.type == "cuda"
    options = {key: value for key, value in options.items() if gpu or key != "torch_compile"}
    arguments: dict[str, Any] = {
        "output_dir": folder,
        "max_steps": count_steps(setting),
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "train_sampling_strategy": "sequential",
        "bf16": True,
        "use_cpu": not gpu,
        "report_to": "none",
        "save_strategy": "no",
        "learning_rate": 1e-3,
        "disable_tqdm": True,
        "remove_unused_columns": False,
    }
    callbacks: list[TrainerCallback] = []
    if attention == "distca":
        callbacks.append(hf_distca.DistCACallback(make_settings(model, changes), record=False))
    callbacks.append(Losses())  # after distca's callback, which adds its figures to the rows
    if options.get("trl"):
        return make_sft_trainer(
            model,
            {**arguments, **{k: v for k, v in options.items() if k != "trl"}},
            make_rows(setting),
            callbacks,
        )
    made = TrainingArguments(**{**arguments, **options})
    collator = hf_distca.PackingCollator()
    return Trainer(
        model, made, data_collator=collator, train_dataset=make_rows(setting), callbacks=callbacks
    )


def make_sft_trainer(
    model: Any, arguments: dict[str, Any], rows: list[Any], callbacks: list[TrainerCallback]
) -> Trainer:
    """Make TRL's SFTTrainer on the same rows, as its packed rows: `input_ids`, `seq_lengths`."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"w{n}": n for n in range(8)}, unk_token="w0"))
    token = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", eos_token="w1")
    packed = [
        {
            "input_ids": [t for document in row["documents"] for t in document],
            "seq_lengths": [*map(len, row["documents"])],
        }
        for row in rows
    ]
    config = SFTConfig(
        **arguments,
        max_length=None,
        padding_free=True,
        gradient_checkpointing=False,
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    return SFTTrainer(
        model,
        config,
        train_dataset=Dataset.from_list(packed),
        processing_class=token,
        callbacks=callbacks,
    )


def run_case(setting: Setting, name: str) -> dict[str, Any]:
    """Train one case; return its losses and gradient norms, exchanged work, and seconds."""
    from accelerate.state import AcceleratorState, GradientState

    for variable in [key for key in os.environ if key.startswith(("FSDP_", "ACCELERATE_"))]:
        del os.environ[variable]
    AcceleratorState._reset_state()  # noqa: SLF001  # of the case before; the process group stays
    GradientState._reset_state()  # noqa: SLF001
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(setting, name, folder)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    rows = next(
        callback for callback in trainer.callback_handler.callbacks if isinstance(callback, Losses)
    ).rows
    moved = {key: value for key, value in rows[-1].items() if "distca" in key or "attention" in key}
    found = {
        "losses": [row["loss"] for row in rows],
        "gradient_norms": [float(row["grad_norm"]) for row in rows],
        "engine": type(trainer.model_wrapped).__name__,
        "last_row": moved,
        "seconds": round(time.monotonic() - began, 1),
    }
    if setting.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Compute the largest relative differences of losses and of gradient norms."""
    off = {}
    for what in ("losses", "gradient_norms"):
        off[what] = max(abs(a / b - 1) for a, b in zip(found[what], expected[what], strict=True))
    return {"off": off, "passed": off["losses"] <= BOUND}


def work(rank: int, ranks: int, setting: Setting, keep: Any) -> None:
    import logging

    logging.getLogger("transformers").setLevel(logging.ERROR)
    cases: dict[str, Any] = {}
    end = setting.started + setting.seconds
    for name in list(CASES)[: setting.size(quick=2, cpu=8, gpu=len(CASES))]:
        beside = CASES[name][1]
        left = torch.tensor([end - time.monotonic()], device=setting.device)
        dist.all_reduce(left, op=dist.ReduceOp.MIN)
        if float(left) < setting.size(quick=0.0, cpu=10.0, gpu=8.0):
            cases[name] = {"left_out": "no time"}
            continue
        try:
            cases[name] = run_case(setting, name)
            if beside is not None and "losses" in cases.get(beside, {}):
                cases[name] |= {"beside": beside, **compare(cases[name], cases[beside])}
        except Exception as error:  # a case that fails on all ranks is also a result
            cases[name] = {"failed": f"{type(error).__name__}: {error}"[:1500]}
        keep(cases=cases)


def prepare(setting: Setting) -> Ranks:
    """Start the ranks, so that they import in the meantime."""
    return Ranks(setting, work, RANKS)


def run(setting: Setting, ranks: Ranks) -> None:
    """Record the losses of every case, and how far they are from those of sdpa."""
    found = ranks.run(setting.seconds)
    left = [name for name, case in found.get("cases", {}).items() if "left_out" in case]
    setting.put(
        **found,
        bound=BOUND,
        backend="nccl" if setting.device.type == "cuda" else "gloo",
        left_out=left,
    )
