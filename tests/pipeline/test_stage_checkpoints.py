"""What is trained in stages is saved as one ordinary checkpoint; what is loaded in stages is this stage alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from staged import Case, batch, configure, loss_for, model_for
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from hf_distca.pipeline import Schedule, from_pretrained, save_pretrained, split
from ranks import RankPool

RATE = 0.5


def trained(rank: int, case: Case, folder: Path) -> None:
    """A step of SGD, and the weights saved and loaded again."""
    configure(case)
    mesh = init_device_mesh("cpu", (case.copies, case.stages), mesh_dim_names=("dp_replicate", "pp"))
    stage = split(model_for(case, "distca"), mesh["pp"])
    schedule = Schedule(stage, case.micro_batches, loss_for(case), scale_grads=False)
    mine = [batch(case, number) for number in range(case.micro_batches)]
    ids, positions, targets = (torch.cat(each) for each in zip(*mine, strict=True))
    schedule.step(ids, position_ids=positions, target=targets)
    torch.optim.SGD(stage.submod.parameters(), lr=RATE).step()
    save_pretrained(stage, folder)
    again = from_pretrained(str(folder), mesh["pp"])
    held, loaded = dict(stage.submod.model.named_parameters()), dict(again.submod.model.named_parameters())
    assert held.keys() == loaded.keys()
    assert all(torch.equal(held[name], loaded[name]) for name in held)
    assert not any(tensor.is_meta for tensor in again.submod.buffers())


def compare(found: Path, case: Case) -> None:
    """The loaded checkpoint has the logits of the model that was trained in one process."""
    model, loss = model_for(case, "sdpa"), loss_for(case)
    for number, lengths in enumerate(case.lengths):
        ids, _, targets = batch(case, number)
        parts = [model(input_ids=one, use_cache=False).logits for one in ids.split(lengths, 1)]
        loss(torch.cat(parts, 1), targets).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    plain, info = AutoModelForCausalLM.from_pretrained(found, attn_implementation="sdpa", output_loading_info=True)
    assert not any(info.values())
    ids = batch(case, 1)[0]
    logits, wanted = (one(input_ids=ids).logits for one in (plain.eval(), model.eval()))
    assert (logits - wanted).abs().max() < 1e-7 * wanted.abs().max()
    assert sorted(file.name for file in found.iterdir() if file.name.startswith(".")) == []


def test_a_checkpoint_of_stages_is_one_of_the_model(rank_pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    case = Case(micro_batches=2, tied=True, layers=2)
    rank_pool(2)(trained, case, tmp_path)
    compare(tmp_path, case)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2", "starcoder2"])
def test_a_checkpoint_of_four_stages_is_one_of_the_model(
    rank_pool: Callable[[int], RankPool], tmp_path: Path, family: str
) -> None:
    case = Case(family, stages=4, micro_batches=2)
    rank_pool(4)(trained, case, tmp_path)
    compare(tmp_path, case)
