"""The shipped profile of the GPU and the attention kernel at hand, for plans before anything is
measured.
"""

from __future__ import annotations

import numpy as np
import torch

from hf_distca.kernels import Kernel
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.profiles import Profile


def shipped_profile(device: torch.device, kernel: Kernel, group: AttentionGroup) -> Profile | None:
    """Return the shipped profile, equal on all ranks; None if there is none, or if GPUs or kernels
    differ. Collective.

    All ranks must plan with one cost model. If their GPUs differ, they use the built-in figures,
    and learn speeds in training.
    """
    profile = (
        None  # not torch's own kernel
        if kernel.name == "cuda" and torch.nn.attention.current_flash_attention_impl() is not None
        else Profile.find_gpu_profile(torch.cuda.get_device_name(device), kernel.name)
    )
    names = Profile.list_shipped()
    place = -1 if profile is None else names.index(profile)
    same = group.all_equal(np.array([place]), doing="comparing GPUs and attention kernels")
    return Profile.load(names[place]) if same and place >= 0 else None
