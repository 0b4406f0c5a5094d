"""Stages save one ordinary checkpoint, and each stage loads only its own part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from staged import Case, make_batch, make_loss, make_model, prepare, run_alone
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from hf_distca.errors import ConfigError
from hf_distca.pipeline import from_pretrained, save_pretrained, split
from ranks import RankPools

RATE = 0.5


def train(rank: int, case: Case, folder: Path) -> None:
    """Run a step of SGD, save the weights and load them again."""
    stage, held, step = prepare(case)
    step()
    torch.optim.SGD(stage.submod.parameters(), lr=RATE).step()
    save_pretrained(stage, folder)
    again = from_pretrained(str(folder), stage.mesh)
    trained, loaded = (dict(model.named_parameters()) for model in (held, again.submod.model))
    assert trained.keys() == loaded.keys()
    assert all(torch.equal(trained[name], loaded[name]) for name in trained)
    assert not any(tensor.is_meta for tensor in again.submod.buffers())


SLOW_CASES = [
    *(Case(family, stages=4, micro_batches=2) for family in ("llama", "gpt2", "starcoder2")),
    # Loaded models multiply experts in groups, which does not support float64.
    Case("mixtral", stages=4, micro_batches=2, dtype=torch.float32),
]


@pytest.mark.parametrize(
    "case",
    [
        Case(micro_batches=2, tied=True, layers=2),
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES),
    ],
    ids=lambda case: f"{case.family} in {case.stages} stages",
)
def test_a_checkpoint_of_stages_has_the_logits_of_the_model(
    rank_pool: RankPools, tmp_path: Path, case: Case
) -> None:
    rank_pool(case.stages)(train, case, tmp_path)
    model = make_model(case, "sdpa")
    run_alone(model, case, make_loss(case))
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info.values())
    ids = make_batch(case, 1)[0]
    logits, wanted = (one(input_ids=ids).logits for one in (plain.eval(), model.eval()))
    tolerance = 1e-7 if case.dtype == torch.float64 else 1e-4
    assert (logits - wanted).abs().max() < tolerance * wanted.abs().max()
    assert not list(tmp_path.glob(".*"))


def save_untrained(rank: int, case: Case, folder: Path, adapter: bool) -> None:
    """Save an untrained model in stages."""
    model: Any = make_model(case, "distca")
    if adapter:
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["down_proj"]))
    save_pretrained(
        split(model, init_device_mesh("cpu", (case.stages,), mesh_dim_names=("pp",))), folder
    )


@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_replaces_older_ones_and_killed_saves(
    rank_pool: RankPools, tmp_path: Path
) -> None:
    """Older checkpoints have one file or more shards; killed saves leave folders."""
    case, old = Case(layers=2), {"old": torch.zeros(1)}
    for name in (
        "model.safetensors",
        "model-00003-of-00003.safetensors",
        "model-of-mine.safetensors",
    ):
        save_file(old, tmp_path / name)
    (tmp_path / ".stage-1").mkdir()
    save_file(old, tmp_path / ".stage-1" / "adapter_model.safetensors")
    rank_pool(2)(save_untrained, case, tmp_path, False)
    found = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert found == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model-of-mine.safetensors",
    ]
    plain, info = AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sdpa", output_loading_info=True
    )
    assert not any(info.values())
    wanted = make_model(case, "sdpa").state_dict()
    assert all(torch.equal(weight, wanted[name]) for name, weight in plain.state_dict().items())
    for stage in range(2):
        (tmp_path / f".stage-{stage}").mkdir()
    rank_pool(2)(save_untrained, case, tmp_path, True)
    assert len(load_file(tmp_path / "adapter_model.safetensors")) == 4


def check_loading(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "pp"))
    stage = from_pretrained(str(folder), mesh["pp"], subfolder="inner")
    assert stage.submod.model.config.num_hidden_layers == 4
    with pytest.raises(ConfigError, match="mesh of 2 dimensions"):
        from_pretrained(str(folder), mesh)
    with pytest.raises(
        ConfigError, match=r"layers=\[1, 1, 2\] are for 3 stages, but the mesh has 2 ranks"
    ):
        from_pretrained(str(folder / "inner"), mesh["pp"], layers=[1, 1, 2])


def test_stages_load_a_subfolder_and_check_mesh_and_layers(
    rank_pool: RankPools, tmp_path: Path
) -> None:
    make_model(Case(layers=2), "sdpa").save_pretrained(tmp_path)
    make_model(Case(layers=4), "sdpa").save_pretrained(tmp_path / "inner")
    rank_pool(2)(check_loading, tmp_path)
