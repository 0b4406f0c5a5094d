"""Options of a verb as the fields of a dataclass, and options that several verbs share."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Annotated, Any, TypeVar

import typer

from hf_distca.errors import ConfigError

Options = TypeVar("Options")
Column = Annotated[
    str, typer.Option(help="Column of the data set: each document's tokens, or its length.")
]
Tokenizer = Annotated[
    str | None, typer.Option(help="Name or folder of a tokenizer, for a column of text.")
]
InJson = Annotated[bool, typer.Option("--json", help="Write everything as JSON.")]


def with_options(
    options: type[Options],
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Return a decorator for a verb that takes a dataclass. The fields of the dataclass, with
    typer's annotations, become the arguments and options of the verb.
    """

    def decorate(verb: Callable[[Options], None]) -> Callable[..., None]:
        @wraps(verb)
        def command(**given: Any) -> None:
            verb(options(**given))

        vars(command)["__signature__"] = signature(options, eval_str=True)
        return command

    return decorate


def read_rate(option: str, gigabytes: float | None) -> float | None:
    """Return the value of an option in bytes per second; None if the option is not given.

    Raises:
        ConfigError: if the value is out of range.
    """
    if gigabytes is not None and not 1e-9 <= gigabytes <= 1e9:
        raise ConfigError(f"{option} {gigabytes:g}: a rate is a number from 1e-9 to 1e9 GB/s.")
    return None if gigabytes is None else gigabytes * 1e9
