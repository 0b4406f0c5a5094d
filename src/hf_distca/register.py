"""Registration of "distca" with transformers: at once if models can be
loaded already, else as soon as they can.

Nothing of transformers or torch is imported for it, so that `import hf_distca` costs nothing where no model is loaded: on the
command line, in a process that only starts others, at the top of a notebook. `transformers.modeling_utils`, where attention
implementations are registered, is what every model file imports first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from hf_distca.errors import UnsupportedError

__all__ = ["STAND_INS", "check_stand_in", "register", "when_imported", "when_models_load"]

STAND_INS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa")
_MODELS = "transformers.modeling_utils"


def when_models_load(act: Callable[[], None]) -> None:
    """Call a function now if transformers has imported the module that all
    models share, else right after it does.
    """
    when_imported(_MODELS, act)


def when_imported(name: str, act: Callable[[], None]) -> None:
    """Call a function now if the module `name` is imported, else right after its first import."""
    if name in sys.modules:
        act()
        return
    waiting = next((finder for finder in sys.meta_path if isinstance(finder, _ImportFinder) and finder.name == name), None)
    if waiting is None:
        waiting = _ImportFinder(name)
        sys.meta_path.insert(0, waiting)
    waiting.acts.append(act)


class _ImportFinder(MetaPathFinder):
    """A finder that finds no module itself; it adds calls to the end of
    one import, and then removes itself.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.acts: list[Callable[[], None]] = []
        self._looking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
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


def check_stand_in(name: str) -> None:
    """Raise unless distca can stand in for an attention of that name.

    Raises:
        UnsupportedError: if distca does not compute that attention as it is meant.
    """
    if name not in STAND_INS:
        raise UnsupportedError(
            f"distca cannot stand in for {name!r}, only for {', '.join(STAND_INS)}: others take masks or arguments of "
            "their own, or are kernels that transformers loads from the hub."
        )


def register() -> None:
    """Give transformers the attention function and the mask function named "distca"."""
    from hf_distca.integration.attention import distca_attention
    from hf_distca.integration.loading import is_ours
    from hf_distca.integration.loading import register as register_as
    from hf_distca.integration.mask import distca_mask
    from hf_distca.integration.positions import count_from_first
    from hf_distca.integration.recurrent_layers import begin_documents_anew

    register_as("distca", distca_attention, distca_mask)
    begin_documents_anew(is_ours)
    count_from_first()
