"""distca under the name of another attention, for trainers that have a closed list of names."""

from __future__ import annotations

import logging

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hf_distca.borrowed import changed_flash_attention, let_names_pass
from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention import distca_attention
from hf_distca.integration.mask import distca_mask
from hf_distca.integration.names import origin, register, registered
from hf_distca.register import STAND_INS, check_stand_in

__all__ = ["STAND_INS", "stand_in"]

_log = logging.getLogger("hf_distca")


def stand_in(name: str) -> None:
    """Let models that ask for the attention `name` have distca, for trainers that take no name but those they know.

    Call it before the model is loaded. From then on transformers has distca's functions in the place of its own, in this process
    and for every model that asks for `name`, also one that is not trained. The trainer's checks and packing stay those of
    `name`. transformers no longer looks for the package behind the name, flash-attn say: distca does not need it. A trainer
    that looks for it by itself still does. Again has no effect.

    What distca does not compute it refuses when it is asked for it, as under its own name: attention that is not causal,
    dropout, other arguments. There is no way back to what was replaced: load such models with another attention.

    Args:
        name: "flash_attention_2", "flash_attention_3", "flash_attention_4" or "sdpa".

    Raises:
        UnsupportedError: if `name` is another, or a package has put a function of its own in its place, as those do that cut
            sequences over ranks. If one does so later, the next forward says so.
    """
    if name in registered():
        return
    check_stand_in(name)
    if name not in ALL_ATTENTION_FUNCTIONS:
        raise UnsupportedError(f"distca cannot stand in for {name!r}: this version of transformers does not have it.")
    replaced = ALL_ATTENTION_FUNCTIONS[name]
    changed = changed_flash_attention() if "flash" in name else None
    for function in (replaced, changed):
        if function is not None and not origin(function).startswith("transformers."):
            raise UnsupportedError(
                f"distca cannot stand in for {name!r}: {origin(function)} has been put in its place. Packages do so to cut "
                "sequences over ranks, which distca would not know of: switch that off."
            )
    register(name, distca_attention, distca_mask)
    let_names_pass(registered())
    _log.warning(
        'distca stands in for attn_implementation="%s": models that ask for it in this process get distca, not %s.',
        name,
        origin(replaced),
    )
