"""Checksums of different weights differ, even if the differences would cancel in a sum."""

from __future__ import annotations

import pytest
import torch

from hf_distca.pipeline import step_checks
from hf_distca.pipeline.step_checks import compute_checksum


def change_weight(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Make weights with the same bits in other places, or with changes that add up to zero."""
    generator = torch.Generator().manual_seed(0)
    rows = weight.clone()
    rows[[0, 5]] = weight[[5, 0]]
    bits = weight.view(
        {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[weight.element_size()]
    )
    drifts = {}
    for name, steps in {
        "opposite": (1, -1),
        "a second difference": (1, -2, 1),
        "a third": (1, -3, 3, -1),
    }.items():
        drift = bits.clone()
        drift[2, : len(steps)] += torch.tensor(steps, dtype=bits.dtype)
        drifts[name] = drift.view(weight.dtype)
    far = bits.clone()  # in different chunks
    far[0, 0] += 1
    far[-1, -1] -= 1
    return {
        "rows": weight[torch.randperm(len(weight), generator=generator)],
        "two rows": rows,
        "columns": weight[:, torch.randperm(weight.shape[1], generator=generator)],
        "a transpose": weight.T,
        **drifts,
        "far apart": far.view(weight.dtype),
        "signs": -weight,
        "zeros": torch.zeros_like(weight),
    }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("chunk", [1 << 22, 100])
def test_different_weights_have_different_checksums(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, chunk: int
) -> None:
    monkeypatch.setattr(step_checks, "_CHUNK", chunk)
    weight = torch.randn(
        24, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float32
    ).to(dtype)
    found = {name: compute_checksum(other) for name, other in change_weight(weight).items()}
    assert compute_checksum(weight) not in found.values()
    assert len(set(found.values())) == len(found)
    assert compute_checksum(weight.clone()) == compute_checksum(weight)
    assert compute_checksum(weight.T.clone().T) == compute_checksum(weight), (
        "strides do not change a checksum"
    )


def test_only_a_missing_weight_has_checksum_zero() -> None:
    assert compute_checksum(None) == 0
    for rows in (0, 3):
        assert 0 < compute_checksum(torch.zeros(rows, 4)) < 1 << 60
