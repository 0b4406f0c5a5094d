"""A training step on two ranks never makes the host wait for the device.

If the collator gives the documents, planning reads host memory, and no tensor computed from weights
or inputs. The test also watches the layers of the model. The test permits one read: before the
layers, transformers reads an element computed from position ids under any attention.
tests/runtime/test_no_host_syncs.py has layers in every layout, and
tests/models/test_steps_on_a_fake_gpu.py has other steps.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from transformers import masking_utils

import hf_distca
from hf_distca.borrowed import without_dispatch_modes
from hf_distca.integration.current_session import current_session
from host_syncs import HostSyncError, NoHostSyncs
from ranks import RankPools
from tiny_runs import pack, settings, tiny_llama

LENGTHS = ([96], [24, 1, 23, 24, 24])


def run_step(rank: int, told: bool) -> str:
    """Run a forward and backward; return the error if the host reads a watched tensor."""
    hf_distca.configure(settings())
    model, inputs = tiny_llama("distca"), pack(*LENGTHS[rank])
    del inputs["labels"]
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


def test_step_with_documents_from_the_collator_reads_no_device_tensor(rank_pool: RankPools) -> None:
    assert rank_pool(2)(run_step, True) == ["4 dispatches"] * 2
    found = rank_pool(2)(run_step, False)
    assert all("on the host" in one for one in found), (
        "without documents, position ids are read, and NoHostSyncs finds the read"
    )
