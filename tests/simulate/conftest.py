from __future__ import annotations

import pytest

from hf_distca.model_shape import find_model
from hf_distca.simulate.hardware import find_hardware
from hf_distca.simulate.setting import Setting


@pytest.fixture
def setting() -> Setting:
    """Eight devices of a node with 16K tokens each."""
    return Setting(find_model("llama-3-8b"), find_hardware("h100"), 8, 16384)
