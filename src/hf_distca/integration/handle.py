"""The handle that the mask function returns and that travels to every layer as `attention_mask`.

A model makes its mask once per forward and kind of layer. Instead of a dense mask it gets a small object. Because that is an
argument, it is the same object in the recompute of activation checkpointing and another one for every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import torch

from hf_distca.agreement.documents import LocalDocuments, read_documents
from hf_distca.errors import UnsupportedError
from hf_distca.integration.families import warn_of_packing
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route

if TYPE_CHECKING:
    from hf_distca.integration.halves import Halves, Handover

__all__ = ["AttentionHandle", "CachedMask", "ForeignMask", "Work"]


@dataclass(frozen=True, eq=False)
class Work:
    """What the first layer found out for all layers.

    Attributes:
        route: this rank's route.
        keep: int64 indices of the tokens that are not padding, on the device of q; None if there is no padding.
        window: keys that a row sees at most; None if no document on any rank is longer than the layer's window.
        collective: whether other ranks take part.
        meter: counts what this micro-batch does in this kind of layer.
        half: 0 if the batch is whole, 1 and 2 for its nano-batches.
        outputs: outputs of the layers, for activation checkpointing.
        name: of the micro-batch, for errors.
    """

    route: Route
    keep: torch.Tensor | None
    window: int | None
    collective: bool
    meter: Meter
    half: int = 0
    outputs: OutputStore = field(default_factory=OutputStore)
    name: str = "a micro-batch"


@dataclass(eq=False)
class AttentionHandle:
    """Stands for the mask of one forward and one kind of layer.

    Attributes:
        batch_size, length: shape of the batch in tokens.
        padding: (batch_size, length) bool mask as the user gave it, true for tokens.
        window: keys that a row of this kind of layer sees at most, None for all.
        chunk: length of the chunks that documents are cut into in this kind of layer, None for no cuts.
        position_ids: those the mask was made with, for models that pass none to attention.
        alone: whether no other rank may be asked to take part, because this forward is one of `generate`.
        grad: whether gradients were enabled when the mask was made, outside of what checkpointing runs without them.
        model_type: of the model that made the mask, for what there is to say about packed documents in it.
        work: filled by the first layer, by window: some models tell the window only to the attention function.
        halves: the handles of the two nano-batches, once a layer has run as halves.
        local: the documents of a nano-batch; a whole batch reads them from what reaches the attention function.
        handover: keys that the second nano-batch reads of the first one.
        second: in the handle of the first nano-batch, that of the second one, which is planned with it.
    """

    batch_size: int
    length: int
    padding: torch.Tensor | None
    window: int | None = None
    chunk: int | None = None
    position_ids: torch.Tensor | None = None
    model_type: str | None = None
    alone: bool = False
    grad: bool = True
    work: dict[int | None, Work] = field(default_factory=dict, repr=False)
    halves: Halves | None = field(default=None, repr=False)
    local: LocalDocuments | None = field(default=None, repr=False)
    handover: Handover | None = field(default=None, repr=False)
    second: AttentionHandle | None = field(default=None, repr=False)
    # Generation with static caches makes masks ahead of the forward and handles them as 4-D tensors.
    ndim: ClassVar[int] = 4

    @property
    def planned_together(self) -> list[AttentionHandle]:
        """The handles that get their work at once: of the first nano-batch both, so that ranks meet once, else this one."""
        return [self] if self.second is None else [self, self.second]

    def read_documents(self, arguments: Mapping[str, Any], *, span_ranks: bool) -> LocalDocuments:
        """The documents of the batch, from the keyword arguments of a layer or of attention."""
        positions = arguments.get("position_ids")
        local = read_documents(
            self.batch_size,
            self.length,
            packed=arguments.get("distca_documents"),
            cu_seq_lens=arguments.get("cu_seq_lens_q"),
            position_ids=self.position_ids if positions is None else positions,
            padding=self.padding,
            span_ranks=span_ranks,
        )
        if len(local.rows) > self.batch_size:
            warn_of_packing(self.model_type)
        return local.in_chunks(self.chunk)

    def contiguous(self) -> AttentionHandle:
        """The handle itself."""
        return self


@dataclass(frozen=True, eq=False)
class ForeignMask:
    """A mask that distca does not compute: refused where attention is called with it, not where it is made.

    The decoders of Bart and its kin make one for a cross attention that they do not have as causal language models.

    Attributes:
        what: what the mask uses, for the error.
    """

    what: str
    ndim: ClassVar[int] = 4  # as for handles

    def contiguous(self) -> ForeignMask:
        """The mask itself."""
        return self

    def refuse(self) -> NoReturn:
        """Say why.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            f"this model's attention mask uses {self.what}; distca computes causal attention within documents. "
            'Use attn_implementation="sdpa" for it.'
        )


class CachedMask(torch.Tensor):
    """The dense mask of a forward that reads a key/value cache: such calls are sdpa's, on this rank alone.

    A tensor, because generation with static caches handles masks as tensors; a class, to tell it from a user's own mask.
    """
