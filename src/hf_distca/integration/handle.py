"""The handle that the mask function returns, which travels to every layer as `attention_mask`.

A model makes its mask once per forward and kind of layer. Instead of a dense mask it gets a small
object. Because that is an argument, it is the same object in the recompute of activation
checkpointing and another one for every micro-batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Self

import torch
from transformers import PreTrainedConfig

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.documents import Documents, TokenBatch
from hf_distca.errors import UnsupportedError
from hf_distca.integration.seen_ahead import Ahead
from hf_distca.integration.families import (
    check_cut_documents,
    check_mask_numbers,
    warn_of_packing,
)
from hf_distca.kernels.base import Scores
from hf_distca.runtime.call import Inputs, LayerExchange
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import OutputStore
from hf_distca.runtime.route import Route
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.layout import Layout

if TYPE_CHECKING:
    from hf_distca.integration.layer_planner import LayerPlanner
    from hf_distca.integration.nano_batches import NanoBatches, SplitDocumentContext

# Keyword argument of a model's forward: the `LayerPlanner` of its handles, in place of one that
# plans with the session; given by stages of a pipeline.
PLANNER = "distca_planner"
# Keyword argument of layers whose model has read the documents of the batch before them, as those
# with recurrent layers do: an object with `documents`.
MODEL_ROWS = "distca_rows"


@dataclass(frozen=True, eq=False)
class LayerWork:
    """Work of a micro-batch in layers that have the same plan, made by the first of them.

    Attributes:
        group: the ranks that take part; a group of this rank alone if no others do.
        route: this rank's route.
        token_indices: int64 indices of the tokens that are not padding, on the device of q; None
            if there is no padding.
        window: keys that a row sees at most; None if no document on any rank is longer than the
            layer's window.
        meter: counts the work of this micro-batch in this kind of layer.
        nano: 0 if the batch is whole, 1 and 2 for its nano-batches.
        outputs: outputs of the layers, for activation checkpointing; None where no recompute can
            follow.
        name: name of the micro-batch, for errors.
        call_numbers: counts the calls of attention, those of recomputes among them.
        make_exchange: makes the `LayerExchange` of a call, with its arguments.
        stage_attention: computes attention in the session's place, from module, inputs and scores;
            for stages of a pipeline.
    """

    group: AttentionGroup
    route: Route
    token_indices: torch.Tensor | None
    window: int | None
    meter: Meter
    nano: int = 0
    outputs: OutputStore | None = None
    name: str = "a micro-batch"
    call_numbers: Iterator[int] = field(default_factory=itertools.count)
    make_exchange: Callable[..., LayerExchange] = LayerExchange
    stage_attention: Callable[[torch.nn.Module, Inputs, Scores], torch.Tensor] | None = None


class LayerSetup(NamedTuple):
    """Common properties of the layers of a micro-batch that are called alike, made for the first of
    them.

    Attributes:
        work: their plan in use.
        dtype: dtype in which they compute.
        compute_attention: computes the attention of one of them, a module, from its inputs.
    """

    work: LayerWork
    dtype: torch.dtype
    compute_attention: Callable[[torch.nn.Module, Inputs], torch.Tensor]


@dataclass(frozen=True, eq=False)
class MaskFacts:
    """Facts that the mask function found about one forward and one kind of layer.

    Attributes:
        window: keys that a row of this kind of layer sees at most, None for all.
        chunk: length of the chunks that documents are cut into in this kind of layer, None for no
            cuts.
        ahead: what tokens see of those behind them, None for causal attention.
        config: config of the model that made the mask, for checks of its documents.
        rotary_reason: reason why positions of this model do not allow documents in several parts,
            or None.
        is_local: whether no other rank may be asked to take part, because this forward is one of
            `generate`.
        can_recompute: whether layers may run again in backward: the mask was made while gradients
            were recorded.
        training: whether the model that made the mask is in training mode; None if it is not known.
    """

    window: int | None = None
    chunk: int | None = None
    ahead: Ahead | None = None
    config: PreTrainedConfig | None = None
    rotary_reason: str | None = None
    is_local: bool = False
    can_recompute: bool = True
    training: bool | None = None

    @property
    def model_type(self) -> str | None:
        """Type of the model."""
        return getattr(self.config, "model_type", None)


_NO_FACTS = MaskFacts()


class _MaskObject:
    """Object in place of a mask tensor: the methods of tensors that transformers calls."""

    # Generation with static caches makes masks ahead of the forward and takes them for 4-D tensors.
    ndim: ClassVar[int] = 4

    def contiguous(self) -> Self:
        """Return the object itself."""
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Raise where another attention computes with this object as its mask."""
        raise UnsupportedError(
            f"{getattr(func, '__name__', func)} of torch got distca's mask: a layer has another"
            " attn_implementation than its model. Give all layers the one of the model."
        )


class AttentionHandle(_MaskObject):
    """Stand-in for the mask of one forward and one kind of layer.

    All layers, and their recomputes, get the same object.

    This is no dataclass: FSDP with mixed precision rebuilds dataclasses, with the dictionaries in
    them, for every layer that it wraps.

    Args:
        planner: plans the layers, with the session of the mask function.
        batch: the tokens, with the documents as the model got them, for models that pass none to
            attention.
        mask: other facts from the mask function.

    Attributes:
        layer_work: filled by the first layer of each kind: some models pass the window only to the
            attention function.
        layer_setups: common properties of layers that are called alike, by the arguments that
            distinguish their calls.
        group: the ranks that take part, once they are known.
        documents: documents of the batch, once they were read, or of the nano-batch.
        has_segments: whether the model's recurrent layers, if it has any, run along their segments.
        nano: 0 for a whole batch, 1 and 2 for its nano-batches.
        nano_batches: the cut of the batch in two, once a layer has used it.
        split_context: keys of the first nano-batch that the second one reads.
        second_handle: in the handle of the first nano-batch, the handle of the second one, which is
            planned with it.
    """

    def __init__(
        self, planner: LayerPlanner, batch: TokenBatch, mask: MaskFacts = _NO_FACTS
    ) -> None:
        self.planner = planner
        self.batch = batch
        self.mask = mask
        self.layer_work: dict[PlanKey, LayerWork] = {}
        self.layer_setups: dict[tuple[object, ...], LayerSetup] = {}
        self.group: AttentionGroup | None = None
        self.documents: Documents | None = None
        self.has_segments = False
        self.nano = 0
        self.nano_batches: NanoBatches | None = None
        self.split_context: SplitDocumentContext | None = None
        self.second_handle: AttentionHandle | None = None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the mask that this stands for, for models that hand it to transformers again."""
        rows, length = self.batch.shape
        return rows, 1, length, length

    def is_training(self, module: torch.nn.Module) -> bool:
        """Return whether this is a forward of training, which all ranks run.

        The model says it, not the layer at hand: frozen layers may be in evaluation mode. Where no
        model is known, `module` says it.
        """
        return module.training if self.mask.training is None else self.mask.training

    def make_nano_handle(
        self,
        nano: int,
        shape: tuple[int, int],
        documents: Documents,
        split_context: SplitDocumentContext,
    ) -> AttentionHandle:
        """Make the handle of a nano-batch, 1 or 2, of (rows, tokens)."""
        handle = AttentionHandle(self.planner, TokenBatch(*shape), self.mask)
        handle.nano = nano
        handle.documents = documents
        handle.split_context = split_context
        handle.group = self.group
        handle.has_segments = self.has_segments
        return handle

    def make_key(self, shape: AttentionShape, device: str, window: int | None) -> PlanKey:
        """Return the plan key of a layer that passes this window to the attention
        function; the mask's own window goes first.
        """
        return PlanKey(
            shape,
            device,
            window if self.mask.window is None else self.mask.window,
            self.mask.chunk,
            self.nano,
        )

    def read_documents(
        self, arguments: Mapping[str, Any], *, span_ranks: bool, training: bool
    ) -> Documents:
        """Read the documents of the batch from the keyword arguments of a layer or of attention."""
        rows = arguments.get(MODEL_ROWS)
        if rows is None:
            batch = self.batch.with_documents(arguments)
            documents = batch.read_documents(span_ranks=span_ranks, training=training)
            if documents.is_packed(batch.length):
                warn_of_packing(self.mask.model_type)
        else:  # its model has read them
            documents = rows.documents
            self.has_segments = True
        self.documents = documents.cut_into_chunks(self.mask.chunk)
        return self.documents

    def check_documents(self, layout: Layout | None, window: int | None, rank: int = 0) -> None:
        """Check the documents for layers with a window, or None for no window; this is a rank of
        the layout.

        Without a layout, all of them are whole here.

        `check_cut_documents` raises on all ranks or none, because all know the layout; other checks
        are about this rank's own mask.
        """
        documents, mask = self.documents, self.mask
        if documents is None:
            return
        documents.check_holes(window)
        if documents.has_mask_numbers:
            check_mask_numbers(mask.config)
        if layout is not None and documents.span_ranks and layout.is_scattered:
            check_cut_documents(mask.model_type, mask.rotary_reason, has_segments=self.has_segments)
            if mask.ahead is not None:
                mask.ahead.check_whole(documents, layout, rank)


@dataclass(frozen=True, eq=False)
class ForeignMask(_MaskObject):
    """A mask that distca does not compute: an error where attention is called with it, not where it
    is made.

    The decoders of Bart and its kin make one for a cross attention that they do not have as causal
    language models.

    Attributes:
        features: unsupported features of the mask, for the error.
    """

    features: str


@dataclass(frozen=True, eq=False)
class DenseMask(_MaskObject):
    """The dense mask of a forward whose tensors have no values to plan with: sdpa computes such
    calls, on this rank alone.
    """

    mask: torch.Tensor


class CachedMask(torch.Tensor):
    """The dense mask of a forward that reads a key/value cache: sdpa computes such calls, on this
    rank alone.

    A tensor, because generation with static caches handles masks as tensors; a class, to tell it
    from a user's own mask.
    """
