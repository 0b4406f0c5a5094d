"""Options that several verbs have, written once as the fields of a dataclass: `with_options` adds
them to a verb.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Concatenate,
    Literal,
    ParamSpec,
    TypeVar,
    get_type_hints,
)

import typer

from hf_distca.errors import ConfigError

if TYPE_CHECKING:
    from hf_distca.schedule.cost import CostModel

Options = TypeVar("Options")
Own = ParamSpec("Own")
Column = Annotated[
    str, typer.Option(help="Column of a data set that holds tokens, or their number.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Tokenizer of a column of text, as from_pretrained takes it.")
]

_CostName = Literal["pairs", "cpu", "cuda"]
_LIMIT = 2**31  # what follows counts with 64 bits


def with_options(
    options: type[Options],
) -> Callable[[Callable[Concatenate[Options, Own], None]], Callable[..., None]]:
    """Make a verb whose options include the fields of a dataclass, and which gets
    the filled dataclass as its first argument.

    Fields have typer's annotations. The verb's own arguments and options have other names than
    fields; required ones come first.
    """
    hints = get_type_hints(options, include_extras=True)
    shared = [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options)  # type: ignore[arg-type]
    ]

    def decorate(verb: Callable[Concatenate[Options, Own], None]) -> Callable[..., None]:
        _, *rest = signature(verb, eval_str=True).parameters.values()

        @wraps(verb)
        def command(**given: Any) -> None:
            filled = options(**{parameter.name: given.pop(parameter.name) for parameter in shared})
            verb(filled, **given)  # type: ignore[call-arg]

        special = (parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in rest)
        parameters = sorted(
            (*shared, *special), key=lambda parameter: parameter.default is not Parameter.empty
        )
        vars(command)["__signature__"] = Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer of attention in bfloat16, the devices and links that run it, and the file of the
    result.
    """

    cost: Annotated[
        _CostName, typer.Option(help="What is balanced: seconds on a device, or causal pairs.")
    ] = "cuda"
    tile: Annotated[
        int, typer.Option(help="Documents are cut at multiples of this where tokens allow.")
    ] = 128
    query_heads: Annotated[int, typer.Option(help="Query heads of a layer.")] = 32
    key_value_heads: Annotated[int, typer.Option(help="Key/value heads of a layer.")] = 8
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = 128
    window: Annotated[
        int | None,
        typer.Option(help="Keys that a position sees, if all layers have a sliding window."),
    ] = None
    cost_file: Annotated[
        str | None,
        typer.Option(
            "--cost-model",
            help="Seconds of your own instead: a file with a CostModel in JSON.",
            show_default=False,
        ),
    ] = None
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Ranks of a node; its links are faster.", show_default=False)
    ] = None
    link_gigabytes: Annotated[
        float | None,
        typer.Option(
            help="GB/s that a rank sends to other nodes.", show_default="as the cost model"
        ),
    ] = None
    node_gigabytes: Annotated[
        float | None,
        typer.Option(
            help="GB/s that a rank sends inside its node.", show_default="as the cost model"
        ),
    ] = None
    ranks_per_link: Annotated[
        int, typer.Option(help="Ranks of a node that share a link to other nodes.")
    ] = 1
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Where the result goes, as JSON; else standard output."
        ),
    ] = None

    @property
    def has_seconds(self) -> bool:
        """True if figures are seconds of a device, and not causal pairs."""
        return self.cost_file is not None or self.cost != "pairs"

    def make_cost_model(self) -> CostModel:
        """Make the cost model in the file, or else the built-in one of `cost`, with the links of
        the options.
        """
        from hf_distca.config import read_cost_model
        from hf_distca.schedule.cost import AttentionShape, CostModel

        for name in (
            "tile",
            "query_heads",
            "key_value_heads",
            "head_dim",
            "window",
            "ranks_per_node",
            "ranks_per_link",
        ):
            if (getattr(self, name) or 0) >= _LIMIT:
                raise ConfigError(
                    f"--{name.replace('_', '-')} {getattr(self, name)}: the limit is 2**31."
                )
        shape = AttentionShape(
            self.query_heads, self.key_value_heads, self.head_dim, self.head_dim, 2
        )
        if self.cost_file is not None:
            model = replace(read_cost_model(self.cost_file), shape=shape, tile=self.tile)
        elif self.cost == "pairs":
            model = CostModel.make_of_pairs(shape)
        else:
            model = CostModel.make_analytic(shape, device_type=self.cost, tile=self.tile)
        links: dict[str, Any] = {}
        for option, rate in (
            ("link_gigabytes", self.link_gigabytes),
            ("node_gigabytes", self.node_gigabytes),
        ):
            if rate is not None and not 1e-9 <= rate <= 1e9:
                raise ConfigError(
                    f"--{option.replace('_', '-')} {rate:g}: a rate is a number from 1e-9 to 1e9"
                    " GB/s."
                )
            if rate is not None:
                links[
                    "node_bytes_per_second" if "node" in option else "exchange_bytes_per_second"
                ] = rate * 1e9
        return replace(model, window=self.window, ranks_per_link=self.ranks_per_link, **links)
