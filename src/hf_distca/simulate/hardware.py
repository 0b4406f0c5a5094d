"""What devices and networks reach, with where each figure comes from."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import AttentionShape, CostModel, KernelCost

__all__ = ["KNOWN_HARDWARE", "Hardware", "find_hardware"]


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its links. Rates are those reached, not those of data sheets.

    Attributes:
        name: what it is called.
        matmul_flops: floating-point operations per second of a large matrix product.
        memory_rate: bytes per second of operations that only read and write memory.
        memory_bytes: memory of the device.
        node_rate: bytes per second that a device sends, while it receives as much, within a node.
        link_gbps: gigabits per second of a device's share of the network between nodes.
        link_share: part of `link_gbps` that messages reach.
        exchange_seconds: fixed seconds of one exchange.
        forward, backward: coefficients of the attention kernel.
        element_bytes: bytes of one element of weights and activations.
        sources: where each figure comes from, by name.
    """

    name: str
    matmul_flops: float
    memory_rate: float
    memory_bytes: float
    node_rate: float
    link_gbps: float
    link_share: float
    exchange_seconds: float
    forward: KernelCost
    backward: KernelCost
    element_bytes: int
    sources: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, float | int) and not 0 < value < float("inf") and part.name != "exchange_seconds":
                raise ConfigError(f"{self.name}: {part.name}={value!r} must be a positive number.")

    @property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to another node, while it receives as much."""
        return self.link_gbps * 1e9 / 8 * self.link_share


# Coefficients, bandwidth and latency of the built-in profile, which training uses: one source for both.
_H100 = CostModel.analytic(AttentionShape(32, 8, 128, 128, 2), device_type="cuda")
_A100_KERNEL = (KernelCost(5e-7, 1.6e12, 2.0e14), KernelCost(1e-6, 1.2e12, 1.7e14))

_HOPPER_SOURCES = (
    ("matmul", "794.5 of 989 TFLOP/s: largest measured bf16 product, ml-engineering, 'Maximum Achievable Matmul FLOPS'"),
    ("node", "350 GB/s: all-gather and reduce-scatter of 0.5 to 1 GB on 8 H200, nccl-tests in hao-ai-lab/DistCA, commit 2afd219"),
    ("link", "400 Gbit/s a GPU (DGX data sheet), of which messages reach 80 %: assumed, as in the built-in cost model"),
    (
        "attention",
        "the built-in cost model: forward 350 TFLOP/s fits published FlashAttention-2 timings on an H100; backward 280 is "
        "assumed (arXiv 2407.08608, figure 6, has 370 and 320 for equal long documents)",
    ),
)


def _hopper(name: str, memory_rate: float, memory_bytes: float) -> Hardware:
    memory = (
        "memory",
        f"{memory_rate / 0.85 / 1e12:.2f} TB/s and {memory_bytes / 1e9:.0f} GB (data sheet), 85 % reached: assumed",
    )
    return Hardware(
        name,
        *(7.945e14, memory_rate, memory_bytes, 3.5e11, 400.0, 0.8, _H100.exchange_seconds),
        *(_H100.forward, _H100.backward, 2),
        sources=(_HOPPER_SOURCES[0], memory, *_HOPPER_SOURCES[1:]),
    )


KNOWN_HARDWARE = {
    "h100": _hopper("h100", 0.85 * 3.35e12, 80e9),
    "h200": _hopper("h200", 0.85 * 4.8e12, 141e9),
    "a100": Hardware(
        "a100",
        *(2.679e14, 0.85 * 2.039e12, 80e9, 2.3e11, 200.0, 0.8, _H100.exchange_seconds),
        *(*_A100_KERNEL, 2),
        sources=(
            ("matmul", "267.9 of 312 TFLOP/s: largest measured bf16 product, ml-engineering, 'Maximum Achievable Matmul FLOPS'"),
            ("memory", "2.04 TB/s and 80 GB (data sheet), 85 % reached: assumed"),
            ("node", "230 GB/s: 300 GB/s each way (data sheet), of which collectives reach as large a part as on H200: assumed"),
            ("link", "200 Gbit/s a GPU (DGX data sheet), of which messages reach 80 %: assumed"),
            ("attention", "200 and 170 TFLOP/s: FlashAttention-2 on an A100, arXiv 2307.08691, figures 4 to 6, read off"),
        ),
    ),
}


def find_hardware(name: str) -> Hardware:
    """Known hardware by name.

    Raises:
        ConfigError: if there is none of this name.
    """
    if name.lower() not in KNOWN_HARDWARE:
        raise ConfigError(f"hardware {name!r} is not known: it must be one of {', '.join(KNOWN_HARDWARE)}.")
    return KNOWN_HARDWARE[name.lower()]
