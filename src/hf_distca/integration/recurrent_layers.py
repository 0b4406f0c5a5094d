"""Recurrent layers of hybrid models (linear attention, Mamba 2, short convolutions) in which each packed document begins anew.

Such layers mix tokens along a row: a document would begin with the state that the one before it left, and its convolution would
see that one's last tokens. So two things in the modeling modules of transformers are replaced, as soon as they are imported:

- The forward of the model that calls the layers finds out where documents begin and adds that to its keyword arguments, as
  `PackedRows`. The models hand their keyword arguments on, through layers and mixers, to the functions that mix tokens. An
  argument is the same in the recompute of activation checkpointing and another one for every micro-batch in flight.
- Those functions cut rows where `PackedRows` says so. Without it, as under another attention implementation, they call what they
  replace. Packages (fla, mamba-ssm, causal-conv1d) are told where documents begin; functions of torch run document by document.

A model that generates goes on from its cache as ever.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from hf_distca.agreement.documents import Documents, TokenBatch
from hf_distca.borrowed import is_of_package
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.kernels.varlen import to_device
from hf_distca.register import when_imported

__all__ = ["MODULES", "PACKED_ROWS", "PackedRows", "begin_documents_anew", "packed_rows"]

PACKED_ROWS = "distca_rows"  # the keyword argument

_CONVOLUTION = ("causal_conv1d_fn",)
_DELTA_RULE = (*_CONVOLUTION, "torch_chunk_gated_delta_rule")
_KIMI_DELTA = (*_CONVOLUTION, "chunk_kimi_delta_attention")
_MAMBA2 = (*_CONVOLUTION, "mamba2_chunk_scan", "mamba2_split_conv1d_scan_combined")

# Modeling modules: the model whose forward calls the layers, and the functions through which their tokens mix. Seen in
# transformers 5.16.0, 5.18.0 and 5.23.0; before 5.16 mixers keep functions of their own, and nothing is replaced.
MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bailing_hybrid": ("BailingHybridModel", _KIMI_DELTA),
    "bamba": ("BambaModel", _MAMBA2),
    "falcon_h1": ("FalconH1Model", _MAMBA2),
    "granitemoehybrid": ("GraniteMoeHybridModel", _MAMBA2),
    "kimi_linear": ("KimiLinearModel", _KIMI_DELTA),
    "lfm2": ("Lfm2Model", _CONVOLUTION),
    "lfm2_moe": ("Lfm2MoeModel", _CONVOLUTION),
    "lfm3": ("Lfm3Model", _CONVOLUTION),
    "nemotron_h": ("NemotronHModel", _MAMBA2),
    "olmo_hybrid": ("OlmoHybridModel", _DELTA_RULE),
    "qwen3_5": ("Qwen3_5TextModel", _DELTA_RULE),
    "qwen3_5_moe": ("Qwen3_5MoeTextModel", _DELTA_RULE),
    "qwen3_next": ("Qwen3NextModel", _DELTA_RULE),
    "zamba2": ("Zamba2Model", _MAMBA2),
}

# What packing loaders give beside documents. Functions of torch raise when they get it.
_BOUNDS = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


class PackedRows:
    """The documents of a batch, and where its rows are cut so that each begins anew.

    It is no dataclass: FSDP with mixed precision rebuilds those for every layer.

    Args:
        documents: of the batch.
        batch_size, length: its shape in tokens.

    Attributes:
        pieces: (tokens before, tokens) of each piece of the rows, one row after another: padding belongs to the document before
            it. Empty if every row is one piece.
    """

    __slots__ = ("_tensors", "batch_size", "documents", "length", "pieces")

    def __init__(self, documents: Documents, batch_size: int, length: int) -> None:
        self.documents, self.batch_size, self.length = documents, batch_size, length
        lengths = documents.rows[:, 2]
        first = np.cumsum(lengths) - lengths
        begin = np.union1d(first if documents.keep is None else documents.keep[first], np.arange(batch_size) * length)
        packed = len(lengths) > batch_size
        ends = np.append(begin[1:], batch_size * length)
        self.pieces = tuple(zip(begin.tolist(), (ends - begin).tolist(), strict=True)) if packed else ()
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {}

    def cu_seqlens(self, device: torch.device) -> torch.Tensor:
        """(pieces + 1,) int64: where pieces begin, and the end of the last."""
        return self._on("cu_seqlens", device, lambda: np.append(self._begin, self.batch_size * self.length))

    def seq_idx(self, device: torch.device) -> torch.Tensor:
        """(batch, length) int32: the number of each token's piece."""
        shape, numbers = (self.batch_size, self.length), np.arange(len(self.pieces), dtype=np.int32)
        return self._on("seq_idx", device, lambda: np.repeat(numbers, [tokens for _, tokens in self.pieces]).reshape(shape))

    def spread(self, halo: int, device: torch.device) -> torch.Tensor:
        """(batch * length,) int64: where each token is if `halo` zeros stand between two pieces."""
        return self._on(
            ("spread", halo),
            device,
            lambda: np.concatenate([before + number * halo + np.arange(n) for number, (before, n) in enumerate(self.pieces)]),
        )

    @property
    def _begin(self) -> Any:
        return np.array([before for before, _ in self.pieces], dtype=np.int64)

    def _on(self, name: Any, device: torch.device, make: Callable[[], Any]) -> torch.Tensor:
        """A tensor that is made once for a micro-batch and a device."""
        if (name, device) not in self._tensors:
            self._tensors[name, device] = to_device(torch.from_numpy(make()), device)
        return self._tensors[name, device]


def packed_rows(arguments: Mapping[str, Any]) -> PackedRows | None:
    """What a model has added to the keyword arguments of its layers, if it is one of those here."""
    rows = arguments.get(PACKED_ROWS)
    return rows if isinstance(rows, PackedRows) else None


def begin_documents_anew(asks_for_us: Callable[[PreTrainedModel], bool]) -> None:
    """Replace what was named above, in each module now if it is imported, else right after that.

    Args:
        asks_for_us: whether a model runs distca's attention.
    """
    for name, (model, functions) in MODULES.items():
        path = f"transformers.models.{name}.modeling_{name}"
        when_imported(path, partial(_replace, path, model, functions, asks_for_us))


def _replace(path: str, model: str, functions: tuple[str, ...], asks_for_us: Callable[[PreTrainedModel], bool]) -> None:
    import sys

    module = sys.modules[path]
    model_class = getattr(module, model, None)
    if model_class is None or not set(functions) <= vars(module).keys() & _called_in_forwards(module):
        return  # another version, whose layers mix tokens in another way
    for name in functions:
        setattr(module, name, _separating(getattr(module, name), _SEPARATED[name]))
    model_class.forward = _telling(model_class.forward, asks_for_us)


def _called_in_forwards(module: ModuleType) -> set[str]:
    """The global names that forwards of the classes of a module use."""
    classes = (value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__)
    forwards = (inspect.unwrap(vars(one)["forward"]) for one in classes if "forward" in vars(one))
    return {name for forward in forwards for name in forward.__code__.co_names}


def _telling(forward: Callable[..., Any], asks_for_us: Callable[[PreTrainedModel], bool]) -> Callable[..., Any]:
    """A forward that adds `PackedRows` to its keyword arguments."""
    _, *names = inspect.signature(forward).parameters

    @wraps(forward)
    def telling(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        if not asks_for_us(self):
            return forward(self, *args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        rows = _rows_of(self, given)
        if rows is not None:
            given[PACKED_ROWS] = rows
            if rows.pieces:
                given["use_cache"] = False  # nobody goes on from the end of several documents
        return forward(self, **given)

    return telling


@torch.compiler.disable  # type: ignore[untyped-decorator]  # it reads documents
def _rows_of(model: PreTrainedModel, given: Mapping[str, Any]) -> PackedRows | None:
    """The rows of a batch. None where a cache is read, and where attention is about to say what is wrong with its documents."""
    tokens = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    if not isinstance(tokens, torch.Tensor) or isinstance(mask, dict) or (cache is not None and cache.get_seq_length()):
        return None
    batch_size, length = tokens.shape[:2]
    padding = mask[:, :length].bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    try:
        rows = PackedRows(_documents(model, given, (batch_size, length), padding), batch_size, length)
    except (LayoutError, UnsupportedError):
        return None
    if rows.pieces and cache is not None:
        raise UnsupportedError(
            f"{type(model).__name__} got past_key_values and {len(rows.documents.rows)} packed documents in {batch_size} rows: a "
            "cache does not keep their states apart. Leave past_key_values out."
        )
    return rows


def _documents(
    model: PreTrainedModel, given: Mapping[str, Any], shape: tuple[int, int], padding: torch.Tensor | None
) -> Documents:
    """The documents of a batch, from the arguments of a model."""
    from hf_distca.integration.session import current_session  # it imports handles, which import this

    return TokenBatch(
        *shape,
        packed=given.get("distca_documents"),
        cu_seq_lens=given.get("cu_seq_lens_q"),
        position_ids=given.get("position_ids"),
        padding=padding,
    ).documents(span_ranks=current_session().config.documents_span_ranks, training=model.training)


def _separating(original: Callable[..., Any], separated: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of `original`, by which pieces of rows are computed apart where there are any."""
    apart = torch.compiler.disable(separated)  # type: ignore[no-untyped-call]  # where pieces begin differs from batch to batch

    @wraps(original)
    def separating(*args: Any, **kwargs: Any) -> Any:
        rows = kwargs.pop(PACKED_ROWS, None)
        if rows is None:
            return original(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDS}
        if not rows.pieces:
            return original(*args, **kwargs)
        return apart(original, rows, *args, **kwargs)

    return separating


def _convolve(
    original: Callable[..., Any], rows: PackedRows, states_BDL: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """A causal convolution along (batch, width, length), which sees zeros in front of each piece."""
    if is_of_package(original):
        channels_last = states_BDL.transpose(1, 2).contiguous().transpose(1, 2)
        return original(channels_last, weight, *args, seq_idx=rows.seq_idx(states_BDL.device), **kwargs)
    width, halo = states_BDL.shape[1], weight.shape[-1] - 1
    place = rows.spread(halo, states_BDL.device)
    states_DT = states_BDL.transpose(0, 1).reshape(width, -1)
    apart_DT = states_DT.new_zeros(width, states_DT.shape[1] + halo * (len(rows.pieces) - 1)).index_copy(1, place, states_DT)
    out_DT = original(apart_DT[None], weight, *args, **kwargs)[0].index_select(1, place)
    return out_DT.view(width, rows.batch_size, rows.length).transpose(0, 1)


@dataclass(frozen=True)
class _Recurrence:
    """A function that runs a recurrence, in which each piece begins without a state.

    Attributes:
        of_tokens: its arguments with a number or more for each token, (batch, length, ...).
        takes: what the function of a package takes to tell pieces apart.
    """

    of_tokens: tuple[str, ...]
    takes: str

    def __call__(self, original: Callable[..., Any], rows: PackedRows, *args: Any, **kwargs: Any) -> Any:
        """The outputs (batch, length, ...); those of a delta rule with None for the last state."""
        device = args[0].device
        if is_of_package(original) and self.takes == "seq_idx":
            return original(*args, **kwargs, seq_idx=rows.seq_idx(device))
        args, kwargs = self._changed(original, args, kwargs, _joined)
        if is_of_package(original):
            out, _ = original(*args, **kwargs, cu_seqlens=rows.cu_seqlens(device))
            return out.view(rows.batch_size, rows.length, *out.shape[2:]), None
        results = []
        for before, tokens in rows.pieces:
            places, names = self._changed(original, args, kwargs, lambda states: states.narrow(1, before, tokens))  # noqa: B023
            results.append(original(*places, **names))
        outs = [result[0] if isinstance(result, tuple) else result for result in results]
        out = torch.cat(outs, dim=1).view(rows.batch_size, rows.length, *outs[0].shape[2:])
        return (out, None) if isinstance(results[0], tuple) else out

    def _changed(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Any], Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments whose states of tokens are changed. They keep their places: packages name some of them otherwise."""
        names = inspect.signature(original).parameters
        places = tuple(change(value) if name in self.of_tokens else value for name, value in zip(names, args, strict=False))
        return places, {name: change(value) if name in self.of_tokens else value for name, value in kwargs.items()}


def _joined(states: torch.Tensor) -> torch.Tensor:
    """Rows one after another, as one."""
    return states.reshape(1, -1, *states.shape[2:])


def _fused(original: Callable[..., Any], rows: PackedRows, zxbcdt: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Convolution, recurrence and output projection of Mamba 2 in a function of mamba-ssm; None where that is not installed."""
    if not is_of_package(original):
        return original(zxbcdt, *args, **kwargs)
    return original(zxbcdt, *args, seq_idx=rows.seq_idx(zxbcdt.device), **kwargs)


_DELTA_STATES = ("query", "key", "value", "g", "beta")
_SEPARATED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _Recurrence(_DELTA_STATES, "cu_seqlens"),
    "chunk_kimi_delta_attention": _Recurrence(_DELTA_STATES, "cu_seqlens"),
    "mamba2_chunk_scan": _Recurrence(("hidden_states", "dt", "B", "C"), "seq_idx"),
    "mamba2_split_conv1d_scan_combined": _fused,
}
