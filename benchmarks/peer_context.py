"""Steps of `benchmarks/peers.py` whose ranks share each sequence: Ulysses of DeepSpeed, and torch's context parallelism."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import (
    DeepSpeedPlugin,
    DeepSpeedSequenceParallelConfig,
    FullyShardedDataParallelPlugin,
    InitProcessGroupKwargs,
    ParallelismConfig,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.nn.functional import all_gather
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.functional import pad

from peer_steps import RATE, Batch, Documents, pairs
from step_time import plain_model_of


class Ulysses:
    """accelerate's ``ParallelismConfig(sp_size=...)``, a document a micro-batch: its guide says that sdpa may not be given more."""

    def __init__(self, arguments: argparse.Namespace, rank: int, ranks: int) -> None:
        import deepspeed  # patches torch and transformers, which other ways are spared

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled, to exchange in shared memory
        deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
        self.documents, self.ranks = Documents(arguments.tokens, ranks), ranks
        rows = self.rows()
        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(rows),
            "zero_optimization": {"stage": 0},
        }
        accelerator = Accelerator(
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],  # else it takes a machine without GPUs for one process
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=ranks, sp_handler=handler),
        )
        model = plain_model_of(arguments, "sdpa")
        self.model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
        self.group = deepspeed.utils.groups._get_sequence_parallel_group()
        # The adapter of its loader does the same, but over gloo only with rows of one length.
        self.batches = [{name: values.chunk(ranks, dim=1)[rank] for name, values in row.items()} for row in rows]
        self.tokens = sum(batch["input_ids"].numel() for batch in self.batches)
        self.pairs = pairs(*(row["input_ids"].numel() for row in rows)) / ranks  # of as large a part of the heads

    def rows(self) -> list[Batch]:
        """The sequences that all ranks compute together, one after another, each of a length that ranks divide."""
        return [self._row([document]) for document in self.documents.all]

    def _row(self, documents: list[torch.Tensor]) -> Batch:
        """A sequence of documents with the next token of each as its label."""
        ids = torch.cat(documents)
        labels = torch.cat([pad(document[1:], (0, 1), value=-100) for document in documents])
        positions = torch.cat([torch.arange(len(document)) for document in documents])
        missing = (0, -len(ids) % self.ranks)
        row = {"input_ids": pad(ids, missing), "shift_labels": pad(labels, missing, value=-100), "position_ids": pad(positions, missing)}
        return {name: values[None] for name, values in row.items()}

    def step(self) -> float:
        """Train once; returns the loss of the global batch."""
        total = 0.0
        for batch in self.batches:
            loss = self.model(**batch, labels=batch["shift_labels"], use_cache=False).loss
            # Means of all ranks, weighted with their targets, as in accelerate's guide to sequence parallelism.
            means, counts = all_gather(loss, group=self.group), all_gather((batch["shift_labels"] != -100).sum(), group=self.group)
            share = sum(mean * count for mean, count in zip(means, counts, strict=True) if count) / self.documents.targets
            self.model.backward(share * len(self.batches))  # DeepSpeed divides by the number of micro-batches
            self.model.step()
            total += float(share.detach())
        return total


class PackedUlysses(Ulysses):
    """The same with the rows of plain packing, which sdpa takes for one document each."""

    def rows(self) -> list[Batch]:
        return [self._row(row) for row in self.documents.rows]
