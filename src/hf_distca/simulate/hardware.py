"""Measured rates of devices and networks, with the source of each figure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from hf_distca.errors import ConfigError
from hf_distca.schedule.cost import KernelCost
from hf_distca.schedule.profiles import Profile

__all__ = ["KNOWN_HARDWARE", "REACHED", "Hardware", "find_hardware"]

REACHED = 0.85  # of the data sheet's rates of memory and of the link to the host: assumed
# Of that, by copies into another order. pytorch issue 178066: heads are put in order for an
# all-to-all in 0.38 of its time on H100 and 0.43 on A100. With the all-to-alls of the shipped
# profiles among 8 GPUs, that is 0.54 and 0.55 of the data sheet's rate.
_REORDERED = 0.545 / REACHED


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device and its links. Rates are those reached, not those of data sheets.

    Attributes:
        name: its name.
        matmul_flops: floating-point operations per second of a large matrix product.
        memory_rate: bytes per second of operations that only read and write memory.
        memory_bytes: memory of the device.
        gather_rate: bytes per second of an all-gather or a reduce-scatter on each device, within a
            node.
        node_rate: bytes per second that a device sends, while it receives as much, within a node.
        link_gbps: gigabits per second of a device's share of the network between nodes.
        link_share: part of `link_gbps` that messages reach.
        exchange_seconds, peer_seconds: fixed seconds of one exchange, and the addition for each
            other rank in it.
        forward, backward: coefficients of the attention kernel.
        element_bytes: bytes of one element of weights and activations.
        sources: source of each figure, by name.
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
    sources: tuple[tuple[str, str], ...]
    ranks_per_node: int = 8
    host_bytes: float = 2.5e11
    host_rate: float = REACHED * 6.4e10

    def __post_init__(self) -> None:
        for part in fields(self):
            value = getattr(self, part.name)
            if (
                isinstance(value, float | int)
                and not 0 < value < float("inf")
                and "seconds" not in part.name
            ):
                raise ConfigError(f"{self.name}: {part.name}={value!r} must be a positive number.")

    @property
    def copy_rate(self) -> float:
        """Bytes per second of copies that put rows or heads into another order."""
        return _REORDERED * self.memory_rate

    @property
    def link_rate(self) -> float:
        """Bytes per second that a device sends to another node, while it receives as much."""
        return self.link_gbps * 1e9 / 8 * self.link_share


@dataclass(frozen=True, slots=True)
class _Device:
    """A device without its attention kernel and links, which are in a shipped profile."""

    matmul_flops: float
    memory_rate: float  # of the data sheet
    memory_bytes: float
    gather_rate: float
    link_gbps: float
    profile: str  # without the kernel
    kernel: str  # unless another one is named
    matmul: str  # where the figure comes from
    gather: str
    ranks_per_node: int = 8
    host_bytes: float = 2.5e11  # 2 TB for eight
    host_rate: float = 6.4e10  # of the data sheet: PCIe 5.0, 16 lanes

    def with_kernel(self, name: str, kernel: str) -> Hardware:
        measured = Profile.load(f"{self.profile}_{kernel}")
        rates, inside, between = measured.kernels[0], measured.inside, measured.between
        if inside is None or between is None:
            raise ConfigError(
                f"profile {measured.name} has inside={inside} and between={between}: of a GPU, it"
                " needs the rates of both."
            )
        # Than that of the GPU that was timed.
        faster = self.memory_rate / _DEVICES[self.profile].memory_rate
        forward, backward = (
            replace(cost, bytes_per_second=faster * cost.bytes_per_second)
            for cost in (rates.forward, rates.backward)
        )
        memory = (
            f"{self.memory_rate / 1e12:.2f} TB/s, {self.memory_bytes / 1e9:.0f} GB (data sheet);"
            f" {REACHED:.0%} reached: assumed"
        )
        wire = self.link_gbps * 1e9 / 8
        host = (
            f"{self.host_bytes / 1e9:.0f} GB a device, {self.host_rate / 1e9:.0f} GB/s each way"
            f" (data sheets), {100 * REACHED:.0f} % of it assumed"
        )
        link = (
            f"{self.link_gbps:.0f} Gbit/s a GPU, of which messages reach"
            f" {between.bytes_per_second / wire:.0%}"
        )
        errors = (
            f"largest error of fitted timings {rates.errors['fitted_forward_largest']:.0%} forward"
        )
        return Hardware(
            name,
            *(
                self.matmul_flops,
                REACHED * self.memory_rate,
                self.memory_bytes,
                self.gather_rate,
                inside.bytes_per_second,
            ),
            *(
                self.link_gbps,
                between.bytes_per_second / wire,
                between.seconds,
                between.peer_seconds,
            ),
            *(forward, backward, rates.element_bytes),
            sources=(
                ("matmul", self.matmul),
                ("memory", memory),
                ("host", host),
                ("gather", self.gather),
                ("links", f"{link}; {measured.sources['links']}"),
                (
                    "attention",
                    (
                        f"profile {measured.name}, bytes {faster:.2f} times as fast, {errors},"
                        f" {measured.sources['kernel']}"
                    ),
                ),
            ),
            ranks_per_node=self.ranks_per_node,
            host_bytes=self.host_bytes,
            host_rate=REACHED * self.host_rate,
        )


_ML_ENGINEERING = "largest measured bf16 product, ml-engineering, 'Maximum Achievable Matmul FLOPS'"
_H200_GATHER = (
    "350 GB/s: all-gather and reduce-scatter of 0.5 to 1 GB on 8 H200, nccl-tests in"
    " hao-ai-lab/DistCA, commit 2afd219"
)
_HOPPER = _Device(
    *(7.945e14, 3.35e12, 80e9, 3.5e11, 400.0, "h100", "flash_attn_2"),
    matmul=f"794.5 of 989 TFLOP/s: {_ML_ENGINEERING}",
    gather=_H200_GATHER,
)
_BLACKWELL = _Device(
    *(1.745e15, 8e12, 180e9, 7.4e11, 400.0, "b200", "flash_attn_4"),
    matmul=f"1745 of 2250 TFLOP/s: {_ML_ENGINEERING}",
    gather=(
        "740 GB/s: as much more than an all-to-all as on H200, which is what DeepEP V2 reaches over"
        " NVLink on SM100"
    ),
)
_DEVICES = {
    "h100": _HOPPER,
    "h200": replace(_HOPPER, memory_rate=4.8e12, memory_bytes=141e9),
    "a100": _Device(
        *(2.679e14, 2.039e12, 80e9, 2.3e11, 200.0, "a100", "flash_attn_2"),
        matmul=f"267.9 of 312 TFLOP/s: {_ML_ENGINEERING}",
        gather=(
            "230 GB/s: 300 GB/s each way (data sheet), of which collectives reach as large a part"
            " as on H200: assumed"
        ),
        host_rate=3.2e10,  # PCIe 4.0
    ),
    "b200": _BLACKWELL,
    # NVL72: the links of a node join 72, and two share the 480 GB of a Grace and the 450 GB/s each
    # way to it.
    "gb200": replace(
        _BLACKWELL, memory_bytes=186e9, ranks_per_node=72, host_bytes=2.4e11, host_rate=2.25e11
    ),
}
KNOWN_HARDWARE = {
    name: device.with_kernel(name, device.kernel) for name, device in _DEVICES.items()
}


def find_hardware(name: str, kernel: str | None = None) -> Hardware:
    """Find known hardware by name, with an attention kernel: flash-attention 2 if none is named,
    and 4 on Blackwell.

    Raises:
        ConfigError: if there is none of this name, or no published timings of the kernel on it.
    """
    device = _DEVICES.get(name.lower())
    if device is None:
        raise ConfigError(
            f"hardware {name!r} is not known: it must be one of {', '.join(_DEVICES)}."
        )
    if kernel is None:
        return KNOWN_HARDWARE[name.lower()]
    kernels = [
        shipped.removeprefix(f"{device.profile}_")
        for shipped in Profile.list_shipped()
        if shipped.startswith(device.profile)
    ]
    if kernel not in kernels:
        raise ConfigError(
            f"kernel {kernel!r} has no published timings on {name}: it must be one of"
            f" {', '.join(kernels)}."
        )
    return device.with_kernel(name.lower(), kernel)
