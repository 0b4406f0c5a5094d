"""Core attention disaggregation for Hugging Face: ``import hf_distca`` registers ``attn_implementation="distca"``."""

from __future__ import annotations

from importlib.metadata import version

from hf_distca.agreement.documents import PackedDocuments
from hf_distca.config import DistCAConfig
from hf_distca.errors import (
    ConfigError,
    DistCADesyncError,
    DistCAError,
    KernelError,
    LayoutError,
    PlanError,
    UnsupportedError,
)
from hf_distca.integration.ahead import plan_ahead
from hf_distca.integration.attention import distca_attention
from hf_distca.integration.data import PackingCollator
from hf_distca.integration.figures import Metrics, balance_figures, metrics
from hf_distca.integration.mask import distca_mask
from hf_distca.integration.names import register
from hf_distca.integration.prepare import prepare
from hf_distca.integration.profile import profile
from hf_distca.integration.session import attention_seconds, balancing, configure
from hf_distca.integration.stand_in import stand_in
from hf_distca.integration.trainer import DistCACallback, DistCATrainerMixin, PlanAheadMixin

__all__ = [
    "ConfigError",
    "DistCACallback",
    "DistCAConfig",
    "DistCADesyncError",
    "DistCAError",
    "DistCATrainerMixin",
    "KernelError",
    "LayoutError",
    "Metrics",
    "PackedDocuments",
    "PackingCollator",
    "PlanAheadMixin",
    "PlanError",
    "UnsupportedError",
    "__version__",
    "attention_seconds",
    "balance_figures",
    "balancing",
    "configure",
    "metrics",
    "plan_ahead",
    "prepare",
    "profile",
    "stand_in",
]

__version__ = version("hf-distca")

register("distca", distca_attention, distca_mask)
