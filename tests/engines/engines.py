"""The engines by name, and the cases of the matrix.

An engine is a function of a `Case`, a rank and an attention implementation. It trains a few steps
and returns a `Run` with evidence of the engine. To add an engine, write a line in `ENGINES`; its
function belongs in `bare_engines` if it wraps the model of a loop, and in `trainer_engines` if it
consists of arguments for a Trainer.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product

from bare_engines import (
    compiled,
    ddp,
    fsdp1,
    fully_sharded,
    hybrid_sharded,
    tensor_parallel,
    train_loop,
)
from case import CHECKPOINTING, Case, Run
from trainer_engines import (
    accelerate_fsdp2,
    check_ddp,
    compiled_by_trainer,
    native,
    quantized,
    run_trainer,
    trl,
    zero,
)

import hf_distca
from recorded import counted_planning

ENGINES: dict[str, Callable[[Case, int, str], Run]] = {
    "DDP": partial(train_loop, wrap=ddp),
    "DDP, Trainer": partial(run_trainer, evidence=check_ddp),
    "DDP, TRL SFT with packing": trl,
    "DDP, torch.compile": partial(train_loop, wrap=compiled),
    "FSDP1": partial(train_loop, wrap=fsdp1),
    "FSDP2, fully_shard": partial(train_loop, wrap=fully_sharded),
    "FSDP2, transformers": native,
    "FSDP2, accelerate": accelerate_fsdp2,
    "ZeRO-1": partial(zero, 1),
    "ZeRO-2": partial(zero, 2),
    "ZeRO-3": partial(zero, 3),
}
# On four ranks only.
MESHES: dict[str, Callable[[Case, int, str], Run]] = {
    "HSDP 2 x 2, fully_shard": partial(train_loop, wrap=hybrid_sharded),
    "HSDP 2 x 2, transformers": partial(native, replicas=2),
    "TP 2 x FSDP2 2, transformers": tensor_parallel,
}
# The base is frozen: only adapters train.
QUANTIZED: dict[str, Callable[[Case, int, str], Run]] = {"DDP, Trainer, base in 4 bits": quantized}
# Inductor generates new code for each case, which takes long.
GENERATED: dict[str, Callable[[Case, int, str], Run]] = {
    "DDP, Trainer, torch_compile": compiled_by_trainer
}
# Other ways of training in half precision that an engine offers.
ALSO = {
    "FSDP1": ("mixed",),
    "FSDP2, fully_shard": ("mixed",),
    "DDP, Trainer": ("bf16 weights", "fp16"),
    "FSDP2, transformers": ("bf16 weights",),
}
BY_NAME = ENGINES | QUANTIZED | GENERATED | MESHES


def cases() -> Iterator[Case]:
    """Yield the cases of the matrix, those on two ranks first."""
    both, precisions = (False, True), ("bf16", "float32")
    for engine, ping_pong, precision in product(ENGINES | QUANTIZED, both, precisions):
        adapters = engine in QUANTIZED
        for peft, checkpointing in product(both[adapters:], CHECKPOINTING):
            yield Case(engine, checkpointing, peft, ping_pong, precision=precision)
        yield Case(engine, "non-reentrant", adapters, ping_pong, 2, precision)
    for engine, ways in ALSO.items():
        for ping_pong, precision in product(both, ways):
            yield Case(engine, ping_pong=ping_pong, precision=precision)
            yield Case(engine, "non-reentrant", False, ping_pong, 2, precision)
    for engine, ping_pong, checkpointing, precision in product(
        GENERATED, both, ("off", "non-reentrant"), precisions
    ):
        yield Case(engine, checkpointing, ping_pong=ping_pong, precision=precision)
    for engine, ping_pong in product(ENGINES, both):
        yield Case(engine, ping_pong=ping_pong, ranks=4)
    for engine, ping_pong, checkpointing, precision in product(
        MESHES, both, ("off", "non-reentrant"), precisions
    ):
        yield Case(engine, checkpointing, ping_pong=ping_pong, precision=precision, ranks=4)
    for ping_pong in both:
        yield Case("HSDP 2 x 2, fully_shard", ping_pong=ping_pong, precision="mixed", ranks=4)


def train(rank: int, case: Case, implementation: str) -> Run:
    """Train on this rank; every rank of the world must call it."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", FutureWarning)
    forget_accelerate()
    hf_distca.configure(case.settings)
    with counted_planning() as gathers:
        run = BY_NAME[case.engine](case, rank, implementation)
    # Leave out the gather of measurements, once a log: integration/test_log_rows counts it.
    return replace(run, gathers=sum("what ranks measured" not in gather for gather in gathers))


def forget_accelerate() -> None:
    """Reset accelerate, which keeps the engine of an earlier run in shared state and environment
    variables.
    """
    from accelerate.state import AcceleratorState, GradientState
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    for name in [
        name
        for name in os.environ
        if name.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    ]:
        del os.environ[name]
