"""That the kernels around real varlen ops pass what these expect: imitations on the CPU with the ops' own argument lists."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dense_attention import CASES, SCORES, SHAPES, exact, random_pools, relative_error, run_kernel
from signatures import FLASH_ATTN_3, FLASH_ATTN_4
from strict_varlen_op import StrictVarlenOp

from hf_distca.kernels import Kernel, Scores, flash
from hf_distca.kernels.base import Operands, Saved
from hf_distca.kernels.flash import AtenFlash
from hf_distca.kernels.varlen import Sequences

OP = StrictVarlenOp()


def scores_of(scale: float, left: int, right: int, causal: bool, softcap: float = 0.0) -> Scores:
    """The flash-attention convention: keys [position - left, position + right], -1 for no limit, `causal` caps the right."""
    assert causal
    assert left >= -1
    assert right == (-1 if left == -1 else 0)
    return Scores(scale, None if left == -1 else left + 1, softcap or None)


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
    scores = scores_of(scale, left, right, is_causal)
    return *OP.attend(q, k, v, Sequences(cum_seq_q, cum_seq_k, max_q, max_k), scores), None, None, None


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
    scores = scores_of(scale, left, right, is_causal)
    return OP.differentiate(grad_out, q, k, v, out, logsumexp, Sequences(cum_seq_q, cum_seq_k, max_q, max_k), scores)


def package(version: tuple[int, int, int]) -> dict[str, Callable[..., Any]]:
    """The two functions of flash-attn in a version."""

    def shared(options: dict[str, Any]) -> tuple[Sequences, Scores]:
        sizes = (
            options.pop(f"{name}seqlen{s}")
            for name in ("cu_", "max_")
            for s in (("s_q", "s_k") if name == "cu_" else ("_q", "_k"))
        )
        sequences = Sequences(*sizes)
        assert options.pop("dropout_p") == 0
        assert options.pop("alibi_slopes") is None
        if version < (2, 7):
            left, right = options.pop("window_size")
        else:
            left, right = options.pop("window_size_left"), options.pop("window_size_right")
        scores = scores_of(options.pop("softmax_scale"), left, right, options.pop("causal"), options.pop("softcap"))
        assert not options
        return sequences, scores

    def forward(*, q: Any, k: Any, v: Any, return_softmax: bool, **options: Any) -> tuple[Any, ...]:
        o, lse = OP.attend(q, k, v, *shared(options))
        return (o, lse, None, None) if version >= (2, 7) else (o, q, k, v, o, lse, None, None)

    def backward(
        *,
        dout: Any,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        softmax_lse: Any,
        dq: Any,
        dk: Any,
        dv: Any,
        deterministic: bool,
        **options: Any,
    ) -> None:
        for dx, value in zip((dq, dk, dv), OP.differentiate(dout, q, k, v, out, softmax_lse, *shared(options)), strict=True):
            dx.copy_(value)

    return {"_flash_attn_varlen_forward": forward, "_flash_attn_varlen_backward": backward}


def sizes(options: dict[str, Any]) -> Sequences:
    return Sequences(*(options.pop(name) for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")))


class Interface3:
    """FlashAttention 3."""

    def _flash_attn_forward(self, **options: Any) -> tuple[Any, ...]:
        assert options.keys() <= set(FLASH_ATTN_3["_flash_attn_forward"])
        assert options.pop("num_splits") == 1
        return *OP.attend(*self._pools(options), sizes(options), self._scores(options, "causal")), None, None

    def _flash_attn_backward(self, **options: Any) -> None:
        assert options.keys() <= set(FLASH_ATTN_3["_flash_attn_backward"])
        assert options.pop("deterministic") is False
        do, *grads, o, lse = (options.pop(name) for name in ("dout", "dq", "dk", "dv", "out", "softmax_lse"))
        found = OP.differentiate(do, *self._pools(options), o, lse, sizes(options), self._scores(options, "is_causal"))
        for dx, value in zip(grads, found, strict=True):
            dx.copy_(value)

    @staticmethod
    def _pools(options: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(options.pop(name) for name in "qkv")

    @staticmethod
    def _scores(options: dict[str, Any], causal: str) -> Scores:
        left, right = options.pop("window_size_left"), options.pop("window_size_right")
        scores = scores_of(options.pop("softmax_scale"), left, right, options.pop(causal), options.pop("softcap"))
        assert not options
        return scores


class Interface4(Interface3):
    """FlashAttention 4: no limit is None, and the gradients are returned."""

    def _flash_attn_fwd(self, **options: Any) -> tuple[Any, ...]:
        assert options.keys() <= set(FLASH_ATTN_4["_flash_attn_fwd"])
        assert options.pop("return_lse") is True
        return *OP.attend(*self._pools(options), sizes(options), self._scores(self._limits(options), "causal")), None, None, None

    def _flash_attn_bwd(self, **options: Any) -> tuple[Any, ...]:
        assert options.keys() <= set(FLASH_ATTN_4["_flash_attn_bwd"])
        assert options.pop("deterministic") is False
        do, o, lse = (options.pop(name) for name in ("dout", "out", "lse"))
        return OP.differentiate(do, *self._pools(options), o, lse, sizes(options), self._scores(self._limits(options), "causal"))

    @staticmethod
    def _limits(options: dict[str, Any]) -> dict[str, Any]:
        for name in ("window_size_left", "window_size_right"):
            options[name] = -1 if options[name] is None else options[name]
        return options


@pytest.fixture(params=["cuda", "flash_attn 2.6.2", "flash_attn 2.8.3", "flash_attn_3", "flash_attn_4"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    name, _, numbers = request.param.partition(" ")
    version = tuple(map(int, numbers.split("."))) if numbers else None
    functions = SimpleNamespace(**package(version)) if version else None
    modules = {
        "flash_attn.flash_attn_interface": functions,
        "flash_attn_interface": Interface3(),
        "flash_attn.cute.interface": Interface4(),
    }
    monkeypatch.setattr(flash, "_module", modules.__getitem__)
    monkeypatch.setattr(flash, "_installed", lambda: version)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", aten_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", aten_backward)
    return {kernel.name: kernel for kernel in (flash.CUDA, flash.FLASH_ATTN, flash.FLASH_ATTN_3, flash.FLASH_ATTN_4)}[name]


@pytest.mark.parametrize("scores", SCORES)
def test_results(kernel: Kernel, scores: str) -> None:
    if kernel.name == "cuda" and SCORES[scores].softcap is not None:
        pytest.skip("the op has no softcap; test_select_kernel has the refusal")
    case = CASES["shared keys with gaps"]
    pools = random_pools(case, SHAPES["GQA"], torch.float64)
    expected = exact(pools, case.tasks, SCORES[scores])
    for name, value in run_kernel(kernel, pools, case.tasks, SCORES[scores]).items():
        assert relative_error(value, expected[name]) <= 1e-10, name


@pytest.mark.parametrize("window", [None, 5])
def test_the_installed_torch_takes_these_arguments(window: int | None) -> None:
    q, k = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in ((10, 4, 64), (20, 2, 64)))
    cu = torch.empty(2, dtype=torch.int32, device="meta")
    sequences, scores = Sequences(cu, cu, 10, 20), Scores(0.1, window)
    o, lse = AtenFlash().forward(Operands(q, k, k), sequences, scores)
    assert o.shape == q.shape
    assert lse.shape == (10, 4)
    dq, dk, dv = AtenFlash().backward(Saved(q, q, o, lse, k, k), sequences, scores)
    assert dq.shape == q.shape
    assert dk.shape == dv.shape == k.shape


def source_of(package: str) -> Path | None:
    """The file of the functions, where the package is installed: it is read, not imported."""
    if package == "flash_attn_3":
        spec = find_spec("flash_attn_interface")
        return None if spec is None or spec.origin is None else Path(spec.origin)
    try:
        path = Path(str(distribution("flash-attn-4").locate_file("flash_attn/cute/interface.py")))
    except PackageNotFoundError:
        return None
    return path if path.exists() else None


@pytest.mark.parametrize(("package", "known"), [("flash_attn_3", FLASH_ATTN_3), ("flash_attn_4", FLASH_ATTN_4)])
def test_installed_sources_have_the_arguments_that_were_read(package: str, known: dict[str, list[str]]) -> None:
    path = source_of(package)
    if path is None:
        pytest.skip(f"{package} is not installed: its arguments are those of signatures.py")
    found = {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }
    for name, arguments in known.items():
        assert found[name] == arguments, f"{name} of {path}"
