"""FlashAttention 4 as it is installed, without what it compiles with: its sources decide which
functions a call needs.

`flash_attn.cute.interface` and the modules that its keys are made of run as they are; all else that
they import is a stand-in. Under torch's `FakeTensorMode` the package compiles and launches nothing,
and fills its caches all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

_REAL = ("interface", "cache_utils", "config", "cute_dsl_utils", "fa_logging", "testing", "utils")
_COMPILERS = ("cuda", "cutlass", "einops", "quack", "tvm_ffi")


class _StandIns:
    """Finds modules of compilers, and those of the package that no key is made of."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        package, _, rest = name.partition("flash_attn.cute.")
        own = not package and rest and rest not in _REAL
        return (
            ModuleSpec(name, self, is_package=True)
            if own or name.split(".")[0] in _COMPILERS
            else None
        )

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__ = [], spec
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing: it has every name."""


@contextmanager
def uncompiled(folder: Path, architecture: int) -> Iterator[ModuleType]:
    """The functions of the package in `folder` (flash_attn/cute), as for a GPU of a compute
    capability such as 90.
    """
    package = ModuleType("flash_attn.cute")
    package.__path__ = [str(folder)]
    environment = {"FLASH_ATTENTION_ARCH": f"sm_{architecture}", "FLASH_ATTENTION_NUM_SMS": "132"}
    finder: Any = _StandIns()
    with patch.dict("os.environ", environment):
        before = _take_out()
        sys.meta_path.insert(0, finder)
        sys.modules |= {"flash_attn": ModuleType("flash_attn"), "flash_attn.cute": package}
        try:
            module: Any = import_module("flash_attn.cute.interface")
            # A class of kernels is asked this.
            module.FlashAttentionBackwardSm100.accum_tile_orders.return_value = (None, None)
            yield module
        finally:
            sys.meta_path.remove(finder)
            _take_out()
            sys.modules |= before


def _take_out() -> dict[str, ModuleType]:
    """The modules of the package and of compilers that were imported, which have to be found
    anew.
    """
    names = [name for name in sys.modules if name.split(".")[0] in ("flash_attn", *_COMPILERS)]
    return {name: sys.modules.pop(name) for name in names}
