"""Attention of blocks that see themselves, and of prompts that answers share, as sums of causal
documents: seconds of one layer's attention, forward and backward.

A block (an image of Gemma 3) sees all of its own tokens and what came before. That is the causal
document and, read backwards, the causal document of the block's rows t[m-2]..t[0] on its keys
t[m-1]..t[1]: the strict upper triangle. The two are merged by their log-sum-exp; backward of both
takes the merged output and log-sum-exp, and gradients add. Answers that share a prompt have its
keys before their own, and its rows are computed once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gpu_setting import Setting, free, seconds_of
from gpu_workloads import Batch, Variant, batch_of, variants
from hf_distca.kernels import Kernel, ScoreOptions
from hf_distca.kernels.base import BackwardInputs, Operands
from hf_distca.kernels.flash import CUDA, FLASH_ATTN_4

# Gemma 3 4B (its config.json): query heads, key heads, width; 256 tokens an image.
HEADS, KEY_HEADS, WIDTH, IMAGE, IMAGES = 8, 4, 256, 256, 8
ANSWERS = 8
BOUND = 2e-2  # of bfloat16 gradients of two right computations, relative to their norm

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Computed = tuple[torch.Tensor, ...]


class Blocks:
    """One causal document whose blocks see all of themselves."""

    def __init__(self, tokens: int, starts: list[int], size: int, device: torch.device) -> None:
        self.document = batch_of([(tokens, tokens)])
        self.triangles = batch_of([(size - 1, size - 1)] * len(starts))
        back = torch.arange(size - 1, 0, -1)
        self.keys = torch.cat([start + back for start in starts]).to(device)
        self.queries = self.keys - 1

    def forward(
        self, kernel: Kernel, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The merged output, and its log-sum-exp of shape (T, H)."""
        scores = ScoreOptions(q_THD.shape[-1] ** -0.5)
        o_THV, lse_TH = kernel.forward(Operands(q_THD, k_TKD, v_TKV), self.document.tasks, scores)
        upper = Operands(q_THD[self.queries], k_TKD[self.keys], v_TKV[self.keys])
        more_THV, more_TH = kernel.forward(upper, self.triangles.tasks, scores)
        own = lse_TH[self.queries]
        both = torch.logaddexp(own, more_TH)
        merged = o_THV[self.queries] * (own - both).exp()[..., None]
        merged += more_THV * (more_TH - both).exp()[..., None]
        o_THV[self.queries] = merged.to(o_THV.dtype)
        lse_TH[self.queries] = both
        return o_THV, lse_TH

    def backward(
        self, kernel: Kernel, do_THV: torch.Tensor, inputs: Inputs, found: Any
    ) -> Computed:
        q_THD, k_TKD, v_TKV = inputs
        scores = ScoreOptions(q_THD.shape[-1] ** -0.5)
        saved = BackwardInputs(do_THV, q_THD, *found, k_TKD, v_TKV)
        dq, dk, dv = kernel.backward(saved, self.document.tasks, scores)
        rows = (x[self.queries] for x in (do_THV, q_THD, *found))
        upper = BackwardInputs(*rows, k_TKD[self.keys], v_TKV[self.keys])
        more = kernel.backward(upper, self.triangles.tasks, scores)
        for grad, index, extra in zip(
            (dq, dk, dv), (self.queries, self.keys, self.keys), more, strict=True
        ):
            grad.index_add_(0, index, extra.to(grad.dtype))
        return dq, dk, dv


def draw_inputs(setting: Setting, rows: int, keys: int) -> tuple[Inputs, torch.Tensor]:
    made = {"dtype": setting.dtype, "device": setting.device}
    q_THD, do_THV = (torch.randn(rows, HEADS, WIDTH, **made) for _ in range(2))
    k_TKD, v_TKV = (torch.randn(keys, KEY_HEADS, WIDTH, **made) for _ in range(2))
    return (q_THD, k_TKD, v_TKV), do_THV


def time_batch(
    setting: Setting, kernel: Kernel, batch: Batch, inputs: Inputs, do_THV: torch.Tensor
) -> dict[str, float]:
    """Seconds of plain causal tasks."""
    scores = ScoreOptions(WIDTH**-0.5)
    found = kernel.forward(Operands(*inputs), batch.tasks, scores)
    saved = BackwardInputs(do_THV, inputs[0], *found, *inputs[1:])
    return time_both(
        setting,
        lambda: kernel.forward(Operands(*inputs), batch.tasks, scores),
        lambda: kernel.backward(saved, batch.tasks, scores),
    )


def time_both(
    setting: Setting, forward: Callable[[], object], backward: Callable[[], object]
) -> dict[str, float]:
    return {
        "forward": seconds_of(forward, setting.device),
        "backward": seconds_of(backward, setting.device),
    }


def run_dense(
    inputs: Inputs, do_THV: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor, Callable[[], object], Callable[[], Computed]]:
    """Sdpa with its dense mask: the output, a forward to time, and its backward."""
    leaves = [x.transpose(0, 1)[None].detach().requires_grad_() for x in inputs]
    grouped = HEADS // KEY_HEADS

    def forward() -> torch.Tensor:
        q, k, v = leaves
        k, v = (x.repeat_interleave(grouped, 1) for x in (k, v))  # as transformers does with a mask
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    out = forward()
    gradient = do_THV.transpose(0, 1)[None]

    def backward() -> Computed:
        return torch.autograd.grad(out, leaves, gradient, retain_graph=True)

    return out, forward, backward


def measure_images(setting: Setting, variant: Variant) -> dict[str, Any]:
    """Images in a document: ours, causal alone, sdpa with a dense mask; and how far ours is from
    sdpa.
    """
    tokens = setting.size(quick=256, cpu=1024, gpu=16384)
    size = setting.size(quick=16, cpu=32, gpu=IMAGE)
    starts = [(2 * place + 1) * tokens // (2 * IMAGES) for place in range(IMAGES)]
    blocks = Blocks(tokens, starts, size, setting.device)
    inputs, do_THV = draw_inputs(setting, tokens, tokens)
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=setting.device).tril()
    for start in starts:
        mask[start : start + size, start : start + size] = True
    row: dict[str, Any] = {
        "kernel": variant.label,
        "tokens": tokens,
        "images": IMAGES,
        "size": size,
    }
    with variant.active() as kernel:
        row["causal alone"] = time_batch(setting, kernel, blocks.document, inputs, do_THV)
        found = blocks.forward(kernel, *inputs)
        grads = blocks.backward(kernel, do_THV, inputs, found)
        row["blocks"] = time_both(
            setting,
            lambda: blocks.forward(kernel, *inputs),
            lambda: blocks.backward(kernel, do_THV, inputs, found),
        )
    out, forward, backward = run_dense(inputs, do_THV, mask)
    row["sdpa with a mask"] = time_both(setting, forward, backward)
    ours = (found[0], *grads)
    theirs = (x[0].detach().transpose(0, 1) for x in (out, *backward()))
    row["apart"] = [
        float((a.double() - b.double()).norm() / b.double().norm())
        for a, b in zip(ours, theirs, strict=True)
    ]
    row["passed"] = max(row["apart"]) <= BOUND
    return row


def measure_prompts(setting: Setting, variant: Variant) -> dict[str, Any]:
    """A prompt with answers that share its keys, and the same with a copy of the prompt for each
    answer.
    """
    prompt, answer = setting.size(quick=(64, 16), cpu=(512, 64), gpu=(8192, 1024))
    row: dict[str, Any] = {"kernel": variant.label, "prompt": prompt, "answers": [answer] * ANSWERS}
    # A kernel wants the keys of a task in one piece: each answer's follow a copy of the prompt's.
    shared = batch_of([(prompt, prompt), *[(answer, prompt + answer)] * ANSWERS])
    copies = batch_of([(prompt + answer, prompt + answer)] * ANSWERS)
    with variant.active() as kernel:
        for name, batch in (("shared", shared), ("copies", copies)):
            inputs, do_THV = draw_inputs(setting, batch.rows, batch.keys)
            row[name] = time_batch(setting, kernel, batch, inputs, do_THV)
            free(setting.device)
    return row


def run(setting: Setting) -> None:
    """Put images and prompts of each kernel."""
    torch.manual_seed(0)
    rows: dict[str, list[Any]] = {"images": [], "prompts": []}
    for variant in variants(setting, (CUDA, FLASH_ATTN_4)):
        for name, measure in (("prompts", measure_prompts), ("images", measure_images)):
            if setting.time_for(
                f"{variant.label}, {name}", setting.size(quick=0.0, cpu=20.0, gpu=4.0)
            ):
                rows[name].append(measure(setting, variant))
                setting.put(**rows)
                free(setting.device)
