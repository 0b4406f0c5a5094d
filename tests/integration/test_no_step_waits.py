"""That a step makes the host wait for nothing but its plan, in models, on two ranks.

Layers: from the second layer of a forward on, and through all of backward, no tensor is read at
all: the plan is there, whoever made it. Forward of the first layer: if the collator says where
documents lie, planning reads host memory, and no tensor that comes from the model's weights or
inputs. What the model itself does in its layers is under the mode, too. Before its layers,
transformers reads one element of what it makes of the position ids, whatever computes attention;
that is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM, masking_utils

import hf_distca
from checkpointed import checkpoint_layers
from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.borrowed import without_dispatch_modes
from hf_distca.integration.current_session import current_session
from hf_distca.schedule.cost import AttentionShape, CostModel
from host_syncs import HostSyncError, NoHostSyncs
from ranks import RankPool
from tiny_runs import PAIRS, settings, tiny_llama
from turns import in_turn

LENGTHS = ([96], [24, 1, 23, 24, 24])
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "ping-pong": {"ping_pong": True},
    "alone": {"balance": False},
}


@contextmanager
def forbidden_from_second_layer(model: LlamaForCausalLM, mode: NoHostSyncs) -> Iterator[None]:
    """Forbid reads from the second layer of the forward inside on."""
    layers = model.model.layers
    handles = [
        layers[1].register_forward_pre_hook(lambda *_: mode.__enter__() and None),
        layers[-1].register_forward_hook(lambda *_: mode.__exit__(None, None, None)),
    ]
    yield
    for handle in handles:
        handle.remove()


def packed(rank: int) -> dict[str, Any]:
    tokens = sum(LENGTHS[rank])
    positions = torch.cat([torch.arange(length) for length in LENGTHS[rank]])[None]
    ids = torch.randint(2, 61, (1, tokens), generator=torch.Generator().manual_seed(rank))
    return {
        "input_ids": ids,
        "position_ids": positions,
        "distca_documents": PackedDocuments(tuple(LENGTHS[rank])),
    }


def dealt(rank: int) -> dict[str, Any]:
    """A share of documents that were dealt: the longest is on both ranks."""
    lengths, tokens = np.array([150, 1, 41]), 96
    shape = AttentionShape(4, 2, 16, 16, 4)
    made = Dealing(2, tokens, {PlanKey(shape, "cpu", None): PAIRS}, current_session().config)
    share = made.make_share(lengths, (0, 0), rank)
    starts = share.starts or (0,) * len(share.lengths)
    positions = torch.cat(
        [torch.arange(a, a + n) for a, n in zip(starts, share.lengths, strict=True)]
    )[None]
    ids = torch.randint(2, 61, positions.shape, generator=torch.Generator().manual_seed(rank))
    return {"input_ids": ids, "position_ids": positions, "distca_documents": share}


def step(rank: int, way: dict[str, Any], batch: str, reentrant: bool | None) -> tuple[int, int]:
    """Returns the operations that were looked at, and the exchanges of the step."""
    pairs = CostModel.make_of_pairs(AttentionShape(4, 2, 16, 16, 4))
    hf_distca.configure(settings(cost_model=pairs, documents_span_ranks=batch == "dealt", **way))
    model = tiny_llama("distca", layers=2)
    if reentrant is not None:
        checkpoint_layers(model, use_reentrant=reentrant)
        model.enable_input_require_grads()
    inputs = dealt(rank) if batch == "dealt" else packed(rank)
    if batch == "positions":
        del inputs["distca_documents"]
    mode = NoHostSyncs()
    with forbidden_from_second_layer(model, mode):
        logits = model(**inputs, use_cache=False).logits
    with mode:
        logits.float().logsumexp(-1).sum().backward()
    meter = current_session().meter
    return mode.operations, meter.dispatches + meter.returns


def steps(rank: int, batch: str, reentrant: list[bool | None]) -> list[tuple[int, int]]:
    found = []
    for name, way in WAYS.items():
        for one in reentrant:
            try:
                found.append(step(rank, way, batch, one))
            except Exception as error:
                raise AssertionError(
                    f"{name}, {batch}, reentrant {one}: {type(error).__name__}: {error}"
                ) from error
    return found


@pytest.mark.parametrize(
    ("batch", "reentrant"),
    in_turn([("packed", [None, False]), ("dealt", [True]), ("positions", [False])], 3),
)
def test_layers_read_no_tensor(
    rank_pool: Callable[[int], RankPool], batch: str, reentrant: list[bool | None]
) -> None:
    """However layers run, checkpointed or not."""
    first, second = rank_pool(2)(steps, batch, reentrant)
    ways = [name for name in WAYS for _ in reentrant]
    exchanges = dict.fromkeys(WAYS, 0)
    for name, (operations, count), (_, other) in zip(ways, first, second, strict=True):
        assert operations > 150, "the mode saw too little"
        assert count == other
        exchanges[name] = count
    # A document over ranks is computed by both, balanced or not.
    assert (exchanges["plain"], exchanges["alone"]) == (2 * 4, 2 * 4 if batch == "dealt" else 0)
    assert exchanges["ping-pong"] == 2 * exchanges["plain"]


def whole_step(rank: int, told: bool) -> str:
    """A forward and backward in which nothing is read that is computed of weights or inputs."""
    hf_distca.configure(settings())
    model, inputs = tiny_llama("distca"), packed(rank)
    if not told:
        del inputs["distca_documents"]
    of_device = [
        *model.parameters(),
        *model.buffers(),
        *(x for x in inputs.values() if isinstance(x, torch.Tensor)),
    ]
    find = masking_utils.find_packed_sequence_indices

    def unseen(position_ids: torch.Tensor) -> Any:
        with without_dispatch_modes():
            return find(position_ids)

    try:
        with (
            patch.object(masking_utils, "find_packed_sequence_indices", unseen),
            NoHostSyncs(of=of_device),
        ):
            model(**inputs, use_cache=False).logits.sum().backward()
    except HostSyncError as error:
        return str(error)
    return f"{current_session().meter.dispatches} dispatches"


def test_planning_by_the_collator_reads_nothing_of_the_device(
    rank_pool: Callable[[int], RankPool],
) -> None:
    """Planning reads nothing of the device where the collator says the documents."""
    assert rank_pool(2)(whole_step, True) == ["4 dispatches"] * 2
    found = rank_pool(2)(whole_step, False)
    assert all("on the host" in one for one in found), (
        "position ids have to be read, and the mode sees it"
    )
