"""`document_shares`, which makes a data set from documents of any length. Trainers, accelerate and
loaders read each rank's part of this data set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.state import AcceleratorState, is_initialized
from accelerate.utils import get_int_from_env, parse_choice_from_env, parse_flag_from_env

from hf_distca.agreement.announce import PlanKey
from hf_distca.agreement.dealt_share import Dealing, Placement
from hf_distca.borrowed import has_partial_state
from hf_distca.config import DistCAConfig, check_settings
from hf_distca.data.columns import read_input_names
from hf_distca.data.global_batches import FillRule, GlobalBatches, LongerRule
from hf_distca.data.reading import read_document_lengths
from hf_distca.data.shares import Shares, StreamedShares
from hf_distca.errors import ConfigError
from hf_distca.integration.hooks.dealt_trainers import wrap_trainers
from hf_distca.integration.layer_kinds import list_layer_keys, make_initial_cost
from hf_distca.integration.training.callback import find_session
from hf_distca.runtime.members import find_launched_per_node
from hf_distca.schedule.cost import AttentionShape

if TYPE_CHECKING:
    from datasets import Dataset


def document_shares(
    documents: Any,
    tokens_per_rank: int,
    *,
    model: Any = None,
    shapes: Sequence[tuple[AttentionShape, int | None]] | None = None,
    ranks: int | None = None,
    ranks_per_node: int | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    config: DistCAConfig | None = None,
    seed: int | None = 0,
    fill: FillRule | None = None,
    longer: LongerRule = "cut",
    column: str = "input_ids",
    lengths: Any = None,
    pad_token_id: int = 0,
    placement: Placement = "dealt",
) -> Dataset | StreamedShares:
    """Deal documents to ranks, so that all ranks have equally many tokens and about equal attention
    work. Documents may be longer than a rank holds.

    All ranks together train on global batches of ``ranks * tokens_per_rank`` tokens. The documents
    of a batch depend on the seed, the epoch and this number of tokens. A global batch is dealt and
    planned when it is loaded, in the loader's workers if there are any. A long document is dealt to
    several ranks. Item ``k * ranks + r`` of the data set is rank r's share of global batch k. So
    items must be read in order, one in each batch, and each rank must read its own items: use
    `PackingCollator` and ``TrainingArguments(per_device_train_batch_size=1,
    train_sampling_strategy="sequential")``.

    Call it with the same arguments on every rank, before or after `TrainingArguments` or an
    `Accelerator` is made.

    Args:
        documents: a `datasets.Dataset` or a sequence of rows, with a column of token ids; or a
            sequence of lists of token ids. If rows have `labels`, they are used; -100 marks tokens
            that are not trained on. An iterable without a length is read as a stream, see below.
        tokens_per_rank: number of tokens of each rank in a micro-batch.
        model: the model, or its config: documents are dealt for its attention. A column that is an
            input of the model, but is not read, raises an error.
        shapes: instead of a model, (shape, window or None) of each kind of layer, kinds without a
            window first.
        ranks: number of ranks that share attention. By default all processes, or as many of them as
            `config` puts in a group. Tensor-parallel ranks count once. Several groups take global
            batches in turns: item ``k * ranks + r`` is then the share for rank r of the group that
            trains on batch k.
        ranks_per_node: number of ranks of a node; documents are kept on one node if possible. If
            neither this nor `ranks` is given, it is read from torchrun or `accelerate launch`.
        dtype: dtype of attention, such as ``torch.bfloat16`` with ``TrainingArguments(bf16=True)``.
            By default the mixed precision of an `Accelerator` or `accelerate launch`, else the
            model's dtype.
        device: type of the device that trains; by default accelerate's device, or the device that
            accelerate would choose.
        config: settings to train with; by default those given to `hf_distca.configure`.
        seed: seed by which each epoch is shuffled. If None, every epoch keeps the given order,
            which suits evaluation.
        fill: ``"whole"`` for whole documents, with padding where no document fits. ``"cut"`` to
            fill global batches to the token: the rest of a document becomes a separate document in
            the next batch, and the rest of an epoch is dropped. By default shuffled documents stay
            whole. Documents that keep their order are cut, because packing whole documents would
            change the order.
        longer: whether documents that are longer than a global batch are cut (``"cut"``) or refused
            (``"refuse"``).
        column: name of the column of token ids.
        lengths: number of tokens of each document, or the name of a column with these numbers. A
            `datasets.Dataset` of token ids does not need them.
        pad_token_id: token of padding.
        placement: ``"in order"`` is a baseline for dealing. It puts documents on ranks in their
            order, and cuts them where a rank is full. The global batches, and the number of tokens
            of each rank, stay the same.

    Returns:
        A `datasets.Dataset` that makes shares when they are read; `datasets` must be installed.
        Shares contain ``shift_labels``, an argument of transformers' models, because ``labels``
        cannot be shifted where a document is cut.

        For an iterable without a length, a `StreamedShares`. It is a torch `IterableDataset` that
        takes documents in the order in which they come. A stream accepts no `seed`, `fill`,
        `longer` or `lengths`, and needs ``max_steps`` and ``{"dispatch_batches": False}``.

    Raises:
        ConfigError: if an argument is out of its range, or if there are no shapes and no model that
            can be read.
        LayoutError: if the column of token ids is missing, or if documents have no tokens, or too
            few tokens for one global batch.
    """
    check_settings(config, "document_shares()")
    config = config or find_session().config
    if ranks is None:
        ranks = config.group_size or config.group_ranks(_count_processes())
        ranks_per_node = find_launched_per_node(ranks) if ranks_per_node is None else ranks_per_node
    device_type = torch.device(_find_device() if device is None else device).type
    wrap_trainers()
    if shapes is not None and not shapes:
        raise ConfigError(
            "shapes=[] is empty: give (AttentionShape(...), window) for at least one kind of layer."
        )
    keys = (
        [PlanKey(shape, device_type, window) for shape, window in shapes]
        if shapes is not None
        else list_layer_keys(model, dtype or _find_mixed_dtype(), device_type)
    )
    dealing = Dealing(
        ranks,
        tokens_per_rank,
        {key: make_initial_cost(key, config) for key in keys},
        config,
        ranks_per_node,
        placement,
    )
    # Check these numbers here, so that an error is raised here and not in a worker of the loader.
    if not isinstance(tokens_per_rank, int):
        raise ConfigError(
            f"tokens_per_rank={tokens_per_rank!r} must be a whole number of at least 1."
        )
    dealing.deal_layouts(np.array([ranks * tokens_per_rank]))
    inputs = read_input_names(model)
    if not hasattr(documents, "__len__"):
        # Seed 0, the default, is accepted, although a stream is not shuffled.
        if fill not in (None, "cut") or longer != "cut" or seed or lengths is not None:
            raise ConfigError(
                f"seed={seed!r}, fill={fill!r}, longer={longer!r} and lengths={lengths!r} are given"
                " for a stream of documents, which is always read in order and cut where a global"
                " batch is full. Leave these arguments out, and shuffle the stream itself."
            )
        return StreamedShares(documents, dealing, column=column, inputs=inputs)
    quiet = dist.is_available() and dist.is_initialized() and dist.get_rank() > 0
    lengths = read_document_lengths(documents, column, lengths, quiet=quiet)
    fill = fill or ("cut" if seed is None else "whole")
    batches = GlobalBatches(lengths, dealing.tokens, seed, fill, longer, quiet=quiet)
    return make_lazy_dataset(
        Shares(documents, batches, dealing, column=column, pad_token_id=pad_token_id, inputs=inputs)
    )


def make_lazy_dataset(shares: Shares) -> Dataset:
    """Make a data set of item indices, with a transform that makes a share from each index when it
    is read.

    The column of indices is named "input_ids", like an argument of every model, so that no Trainer
    removes it as unused.
    """
    from datasets import Dataset  # an optional package, and slow to import

    dataset = Dataset.from_dict({"input_ids": np.arange(len(shares))}).with_transform(shares)
    dataset.set_epoch = shares.set_epoch  # accelerate's loaders call it
    return dataset


def _count_processes() -> int:
    """Return the number of processes that train.

    accelerate is not asked, because accelerate would start torch.distributed, and the timeout of a
    Trainer would have no effect.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(
        get_int_from_env(
            ["WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE"], 1
        )
    )


def _find_device() -> str:
    if has_partial_state():
        return str(PartialState().device)
    accelerator = (
        None
        if parse_flag_from_env("ACCELERATE_USE_CPU")
        else torch.accelerator.current_accelerator()
    )
    return accelerator.type if accelerator else "cpu"


def _find_mixed_dtype() -> torch.dtype | None:
    """Return the mixed-precision dtype configured in accelerate, if any.

    The dtype in `TrainingArguments` is not visible here.
    """
    precision = (
        AcceleratorState().mixed_precision
        if is_initialized()
        else parse_choice_from_env("ACCELERATE_MIXED_PRECISION")
    )
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
