"""Steps of `benchmarks/steps/peers.py` in which ranks share every sequence: Ulysses of DeepSpeed,
and context parallelism of torch.

In a file of its own, since importing DeepSpeed patches torch and transformers, which the other ways
are spared.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial

import deepspeed
import torch
from accelerate import Accelerator
from accelerate.big_modeling import _attach_context_parallel_hooks
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
from torch.distributed.tensor.experimental._attention import _ContextParallel
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import pad

from peer_steps import HIDDEN, RATE, Batch, Documents, pairs
from step_time import plain_model_of

warnings.filterwarnings(
    "ignore", "torch.distributed.nn.functional.all_gather is deprecated", FutureWarning
)


class Ulysses:
    """accelerate's ``ParallelismConfig(sp_size=...)``, a document a micro-batch: its guide says not
    to pack for sdpa.

    Args:
        as_guided: take the loss as the guide does. Under ZeRO-0 to 2, DeepSpeed then sums up what
            the guide's gather of losses has summed up before (deepspeedai/DeepSpeed issue 5248), so
            else the loss is divided by the ranks.
    """

    def __init__(
        self,
        arguments: argparse.Namespace,
        rank: int,
        ranks: int,
        *,
        stage: int = 0,
        as_guided: bool = False,
    ) -> None:
        # It would be compiled, to exchange in shared memory.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self.documents, self.ranks = Documents(arguments.tokens, ranks), ranks
        self.too_large = 1 if as_guided else ranks
        rows = self.rows()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": len(rows),
            "gradient_clipping": 0.0,  # accelerate would clip at 1
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
        }
        handler = DeepSpeedSequenceParallelConfig(
            sp_seq_length_is_variable=True, sp_attn_implementation="sdpa"
        )
        accelerator = Accelerator(
            # Without GPUs it would take this for one process.
            kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
            deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
            parallelism_config=ParallelismConfig(
                sp_backend="deepspeed", sp_size=ranks, sp_handler=handler
            ),
        )
        model = plain_model_of(arguments, "sdpa", HIDDEN)
        self.model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), RATE))
        self.group = deepspeed.utils.groups._get_sequence_parallel_group()  # noqa: SLF001 - so does the Trainer
        # The adapter of accelerate's loader does the same, but over gloo only for rows of one
        # length.
        self.batches = [
            {name: values.chunk(ranks, dim=1)[rank] for name, values in row.items()} for row in rows
        ]
        self.tokens = sum(batch["input_ids"].numel() for batch in self.batches)
        # Of as large a part of the heads.
        self.pairs = pairs(*(row["input_ids"].numel() for row in rows)) / ranks

    def rows(self) -> list[Batch]:
        """The sequences that all ranks compute together, one after another."""
        return [row_of([document], self.ranks) for document in self.documents.all]

    def step(self) -> float:
        """Train once; returns the loss of the global batch."""
        total = 0.0
        for batch in self.batches:
            loss = self.model(**batch, labels=batch["shift_labels"], use_cache=False).loss
            # Means of all ranks, weighted with their targets, as in accelerate's guide to sequence
            # parallelism.
            means = all_gather(loss, group=self.group)
            counts = all_gather((batch["shift_labels"] != -100).sum(), group=self.group)
            share = (
                sum(mean * count for mean, count in zip(means, counts, strict=True) if count)
                / self.documents.targets
            )
            # DeepSpeed divides by the number of micro-batches.
            self.model.backward(share * len(self.batches) / self.too_large)
            self.model.step()
            total += float(share.detach())
        return total


guided_under_zero_2 = partial(Ulysses, stage=2, as_guided=True)
guided_under_zero_3 = partial(Ulysses, stage=3, as_guided=True)


class PackedUlysses(Ulysses):
    """The same with the rows of plain packing, of which sdpa takes each for one document, as the
    guide warns.
    """

    def rows(self) -> list[Batch]:
        return [row_of(row, self.ranks) for row in self.documents.rows]


def row_of(documents: list[torch.Tensor], divisor: int) -> Batch:
    """A sequence of documents with the next token of each as its label, padded to a length that
    `divisor` divides.
    """
    labels = torch.cat([pad(document[1:], (0, 1), value=-100) for document in documents])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    missing = (0, -len(labels) % divisor)
    row = {"input_ids": torch.cat(documents), "shift_labels": labels, "position_ids": positions}
    return {
        name: pad(values, missing, value=-100 if "labels" in name else 0)[None]
        for name, values in row.items()
    }


def one_head(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    """Ulysses of a model with one head."""
    Ulysses(argparse.Namespace(**{**vars(arguments), "heads": 1}), rank, ranks)


def accelerate_context_parallel(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    """Context parallelism by accelerate, ``ParallelismConfig(cp_size=...)``, which needs FSDP2."""
    Accelerator(
        cpu=True,
        fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
        parallelism_config=ParallelismConfig(cp_size=ranks),
    )


def torch_context_parallel(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    """Ring attention by torch: forward and backward of one document, in a model with the hooks that
    accelerate gives it.
    """
    row = row_of(Documents(arguments.tokens, ranks).all[:1], 2 * ranks)
    model, buffers = plain_model_of(arguments, "sdpa", HIDDEN), list(row.values())
    _attach_context_parallel_hooks(model)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    with context_parallel(
        mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers), no_restore_buffers=set(buffers)
    ):
        model(**row, labels=row["shift_labels"], use_cache=False).loss.backward()


class FlexAttention(torch.nn.Module):
    """What torch's context parallelism takes for flex attention: a module whose inputs it may
    gather.
    """

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return flex_attention(query, key, value)


def flex_context_parallel(arguments: argparse.Namespace, rank: int, ranks: int) -> None:
    """All-gather for flex attention by torch, which can have a mask of documents: attention alone,
    forward and backward.
    """
    kind = _ContextParallel.AttentionType.FLEX
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    attention = _ContextParallel(seq_dim=2, attention_type=kind)._apply(FlexAttention(), mesh)  # noqa: SLF001 - there is no public way yet
    query, key, value = torch.randn(3, 1, arguments.heads, 128, 64, requires_grad=True)
    attention(query, key, value).sum().backward()
