"""A Llama-architecture stack of layers, and attention functions to compare distca with."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaModel

from gpu_setting import Setting
from hf_distca.agreement.documents import PackedDocuments

PLAIN = "plain_varlen"


class _PlainVarlen(torch.autograd.Function):
    """Packed causal attention by torch's flash attention, with nothing around it."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: torch.Tensor, longest: int, scale: float
    ) -> torch.Tensor:
        ends = (cu, cu, longest, longest)
        o_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(  # noqa: SLF001
            q_THD, k_TKD, v_TKD, *ends, dropout_p=0.0, is_causal=True, return_debug_mask=False, scale=scale
        )
        ctx.save_for_backward(q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu)
        ctx.longest, ctx.scale = longest, scale
        return o_THD

    @staticmethod
    def backward(ctx: Any, do_THD: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q_THD, k_TKD, v_TKD, o_THD, lse_HT, cu = ctx.saved_tensors
        state = torch.zeros(2, dtype=torch.uint64, device=cu.device), torch.empty(0, dtype=torch.uint64, device=cu.device)
        ends = (cu, cu, ctx.longest, ctx.longest)
        grads = torch.ops.aten._flash_attention_backward(  # noqa: SLF001
            do_THD.contiguous(), q_THD, k_TKD, v_TKD, o_THD, lse_HT, *ends, 0.0, True, *state, scale=ctx.scale
        )
        return *grads, None, None, None


def _by_document(q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, cu: torch.Tensor) -> torch.Tensor:
    """On the CPU: `sdpa` of each document by itself."""
    rows = []
    for a, b in pairwise(cu.tolist()):
        q, k, v = (x[a:b].transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


def plain_varlen(
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
    """An attention function of transformers, as flash attention's is: one varlen call for a packed row."""
    q_THD, k_TKD, v_TKD = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    if query.device.type == "cuda":
        o_THD = _PlainVarlen.apply(q_THD, k_TKD, v_TKD, cu_seq_lens_q, max_length_q, scaling)
    else:
        o_THD = _by_document(q_THD, k_TKD, v_TKD, cu_seq_lens_q)
    return o_THD.unflatten(0, (query.shape[0], -1)), None


def _no_mask(**_: Any) -> None:
    return None


AttentionInterface.register(PLAIN, plain_varlen)
AttentionMaskInterface.register(PLAIN, _no_mask)


def stack(setting: Setting, layers: int, *, small: bool = False) -> LlamaModel:
    """Layers of Llama-8B's shape, or smaller ones where there is no GPU, in training mode, without a head.

    In the dtype that a model trains in there; those that are asked to be small are in float32.
    """
    little = (128, 4, 2, 256)
    sizes = setting.size(quick=little, cpu=(256, 4, 2, 704), gpu=(4096, 32, 8, 14336))
    hidden, heads, key_heads, wide = little if small else sizes
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=hidden // heads,
        vocab_size=64,
        max_position_embeddings=2**17,
        use_cache=False,
        attn_implementation=PLAIN,
    )
    with torch.device(setting.device):
        return LlamaModel(config).to(torch.float32 if small else setting.dtype).train()


class Packed:
    """One row of packed documents as embeddings, with what each attention function reads documents from."""

    def __init__(self, setting: Setting, model: LlamaModel, lengths: list[int]) -> None:
        self.lengths, self.model, tokens = lengths, model, sum(lengths)
        made = {"device": setting.device, "dtype": next(model.parameters()).dtype}
        self.embeddings = torch.randn(1, tokens, model.config.hidden_size, **made)
        self.gradient = torch.randn(1, tokens, model.config.hidden_size, **made) / tokens
        positions = [position for length in lengths for position in range(length)]
        cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=setting.device)
        self.positions = torch.tensor([positions], device=setting.device)
        self.flash = {"cu_seq_lens_q": cu, "cu_seq_lens_k": cu, "max_length_q": max(lengths), "max_length_k": max(lengths)}

    def arguments(self, implementation: str) -> dict[str, Any]:
        documents = {"distca_documents": PackedDocuments(tuple(self.lengths))}
        told = documents if implementation.startswith("distca") else self.flash if implementation != "sdpa" else {}
        return {"inputs_embeds": self.embeddings, "position_ids": self.positions, **told}

    def use(self, implementation: str) -> None:
        self.model.set_attn_implementation(implementation)

    def forward(self, implementation: str) -> torch.Tensor:
        return self.model(**self.arguments(implementation)).last_hidden_state

    def step(self, implementation: str) -> torch.Tensor:
        """Forward and backward; gradients are left in the parameters. Returns the output."""
        out = self.forward(implementation)
        out.backward(self.gradient)
        return out.detach()


def documents_of(tokens: int) -> list[int]:
    """Documents of very unequal lengths, `tokens` together: a half, a quarter and so on, and many short ones."""
    lengths, left = [], tokens
    while left > max(tokens // 16, 64):
        lengths.append(left // 2)
        left -= left // 2
    short = max(tokens // 128, 16)
    return lengths + [short] * (left // short) + ([left % short] if left % short else [])


def timed(function: Callable[..., Any], clock: Callable[[], float], taken: list[float]) -> Callable[..., Any]:
    """The attention function, which adds the host's seconds in each call to a list."""

    def call(*args: Any, **kwargs: Any) -> Any:
        started = clock()
        result = function(*args, **kwargs)
        taken.append(clock() - started)
        return result

    return call
