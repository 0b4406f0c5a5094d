"""Options that several verbs have, written once: as the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_type_hints

__all__ = ["taking"]

Options = TypeVar("Options")
Own = ParamSpec("Own")


def taking(options: type[Options]) -> Callable[[Callable[Concatenate[Options, Own], None]], Callable[..., None]]:
    """A verb that has the fields of a dataclass among its options, and gets them as its first argument, filled in.

    Fields are annotated as typer wants it. The verb's own arguments and options have other names than fields; those that must be
    given come first.
    """
    hints = get_type_hints(options, include_extras=True)
    shared = [_parameter(field, hints[field.name]) for field in fields(options)]  # type: ignore[arg-type]

    def decorate(verb: Callable[Concatenate[Options, Own], None]) -> Callable[..., None]:
        own = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in list(signature(verb, eval_str=True).parameters.values())[1:]]

        @wraps(verb)
        def command(**given: Any) -> None:
            filled = options(**{one.name: given.pop(one.name) for one in shared})
            verb(filled, **given)  # type: ignore[call-arg]

        needed = [one for one in (*own, *shared) if one.default is Parameter.empty]
        every = [*needed, *(one for one in (*shared, *own) if one not in needed)]
        vars(command)["__signature__"] = Signature(every)
        command.__annotations__ = {one.name: one.annotation for one in every}
        return command

    return decorate


def _parameter(field: Field[Any], annotation: Any) -> Parameter:
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
