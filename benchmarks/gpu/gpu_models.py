"""A Llama-architecture stack of layers, and attention functions to compare distca with."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaModel

import hf_distca
from gpu_setting import Setting, synchronize
from hf_distca.agreement.documents import PackedDocuments
from hf_distca.kernels import KernelRequest, ScoreOptions
from hf_distca.kernels.flash import FLASH_ATTN_4
from models import make_llama_config
from processes import order_modes

# transformers would treat a name with "flash" in it as its own, and look for a package.
PLAIN, PLAIN_4 = "plain_varlen", "plain_varlen_4"


class _PlainVarlen(torch.autograd.Function):
    """Packed causal attention by torch's flash attention, with no other code around it."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        cu: torch.Tensor,
        longest: int,
        scale: float,
    ) -> torch.Tensor:
        ends = (cu, cu, longest, longest)
        o_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
            q_THD,
            k_TKD,
            v_TKD,
            *ends,
            dropout_p=0.0,
            is_causal=True,
            return_debug_mask=False,
            scale=scale,
        )
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu)
        ctx.longest, ctx.scale = longest, scale
        return o_THD

    @staticmethod
    def backward(ctx: Any, do_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu = ctx.saved_tensors
        state = (
            torch.zeros(2, dtype=torch.uint64, device=cu.device),
            torch.empty(0, dtype=torch.uint64, device=cu.device),
        )
        ends = (cu, cu, ctx.longest, ctx.longest)
        grads = torch.ops.aten._flash_attention_backward(  # noqa: SLF001
            do_THD.contiguous(),
            q_THD,
            k_TKD,
            v_TKD,
            o_THD,
            lse_HT,
            *ends,
            0.0,
            True,
            *state,
            scale=ctx.scale,
        )
        return *grads, None, None, None


def _attend_by_document(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: torch.Tensor
) -> torch.Tensor:
    """Compute `sdpa` of each document separately, for the CPU."""
    rows = []
    for a, b in pairwise(cu.tolist()):
        q, k, v = (x[a:b].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


def _flatten_rows(*states_BHLD: torch.Tensor) -> list[torch.Tensor]:
    """Return rows in the dtype of autocast; rotary embeddings leave q and k in float32."""
    device = states_BHLD[0].device.type
    dtype = (
        torch.get_autocast_dtype(device)
        if torch.is_autocast_enabled(device)
        else states_BHLD[-1].dtype
    )
    return [x.transpose(1, 2).flatten(0, 1).to(dtype) for x in states_BHLD]


def _wrap_varlen(
    attend: Callable[..., torch.Tensor],
) -> Callable[..., tuple[torch.Tensor, None]]:
    """Wrap a varlen call as an attention function of transformers for a packed row."""

    def attention(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        scaling: float,
        cu_seq_lens_q: torch.Tensor,
        max_length_q: int,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        o_THD = attend(*_flatten_rows(query, key, value), cu_seq_lens_q, max_length_q, scaling)
        return o_THD.unflatten(0, (query.shape[0], -1)), None

    return attention


@_wrap_varlen
def plain_varlen(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """Call torch's own varlen attention."""
    if q_THD.device.type != "cuda":
        return _attend_by_document(q_THD, k_TKD, v_TKD, cu)
    o_THD: torch.Tensor = _PlainVarlen.apply(q_THD, k_TKD, v_TKD, cu, longest, scale)
    return o_THD


@_wrap_varlen
def plain_flash_attention_4(
    q_THD: torch.Tensor,
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    cu: torch.Tensor,
    longest: int,
    scale: float,
) -> torch.Tensor:
    """Call the autograd function of FlashAttention 4."""
    from flash_attn.cute.interface import flash_attn_varlen_func

    ends = {
        "cu_seqlens_q": cu,
        "cu_seqlens_k": cu,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
    }
    found = flash_attn_varlen_func(q_THD, k_TKD, v_TKD, **ends, softmax_scale=scale, causal=True)
    o_THD: torch.Tensor = found[0] if isinstance(found, tuple) else found
    return o_THD


def _no_mask(**_: Any) -> None:
    return None


for _name, _function in ((PLAIN, plain_varlen), (PLAIN_4, plain_flash_attention_4)):
    AttentionInterface.register(_name, _function)
    AttentionMaskInterface.register(_name, _no_mask)


class Pair(NamedTuple):
    """A kernel of distca, and plain varlen attention by the same kernel."""

    kernel: str
    plain: str

    def use(self) -> None:
        """Set distca to this kernel."""
        hf_distca.configure(hf_distca.DistCAConfig(kernel=self.kernel))  # type: ignore[arg-type]


def list_pairs(setting: Setting) -> list[Pair]:
    """List the device's kernels for which plain attention exists."""
    if setting.device.type != "cuda":
        return [Pair("auto", PLAIN)]
    case = KernelRequest(setting.device, setting.dtype, 128, 128, ScoreOptions(1.0))
    fourth = [] if FLASH_ATTN_4.unsupported_reason(case) else [Pair("flash_attn_4", PLAIN_4)]
    return [*fourth, Pair("cuda", PLAIN)]


def make_stack(setting: Setting, layers: int, *, small: bool = False) -> LlamaModel:
    """Make layers of Llama-8B's shape, or smaller ones without a GPU, in training mode.

    Weights have the training dtype of the device; with `small` they are float32.
    """
    little = (128, 4, 2, 256)
    sizes = setting.size(quick=little, cpu=(256, 4, 2, 704), gpu=(4096, 32, 8, 14336))
    hidden, heads, key_heads, wide = little if small else sizes
    torch.manual_seed(0)
    options = {"use_cache": False, "attn_implementation": PLAIN}
    config = make_llama_config((hidden, wide, layers), (heads, key_heads), 64, **options)
    with torch.device(setting.device):
        return LlamaModel(config).to(torch.float32 if small else setting.dtype).train()


class Packed:
    """One row of packed documents as embeddings, and the bounds for each attention function."""

    def __init__(
        self, setting: Setting, model: LlamaModel, lengths: list[int], *, embedded: bool = True
    ) -> None:
        self.lengths, self.model, tokens = lengths, model, sum(lengths)
        if embedded:
            made = {"device": setting.device, "dtype": next(model.parameters()).dtype}
            self.embeddings = torch.randn(1, tokens, model.config.hidden_size, **made)
            self.gradient = torch.randn(1, tokens, model.config.hidden_size, **made) / tokens
        positions = [position for length in lengths for position in range(length)]
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=setting.device)
        self.positions = torch.tensor([positions], device=setting.device)
        self.flash = {
            "cu_seq_lens_q": cu,
            "cu_seq_lens_k": cu,
            "max_length_q": max(lengths),
            "max_length_k": max(lengths),
        }

    def arguments(self, implementation: str) -> dict[str, Any]:
        documents = {"distca_documents": PackedDocuments(tuple(self.lengths))}
        told = (
            documents
            if implementation.startswith("distca")
            else {}
            if implementation == "sdpa"
            else self.flash
        )
        return {"inputs_embeds": self.embeddings, "position_ids": self.positions, **told}

    def use(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)

    def forward(self, implementation: str) -> torch.Tensor:
        return self.model(**self.arguments(implementation)).last_hidden_state

    def step(self, implementation: str) -> torch.Tensor:
        """Run forward and backward, leave gradients in the parameters, and return the output."""
        out = self.forward(implementation)
        out.backward(self.gradient)
        return out.detach()


def time_steps(
    setting: Setting, packed: Packed, names: list[str], rounds: int
) -> dict[str, list[float]]:
    """Time steps of the implementations in turns, after one uncounted step each; return seconds."""
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds + 1):
        for name in order_modes(names, round_):
            packed.use(name)
            synchronize(setting.device)
            started = time.perf_counter()
            packed.step(name)
            synchronize(setting.device)
            if round_:
                seconds[name].append(time.perf_counter() - started)
            packed.model.zero_grad(set_to_none=True)
    return seconds


def make_documents(tokens: int) -> list[int]:
    """Return documents of very unequal lengths with `tokens` in all: a half, a quarter and so on,
    and many short ones.
    """
    lengths, left = [], tokens
    while left > max(tokens // 16, 64):
        lengths.append(left // 2)
        left -= left // 2
    short = max(tokens // 128, 16)
    return lengths + [short] * (left // short) + ([left % short] if left % short else [])
