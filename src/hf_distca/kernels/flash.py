"""Flash attention for GPUs: the kernel inside torch's CUDA wheels, three optional packages, and one
kernel from the Hugging Face hub.

All of them compute sequences of different lengths in one call. Their functions are called directly,
without their autograd layer. Packages differ in modules, names of arguments and limits, so each
package has a `_Package`.

FlashAttention 3 and 4 are not called through torch's
`torch.nn.attention.activate_flash_attention_impl`. That function changes the kernel of the whole
process, including `sdpa` of other models, and does not support softcap. For FlashAttention 4 it
also expects two results from a forward that returns five (flash-attn-4 4.0.0b36, torch 2.11 and
2.13). FlashAttention 4 has run on an H100. FlashAttention 3 has not run yet. Its `_Package` follows
its sources (commit 01afd16, and commit 5f632e2 of kernels-community). `hf_distca.kernels.check`
checks each kernel on the device before its first use.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from packaging.version import Version

from hf_distca.borrowed import cuda_attention, cuda_attention_backward
from hf_distca.kernels.base import (
    BackwardInputs,
    Grads,
    KernelRequest,
    Operands,
    Outputs,
    ScoreOptions,
    find_capability,
    find_first_reason,
)
from hf_distca.kernels.varlen import Sequences, VarlenKernel

_MAX_HEAD_DIM = 256
_HALF_DTYPES = (torch.float16, torch.bfloat16)
# Older versions of flash-attn have other names and return values.
_MIN_FLASH_ATTN = (2, 7)
# Major compute capabilities for which FlashAttention 4 has a backward.
_FA4_CAPABILITIES = (9, 10, 11, 12)
# Least value of `max_seqlen_q` and `max_seqlen_k` for FlashAttention 4. It exceeds two blocks,
# which have up to 192 rows each.
_MIN_LONGEST = 512
_INTERFACE_3, INTERFACE_4 = "flash_attn_interface", "flash_attn.cute.interface"
# Name of the module `_INTERFACE_3` in wheels.
_INTERFACE_3_IN_PACKAGE = "flash_attn_3.flash_attn_interface"
# The package `kernels` downloads this repository from the Hugging Face hub.
_HUB_3 = "kernels-community/flash-attn3"


def flash_reason(case: KernelRequest) -> str | None:
    """Return why flash-attention 2, in torch or a package, cannot run a case; None if it can."""
    device = case.device
    width = max(case.head_dim, case.value_head_dim)
    capability = find_capability(device)
    is_nvidia = torch.version.hip is None
    seen = f"{device} has {capability[0]}.{capability[1]}"
    return find_first_reason(
        (device.type != "cuda", f"it runs on CUDA devices, the tensors are on {device.type!r}"),
        (
            case.dtype not in _HALF_DTYPES,
            f"it computes in bfloat16 and float16, not in {case.dtype}: run the model in half"
            " precision or under autocast",
        ),
        (
            width > _MAX_HEAD_DIM,
            f"head dimensions go up to {_MAX_HEAD_DIM}, got {case.head_dim} for queries and keys"
            f" and {case.value_head_dim} for values",
        ),
        (not torch.cuda.is_available(), "torch finds no CUDA device"),
        (
            is_nvidia and capability < (8, 0),
            f"it needs compute capability 8.0 (Ampere) or later, {seen}",
        ),
        (
            is_nvidia
            and 192 < width <= 224
            and capability != (8, 0)
            and capability[0] not in (9, 10),
            "its backward runs head dimensions of 193 to 224 on GPUs of compute capability 8.0, 9"
            f" and 10 only, {seen} and the head dimension is {width}",
        ),
    )


@cache
def _make_random_state(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make placeholders for the random state on a device.

    No kernel reads them, so no stream needs to wait for them.
    """
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(
        0, dtype=torch.uint64, device=device
    )


class AtenFlash:
    """`VarlenOp` over ``aten::_flash_attention_forward`` and ``aten::_flash_attention_backward``.

    Forward returns the output, the log-sum-exp, and a random state for dropout in backward.
    Releases differ in the number of tensors of this state. Without dropout, backward ignores the
    state, so backward gets placeholders of the right dtype, and forward does not save the state.
    """

    takes_gaps = torch.version.hip is None
    width_multiple = 8

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        """See `VarlenOp.forward`."""
        o_THD, lse_HT, *_ = cuda_attention(
            *pools,
            *sequences,
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=scores.scale,
            **self._make_window(scores),
        )
        return Outputs(o_THD, lse_HT.T)

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        """See `VarlenOp.backward`."""
        do_THD, q_THD, o_THD, lse_TH, k_TKD, v_TKD = pools
        return Grads(
            *cuda_attention_backward(
                do_THD,
                q_THD,
                k_TKD,
                v_TKD,
                o_THD,
                lse_TH.T.contiguous(),
                *sequences,
                0.0,
                True,
                *_make_random_state(q_THD.device),
                scale=scores.scale,
                **self._make_window(scores),
            )
        )

    def _make_window(self, scores: ScoreOptions) -> dict[str, int]:
        """Return the arguments for the window. The op counts the keys to the left of a row's own
        key. Without these arguments it hides no keys.
        """
        return (
            {}
            if scores.window is None
            else {"window_size_left": scores.window - 1, "window_size_right": 0}
        )


@dataclass(frozen=True)
class _Package:
    """Calling convention of a package's functions.

    Attributes:
        module: module of the functions.
        forward, backward: names of the functions.
        no_limit: window size that means an unlimited number of keys on a side.
        options: further arguments of both functions, in addition to lengths, scale, softcap and
            window.
        forward_options, backward_options: further arguments of one of the functions.
        lse: name of backward's argument for the log-sum-exp.
        in_place: whether backward writes the gradients to tensors that it gets as arguments, rather
            than returning them.
        least_longest: least value of ``max_seqlen_q`` and ``max_seqlen_k``. With a smaller value,
            FlashAttention 4 would compile extra kernels for sequences of one block. It uses the
            value only to bound its loops.
        width_multiple: see `VarlenOp`.
    """

    module: str
    forward: str
    backward: str
    no_limit: int | None = -1
    options: Mapping[str, Any] = field(default_factory=dict)
    forward_options: Mapping[str, Any] = field(default_factory=dict)
    backward_options: Mapping[str, Any] = field(default_factory=dict)
    lse: str = "softmax_lse"
    in_place: bool = True
    least_longest: int = 0
    width_multiple: int = 8


class _PackageFlash:
    """`VarlenOp` over the functions of a package."""

    takes_gaps = True

    def __init__(self, package: _Package) -> None:
        self._package, self.width_multiple = package, package.width_multiple

    def forward(self, pools: Operands, sequences: Sequences, scores: ScoreOptions) -> Outputs:
        """See `VarlenOp.forward`."""
        package = self._package
        tensors = dict(zip("qkv", pools, strict=True))
        function = getattr(_import_once(package.module), package.forward)
        o_THD, lse_HT, *_ = function(
            **tensors, **package.forward_options, **self._make_options(sequences, scores)
        )
        return Outputs(o_THD, lse_HT.T)

    def backward(self, pools: BackwardInputs, sequences: Sequences, scores: ScoreOptions) -> Grads:
        """See `VarlenOp.backward`."""
        package = self._package
        arguments = {
            **dict(zip(("dout", "q", "out", package.lse, "k", "v"), pools, strict=True)),
            package.lse: pools.lse_TH.T.contiguous(),
            **package.backward_options,
            **self._make_options(sequences, scores),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        }
        function = getattr(_import_once(package.module), package.backward)
        if not package.in_place:
            return Grads(*function(**arguments)[:3])
        grads = Grads(
            *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in pools.operands)
        )
        function(**arguments, **dict(zip(("dq", "dk", "dv"), grads, strict=True)))
        return grads

    def _make_options(self, sequences: Sequences, scores: ScoreOptions) -> dict[str, Any]:
        """Return the arguments that forward and backward share."""
        package, window = self._package, scores.window
        # Numbers of visible keys on each side of a row's own key.
        left, right = (package.no_limit,) * 2 if window is None else (window - 1, 0)
        return {
            **package.options,
            "cu_seqlens_q": sequences.cu_rows,
            "cu_seqlens_k": sequences.cu_keys,
            "max_seqlen_q": max(sequences.max_rows, package.least_longest),
            "max_seqlen_k": max(sequences.max_keys, package.least_longest),
            "softmax_scale": scores.scale,
            "softcap": scores.softcap or 0.0,
            "window_size_left": left,
            "window_size_right": right,
        }


_FLASH_ATTN = _Package(
    "flash_attn.flash_attn_interface",
    "_flash_attn_varlen_forward",
    "_flash_attn_varlen_backward",
    options={"dropout_p": 0.0, "causal": True, "alibi_slopes": None},
    forward_options={"return_softmax": False},
)
_FLASH_ATTN_3 = _Package(
    _INTERFACE_3,
    "_flash_attn_forward",
    "_flash_attn_backward",
    forward_options={"causal": True, "num_splits": 1},
    backward_options={"is_causal": True},
)
_FLASH_ATTN_4 = _Package(
    INTERFACE_4,
    "_flash_attn_fwd",
    "_flash_attn_bwd",
    no_limit=None,
    options={"causal": True},
    forward_options={"return_lse": True},
    lse="lse",
    in_place=False,
    least_longest=_MIN_LONGEST,
    # On Hopper, the backward kernel (4.0.0b36) counts widths in units of 16, but the code around
    # the kernel counts in units of 32. For heads of 16, 40 and 80, gradients of queries were wrong
    # by 67 to 85%.
    width_multiple=32,
)


@cache
def _import_once(name: str) -> Any:
    """Import a package's module, and return it or the exception.

    Call this only if the module is needed, because it loads CUDA libraries or a compiler.
    """
    # Keep compiled kernels on disk for later processes, unless the user has set the variable to 0.
    if name == INTERFACE_4:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # users can do nothing about warnings of compilers
            if name == _HUB_3:
                return import_module("kernels").get_kernel(name, version=1).flash_attn_interface
            return import_module(name)
    except Exception as error:
        if name == _INTERFACE_3 and not isinstance(
            other := _import_once(_INTERFACE_3_IN_PACKAGE), Exception
        ):
            return other
        return error


@cache
def _find_version() -> tuple[int, ...] | None:
    """Return the version of flash-attn as numbers; None if it is not installed."""
    try:
        return Version(version("flash-attn")).release
    except PackageNotFoundError:
        return None


def import_error(name: str = _INTERFACE_3) -> Exception | None:
    """Return the exception that importing a module raised; None if it can be imported."""
    module = _import_once(name)
    return module if isinstance(module, Exception) else None


def _aten_reason(case: KernelRequest) -> str | None:
    reason = flash_reason(case)
    if reason is None and case.scores.softcap is not None:
        return (
            "torch's flash attention has no softcap; the packages flash-attn and, on Hopper and"
            " Blackwell GPUs, flash-attn-4 have it"
        )
    if reason is None and not torch.backends.cuda.is_flash_attention_available():
        return "this build of torch comes without flash attention"
    return reason


def _flash_attn_reason(case: KernelRequest) -> str | None:
    installed = _find_version()
    if installed is None:
        return "the package flash-attn is not installed: pip install flash-attn"
    if installed < _MIN_FLASH_ATTN or installed[0] != _MIN_FLASH_ATTN[0]:
        return (
            f"flash-attn is installed in version {'.'.join(map(str, installed))}, but this kernel"
            " needs 2.7 or a later 2.x"
        )
    return flash_reason(case)


def _generation_reason(
    case: KernelRequest, module: str, package: str, capabilities: Sequence[int], gpus: str
) -> str | None:
    """Return why FlashAttention 3 or 4 cannot run a case; None if it can. `capabilities` are the
    major compute capabilities of the GPUs that the package supports.
    """
    if (reason := flash_reason(case)) is not None:
        return reason
    if (major := find_capability(case.device)[0]) not in capabilities:
        return f"{package} is for {gpus} GPUs, but {case.device} has compute capability {major}"
    if (error := import_error(module)) is not None:
        return f"{package} cannot be imported ({type(error).__name__}: {error})"
    return None


def _flash_attn_3_reason(case: KernelRequest, module: str = _INTERFACE_3) -> str | None:
    return _generation_reason(case, module, "FlashAttention 3", (9,), "Hopper")


def _flash_attn_4_reason(case: KernelRequest) -> str | None:
    width = max(case.head_dim, case.value_head_dim)
    if find_capability(case.device)[0] in _FA4_CAPABILITIES[1:] and 128 < width <= 248:
        return (
            f"on {case.device} FlashAttention 4 supports head dimensions up to 128 or of 256,"
            f" not {width}"
        )
    return _generation_reason(
        case, INTERFACE_4, "flash-attn-4", _FA4_CAPABILITIES, "Hopper and Blackwell"
    )


# All kernels below run bfloat16 and float16, on Ampere GPUs and later.

# This kernel is part of torch. It supports head dimensions up to 256, but no softcap.
CUDA = VarlenKernel(AtenFlash(), "cuda", _aten_reason)
# The kernel of the package flash-attn. It supports head dimensions up to 256.
FLASH_ATTN = VarlenKernel(_PackageFlash(_FLASH_ATTN), "flash_attn", _flash_attn_reason)
# FlashAttention 3 for Hopper GPUs, from wheels of the PyTorch index or built from the folder
# `hopper` of its sources. It has not run yet.
FLASH_ATTN_3 = VarlenKernel(_PackageFlash(_FLASH_ATTN_3), "flash_attn_3", _flash_attn_3_reason)
# FlashAttention 3 from the Hugging Face hub. It runs only if the user names it.
FLASH_ATTN_3_HUB = VarlenKernel(
    _PackageFlash(replace(_FLASH_ATTN_3, module=_HUB_3)),
    _HUB_3,
    partial(_flash_attn_3_reason, module=_HUB_3),
)
# The kernels of the package flash-attn-4, which compiles them (see `hf_distca.kernels.check`). They
# support Hopper GPUs with head dimensions up to 256, and Blackwell GPUs with head dimensions up to
# 128, or of exactly 256.
FLASH_ATTN_4 = VarlenKernel(_PackageFlash(_FLASH_ATTN_4), "flash_attn_4", _flash_attn_4_reason)
