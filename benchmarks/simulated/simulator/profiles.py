"""`Profile`: rates of a kind of device and its links, for many attention shapes, fitted to timings.

The simulator predicts seconds with them. `published_timings.py` writes those of GPUs. The library
plans with one factor of each (`hf_distca.schedule.gpus`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_distca.errors import ConfigError
from hf_distca.input_files import read_file
from hf_distca.schedule.cost import AttentionShape, CostModel
from simulator.fits import FittedCost

FOLDER = Path(__file__).parents[1] / "profiles"
_FORMAT = 2


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
    forward: FittedCost
    backward: FittedCost
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
        name: a short name, that of its file.
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
            raise ConfigError(f"profile {self.name!r} has no kernel rates.")

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

        def replace_infinities(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            return {name: None if value == math.inf else value for name, value in pairs}

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
                raise ValueError(f"its format is not {_FORMAT}")
            for row in data["kernels"]:
                for way in ("forward", "backward"):
                    row[way] = FittedCost.from_json(row[way])
            data["kernels"] = tuple(KernelRates(**row) for row in data["kernels"])
            for link in ("inside", "between"):
                data[link] = ExchangeRates(**data[link]) if data.get(link) else None
            return cls(**data)
        except (AttributeError, ConfigError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the text is no profile in JSON ({type(error).__name__}: {error}): got"
                f" {text[:100]!r}."
            ) from error

    @classmethod
    def load(cls, source: str | Path) -> Profile:
        """Load the profile of this name in `FOLDER`, or the one in a file.

        Raises:
            ConfigError: if there is neither, or it cannot be read as a profile.
        """
        names = cls.list_names()
        path = FOLDER / f"{source}.json" if str(source) in names else Path(source)
        try:
            return cls.from_json(read_file(path).decode("utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{source}: neither a profile in a file ({error}) nor one of {', '.join(names)}."
            ) from error

    @staticmethod
    def list_names() -> list[str]:
        """List the names of the profiles in `FOLDER`."""
        return sorted(path.stem for path in FOLDER.glob("*.json"))
