"""Measured rates of devices and networks, with the source of each figure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import KernelCost
from simulator.profiles import (
    ELEMENT_BYTES,
    EXCHANGE_SECONDS,
    PEER_SECONDS,
    PROFILES,
)

REACHED = 0.85  # of the data sheet's rates of memory and of the link to the host: assumed
# A further factor for copies into another order. pytorch issue 178066: putting heads in order for
# an all-to-all takes 0.38 of its time on H100 and 0.43 on A100. With the all-to-alls of the
# profiles among 8 GPUs, that is 0.54 and 0.55 of the data sheet's rate.
_REORDERED = 0.545 / REACHED


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its links. Rates are measured ones, not those of data sheets.

    Attributes:
        name: name of the device.
        matmul_flops: floating-point operations per second of a large matrix product.
        memory_rate: bytes per second of operations that only read and write memory.
        memory_bytes: memory of the device.
        gather_rate: bytes per second of an all-gather or a reduce-scatter on each device, within a
            node.
        node_rate: bytes per second that a device sends within a node, while it receives as many.
        link_gbps: gigabits per second of a device's share of the network between nodes.
        link_share: part of `link_gbps` that messages reach.
        exchange_seconds, peer_seconds: fixed seconds of one exchange, and the addition for each
            other rank in it.
        forward, backward: coefficients of the attention kernel.
        element_bytes: bytes of one element of weights and activations.
        ranks_per_node: devices that share a fast link.
        host_bytes: a device's share of the memory of its host.
        host_rate: bytes per second of a copy to the host, or from it.
    """

    name: str
    matmul_flops: float
    memory_rate: float
    memory_bytes: float
    gather_rate: float
    node_rate: float
    link_gbps: float
    link_share: float
    exchange_seconds: float
    peer_seconds: float
    forward: KernelCost
    backward: KernelCost
    element_bytes: int
    ranks_per_node: int = 8
    host_bytes: float = 2.5e11
    host_rate: float = REACHED * 6.4e10

    @property
    def copy_rate(self) -> float:
        """Bytes per second of copies that put rows or heads into another order."""
        return _REORDERED * self.memory_rate

    @property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to another node, while it receives as many."""
        return self.link_gbps * 1e9 / 8 * self.link_share


# Products: the largest measured rates in bf16 (ml-engineering, "Maximum Achievable Matmul FLOPS"):
# 794.5 of 989 TFLOP/s on Hopper, 267.9 of 312 on A100, 1745 of 2250 on Blackwell. Memory and host:
# data sheets. Gathers: on Hopper, all-gather and reduce-scatter of 0.5 to 1 GB on 8 H200
# (nccl-tests in hao-ai-lab/DistCA, commit 2afd219); on A100, the same share of 300 GB/s each way is
# assumed; on Blackwell, the same ratio to an all-to-all as on H200, which DeepEP V2 reaches over
# NVLink.
_HOPPER: dict[str, Any] = {
    "matmul_flops": 7.945e14,
    "memory_rate": 3.35e12,
    "memory_bytes": 80e9,
    "gather_rate": 3.5e11,
    "link_gbps": 400.0,
    "ranks_per_node": 8,
    "host_bytes": 2.5e11,  # 2 TB for eight
    "host_rate": 6.4e10,  # PCIe 5.0, 16 lanes
}
_BLACKWELL = _HOPPER | {
    "matmul_flops": 1.745e15,
    "memory_rate": 8e12,
    "memory_bytes": 180e9,
    "gather_rate": 7.4e11,
}
_FIGURES = {
    "h100": _HOPPER,
    "h200": _HOPPER | {"memory_rate": 4.8e12, "memory_bytes": 141e9},
    "a100": _HOPPER
    | {
        "matmul_flops": 2.679e14,
        "memory_rate": 2.039e12,
        "gather_rate": 2.3e11,
        "link_gbps": 200.0,
        "host_rate": 3.2e10,  # PCIe 4.0
    },
    "b200": _BLACKWELL,
    # NVL72: fast links join 72 GPUs. Two GPUs share the 480 GB of a Grace CPU, and 450 GB/s each
    # way to it.
    "gb200": _BLACKWELL
    | {"memory_bytes": 186e9, "ranks_per_node": 72, "host_bytes": 2.4e11, "host_rate": 2.25e11},
}
# The device whose profile has a device's attention kernel and links.
_TIMED = {"h100": "h100", "h200": "h100", "a100": "a100", "b200": "b200", "gb200": "b200"}
_DEFAULT_KERNELS = {"h100": "flash_attn_2", "a100": "flash_attn_2", "b200": "flash_attn_4"}
DEVICES = tuple(_FIGURES)


def find_hardware(name: str, kernel: str | None = None) -> Hardware:
    """Find a device by name, with an attention kernel: flash-attention 2 by default, and 4 on
    Blackwell.

    Raises:
        ConfigError: if no device has this name, or there are no published timings of the kernel on
            it.
    """
    device = name.lower()
    if device not in DEVICES:
        raise ConfigError(
            f"hardware {name!r} is not known: it must be one of {', '.join(DEVICES)}."
        )
    timed = _TIMED[device]
    kernels = [
        shipped.removeprefix(f"{timed}_") for shipped in PROFILES if shipped.startswith(timed)
    ]
    kernel = _DEFAULT_KERNELS[timed] if kernel is None else kernel
    if kernel not in kernels:
        raise ConfigError(
            f"kernel {kernel!r} has no published timings on {name}: it must be one of"
            f" {', '.join(kernels)}."
        )
    return _with_profile(device, f"{timed}_{kernel}")


def _with_profile(device: str, name: str) -> Hardware:
    """Combine the figures of a device with the attention kernel and links of a profile."""
    figures, timed = _FIGURES[device], _TIMED[device]
    profile = PROFILES[name]
    # Relative to the timed GPU.
    faster = figures["memory_rate"] / _FIGURES[timed]["memory_rate"]
    forward, backward = (
        replace(cost, bytes_per_second=faster * cost.bytes_per_second)
        for cost in (profile.forward, profile.backward)
    )
    rates = {name: REACHED * figures[name] for name in ("memory_rate", "host_rate")}
    return Hardware(
        name=device,
        node_rate=profile.node_rate,
        link_share=profile.link_rate / (figures["link_gbps"] * 1e9 / 8),
        exchange_seconds=EXCHANGE_SECONDS,
        peer_seconds=PEER_SECONDS,
        forward=forward,
        backward=backward,
        element_bytes=ELEMENT_BYTES,
        **figures | rates,
    )
