"""Recurrent layers of hybrid models (linear attention, Mamba 2, short convolutions) that start each
document without a state.

The layers of transformers mix tokens along a row of the batch. In a packed row, a document would
begin with the state that the previous document left, and its convolution would see the last tokens
of that document. Parts of a document on other ranks would be missing. So three things in the
modeling modules of transformers are replaced as soon as the modules are imported:

- The forward of the model reads the documents and adds them to its keyword arguments, as
  `RecurrentRows`. Models pass their keyword arguments on, through layers and mixers (modules such
  as linear attention), to the functions that mix tokens. Arguments are used because the recompute
  of activation checkpointing gets the same objects, and each micro-batch in flight has its own.
- The forward of a mixer adds the mixer to this argument, so that the functions can keep tensors
  from other ranks for the mixer's recompute.
- The functions that mix tokens run along segments of documents instead of rows, and call the
  replaced function as their kernel. Without `RecurrentRows` (under another attention
  implementation, for example) they only call the replaced function.

Generation still uses the cache of the model.
"""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial, wraps
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_distca.agreement.documents import PACKING_KEYS
from hf_distca.borrowed import is_of_package
from hf_distca.errors import UnsupportedError
from hf_distca.hybrids.carryover import RuleOutputs
from hf_distca.hybrids.convolution import compute_causal_convolution
from hf_distca.hybrids.delta_rule import (
    DeltaInputs,
    compute_gated_delta_rule,
    run_by_document,
)
from hf_distca.hybrids.recurrent_rows import RecurrentRows
from hf_distca.hybrids.recurrent_segments import make_recurrent_rows
from hf_distca.hybrids.segments import Segments
from hf_distca.hybrids.state_space import ScanInputs, compute_mamba2, scan_by_document
from hf_distca.import_hooks import call_after_import
from hf_distca.integration.families import check_cut_documents, warn_of_packing
from hf_distca.integration.handle import MODEL_ROWS
from hf_distca.integration.hooks.mask import find_planner
from hf_distca.runtime.outputs import LayerOutputs

_CONVOLUTION_FUNCTIONS = ("causal_conv1d_fn",)
_DELTA_RULE_FUNCTIONS = (*_CONVOLUTION_FUNCTIONS, "torch_chunk_gated_delta_rule")
_KIMI_DELTA_FUNCTIONS = (*_CONVOLUTION_FUNCTIONS, "chunk_kimi_delta_attention")
# Name of the function that computes a whole Mamba 2 layer. Without mamba-ssm, modules have None
# under this name.
_FUSED_FUNCTION = "mamba2_split_conv1d_scan_combined"
_MAMBA2_FUNCTIONS = (*_CONVOLUTION_FUNCTIONS, "mamba2_chunk_scan", _FUSED_FUNCTION)

# For each modeling module: the model whose forward calls the layers, and the functions that mix
# tokens. This was checked in transformers 5.16.0, 5.18.0 and 5.23.0. In older versions mixers hold
# their own functions, and nothing is replaced. LFM2 in 5.18.0 does not pass its keyword arguments
# on. `_check_rows_used` detects this.
RECURRENT_MODULES: dict[str, tuple[str, tuple[str, ...]]] = {
    "bailing_hybrid": ("BailingHybridModel", _KIMI_DELTA_FUNCTIONS),
    "bamba": ("BambaModel", _MAMBA2_FUNCTIONS),
    "falcon_h1": ("FalconH1Model", _MAMBA2_FUNCTIONS),
    "granitemoehybrid": ("GraniteMoeHybridModel", _MAMBA2_FUNCTIONS),
    "kimi_linear": ("KimiLinearModel", _KIMI_DELTA_FUNCTIONS),
    "lfm2": ("Lfm2Model", _CONVOLUTION_FUNCTIONS),
    "lfm2_moe": ("Lfm2MoeModel", _CONVOLUTION_FUNCTIONS),
    "lfm3": ("Lfm3Model", _CONVOLUTION_FUNCTIONS),
    "nemotron_h": ("NemotronHModel", _MAMBA2_FUNCTIONS),
    "olmo_hybrid": ("OlmoHybridModel", _DELTA_RULE_FUNCTIONS),
    "qwen3_5": ("Qwen3_5TextModel", _DELTA_RULE_FUNCTIONS),
    "qwen3_5_moe": ("Qwen3_5MoeTextModel", _DELTA_RULE_FUNCTIONS),
    "qwen3_next": ("Qwen3NextModel", _DELTA_RULE_FUNCTIONS),
    "zamba2": ("Zamba2Model", _MAMBA2_FUNCTIONS),
}

# Arguments that give document boundaries. They are dropped, because the plain torch functions do
# not accept them. Some mixers pass one of `PACKING_KEYS` as "cu_seqlens".
_BOUNDARY_ARGUMENTS = ("cu_seqlens", *PACKING_KEYS)


class _MixerCall(NamedTuple):
    """Facts that a function gets from the mixer that calls it: rows and segments of the batch, and
    the mixer.
    """

    rows: RecurrentRows
    segments: Segments
    mixer: torch.nn.Module

    def get_outputs(self, name: str, inputs: Sequence[torch.Tensor]) -> LayerOutputs | None:
        """Return the store for rows that a function receives from other ranks; None if no recompute
        can follow.
        """
        return (
            self.rows.stores[name].find_outputs(self.mixer, inputs)
            if self.segments.exchanges and self.mixer.training
            else None
        )

    def merge_rows(self, states: torch.Tensor) -> torch.Tensor:
        """Join the rows of states (batch, length, ...) into one row: (1, batch * length, ...)."""
        shape = self.rows.shape
        if states.shape[:2] != shape:
            raise UnsupportedError(
                f"{type(self.mixer).__name__} got {tuple(states.shape[:2])} (rows, tokens) of a"
                f" batch of {shape} with packed documents, but a layer that mixes tokens outside"
                " attention needs the whole batch. Set DistCAConfig(ping_pong=False)."
            )
        return states.flatten(0, 1)[None]

    def split_rows(self, joined: torch.Tensor) -> torch.Tensor:
        """Split a joined row into the rows of the batch: (batch, length, ...)."""
        return joined.view(*self.rows.shape, *joined.shape[2:])


def register() -> None:
    """Replace the forwards and functions in `RECURRENT_MODULES`. A module that is not imported yet
    gets its replacements right after its import.
    """
    for name in RECURRENT_MODULES:
        call_after_import(
            f"transformers.models.{name}.modeling_{name}", partial(_replace_functions, name)
        )


def _replace_functions(name: str) -> None:
    module = sys.modules[f"transformers.models.{name}.modeling_{name}"]
    model, functions = RECURRENT_MODULES[name]
    used_names = dict(_list_forwards(module))
    mixers = tuple(owner for owner, names in used_names.items() if names & set(functions))
    if not hasattr(module, model) or not set(functions) <= vars(module).keys() & set().union(
        *used_names.values()
    ):
        return  # layers of this version of transformers do not mix tokens with these functions
    for function in functions:
        setattr(module, function, _run_along_segments(getattr(module, function), function))
    for mixer in mixers:
        mixer.forward = _pass_rows_to_mixer(mixer.forward)
    model_class = getattr(module, model)
    model_class.forward = _pass_rows_to_model(
        model_class.forward, partial(_check_rows_used, mixers, functions)
    )


def _list_forwards(module: ModuleType) -> Iterator[tuple[Any, set[str]]]:
    """Yield each class of a module that defines a forward, with the global names that the forward
    uses.
    """
    for owner in vars(module).values():
        if (
            inspect.isclass(owner)
            and owner.__module__ == module.__name__
            and "forward" in vars(owner)
        ):
            code = dis.get_instructions(inspect.unwrap(vars(owner)["forward"]))
            yield owner, {step.argval for step in code if step.opname == "LOAD_GLOBAL"}


def _pass_rows_to_model(
    forward: Callable[..., Any],
    check: Callable[[PreTrainedModel, RecurrentRows], None],
) -> Callable[..., Any]:
    """Wrap the forward of a model. The wrapper adds `RecurrentRows` to the keyword arguments, and
    checks that the mixers used these rows.
    """
    _, *names = inspect.signature(forward).parameters

    @wraps(forward)
    def forward_with_rows(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        planner = find_planner(self)
        if planner is None:
            return forward(self, *args, **kwargs)
        arguments = dict(zip(names, args, strict=False)) | kwargs
        rows = make_recurrent_rows(planner, self, arguments)
        if rows is None:
            return forward(self, **arguments)
        if rows.segments is not None:
            arguments["use_cache"] = False  # generation cannot continue from several documents
        output = forward(self, **arguments, **{MODEL_ROWS: rows})
        check(self, rows)
        return output

    return forward_with_rows


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _check_rows_used(
    mixers: tuple[type, ...],
    functions: tuple[str, ...],
    model: PreTrainedModel,
    rows: RecurrentRows,
) -> None:
    """If a model has not passed its rows to the functions of its mixers, warn about packed
    documents, and raise for cut documents.
    """
    if (
        rows.segments is None
        or _FUSED_FUNCTION in rows.used_functions
        or set(functions) - {_FUSED_FUNCTION} <= rows.used_functions
    ):
        return
    if any(isinstance(part, mixers) for part in model.modules()):
        model_type = model.config.model_type
        warn_of_packing(model_type)
        if not rows.segments.has_only_whole_documents:
            check_cut_documents(model_type, has_segments=False)


def _pass_rows_to_mixer(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a mixer, so that the functions that mix its tokens get the mixer."""

    @wraps(forward)
    def forward_with_mixer(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        rows = kwargs.get(MODEL_ROWS)
        if isinstance(rows, RecurrentRows) and rows.segments is not None:
            kwargs[MODEL_ROWS] = _MixerCall(rows, rows.segments, self)
        return forward(self, *args, **kwargs)

    return forward_with_mixer


def _run_along_segments(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Make a replacement for `original` that runs along segments if there are any."""

    # A compiler would write the segment lengths of one micro-batch into its graph as constants.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def run(call: _MixerCall, *args: Any, **kwargs: Any) -> Any:
        output = _REPLACEMENTS[name](original, call, *args, **kwargs)
        if output is not None:
            call.rows.used_functions.add(name)
        return output

    @wraps(original)
    def run_along_segments(*args: Any, **kwargs: Any) -> Any:
        call = kwargs.pop(MODEL_ROWS, None)
        if call is None:
            return original(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in _BOUNDARY_ARGUMENTS}
        return (
            run(call, *args, **kwargs)
            if isinstance(call, _MixerCall)
            else original(*args, **kwargs)
        )

    return run_along_segments


def _convolve(
    original: Callable[..., Any],
    call: _MixerCall,
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute a causal convolution of a tensor (batch, channels, length)."""
    if is_of_package(original) and call.segments.has_only_whole_documents:
        channels_last = hidden_states.transpose(1, 2).contiguous().transpose(1, 2)
        return original(
            channels_last, weight, *args, seq_idx=call.rows.make_seq_idx(weight.device), **kwargs
        )
    row_BCT = call.merge_rows(hidden_states.transpose(1, 2)).transpose(1, 2)
    stored = call.get_outputs("convolution", (row_BCT,))
    out = compute_causal_convolution(
        row_BCT,
        lambda x_BCT: original(x_BCT, weight, *args, **kwargs),
        weight.shape[-1],
        call.segments,
        stored,
    )
    return call.split_rows(out.transpose(1, 2)).transpose(1, 2)


def _compute_delta_rule(
    original: Callable[..., Any],
    call: _MixerCall,
    *states: torch.Tensor,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute a delta rule from query, key, value, decay and beta, each (batch, length, heads,
    ...). The final state is not computed.
    """
    _check_no_state(call, kwargs, "initial_state", "output_final_state")
    inputs = DeltaInputs(
        *map(
            call.merge_rows,
            (*states, *(kwargs.pop(name) for name in ("g", "beta")[len(states) - 3 :])),
        )
    )
    kernel = partial(original, **kwargs)
    rule = (
        partial(_run_package_rule, kernel, call.rows)
        if is_of_package(original)
        else run_by_document(kernel)
    )
    out = compute_gated_delta_rule(inputs, call.segments, rule, call.get_outputs("state", inputs))
    return call.split_rows(out), None


def _check_no_state(call: _MixerCall, kwargs: dict[str, Any], *names: str) -> None:
    """Remove the arguments for initial and final states. Raise if one of them asks for a state."""
    values = {name: kwargs.pop(name, None) for name in names}
    passed = [name for name, value in values.items() if value is not None and value is not False]
    if passed:
        raise UnsupportedError(
            f"{type(call.mixer).__name__} runs its rule with {passed[0]}, but this batch has packed"
            " or cut documents, for which distca neither takes nor returns a state. Give this model"
            " whole documents, one in each row."
        )


def _run_package_rule(
    kernel: Callable[..., Any],
    rows: RecurrentRows,
    inputs: DeltaInputs,
    lengths: Sequence[int],
    states: torch.Tensor | None,
    *,
    final_states: bool,
) -> RuleOutputs:
    """Run the delta rule of a package such as fla, which takes several documents in one call."""
    query, key, value, decay, beta = inputs
    return RuleOutputs(
        *kernel(
            *(query, key, value),
            g=decay,
            beta=beta,
            initial_state=states,
            output_final_state=final_states,
            cu_seqlens=rows.make_cu_seqlens(lengths, query.device),
        )
    )


def _compute_scan(
    original: Callable[..., Any],
    call: _MixerCall,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    *rates: torch.Tensor,
    **kwargs: Any,
) -> Any:
    """Compute the scan of Mamba 2. The final state is not computed.

    `rates` are A, B and C. A is (heads,). All other tensors are (batch, length, heads or groups,
    ...).
    """
    _check_no_state(call, kwargs, "initial_states", "return_final_states")
    if is_of_package(original) and call.segments.has_only_whole_documents:
        return original(
            hidden_states, dt, *rates, seq_idx=call.rows.make_seq_idx(dt.device), **kwargs
        )
    decay, *projections = rates
    x, steps, *projections = map(
        call.merge_rows, (hidden_states, _compute_steps(dt, kwargs), *projections)
    )
    inputs = ScanInputs(x, steps, decay, *projections)
    scan = scan_by_document(partial(original, **kwargs))
    return call.split_rows(
        compute_mamba2(inputs, call.segments, scan, call.get_outputs("state", inputs))
    )


def _compute_steps(dt: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    """Apply the bias, softplus and limits in `kwargs` to `dt`, and remove them from `kwargs`.
    Return the steps of a scan.
    """
    bias, softplus, limits = (
        kwargs.pop(name, None) for name in ("dt_bias", "dt_softplus", "dt_limit")
    )
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if softplus:
        dt = torch.nn.functional.softplus(dt)
    return dt if limits is None else dt.clamp(*limits)


def _compute_fused(
    original: Callable[..., Any],
    call: _MixerCall,
    zxbcdt: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Compute convolution, scan and output projection of Mamba 2 in one call if all documents are
    whole. Otherwise return None. The mixer then makes three calls, as it does without mamba-ssm.
    """
    if is_of_package(original) and call.segments.has_only_whole_documents:
        return original(zxbcdt, *args, seq_idx=call.rows.make_seq_idx(zxbcdt.device), **kwargs)
    return None


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _convolve,
    "torch_chunk_gated_delta_rule": _compute_delta_rule,
    "chunk_kimi_delta_attention": _compute_delta_rule,
    "mamba2_chunk_scan": _compute_scan,
    _FUSED_FUNCTION: _compute_fused,
}
