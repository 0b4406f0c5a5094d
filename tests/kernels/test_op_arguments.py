"""Kernels pass the arguments that varlen ops expect: CPU imitations have the ops' arguments."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_attention import CASES, SCORES, SHAPES, check_exact, draw_pools
from signatures import FLASH_ATTN_3, FLASH_ATTN_4
from strict_varlen_op import StrictVarlenOp

from hf_distca.kernels import Kernel, ScoreOptions, efficient, flash
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.flash import AtenFlash
from hf_distca.kernels.varlen import Sequences

OP = StrictVarlenOp(takes_gaps=True)
KERNELS = (
    flash.CUDA,
    efficient.EFFICIENT,
    flash.FLASH_ATTN,
    flash.FLASH_ATTN_3,
    flash.FLASH_ATTN_3_HUB,
    flash.FLASH_ATTN_4,
)
BACKWARD = torch.ops.aten._efficient_attention_backward


def read_scores(
    scale: float, left: int, right: int, causal: bool, softcap: float = 0.0
) -> ScoreOptions:
    """Read flash attention's options: keys [position - left, position + right], -1 for no limit."""
    assert causal
    assert left >= -1
    assert right == (-1 if left == -1 else 0)
    return ScoreOptions(scale, None if left == -1 else left + 1, softcap or None)


def attend(
    op: StrictVarlenOp, pools: Sequence[Any], sequences: Sequences, scores: ScoreOptions
) -> tuple[Any, Any]:
    """Return outputs and log-sum-exps, (heads, rows) as in the real functions."""
    o, lse_TH = op.forward(Operands(*pools), sequences, scores)
    return o, lse_TH.T.contiguous()


def differentiate(
    op: StrictVarlenOp,
    results: Sequence[Any],
    pools: Sequence[Any],
    sequences: Sequences,
    scores: ScoreOptions,
) -> tuple[Any, ...]:
    """Compute gradients from the results of `attend` and the gradient of the outputs."""
    (do, o, lse_HT), (q, k, v) = results, pools
    assert lse_HT.is_contiguous()
    return op.backward(BackwardInputs(do, q, o, lse_HT.T, k, v), sequences, scores)


def aten_forward(
    q: Any,
    k: Any,
    v: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:
    assert dropout_p == 0
    assert not return_debug_mask
    left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
    scores = read_scores(scale, left, right, is_causal)
    sequences = Sequences(cum_seq_q, cum_seq_k, max_q, max_k)
    return *attend(OP, (q, k, v), sequences, scores), None, None, None


def aten_backward(
    grad_out: Any,
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    logsumexp: Any,
    cum_seq_q: Any,
    cum_seq_k: Any,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Any,
    unused: Any,
    *,
    scale: float,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Any, ...]:
    assert dropout_p == 0
    assert rng_state.dtype == unused.dtype == torch.uint64
    left, right = (-1 if x is None else x for x in (window_size_left, window_size_right))
    scores = read_scores(scale, left, right, is_causal)
    sequences = Sequences(cum_seq_q, cum_seq_k, max_q, max_k)
    return differentiate(OP, (grad_out, out, logsumexp), (q, k, v), sequences, scores)


class Efficient:
    """Memory-efficient attention with the arguments, strides and padding of torch's op.

    Masks of windows in backward of torch 2.11 and 2.13 (`kernel_backward.h` in a wheel) ignore that
    a sequence has more keys than rows. On a GPU, gradients of slices were 30 to 68 % off.
    """

    def __init__(self) -> None:
        self.op = StrictVarlenOp(window_from_first_key=True)
        self.padding: list[int] = []  # unused rows of log-sum-exps per sequence

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        bias: None,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        custom_mask_type: int,
        compute_log_sumexp: bool = False,
        *,
        scale: float | None = None,
        seqlen_k: None = None,
        window_size: int | None = None,
    ) -> tuple[Any, ...]:
        assert compute_log_sumexp
        assert (bias, dropout_p, custom_mask_type) == (None, 0, 2)
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        pools = self._checked(query, key, value)
        o, lse_HT = attend(self.op, pools, sequences, ScoreOptions(scale, window_size))
        longest = -(-max_seqlen_q // 32) * 32
        # The op writes some of the padding.
        lse = lse_HT.new_full((len(cu_seqlens_q) - 1, len(lse_HT), longest), float("nan"))
        for number, (first, last) in enumerate(pairwise(cu_seqlens_q.tolist())):
            lse[number, :, : last - first] = lse_HT[:, first:last]
            lse[number, :, last - first : -(-(last - first) // 32) * 32] = float("inf")
        return o[None], lse, None, None, max_seqlen_q, max_seqlen_k

    def backward(
        self,
        grad_out_: Any,
        query: Any,
        key: Any,
        value: Any,
        bias: None,
        out: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        logsumexp: Any,
        dropout_p: float,
        philox_seed: Any,
        philox_offset: Any,
        custom_mask_type: int,
        bias_requires_grad: bool,
        *,
        scale: float | None = None,
        num_splits_key: None = None,
        window_size: int | None = None,
        shared_storage_dqdkdv: bool = False,
    ) -> tuple[Any, ...]:
        assert (bias, dropout_p, custom_mask_type, bias_requires_grad) == (None, 0, 2, False)
        assert philox_seed.dtype == philox_offset.dtype == torch.int64
        assert out.is_contiguous()
        assert logsumexp.is_contiguous()
        assert logsumexp.shape == (
            len(cu_seqlens_q) - 1,
            query.shape[2],
            -(-max_seqlen_q // 32) * 32,
        )
        lengths = cu_seqlens_q.diff().tolist()
        assert all(
            bool((one[:, rows:] == float("inf")).all())
            for one, rows in zip(logsumexp, lengths, strict=True)
        )
        self.padding += [logsumexp.shape[2] - rows for rows in lengths]
        lse = torch.cat([one[:, :rows] for one, rows in zip(logsumexp, lengths, strict=True)], 1)
        sequences = Sequences(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        pools = self._checked(query, key, value)
        scores = ScoreOptions(scale, window_size)
        grads = differentiate(self.op, (grad_out_[0], out[0], lse), pools, sequences, scores)
        return *(grad[None] for grad in grads), None

    @staticmethod
    def _checked(query: Any, key: Any, value: Any) -> list[Any]:
        assert query.shape[2] == key.shape[2] == value.shape[2], "no grouped heads"
        for x in (query, key, value):
            assert x.dim() == 4
            assert len(x) == 1
            assert not any(n % 8 for n in (x.storage_offset(), *x.stride()[:3])), "not aligned"
        return [query[0], key[0], value[0]]


EFFICIENT_OP = Efficient()


class Interface:
    """Common part of the imitated flash-attention packages."""

    longest = 0  # smallest bound of rows and keys that a call may state

    def attend(self, options: dict[str, Any]) -> tuple[Any, Any]:
        return attend(OP, self._pools(options), *self._rest(options))

    def differentiate(self, options: dict[str, Any], lse: str = "softmax_lse") -> tuple[Any, ...]:
        results = [options.pop(name) for name in ("dout", "out", lse)]
        return differentiate(OP, results, self._pools(options), *self._rest(options))

    def write_grads(self, options: dict[str, Any]) -> None:
        grads = [options.pop(name) for name in ("dq", "dk", "dv")]
        for dx, value in zip(grads, self.differentiate(options), strict=True):
            dx.copy_(value)

    @staticmethod
    def _pools(options: dict[str, Any]) -> list[Any]:
        return [options.pop(name) for name in "qkv"]

    def _rest(self, options: dict[str, Any]) -> tuple[Sequences, ScoreOptions]:
        """Read lengths and scores, and assert that no option is left."""
        rows, keys, *said = (
            options.pop(name)
            for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        )
        longest = [int(cu.diff().max()) for cu in (rows, keys)]
        assert said == [max(length, self.longest) for length in longest]
        left, right = (options.pop(f"window_size_{side}") for side in ("left", "right"))
        scores = read_scores(
            options.pop("softmax_scale"), left, right, options.pop("causal"), options.pop("softcap")
        )
        assert not options
        return Sequences(rows, keys, *longest), scores


class Interface2(Interface):
    """flash-attn."""

    def _flash_attn_varlen_forward(self, **options: Any) -> tuple[Any, ...]:
        self._check(options)
        assert options.pop("return_softmax") is False
        return *self.attend(options), None, None

    def _flash_attn_varlen_backward(self, **options: Any) -> None:
        self._check(options)
        assert options.pop("deterministic") is False
        self.write_grads(options)

    @staticmethod
    def _check(options: dict[str, Any]) -> None:
        assert options.pop("dropout_p") == 0
        assert options.pop("alibi_slopes") is None


class Interface3(Interface):
    """FlashAttention 3."""

    def _flash_attn_forward(self, **options: Any) -> tuple[Any, ...]:
        assert options.keys() <= set(FLASH_ATTN_3["_flash_attn_forward"])
        assert options.pop("num_splits") == 1
        return *self.attend(options), None, None

    def _flash_attn_backward(self, **options: Any) -> None:
        assert options.keys() <= set(FLASH_ATTN_3["_flash_attn_backward"])
        assert options.pop("deterministic") is False
        options["causal"] = options.pop("is_causal")
        self.write_grads(options)


class Interface4(Interface):
    """FlashAttention 4: None means no limit, and gradients are returned."""

    longest = 512

    def _flash_attn_fwd(self, **options: Any) -> tuple[Any, ...]:
        assert options.keys() <= set(FLASH_ATTN_4["_flash_attn_fwd"])
        assert options.pop("return_lse") is True
        return *self.attend(self._limits(options)), None, None, None

    def _flash_attn_bwd(self, **options: Any) -> tuple[Any, ...]:
        """On Hopper, the main kernel counts widths in units of 16, the kernels around it in units
        of 32: on an H200, query gradients were 67 to 85 % off for heads of 16, 40 and 80.
        """
        assert options.keys() <= set(FLASH_ATTN_4["_flash_attn_bwd"])
        assert {options[name].shape[2] % 32 for name in "qkv"} == {0}
        assert options.pop("deterministic") is False
        return self.differentiate(self._limits(options), lse="lse")

    @staticmethod
    def _limits(options: dict[str, Any]) -> dict[str, Any]:
        for name in ("window_size_left", "window_size_right"):
            options[name] = -1 if options[name] is None else options[name]
        return options


@pytest.fixture(params=KERNELS, ids=lambda kernel: kernel.name)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    modules = {
        "flash_attn.flash_attn_interface": Interface2(),
        "flash_attn_interface": Interface3(),
        "kernels-community/flash-attn3": Interface3(),
        "flash_attn.cute.interface": Interface4(),
    }
    monkeypatch.setattr(flash, "_import_once", modules.__getitem__)
    monkeypatch.setattr(flash, "cuda_attention", aten_forward)
    monkeypatch.setattr(flash, "cuda_attention_backward", aten_backward)
    monkeypatch.setattr(efficient, "efficient_attention", EFFICIENT_OP.forward)
    monkeypatch.setattr(efficient, "efficient_attention_backward", EFFICIENT_OP.backward)
    kernel: Kernel = request.param
    return kernel


@pytest.mark.parametrize("scores", SCORES)
def test_kernels_of_imitated_ops_are_exact(kernel: Kernel, scores: str) -> None:
    if kernel.name in ("cuda", "efficient") and SCORES[scores].softcap is not None:
        pytest.skip("the op has no softcap; test_select_kernel has the refusal")
    check_results(kernel, "GQA", SCORES[scores])


@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_of_imitated_ops_are_exact_for_every_shape(kernel: Kernel, shape: str) -> None:
    check_results(kernel, shape, SCORES["plain"])


def check_results(kernel: Kernel, shape: str, scores: ScoreOptions) -> None:
    case = CASES["shared keys with gaps"]
    check_exact(kernel, draw_pools(case, SHAPES[shape], torch.float64), case.tasks, scores)


PADDED_SHAPES = ["GQA", "MQA", "odd head dim", "wide heads"]
PADDED_CASES = [
    "shared keys with gaps",
    "whole documents",
    "more rows than a kernel tile",
    "no tasks",
]


# Fast tests run every shape and every case once.
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        pytest.param(name, shape, marks=[pytest.mark.slow] * (number != other))
        for number, name in enumerate(PADDED_CASES)
        for other, shape in enumerate(PADDED_SHAPES)
    ],
)
def test_memory_efficient_attention_gets_padded_log_sum_exps(
    monkeypatch: pytest.MonkeyPatch, name: str, shape: str
) -> None:
    monkeypatch.setattr(efficient, "efficient_attention", EFFICIENT_OP.forward)
    monkeypatch.setattr(efficient, "efficient_attention_backward", EFFICIENT_OP.backward)
    EFFICIENT_OP.padding.clear()
    case = CASES[name]
    pools = draw_pools(case, SHAPES[shape], torch.float64)
    # Rows that are not aligned.
    strided = {key: torch.nn.functional.pad(x, (0, 3))[..., :-3] for key, x in pools.items()}
    for scores in (SCORES["plain"], SCORES["window of 17"]):
        for given in (pools, strided):
            check_exact(efficient.EFFICIENT, given, replace(case.tasks), scores)
        # Padding is less than half of the longest task, plus what rounding up to 32 adds.
        if scores.window is None:
            assert all(
                rows < 31 + max(case.tasks.query_length) / 2 for rows in EFFICIENT_OP.padding
            )


@pytest.mark.parametrize(
    "imitation", [Efficient.forward, Efficient.backward], ids=["forward", "backward"]
)
def test_efficient_imitation_takes_the_arguments_of_torch(imitation: Any) -> None:
    op = torch.ops.aten._efficient_attention_forward if imitation is Efficient.forward else BACKWARD
    arguments = [argument.name for argument in op.default._schema.arguments]
    assert list(inspect.signature(imitation).parameters)[1:] == arguments


@pytest.mark.parametrize("window", [None, 5])
def test_the_installed_torch_takes_the_arguments_of_the_cuda_kernel(window: int | None) -> None:
    q, k = (
        torch.empty(size, dtype=torch.bfloat16, device="meta")
        for size in ((10, 4, 64), (20, 2, 64))
    )
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    sequences, scores = Sequences(cu, cu, 10, 20), ScoreOptions(0.1, window)
    o, lse = AtenFlash().forward(Operands(q, k, k), sequences, scores)
    assert o.shape == q.shape
    assert lse.shape == (10, 4)
    dq, dk, dv = AtenFlash().backward(BackwardInputs(q, q, o, lse, k, k), sequences, scores)
    assert dq.shape == q.shape
    assert dk.shape == dv.shape == k.shape


def find_source(package: str) -> Path | None:
    """Find the file of an installed package's functions, which is read, not imported."""
    if package == "flash_attn_3":
        spec = find_spec("flash_attn_interface")
        return None if spec is None or spec.origin is None else Path(spec.origin)
    try:
        path = Path(str(distribution("flash-attn-4").locate_file("flash_attn/cute/interface.py")))
    except PackageNotFoundError:
        return None
    return path if path.exists() else None


@pytest.mark.parametrize(
    ("package", "known"), [("flash_attn_3", FLASH_ATTN_3), ("flash_attn_4", FLASH_ATTN_4)]
)
def test_installed_packages_have_the_arguments_in_signatures(
    package: str, known: dict[str, list[str]]
) -> None:
    path = find_source(package)
    if path is None:
        pytest.skip(f"{package} is not installed: its arguments are those of signatures.py")
    found = {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for name, arguments in known.items():
        assert found[name] == arguments, f"{name} of {path}"
