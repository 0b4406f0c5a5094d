"""The shipped profile that plans of a GPU begin with: by its name and kernel, and the same on all
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hf_distca.kernels.plain_torch import ReferenceKernel
from hf_distca.measure.calibrate import find_shipped_profile
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.profiles import Profile
from ranks import RankPool


@pytest.mark.parametrize(
    ("device", "kernel", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", "h100_flash_attn_2"),
        ("NVIDIA H200", "flash_attn_3", "h100_flash_attn_3"),
        ("NVIDIA H200", "flash_attn_4", "h100_flash_attn_4"),
        ("NVIDIA H100 80GB HBM3", "kernels-community/flash-attn3", "h100_flash_attn_3"),
        ("NVIDIA A100-SXM4-80GB", "flash_attn", "a100_flash_attn_2"),
        ("NVIDIA GB200", "flash_attn_4", "b200_flash_attn_4"),
        ("NVIDIA B200", "cuda", None),  # nobody published timings
        ("NVIDIA H100 PCIe", "cuda", None),  # fewer multiprocessors
        ("NVIDIA H20", "cuda", None),
        ("NVIDIA H100 80GB HBM3", "reference", None),
    ],
)
def test_a_gpu_and_a_kernel_have_one(device: str, kernel: str, name: str | None) -> None:
    assert Profile.find_gpu_profile(device, kernel) == name


def profile_of(rank: int, devices: list[str], kernels: list[str]) -> str | None:
    kernel = ReferenceKernel()
    kernel.name = kernels[rank]  # type: ignore[misc]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: devices[rank])
        profile = find_shipped_profile(
            torch.device("cuda", 0), kernel, AttentionGroup.find_or_create(timeout_seconds=30)
        )
    return None if profile is None else profile.name


@pytest.mark.parametrize(
    ("devices", "kernels", "expected"),
    [
        (
            ["NVIDIA H100 80GB HBM3", "NVIDIA H200"],
            ["flash_attn_3", "flash_attn_3"],
            "h100_flash_attn_3",
        ),
        (["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB"], ["flash_attn", "flash_attn"], None),
        (["NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"], ["flash_attn_3", "flash_attn"], None),
        (["NVIDIA L40S", "NVIDIA L40S"], ["flash_attn", "flash_attn"], None),
    ],
)
def test_ranks_that_differ_have_none(
    rank_pool: Callable[[int], RankPool],
    devices: list[str],
    kernels: list[str],
    expected: str | None,
) -> None:
    assert rank_pool(2)(profile_of, devices, kernels) == [expected, expected]
