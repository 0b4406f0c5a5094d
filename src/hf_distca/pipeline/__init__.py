"""Pipeline stages that share attention: `split` a model over the ranks of a mesh dimension, run its stages with `Schedule`."""

from __future__ import annotations

from hf_distca.pipeline.gradients import clip_grad_norm_
from hf_distca.pipeline.saving import save_pretrained
from hf_distca.pipeline.schedule import Schedule
from hf_distca.pipeline.split import Stage, from_pretrained, split
from hf_distca.pipeline.step import TickFigures

__all__ = ["Schedule", "Stage", "TickFigures", "clip_grad_norm_", "from_pretrained", "save_pretrained", "split"]
