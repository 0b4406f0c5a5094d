"""Pipeline stages that share attention. `split` divides a model over the ranks of a mesh dimension,
and `Schedule` runs its stages.
"""

from __future__ import annotations

from hf_distca.pipeline.stage_checkpoints import save_pretrained
from hf_distca.pipeline.stage_schedule import Schedule
from hf_distca.pipeline.stage_step import TickFigures, clip_grad_norm_
from hf_distca.pipeline.stages import Stage, from_pretrained, split

__all__ = [
    "Schedule",
    "Stage",
    "TickFigures",
    "clip_grad_norm_",
    "from_pretrained",
    "save_pretrained",
    "split",
]
