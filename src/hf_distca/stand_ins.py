"""Names of the attentions that distca can stand in for."""

from __future__ import annotations

from hf_distca.errors import UnsupportedError

__all__ = ["STAND_INS", "check_stand_in"]

STAND_INS = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "sdpa")


def check_stand_in(name: str) -> None:
    """Raise unless distca can stand in for an attention of that name.

    Raises:
        UnsupportedError: if distca does not compute that attention as it is meant.
    """
    if name not in STAND_INS:
        raise UnsupportedError(
            f"distca cannot stand in for {name!r}, only for {', '.join(STAND_INS)}: others take masks or arguments of "
            "their own, or are kernels that transformers loads from the hub."
        )
