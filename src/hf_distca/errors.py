"""The exceptions of hf_distca.

::

    DistCAError
    ├── ConfigError (ValueError)          a configuration value out of its range
    ├── LayoutError (ValueError)          positions or lengths that describe no set of documents
    ├── PlanError (ValueError)            a plan that breaks one of its invariants
    ├── ReportError (ValueError)          a run folder with nothing to report
    ├── UnsupportedError (NotImplementedError)
    │                                     a model or an argument that distca would get wrong
    ├── KernelError (RuntimeError)        no kernel for this device, dtype or shape
    └── DistCADesyncError (RuntimeError)  ranks that disagree about what they compute

Every message states the values that were seen and what to do about them.
"""

from __future__ import annotations


def make_printable(text: str) -> str:
    """Escape the control characters in a text, except line ends and tabs, so that messages can show
    the text.
    """
    return "".join(
        character
        if character.isprintable() or character in "\n\t"
        else character.encode("unicode_escape").decode()
        for character in text
    )


class DistCAError(Exception):
    """Base class of every error raised by hf_distca."""


class ConfigError(DistCAError, ValueError):
    """A configuration value is out of its range."""


class LayoutError(DistCAError, ValueError):
    """Position ids, lengths or segments do not describe a set of documents."""


class PlanError(DistCAError, ValueError):
    """A plan does not compute every query token exactly once, or needs keys that no rank holds."""


class ReportError(DistCAError, ValueError):
    """A run folder holds nothing to report, or its contents cannot be read."""


class UnsupportedError(DistCAError, NotImplementedError):
    """The model or the call asks for something that distca would not compute exactly."""


class KernelError(DistCAError, RuntimeError):
    """No kernel can run this combination of device, dtype and head dimension."""


class DistCADesyncError(DistCAError, RuntimeError):
    """The ranks of an attention group disagree about the step they are in."""
