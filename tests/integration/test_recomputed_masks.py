"""The recompute of a checkpoint reuses the masks of the forward, which go with the checkpoint."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from handles import make_handle
from hf_distca.integration.handle import MaskStandIn
from hf_distca.integration.hooks.recomputed_masks import reuse_forward_handle


class Masked:
    """A computation that makes two masks; their lengths are the next two of `lengths`."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = iter(lengths or [7, 7] * 9)
        self.seen: list[MaskStandIn] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            self.seen.append(reuse_forward_handle(make_handle(1, next(self.lengths))))
            x = x.sin() * x
        return x


def make_leaf() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def is_repeated(seen: list[MaskStandIn], times: int) -> bool:
    return (
        len(seen) == 2 * times
        and all(one is seen[number % 2] for number, one in enumerate(seen))
        and seen[0] is not seen[1]
    )


def test_recompute_reuses_the_masks_of_the_forward() -> None:
    masked, x = Masked(), make_leaf()
    out = checkpoint(masked, x, use_reentrant=False).sum()
    out.backward(retain_graph=True)
    assert is_repeated(masked.seen, 2)
    out.backward()
    assert is_repeated(masked.seen, 3)


def test_nested_checkpoints_reuse_the_masks_of_the_forward() -> None:
    masked = Masked()
    inner = partial(checkpoint, masked, use_reentrant=False)
    checkpoint(lambda x: inner(x).cos(), make_leaf(), use_reentrant=False).sum().backward()
    assert is_repeated(masked.seen, 3)


def test_consecutive_checkpoints_have_different_masks() -> None:
    first, second, x = Masked(), Masked(), make_leaf()
    out = checkpoint(second, checkpoint(first, x, use_reentrant=False), use_reentrant=False)
    out.sum().backward()
    assert is_repeated(first.seen, 2)
    assert is_repeated(second.seen, 2)
    assert not {*map(id, first.seen)} & {*map(id, second.seen)}


@pytest.mark.parametrize("reentrant", [None, True], ids=["no checkpoint", "reentrant"])
def test_masks_are_reused_only_in_non_reentrant_checkpoints(reentrant: bool | None) -> None:
    masked, x = Masked(), make_leaf()
    out = masked(x) if reentrant is None else checkpoint(masked, x, use_reentrant=reentrant)
    out.sum().backward()
    assert len({*map(id, masked.seen)}) == len(masked.seen) == (2 if reentrant is None else 4)


def test_recompute_with_another_size_makes_a_new_mask() -> None:
    masked = Masked(7, 7, 7, 9)
    checkpoint(masked, make_leaf(), use_reentrant=False).sum().backward()
    assert masked.seen[2] is masked.seen[0]
    assert masked.seen[3].batch.tokens.length == 9


def test_masks_are_freed_with_their_checkpoint() -> None:
    masked = Masked()
    out = checkpoint(masked, make_leaf(), use_reentrant=False).sum()
    alive = [weakref.ref(handle) for handle in masked.seen]
    masked.seen.clear()
    assert all(handle() is not None for handle in alive)
    out.backward()
    del out
    masked.seen.clear()
    gc.collect()
    assert all(handle() is None for handle in alive)
