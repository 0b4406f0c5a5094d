"""Call functions after the import of a module, or at the end of a process.

This file imports neither transformers nor torch, so that `import hf_distca` is fast in a process
that loads no model, such as a command line or a launcher. Every model file first imports
`transformers.modeling_utils`, where attention implementations are registered.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODELS = "transformers.modeling_utils"


def call_after_models_load(act: Callable[[], None]) -> None:
    """Call a function right after the import of the module that all models of transformers share,
    or now if this module is already imported.
    """
    call_after_import(_MODELS, act)


def call_after_import(name: str, act: Callable[[], None]) -> None:
    """Call a function right after the import of this module of transformers, or now if the
    module is already imported.

    A module whose import is under way counts as not imported, because its last lines have not run.
    """
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    if name in sys.modules and name not in _finder.under_way:
        act()
    else:
        _finder.acts.setdefault(name, []).append(act)


def call_at_exit(act: Callable[[], object]) -> None:
    """Call a function when this process ends, but not when a fork of this process ends."""
    process = os.getpid()

    def act_here() -> None:
        if os.getpid() == process:
            act()

    atexit.register(act_here)


class _ImportFinder:
    """Calls functions after the import of modules of transformers. It lets the other finders find
    these modules.

    It has no base class, because importing `importlib.abc` takes longer than the rest of this file.

    Attributes:
        acts: functions to call after the import of a module, by the module's name.
        under_way: names of modules whose import has begun but not ended.
    """

    def __init__(self) -> None:
        self.acts: dict[str, list[Callable[[], None]]] = {}
        self.under_way: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return another finder's spec, whose loader calls the functions in `acts` after the
        import.
        """
        if not fullname.startswith("transformers."):
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next(filter(None, specs), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def act_once(module: ModuleType) -> None:
                self.under_way.add(fullname)
                try:
                    execute(module)
                finally:
                    self.under_way.discard(fullname)
                for act in self.acts.pop(fullname, ()):
                    act()

            spec.loader.exec_module = act_once  # type: ignore[method-assign]
        return spec


_finder = _ImportFinder()
