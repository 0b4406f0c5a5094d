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
        _, *rest = signature(verb, eval_str=True).parameters.values()
        special = [parameter.replace(kind=Parameter.KEYWORD_ONLY) for parameter in rest]

        @wraps(verb)
        def command(**given: Any) -> None:
            filled = options(**{parameter.name: given.pop(parameter.name) for parameter in shared})
            verb(filled, **given)  # type: ignore[call-arg]

        needed = [parameter for parameter in (*special, *shared) if parameter.default is Parameter.empty]
        parameters = [*needed, *(parameter for parameter in (*shared, *special) if parameter not in needed)]
        vars(command)["__signature__"] = Signature(parameters)
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def _parameter(field: Field[Any], annotation: Any) -> Parameter:
    default = Parameter.empty if field.default is MISSING else field.default
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
