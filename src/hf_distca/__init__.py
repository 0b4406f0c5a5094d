"""Core attention disaggregation for Hugging Face: ``import hf_distca`` registers
``attn_implementation="distca"``.

The core has six subpackages. Each of them imports only those listed before it:

- `schedule`: decides which rank computes which part of the attention, without torch.
- `kernels`: computes core attention on one device.
- `runtime`: carries out a plan with routes, messages and attention servers.
- `agreement`: makes ranks tell each other their documents and agree on one plan.
- `data`: reads documents, and deals them to ranks.
- `integration`: connects the other five to transformers and its Trainer.

All other subpackages are optional, and the core does not import them: `hybrids` (recurrent layers),
`pipeline` (models in stages), `pool` (separate attention servers), `plugins` (for trainers that
support plugins) and `tools` (the command line).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hf_distca.errors import ConfigError, DistCADesyncError, DistCAError, UnsupportedError
from hf_distca.import_hooks import call_after_models_load

if TYPE_CHECKING:
    from hf_distca.agreement.documents import PackedDocuments
    from hf_distca.config import DistCAConfig
    from hf_distca.data.collator import PackingCollator
    from hf_distca.integration.current_session import balancing, configure, metrics
    from hf_distca.integration.hooks.mask import prepare
    from hf_distca.integration.reports import Metrics
    from hf_distca.integration.training.callback import DistCACallback
    from hf_distca.integration.training.deal_trainer import deal
    from hf_distca.integration.training.document_shares import document_shares
    from hf_distca.integration.training.place_rows import place_rows
    from hf_distca.tools.observe.imbalance_callback import ImbalanceCallback

    __version__: str

__all__ = [
    "ConfigError",
    "DistCACallback",
    "DistCAConfig",
    "DistCADesyncError",
    "DistCAError",
    "ImbalanceCallback",
    "Metrics",
    "PackedDocuments",
    "PackingCollator",
    "UnsupportedError",
    "__version__",
    "balancing",
    "configure",
    "deal",
    "document_shares",
    "metrics",
    "place_rows",
    "prepare",
]

# The module of each public name, imported when the name is first used. Importing all of them takes
# seconds, mostly for torch and transformers.
_MODULES = {
    "agreement.documents": ("PackedDocuments",),
    "config": ("DistCAConfig",),
    "data.collator": ("PackingCollator",),
    "integration.training.callback": ("DistCACallback",),
    "integration.training.deal_trainer": ("deal",),
    "integration.training.document_shares": ("document_shares",),
    "integration.hooks.mask": ("prepare",),
    "integration.training.place_rows": ("place_rows",),
    "integration.reports": ("Metrics",),
    "integration.current_session": ("balancing", "configure", "metrics"),
    "tools.observe.imbalance_callback": ("ImbalanceCallback",),
}
# Names that earlier versions had, and their replacements.
_REMOVED = {
    "DistCATrainerMixin": "use transformers' Trainer with hf_distca.DistCACallback, which logs the"
    " balance, and hf_distca.deal, which plans steps in loader workers",
    "pipeline": "import hf_distca.pipeline",
    "plan_ahead": "leave the call out; plans of hf_distca.document_shares are made in loader"
    " workers, before a step needs them",
    "share_tokens": "deal documents in the loader: hf_distca.document_shares, or hf_distca.deal for"
    " a Trainer",
    "trace": "record steps with torch.profiler, which shows dispatch, server and return of each"
    " layer",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("hf-distca")
    elif name in _MODULE_OF:
        value = getattr(import_module(f"hf_distca.{_MODULE_OF[name]}"), name)
    else:
        instead = f": {_REMOVED[name]}." if name in _REMOVED else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
    globals()[name] = value  # Python now finds the name without this function
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Modules whose `register` changes transformers' models. They import torch and transformers, so they
# are imported only in processes that load models.
_REGISTERED = ("integration.hooks.register", "hybrids.recurrent_layers")


def _register() -> None:
    for name in _REGISTERED:
        import_module(f"hf_distca.{name}").register()


call_after_models_load(_register)
