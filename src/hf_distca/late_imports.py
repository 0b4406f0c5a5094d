"""Calls that wait for an import: at once if a module is there already, else right after its first
import.

Nothing of transformers or torch is imported for it, so that `import hf_distca` costs nothing where
no model is loaded: on the command line, in a process that only starts others, at the top of a
notebook. `transformers.modeling_utils`, where attention implementations are registered, is what
every model file imports first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["when_imported", "when_models_load"]

_MODELS = "transformers.modeling_utils"


def when_models_load(act: Callable[[], None]) -> None:
    """Call a function now if transformers has imported the module that all models share, else right
    after it does.
    """
    when_imported(_MODELS, act)


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call a function now if the module `name` is imported, else right after its first import."""
    if name in sys.modules:
        act()
        return
    waiting = next(
        (
            finder
            for finder in sys.meta_path
            if isinstance(finder, _ImportFinder) and finder.name == name
        ),
        None,
    )
    if waiting is None:
        waiting = _ImportFinder(name)
        sys.meta_path.insert(0, waiting)
    waiting.acts.append(act)


class _ImportFinder(MetaPathFinder):
    """A finder that finds no module itself; it adds calls to the end of one import, and then
    removes itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.acts: list[Callable[[], None]] = []
        self._looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec that the other finders find."""
        if fullname != self.name or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(fullname)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_act(module: ModuleType) -> None:
                execute(module)
                sys.meta_path.remove(self)
                for act in self.acts:
                    act()

            spec.loader.exec_module = and_act  # type: ignore[method-assign]
        return spec
