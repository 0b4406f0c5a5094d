"""The time factor of a GPU and kernel, and the rates of links, by the GPU name in torch."""

from __future__ import annotations

import pytest
from layouts import SHAPE

from hf_distca.schedule.cost import CostModel
from hf_distca.schedule.gpus import find_factor, make_gpu_cost


@pytest.mark.parametrize(
    ("device", "kernel", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "cuda", ("H100", 0.92)),
        ("NVIDIA H200", "flash_attn_3", ("H100", 0.48)),
        ("NVIDIA H200", "flash_attn_4", ("H100", 0.47)),
        ("NVIDIA H100 80GB HBM3", "kernels-community/flash-attn3", ("H100", 0.48)),
        ("NVIDIA A100-SXM4-80GB", "flash_attn", ("A100", 1.5)),
        ("NVIDIA GB200", "flash_attn_4", ("B200", 0.24)),
        ("NVIDIA B200", "cuda", None),  # nobody published timings
        ("NVIDIA H100 PCIe", "cuda", None),  # fewer multiprocessors
        ("NVIDIA H20", "cuda", None),
        ("NVIDIA H100 80GB HBM3", "reference", None),
        ("cpu", "cpu", None),
    ],
)
def test_factor_of_a_gpu_and_kernel_scales_the_built_in_cost(
    device: str, kernel: str, row: tuple[str, float] | None
) -> None:
    assert find_factor(device, kernel) == row
    cost = make_gpu_cost(SHAPE, device, kernel, tile=256)
    built_in = CostModel.make_analytic(SHAPE, device_type=device, tile=256)
    if row is None:
        assert cost == built_in
        return
    seconds = cost.estimate_directions([512, 4096], [512, 65536])
    times = seconds / built_in.estimate_directions([512, 4096], [512, 65536])
    assert times == pytest.approx(row[1])
    assert cost.exchange_bytes_per_second == {"A100": 1.8e10}.get(row[0], 3.7e10)
    assert cost.node_bytes_per_second == {"A100": 2.1e11, "H100": 3e11, "B200": 6.4e11}[row[0]]
