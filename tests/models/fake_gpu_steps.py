"""A training step of a whole model on a fake GPU, as rank 0, in a process of `cuda_autograd`.

Operations compute only device, dtype and shape. A step raises if the host would wait for the GPU,
and records races between streams. Messages of the other rank have the expected sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import hf_distca
from device_events import Device
from fake_cuda import CUDA, fake_cuda
from gpu_streams import Link, Streams
from hf_distca import kernels
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.integration.current_session import current_session
from hf_distca.integration.hooks import dealt_trainers, dense_masks, mask
from hf_distca.integration.session import Session
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.layout import IntArray
from host_syncs import NoHostSyncs

LAYERS, TOKENS = 2, 1024
LENGTHS = (1300, 300, 200, 148, 100)  # of documents in a global batch
SIZES = {
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 1),
}
# For families whose first two layers are of one kind by default.
BOTH_KINDS = {"layer_types": ["sliding_attention", "full_attention"]}
KINDS = {"gemma4_text": BOTH_KINDS, "gemma3_text": BOTH_KINDS, "cohere2": BOTH_KINDS}


class Way(NamedTuple):
    """How a step runs.

    Attributes:
        ranks: 1, or 2 with a dealt batch.
        ping_pong: whether layers run as two nano-batches.
        reentrant: whether checkpointing is reentrant; None without checkpointing.
        autocast: whether the model is in float32 and computes in bfloat16.
    """

    ranks: int = 2
    ping_pong: bool = False
    reentrant: bool | None = None
    autocast: bool = False


class Step(NamedTuple):
    """Counts of two equal steps, and results of the second step.

    Attributes:
        kernels: the kernels that attention used.
        calls, recomputed_calls: calls of attention that computed, and recomputes that took the
            outputs of the first forward.
        kernel_calls, exchanges: in forward and backward.
        forward_operations, backward_operations: operations that were checked.
        separate: whether backward ran in a separate thread.
        races: between streams, in both steps.
        waits: of the host for events, in both steps.
        wrong: parameters with no gradient, or one of another device, dtype or shape.
    """

    kernels: list[str]
    calls: int
    recomputed_calls: int
    kernel_calls: int
    exchanges: int
    forward_operations: int
    backward_operations: int
    separate: bool
    races: list[str]
    waits: int
    wrong: list[str]


class NoWaits(NoHostSyncs):
    """Allows asynchronous copies to the GPU, which make no host wait."""

    def _check(
        self, func: Any, given: list[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> None:
        upload = kwargs.get("non_blocking") and kwargs.get("device") == CUDA
        if not upload:
            super()._check(func, given, args, kwargs)


@dataclass(frozen=True, eq=False)
class Group(AttentionGroup):
    """A group of two ranks; the other rank announces the same as this rank."""

    def gather(self, row: IntArray, *, activity: str) -> list[IntArray]:
        return [row] * self.size


@dataclass
class Exchanges(Link):
    """A link for a group that compares launched exchanges."""

    checksum = 0


@contextmanager
def in_group(group: AttentionGroup) -> Iterator[None]:
    """Use this group, and skip the first-step checks of values: kernel, positions and loss."""
    with (
        patch.object(Session, "join_group", lambda session: group),
        patch.object(kernels, "mismatch_reason", lambda *case: None),
        patch.object(mask, "check_positions"),
        patch.object(dealt_trainers, "watch_gradient"),
    ):
        yield


def move_to_gpu(model: torch.nn.Module) -> None:
    """Replace the tensors of a model by tensors on the GPU."""
    for module in model.modules():
        for tensors, kind in (
            (module._parameters, torch.nn.Parameter),
            (module._buffers, lambda tensor: tensor),
        ):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = kind(torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA))


def make_batch(way: Way, config: hf_distca.DistCAConfig) -> dict[str, Any]:
    """Make packed documents, or the share of rank 0 in a dealt batch."""
    packed = PackedDocuments((600, 424))
    if way.ranks > 1:
        shape = AttentionShape(4, 2, 32, 32, 2)
        dealing = Dealing(
            way.ranks, TOKENS, {PlanKey(shape, "cuda"): CostModel.make_of_pairs(shape)}, config
        )
        packed = dealing.make_share(np.array(LENGTHS), (0, 0), 0)
    ids = {
        name: torch.empty(1, TOKENS, dtype=torch.int64, device=CUDA)
        for name in ("input_ids", "position_ids", "labels")
    }
    return {
        **ids,
        "shift_labels": ids["labels"],
        "num_items_in_batch": TOKENS,
        "use_cache": False,
        "distca_documents": packed,
    }


def step(family: str, way: Way) -> Step:
    """Run two steps; the first one chooses kernels and plans."""
    pairs = CostModel.make_of_pairs(AttentionShape(4, 2, 32, 32, 2))
    config = hf_distca.DistCAConfig(ping_pong=way.ping_pong, min_gain=0.0, cost_model=pairs)
    hf_distca.configure(config)
    dtype = torch.float32 if way.autocast else torch.bfloat16
    model_config = AutoConfig.for_model(family, **SIZES, **KINDS.get(family, {}))
    model: Any = AutoModelForCausalLM.from_config(
        model_config, attn_implementation="distca", dtype=dtype
    ).train()
    if way.reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": way.reentrant})
        model.enable_input_require_grads()
    gpu, streams, threads = Device(), Streams(), set[int]()
    group = Group((0, 1), 0, data=Exchanges(streams)) if way.ranks > 1 else AttentionGroup()  # type: ignore[arg-type]
    # The fake tensors stand for real tensors, which have documents and plans.
    with (
        fake_cuda(autograd=True),
        gpu.installed(),
        streams.installed(),
        in_group(group),
        patch.object(dense_masks, "has_no_values", return_value=False),
    ):
        move_to_gpu(model)
        for _ in range(2):
            batch = make_batch(way, config)
            with NoWaits() as forward, torch.autocast("cuda", torch.bfloat16, enabled=way.autocast):
                loss = model(**batch).loss
            loss.register_hook(lambda _: threads.add(get_ident()))
            with NoWaits() as backward:
                loss.backward()
        grads = {name: p.grad for name, p in model.named_parameters()}
        right = {name for name, p in model.named_parameters() if _match(p, grads[name])}
    session = current_session()
    return Step(
        list(session.kernel_names),
        session.meter.calls,
        session.meter.recomputed_calls,
        session.meter.kernel_calls,
        session.meter.dispatches + session.meter.returns,
        forward.operations,
        backward.operations,
        get_ident() not in threads,
        streams.races,
        len(gpu.waits),
        sorted(grads.keys() - right),
    )


def _match(parameter: torch.Tensor, grad: torch.Tensor | None) -> bool:
    kinds = [(x.device, x.dtype, x.shape) for x in (parameter, grad) if x is not None]
    return len(kinds) == 2 and kinds[0] == kinds[1] and kinds[0][0] == CUDA
