"""Registers "distca" with transformers: at once where models can be loaded already, else as soon as they can.

Nothing of transformers or torch is imported for it, so that `import hf_distca` costs nothing where no model is loaded: on the
command line, in a process that only starts others, at the top of a notebook. `transformers.modeling_utils`, where attention
implementations are registered, is what every model file imports first.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["register_when_models_load"]

_MODELS = "transformers.modeling_utils"


def register_when_models_load() -> None:
    """Register the name now if transformers has imported what all models share, else when it does."""
    if _MODELS in sys.modules:
        _register()
    elif not any(isinstance(finder, _AfterModels) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterModels())


class _AfterModels(MetaPathFinder):
    """Finds no module by itself; it adds a call to the end of one import, and then is gone."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the other finders find."""
        if fullname != _MODELS:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def and_register(module: ModuleType) -> None:
                execute(module)
                _register()

            spec.loader.exec_module = and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from hf_distca.integration.attention import distca_attention
    from hf_distca.integration.mask import distca_mask

    AttentionInterface.register("distca", distca_attention)
    AttentionMaskInterface.register("distca", distca_mask)
