"""Import path of `plan_ahead` and `DistCATrainerMixin`, which are in `training`."""

from __future__ import annotations

from hf_distca.integration.training.mixin import DistCATrainerMixin, plan_ahead

__all__ = ["DistCATrainerMixin", "plan_ahead"]
