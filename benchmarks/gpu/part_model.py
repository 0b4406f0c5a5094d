"""A model of 1.3 billion weights on rows of 32K tokens, as the Trainer trains it with bf16=True:
losses, seconds, MFU.

Qwen2.5-1.5B's layers (28 of 1,536, 12 query and 2 key/value heads of 128) with a vocabulary of
32,768; weights and AdamW in float32, bfloat16 autocast. Each step has another row of packed
documents of unequal lengths, the same for all. Two plain kernels that are both right differ by
rounding: that is the noise that distca's losses are held against.

MFU counts 6 operations a weight and token, and attention by the sum of squared document lengths: 6
l^2 a layer and query width forward and backward, causal halves counted once (PaLM's formula, arXiv
2204.02311 appendix B); recompute is not counted.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_models import Packed, documents_of, pairs
from gpu_setting import Setting, free, synchronize
from hf_distca.agreement.documents import PackedDocuments
from part_checkpointing import set_checkpointing

PEAK = {"H100": 989e12, "H200": 989e12}  # dense bfloat16, NVIDIA's data sheets


def build(setting: Setting) -> LlamaForCausalLM:
    big = {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
    }
    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    sizes = setting.size(quick=small, cpu={**small, "hidden_size": 256}, gpu=big)
    vocabulary = setting.size(quick=64, cpu=512, gpu=32768)
    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes,
        num_key_value_heads=2,
        vocab_size=vocabulary,
        max_position_embeddings=2**17,
        use_cache=False,
    )
    with torch.device(setting.device):
        return LlamaForCausalLM(config).train()


def batches(
    setting: Setting, model: LlamaForCausalLM, tokens: int, steps: int
) -> list[dict[str, Any]]:
    """Rows of documents that repeat phrases of their own, so that there is something to learn."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for step in range(steps):
        lengths = documents_of(tokens)
        lengths = lengths[step % len(lengths) :] + lengths[: step % len(lengths)]
        phrases = [torch.randint(model.config.vocab_size, (64,), generator=draw) for _ in lengths]
        ids = torch.cat(
            [phrase.repeat(-(-n // 64))[:n] for phrase, n in zip(phrases, lengths, strict=True)]
        )
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()[:-1]])
        labels = ids.clone()
        labels[starts] = -100
        packed = Packed(setting, model.model, lengths, embedded=False)
        rows.append(
            {
                "packed": packed,
                "input_ids": ids[None].to(setting.device),
                "labels": labels[None].to(setting.device),
            }
        )
    return rows


def arguments(row: dict[str, Any], name: str) -> dict[str, Any]:
    packed = row["packed"]
    told = (
        {"distca_documents": PackedDocuments(tuple(packed.lengths))}
        if name == "distca"
        else packed.flash
    )
    return {
        "input_ids": row["input_ids"],
        "labels": row["labels"],
        "position_ids": packed.positions,
        **told,
    }


def train(
    setting: Setting, rows: list[dict[str, Any]], name: str, checkpointing: bool
) -> dict[str, Any]:
    """Train from the same weights. Returns losses, gradient norms, the median of seconds of all
    steps but the first three.
    """
    model = build(setting)
    model.set_attn_implementation(name)
    set_checkpointing(model, checkpointing)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=setting.device.type == "cuda")
    losses, norms, seconds = [], [], []
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for row in rows:
        synchronize(setting.device)
        started = time.perf_counter()
        with torch.autocast(setting.device.type, dtype=torch.bfloat16):
            loss = model(**arguments(row, name)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    taken = statistics.median(seconds[3:] or seconds)
    found = {"losses": losses, "gradient_norms": norms, "seconds": taken, "all_seconds": seconds}
    if setting.device.type == "cuda":
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    weights = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel()
    lengths = rows[0]["packed"].lengths
    width = model.config.num_attention_heads * model.config.head_dim
    operations = 6 * weights * sum(lengths) + 6 * model.config.num_hidden_layers * width * sum(
        n * n for n in lengths
    )
    found |= {"operations": operations, "weights": weights, "tokens_a_second": sum(lengths) / taken}
    gpu = torch.cuda.get_device_name() if setting.device.type == "cuda" else ""
    peak = next((rate for card, rate in PEAK.items() if card in gpu), None)
    if peak is not None:
        found["mfu"] = operations / taken / peak
    return found


def run(setting: Setting) -> None:
    """Put a run of each attention with checkpointing, then short ones without."""
    tokens, steps = setting.size(quick=(128, 4), cpu=(1024, 6), gpu=(32768, 20))
    model = build(setting)
    # Without checkpointing, activations of 16K tokens need 80 GB beside the weights.
    small = setting.device.type == "cuda" and torch.cuda.mem_get_info()[1] < 100e9
    rows = {
        True: batches(setting, model, tokens, steps),
        False: batches(setting, model, tokens // (4 if small else 2), min(steps, 8)),
    }
    del model
    kernels = pairs(setting)
    first = kernels[0]
    runs = [(first.kernel, "distca", True), (first.kernel, first.plain, True)]
    runs += [(kernels[-1].kernel, kernels[-1].plain, True)] * (len(kernels) > 1)
    runs += [(first.kernel, "distca", False), (first.kernel, first.plain, False)]
    found: list[dict[str, Any]] = []
    for kernel, name, checkpointing in runs:
        count = len(rows[checkpointing])
        label = f"{name}, {kernel}, checkpointing {checkpointing}"
        if not setting.time_for(label, setting.size(quick=0.0, cpu=30.0, gpu=3 + 1.4 * count)):
            continue
        next(pair for pair in kernels if pair.kernel == kernel).use()
        row = {"attention": name, "kernel": kernel, "checkpointing": checkpointing}
        row["documents"] = rows[checkpointing][0]["packed"].lengths
        try:
            row |= train(setting, rows[checkpointing], name, checkpointing)
        except torch.OutOfMemoryError as error:
            row["failed"] = str(error)[:300]
        found.append(row)
        setting.put(runs=found)
        free(setting.device)
