"""The mask function, which returns the handle of a micro-batch instead of a dense mask.

Users can call `prepare` before the first step. Otherwise the mask function prepares the model in
the first forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from hf_distca.agreement.document_starts import convert_mask
from hf_distca.agreement.documents import PackedDocuments, TokenBatch
from hf_distca.borrowed import has_no_values
from hf_distca.errors import UnsupportedError
from hf_distca.integration.attention_names import (
    check_not_replaced,
    find_distca_configs,
    is_distca_model,
    iterate_models,
)
from hf_distca.integration.callers import MaskCall
from hf_distca.integration.checks.packed_rows import check_packed_row
from hf_distca.integration.current_session import current_session
from hf_distca.integration.families import (
    PING_PONG_FAMILIES,
    check_family,
    check_layerdrop,
    warn_of_unproven_family,
)
from hf_distca.integration.handle import (
    PLANNER,
    ForwardBatch,
    ForwardContext,
    LayerPlanner,
    MaskStandIn,
)
from hf_distca.integration.hooks.dealt_trainers import check_first_share
from hf_distca.integration.hooks.dense_masks import choose_dense_mask
from hf_distca.integration.hooks.mask_functions import read_mask
from hf_distca.integration.hooks.nano_batch_layers import cut_layers
from hf_distca.integration.hooks.positions import (
    check_positions,
    extend_rotary,
    find_first_position,
    mark_document_starts,
)
from hf_distca.integration.hooks.recomputed_masks import reuse_forward_handle
from hf_distca.integration.mask_objects import CachedMask, DenseMask, ForeignMask
from hf_distca.integration.seen_ahead import Ahead


@torch.compiler.disable  # type: ignore[untyped-decorator]
def distca_mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | MaskStandIn | DenseMask | ForeignMask | None = None,
    local_size: int | None = None,
    config: PreTrainedConfig | None = None,
    **sizes: Any,
) -> MaskStandIn | CachedMask | DenseMask | ForeignMask:
    """Make the handle of a micro-batch instead of a dense mask. This function is registered as the
    mask function "distca".

    `sizes` has ``batch_size``, ``q_length`` and ``kv_length``, and may have ``q_offset``,
    ``kv_offset`` and ``use_vmap``. For a mask that distca does not compute, a `ForeignMask` is
    returned.

    Raises:
        UnsupportedError: if the family of the model is refused, if the model drops layers in
            training, if another package has replaced distca's attention, if the model runs in
            `torch.nn.DataParallel`, or if `check_first_share` refuses a share.
        LayoutError: if position ids differ from the positions in the documents.
    """
    if isinstance(attention_mask, (MaskStandIn, DenseMask, ForeignMask)):
        return attention_mask
    check_family(
        getattr(config, "model_type", None),
        encoder_decoder=getattr(config, "is_encoder_decoder", False),
    )
    check_not_replaced(config)
    limits = read_mask(mask_function, local_size, use_vmap=sizes.get("use_vmap", False))
    if isinstance(limits, str):
        return ForeignMask(limits)
    dense = choose_dense_mask(
        sizes, mask_function, attention_mask=attention_mask, local_size=local_size, config=config
    )
    if dense is not None:
        return dense
    length = sizes["q_length"]
    # transformers has converted this mask to bool. `_choose_padding` prefers the mask as the model
    # got it.
    padding = None if attention_mask is None else attention_mask[:, :length]
    shape = sizes["batch_size"], length
    return reuse_forward_handle(_make_handle(shape, padding, limits, config))


def _make_handle(
    shape: tuple[int, int],
    padding: torch.Tensor | None,
    limits: tuple[int | None, int | None, Ahead | None],
    config: PreTrainedConfig | None,
) -> MaskStandIn:
    """Make a handle. Also check the model that asks for the mask, and prepare it if `prepare` was
    not called.

    Args:
        shape: (rows, tokens) of the batch.
        padding: the 2-D mask as bool; None without padding.
        limits: window, chunk and later tokens, as `read_mask` returns them.
        config: config of the model.
    """
    call = MaskCall()
    both_ways = limits[2] is not None and limits[2].ids is None
    if call.is_in_data_parallel:
        raise UnsupportedError(
            "torch.nn.DataParallel runs replicas of the model in threads of one process, and distca"
            " shares attention between processes. Start one process for each GPU, with torchrun or"
            " accelerate launch; or make one GPU visible (CUDA_VISIBLE_DEVICES=0)."
        )
    warn_of_unproven_family(getattr(config, "model_type", None))
    model = next(call.iterate_models(), None)
    packed = call.find_argument("distca_documents")
    position_ids = call.position_ids
    if torch.is_grad_enabled() if model is None else model.training:
        check_layerdrop(config)
    planner = call.find_argument(PLANNER) or LayerPlanner(current_session())
    session = planner.session
    # The next lines do the work of `prepare`. The mesh belongs to the model that was loaded, which
    # may be an outer model, so all models on the stack are searched.
    session.find_mesh(call.iterate_models())
    if session.config.ping_pong and model is not None:
        cut_layers(model)
    if both_ways and model is not None and model.main_input_name != "input_ids":
        raise UnsupportedError(
            f"{type(model).__name__} takes {model.main_input_name}: distca does not balance image"
            " or audio towers, because attention is only a third of their time, and ranks may have"
            " different numbers of images. Use distca only for the text model:"
            ' attn_implementation={"text_config": "distca"}, and "sdpa" for other parts.'
        )
    first = find_first_position(model)
    if position_ids is None and (positions := call.find_tensor("position_ids")) is not None:
        # transformers passes no position ids when it makes masks of bidirectional attention.
        is_plain = first or (both_ways and positions.dim() == 2)
        position_ids = positions if is_plain else mark_document_starts(positions)
    if model is not None and isinstance(packed, PackedDocuments):
        check_positions(
            model,
            packed,
            position_ids,
            counts_itself=call.has_no_positions and not (first and position_ids is not None),
        )
        check_packed_row(call, model, packed)
        if packed.dealt_share is not None:
            check_first_share(call, packed.dealt_share, session)
    tokens = TokenBatch(
        *shape,
        packed=packed,
        position_ids=position_ids,
        padding=_choose_padding(call.find_tensor("attention_mask"), padding),
        first_position=first,
    )
    context = ForwardContext(
        *limits,
        config=config,
        rotary_reason=extend_rotary(model, config, packed),
        # One rank can generate with a model in training mode, so the mode alone does not tell
        # whether other ranks take part.
        is_generating=call.is_generating,
        # A recompute follows only if gradients are recorded. Under reentrant checkpointing, layers
        # record no gradients in their first forward, but the mask is made before the layers run,
        # outside the checkpoint.
        can_recompute=torch.is_grad_enabled(),
        training=None if model is None else model.training,
    )
    return MaskStandIn(ForwardBatch(planner, tokens, context))


def find_planner(model: PreTrainedModel) -> LayerPlanner | None:
    """Return a planner for a forward of this model; None if the model does not run distca, or its
    tensors have no values to read (under FakeTensorMode, for example).
    """
    is_planned = is_distca_model(model) and not has_no_values()
    return LayerPlanner(current_session()) if is_planned else None


def _choose_padding(
    numbers: torch.Tensor | None, padding: torch.Tensor | None
) -> torch.Tensor | None:
    """Choose the 2-D mask to read. `padding` is the mask as bool. `numbers` is the mask as the
    model got it. The integers in `numbers` may number documents, so `numbers` is chosen if it is
    known and has the shape of `padding`.
    """
    numbers = (
        None
        if padding is None or numbers is None or numbers.dim() != 2
        else convert_mask(numbers[:, : padding.shape[1]])
    )
    return (
        padding if numbers is None or padding is None or numbers.shape != padding.shape else numbers
    )


Model = TypeVar("Model", bound=torch.nn.Module)


def prepare(model: Model) -> Model:
    """Prepare a model to train under distca, before its first step. It is for custom loops;
    Trainers have `DistCACallback`.

    Call it on every rank, after `configure` and after torch.distributed has started. It makes the
    attention group, from the device mesh of the model if there is one. If ping-pong is on, it
    enables decoder layers to run as nano-batches. Without this call, the first forward does the
    same if it finds the model on the call stack. Calling it again has no effect.

    Args:
        model: a model of transformers, or a module that holds one, such as a PEFT or a DDP model.

    Returns:
        The model.

    Raises:
        UnsupportedError: if a part of the model uses distca, but belongs to a refused family or
            drops layers in training, or if another package has replaced distca's attention.
        DistCADesyncError: if not all ranks call this.
    """
    configs = find_distca_configs(model)
    for config in configs:
        check_family(config.model_type, encoder_decoder=config.is_encoder_decoder)
        check_layerdrop(config)
        check_not_replaced(config)
    if not configs:
        return model
    session = current_session()
    session.find_mesh(iterate_models(model))
    if session.config.ping_pong:
        for part in iterate_models(model):
            # For other families, the first forward warns that layers stay whole.
            if part.config.model_type in PING_PONG_FAMILIES:
                cut_layers(part)
    if dist.is_available() and dist.is_initialized():
        session.join_group()
    return model
