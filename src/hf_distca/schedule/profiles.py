"""`Profile`: measurements of a kind of device and its links, for many attention shapes.

``hf-distca profile`` writes them.

A profile holds the rates of the attention kernel for each element size and head width that was
timed, each with its errors on shapes that were held out, and the rates of exchanges, inside a node
and between nodes. `Profile.make_cost_model` derives the cost model of one shape, for the scheduler.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from hf_distca.errors import ConfigError
from hf_distca.input_files import read_file
from hf_distca.schedule.cost import (
    MAX_SECONDS,
    MIN_RATE,
    AttentionShape,
    CostModel,
    KernelCost,
    read_rate,
    replace_infinities,
)

_FORMAT = 2
_SHIPPED_FOLDER = "profiles_data"
_MAX_SIZE = 2**31  # of a width or a tile
# By a word of a GPU's name, the device whose timings stand for it; by the name of a kernel, what it
# runs. The multiprocessors of an H200 are those of an H100.
_GPUS = {
    "A100": "a100",
    "H100": "h100",
    "H200": "h100",
    "GH200": "h100",
    "B200": "b200",
    "GB200": "b200",
}
_KERNELS = {
    "cuda": "flash_attn_2",
    "flash_attn": "flash_attn_2",
    "flash_attn_4": "flash_attn_4",
} | dict.fromkeys(("flash_attn_3", "kernels-community/flash-attn3"), "flash_attn_3")


@dataclass(frozen=True, slots=True)
class KernelRates:
    """The rates of a kernel for one element size and pair of widths.

    They hold for any number of heads.

    Attributes:
        kernel: name of the kernel.
        element_bytes, head_dim, value_head_dim: see `AttentionShape`.
        forward, backward: fitted to batches of tasks with several numbers of heads.
        errors: |estimate / measured - 1| on batches that were held out: median and largest of
            forward and of backward.
        fitted, kept_aside: number of fitted batches, and of batches held out.
    """

    kernel: str
    element_bytes: int
    head_dim: int
    value_head_dim: int
    forward: KernelCost
    backward: KernelCost
    errors: Mapping[str, float] = field(default_factory=dict, hash=False)
    fitted: int = 0
    kept_aside: int = 0


@dataclass(frozen=True, slots=True)
class ExchangeRates:
    """The rates of exchanges over one kind of link.

    Attributes:
        bytes_per_second: rate at which one rank sends while it also receives as much.
        seconds: fixed seconds of one exchange.
        ranks: number of ranks in the measurement.
        errors: see `KernelRates`; median and largest, on sizes that were held out.
        peer_seconds: addition to the fixed seconds for each of the other ranks.
    """

    bytes_per_second: float
    seconds: float
    ranks: int = 2
    errors: Mapping[str, float] = field(default_factory=dict, hash=False)
    peer_seconds: float = 0.0


@dataclass(frozen=True)
class Profile:
    """Measurements of a kind of device and its links.

    Attributes:
        name: a short name; the shipped ones are found by it.
        device: type of the device, as torch names it.
        processor: name of the device.
        date: date of the measurement, as YYYY-MM-DD.
        versions: versions of the packages that took part.
        made_by: the command that measured it.
        kernels: the kernel's rates, at least one.
        inside: exchanges inside a node; None if they were not measured.
        between: exchanges between nodes; None if they were not measured.
        threads: threads of the kernel's process, on a CPU.
        tile: query rows of a kernel tile.
        sources: sources of figures that others measured, by their subject.
    """

    name: str
    device: str
    processor: str
    date: str
    versions: Mapping[str, str] = field(hash=False)
    made_by: str
    kernels: tuple[KernelRates, ...]
    inside: ExchangeRates | None = None
    between: ExchangeRates | None = None
    threads: int | None = None
    tile: int = 128
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ConfigError(
                f"profile {self.name!r} has no kernel rates: measure some with `hf-distca profile`."
            )

    def __repr__(self) -> str:
        """Short text, because settings that hold a profile are printed and compared by ranks."""
        return f"Profile({self.name!r}, {self.device!r}, {self.processor!r}, {self.date!r})"

    def find_rates(self, shape: AttentionShape) -> KernelRates:
        """Return the rates whose element size and widths are nearest to those of a shape; the
        element size counts first.
        """

        def measure_distance(rates: KernelRates) -> tuple[float, float]:
            return (
                abs(math.log(rates.element_bytes / shape.element_bytes)),
                abs(math.log(rates.head_dim / shape.head_dim))
                + abs(math.log(rates.value_head_dim / shape.value_head_dim)),
            )

        return min(self.kernels, key=measure_distance)

    def make_cost_model(
        self, shape: AttentionShape, window: int | None = None, *, tile: int | None = None
    ) -> CostModel:
        """Make the cost model of a shape: rates of the kernel with the nearest widths, and of the
        links.

        Without measured exchanges, those of the built-in figures for the type of device are taken.
        Where only one kind of link was measured, it stands for both.

        Args:
            shape: heads and widths.
            window: keys that a position sees; None for all.
            tile: query rows of a tile; those of the profile if None.

        Raises:
            ConfigError: if the window is below 1.
        """
        built_in = CostModel.make_analytic(shape, device_type=self.device)
        rates = self.find_rates(shape)
        links = self.between or self.inside
        return CostModel(
            shape,
            rates.forward,
            rates.backward,
            built_in.exchange_bytes_per_second if links is None else links.bytes_per_second,
            built_in.exchange_seconds if links is None else links.seconds,
            tile or self.tile,
            f"profile {self.name}",
            window,
            node_bytes_per_second=(
                self.inside.bytes_per_second if self.inside and self.between else None
            ),
            peer_seconds=0.0 if links is None else links.peer_seconds,
        )

    def to_json(self) -> str:
        """Return the profile as JSON, with the names of its attributes as keys.

        Infinite rates, which cost nothing, are null.
        """
        return json.dumps(
            {"format": _FORMAT, **asdict(self, dict_factory=replace_infinities)}, indent=1
        )

    @classmethod
    def from_json(cls, text: str) -> Profile:
        """Read what `to_json` wrote.

        Raises:
            ConfigError: if the text is no profile; the message names the mistake.
        """
        try:
            data: Any = json.loads(text)
            if data.pop("format") != _FORMAT:
                raise ValueError(
                    f"its format is not {_FORMAT}, which this version reads: measure again"
                )
            data["kernels"] = tuple(_parse_kernel_rates(row) for row in data["kernels"])
            for link in ("inside", "between"):
                data[link] = None if data.get(link) is None else _parse_exchange_rates(data[link])
            profile = cls(**data)
            texts = [
                *(profile.name, profile.device, profile.processor, profile.date, profile.made_by),
                *(rates.kernel for rates in profile.kernels),
                *profile.versions.values(),
                *profile.sources.values(),
            ]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("its names, date, versions, sources and command must be texts")
            measured: list[Any] = [
                *profile.kernels,
                *filter(None, (profile.inside, profile.between)),
            ]
            if not all(
                isinstance(error, int | float)
                for rates in measured
                for error in rates.errors.values()
            ):
                raise TypeError("its errors must be numbers")
            if type(profile.tile) is not int or not 1 <= profile.tile < _MAX_SIZE:
                raise ValueError(f"a tile of {profile.tile} rows: it must be from 1 to 2**31")
            return profile
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the text is no profile in JSON ({type(error).__name__}: {error}): `hf-distca"
                f" profile` writes them, got {text[:100]!r}."
            ) from error

    @classmethod
    def load(cls, source: str | Path) -> Profile:
        """Load the shipped profile of this name, or the profile in a file.

        Raises:
            ConfigError: if there is neither, or it cannot be read as a profile.
        """
        if str(source) in cls.list_shipped():
            return cls.from_json(
                (resources.files(__package__) / _SHIPPED_FOLDER / f"{source}.json").read_text(
                    encoding="utf-8"
                )
            )
        try:
            text = read_file(Path(source)).decode("utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{source}: neither a profile in a file ({error}) nor a shipped one"
                f" ({', '.join(cls.list_shipped())})."
            ) from error
        return cls.from_json(text)

    @staticmethod
    def find_gpu_profile(device: str, kernel: str) -> str | None:
        """Return the name of the shipped profile of a GPU and a kernel, both as torch and
        `DistCAConfig` name them; None if there is none.

        Cards with fewer multiprocessors than those that were timed, as PCIe ones of Hopper, have
        none.
        """
        words = set(re.split(r"[\s-]+", device))
        kind = next((kind for model, kind in _GPUS.items() if model in words), None)
        name = f"{kind}_{_KERNELS.get(kernel)}"
        return (
            name
            if name in Profile.list_shipped() and not (kind == "h100" and words & {"PCIe", "NVL"})
            else None
        )

    @staticmethod
    def list_shipped() -> list[str]:
        """List the names of the profiles that come with the package."""
        return sorted(
            file.name.removesuffix(".json")
            for file in (resources.files(__package__) / _SHIPPED_FOLDER).iterdir()
            if file.name.endswith(".json")
        )


def _parse_kernel_rates(row: dict[str, Any]) -> KernelRates:
    rates = KernelRates(
        **{**row, **{name: KernelCost.from_json(row[name]) for name in ("forward", "backward")}}
    )
    if not all(
        type(size) is int and 1 <= size < _MAX_SIZE
        for size in (rates.element_bytes, rates.head_dim, rates.value_head_dim)
    ):
        raise ValueError(f"{rates}: bytes and widths must be from 1 to 2**31")
    return rates


def _parse_exchange_rates(row: dict[str, Any]) -> ExchangeRates:
    rates = ExchangeRates(**{**row, "bytes_per_second": read_rate(row["bytes_per_second"])})
    if not (
        all(0 <= seconds <= MAX_SECONDS for seconds in (rates.seconds, rates.peer_seconds))
        and rates.bytes_per_second >= MIN_RATE
    ):
        raise ValueError(f"{rates}: seconds must be from 0 to 1e6, a rate at least 1 a second")
    return rates
