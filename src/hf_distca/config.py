"""`DistCAConfig`: all settings of a user, in one validated object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml

from hf_distca.errors import ConfigError, UnsupportedError
from hf_distca.input_files import read_file
from hf_distca.schedule.cost import CostModel

# Attention implementations that distca can replace. TREE_ATTENTION is TRL's implementation for
# documents that share prefixes.
TREE_ATTENTION = "tree_fa3"
REPLACEABLE_ATTENTION = (
    *("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa"),
    TREE_ATTENTION,
)


KernelName = Literal[
    "auto",
    "reference",
    "cpu",
    "cuda",
    "efficient",
    "flash_attn",
    "flash_attn_3",
    "kernels-community/flash-attn3",
    "flash_attn_4",
]
_BUILT_IN_COSTS = "analytic"
if TYPE_CHECKING:
    CostSource = str | Path | CostModel
else:
    # HfArgumentParser reads this type. It would drop `str` from a union, but every value from a
    # command line is a string.
    CostSource = str
# Above _MOST_RANKS, a larger group gains almost nothing if document lengths have a long tail, and
# every further rank makes planning slower. Groups below _FEWEST_RANKS balance worse. If the number
# of ranks is a multiple of _WHOLE_NODES, a group consists of whole nodes of 1, 2, 4 or 8 ranks.
_MOST_RANKS, _FEWEST_RANKS, _WHOLE_NODES = 512, 256, 8
_LONGEST_TIMEOUT = 366 * 86400.0  # seconds; longer ones might overflow the clock of torch

# Type and range of each numeric field, and the error text for numbers out of range.
_NUMBERS: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "tolerance": (
        Real,
        lambda value: 0 <= value < 1,
        "in [0, 1): it is a fraction of the mean, 0.01 is usual",
    ),
    "min_gain": (
        Real,
        lambda value: 0 <= value < 1,
        "in [0, 1): it is a fraction of the slowest rank's seconds",
    ),
    "tile": (int, lambda value: value >= 1, "at least 1; flash-attention kernels use 128"),
    "head_groups": (int, lambda value: value >= 1, "at least 1, which splits no document by heads"),
    "max_transient_bytes": (int, lambda value: value >= 1, "at least 1, or None for no bound"),
    "group_size": (
        int,
        lambda value: value >= 1,
        "at least 1, or None for groups of up to 512 ranks",
    ),
    "timeout_seconds": (
        Real,
        lambda value: 0 < value <= _LONGEST_TIMEOUT,
        f"in (0, {_LONGEST_TIMEOUT:g}] (a year), or None for the timeout of torch.distributed",
    ),
    # This setting is not a field of `DistCAConfig`, but users may write it next to the fields.
    "tokens_per_rank": (
        int,
        lambda value: value >= 1,
        "at least 1, the tokens of a rank in a micro-batch",
    ),
}


@dataclass(frozen=True, slots=True)
class DistCAConfig:
    """Settings of core attention disaggregation.

    Every rank of an attention group must use the same settings.

    Attributes:
        balance: move work between ranks. If off, every rank computes its own attention with the
            same kernels, as the baseline of a comparison.
        tolerance: how far the estimated attention seconds of a rank may lie above or below the mean
            of all ranks, as a fraction of the mean.
        min_gain: work is moved only if the slowest rank's estimated attention seconds fall by at
            least this fraction. Otherwise a micro-batch runs locally and nothing is exchanged.
        tile: number of query rows in a tile of the kernel. Documents are cut at multiples of it.
        head_groups: upper limit on the number of groups of key/value heads that a long document is
            split into, so that a server receives only the keys of its heads. The scheduler uses the
            largest number up to this limit that divides the heads. With 1, all heads of a slice are
            moved together.
        kernel: attention kernel, ``"auto"`` for the best one that runs on the device.
        cost_model: ``"analytic"`` for built-in figures of the type of device, a `CostModel` of your
            own, or the path of a JSON file that `CostModel.to_json` wrote (the file is read at
            once). Built-in figures are multiplied by a factor for the GPU and kernel if this factor
            is known and equal on all ranks. The factor does not affect how documents are dealt. The
            shape of your own `CostModel` is replaced by the shape of each layer.
        measured_rates: correct the cost model with measurements of all ranks during training.
            Slower ranks get less work, and less work or none is moved if exchanges cost more time
            than they save. Plans depend only on the documents if this is off, if torch uses
            deterministic algorithms, or with a `CostModel` of your own, which is never corrected.
        documents_span_ranks: read position ids that start above 0 as the continuation of another
            rank's document. If off, every run of positions is a separate document, as in
            transformers.
        balance_evaluation: let ranks share attention also while the model is in evaluation mode.
            Every rank must then evaluate the same number of batches. A dealt batch in which
            documents are cut is computed by all ranks together even if this is off.
        serve_in_place: let ranks that hold tokens compute slices of other ranks' documents. If off,
            only ranks without tokens compute such slices.
        ping_pong: run every decoder layer as two nano-batches in turns, so that one computes while
            the messages of the other travel. This pays if exchanges take long. If nothing is
            exchanged, layers run whole.
        max_transient_bytes: limit on the bytes that one call of core attention uses on a rank for
            other ranks, in its forward or its backward; None for no limit. The limit applies to
            received rows of q, k, v, o, log-sum-exp, dO and gradients, to the messages that carry
            these rows, to tensors that are gathered from these rows, and to the outputs and
            gradients of tasks of other ranks. It does not apply to the rank's own q, k, v, o,
            log-sum-exp and gradients (which grow with its tokens), to copies of these rows for
            documents that are split by heads, or to memory inside the kernel. The scheduler moves
            only slices that fit. A document that spans ranks may need more; then a warning is
            logged.
        group_size: number of neighbouring ranks that share core attention; must divide the number
            of ranks. Work is balanced within a group, and documents may span only ranks of a group.
            Choose a multiple of the node size to profit from fast links. With None, up to 512 ranks
            are one group, and more ranks form groups of 256 to 512; see `group_ranks`.
        timeout_seconds: seconds that a rank waits for other ranks before it raises
            `DistCADesyncError`; None for the timeout of torch.distributed's collectives, which the
            Trainer calls `ddp_timeout`.

    Raises:
        ConfigError: if a value is out of range; the message states the value.
    """

    balance: bool = True
    tolerance: float = 0.01
    min_gain: float = 0.02
    tile: int = 128
    head_groups: int = 4
    kernel: KernelName = "auto"
    cost_model: CostSource = "analytic"
    measured_rates: bool = True
    documents_span_ranks: bool = False
    balance_evaluation: bool = False
    serve_in_place: bool = True
    ping_pong: bool = False
    max_transient_bytes: int | None = None
    group_size: int | None = None
    timeout_seconds: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{field.name}={show_value(value)} must be True or False.")
            if field.name in _NUMBERS and not (value is None and field.default is None):
                _check_number(field.name, value)
        kernel: Any = self.kernel
        if not (isinstance(kernel, str) and kernel in get_args(KernelName)):
            raise ConfigError(
                f"kernel={show_value(kernel)} must be one of"
                f" {', '.join(map(repr, get_args(KernelName)))}."
            )
        if not (is_built_in(self.cost_model) or isinstance(self.cost_model, CostModel)):
            object.__setattr__(self, "cost_model", _read_costs(self.cost_model))

    @classmethod
    def from_file(cls, path: str | Path) -> DistCAConfig:
        """Read the settings in a YAML or JSON file, which maps names of fields to values.

        Args:
            path: path of the file; JSON if it ends in ``.json``, else YAML. The path of a cost
                model in the file is relative to the current folder.

        Raises:
            ConfigError: if the file cannot be read, if a name is not a field, or if a value is out
                of range. The message is one line that begins with the file's name.
        """
        return split_settings(read_values(path), str(path), others=())[0]

    def group_ranks(self, ranks: int) -> int:
        """Return the size of the attention groups into which `ranks` ranks are divided.

        Without a `group_size`, up to 512 ranks are one group. More ranks are divided into groups of
        one size: the largest multiple of 8 from 256 to 512 that divides the number of ranks. If
        there is no such size, or if documents may span ranks, all ranks are one group.
        """
        if self.group_size is not None:
            return self.group_size
        if ranks <= _MOST_RANKS or self.documents_span_ranks:
            return ranks
        sizes = range(_MOST_RANKS // _WHOLE_NODES * _WHOLE_NODES, _FEWEST_RANKS - 1, -_WHOLE_NODES)
        return next((size for size in sizes if ranks % size == 0), ranks)


def read_values(path: str | Path) -> Any:
    """Read the values in a YAML or JSON file. Return None if the file is empty.

    Raises:
        ConfigError: if the file cannot be read. The message is one line that begins with the file's
            name.
    """
    try:
        text = read_file(Path(path))
    except (OSError, TypeError, ValueError) as error:  # `path` may not be a path at all
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{show_value(str(path))[1:-1]}: {reason}.") from error
    return parse_values(text, str(path))


def parse_values(text: str | bytes, source: str) -> Any:
    """Parse a text as JSON if the name of its source ends in ``.json``, else as YAML.

    Raises:
        ConfigError: if the text is not valid. The message is one line that begins with `source`.
    """
    try:
        return json.loads(text) if source.endswith(".json") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{source}: {' '.join(str(error).split())}") from error


def split_settings(
    values: Any, source: str, others: tuple[str, ...] = ("tokens_per_rank",)
) -> tuple[DistCAConfig, dict[str, Any]]:
    """Split a user's values into a `DistCAConfig` and the values whose names are in `others`.

    Args:
        values: the values by name; None if there are no values.
        source: the file, or the key in a file, that the values come from. Errors begin with it.
        others: names that are accepted in addition to the fields of `DistCAConfig`.

    Raises:
        ConfigError: if a name is unknown, or if a field or ``tokens_per_rank`` is out of range.
    """
    known = (*(field.name for field in fields(DistCAConfig)), *others)
    values = {} if values is None else values
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"{source}: {show_value(values)} should be names and values of settings, such as"
            " `ping_pong: true`."
        )
    for name in values:
        if name not in known:
            nearest = get_close_matches(str(name), known, 1)
            there = f"the nearest is {nearest[0]!r}" if nearest else f"there are {', '.join(known)}"
            raise ConfigError(f"{source}: there is no setting {name!r}; {there}.")
    try:
        if values.get("tokens_per_rank") is not None:
            _check_number("tokens_per_rank", values["tokens_per_rank"])
        config = DistCAConfig(
            **{name: value for name, value in values.items() if name not in others}
        )
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return config, {name: values[name] for name in others if name in values}


def _check_number(name: str, value: Any) -> None:
    kind, in_range, expected = _NUMBERS[name]
    if isinstance(value, bool) or not isinstance(value, kind):
        hint = " Numbers in quotes are text, and YAML takes 1e-2 for text: write 0.01 or 1.0e-2."
        raise ConfigError(
            f"{name}={show_value(value)} must be a"
            f" {'whole number' if kind is int else 'number'}." + hint * isinstance(value, str)
        )
    if not in_range(value):
        raise ConfigError(f"{name}={show_value(value)} must be {expected}.")


def show_value(value: Any) -> str:
    """Return the repr of a value for an error, as one line of at most 100 characters."""
    return " ".join(repr(value).split())[:100]


def is_built_in(source: object) -> bool:
    """Return whether a `cost_model` is the name of the built-in cost model."""
    return isinstance(source, str) and source == _BUILT_IN_COSTS


def read_cost_model(path: Any) -> CostModel:
    """Read a cost model from a JSON file.

    Raises:
        ConfigError: if the file cannot be read, or does not contain a cost model. The message is
            one line that begins with the file's name.
    """
    try:
        return CostModel.from_json(read_file(Path(path)).decode("utf-8"))
    except (ConfigError, OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{show_value(str(path))[1:-1]}: {str(error).rstrip('.')}. Give a file that"
            " CostModel.to_json wrote; profiles are no longer supported."
        ) from error


def _read_costs(source: Any) -> CostModel:
    try:
        return read_cost_model(source)
    except ConfigError as error:
        raise ConfigError(
            f"cost_model={show_value(source)} must be 'analytic', a CostModel, or the path of a"
            f" JSON file with a CostModel: {error}"
        ) from error


def check_settings(config: object, receiver: str) -> None:
    """Raise if `receiver` got settings of a wrong type.

    Raises:
        ConfigError: if `config` is neither None nor a `DistCAConfig`.
    """
    if config is not None and not isinstance(config, DistCAConfig):
        raise ConfigError(
            f"{receiver} got {config!r}: give it a DistCAConfig, such as"
            " DistCAConfig(tolerance=0.02)."
        )


def check_replaceable(name: Any) -> None:
    """Raise unless distca can replace the attention implementation of this name.

    Raises:
        UnsupportedError: if distca would not compute the same as this implementation.
    """
    if not (isinstance(name, str) and name in REPLACEABLE_ATTENTION):
        raise UnsupportedError(
            f"distca cannot stand in for {show_value(name)}, only for"
            f" {', '.join(REPLACEABLE_ATTENTION)}. Other implementations take special masks or"
            " arguments, or are kernels that transformers loads from the hub."
        )
