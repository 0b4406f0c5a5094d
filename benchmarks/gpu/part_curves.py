"""Three loss curves of a model of 1.3 billion weights: sdpa, distca, and sdpa with the documents of
each step in another order.

A step has 16K tokens in documents of unequal lengths; weights and AdamW are float32, autocast is
bfloat16. distca computes one packed row with activation checkpointing. sdpa computes documents of
equal length as rows of one batch, without a mask, and adds the gradients of its batches. In exact
arithmetic the three curves are equal: the distance of the third from the first is the effect of
rounding on this training. Plain varlen attention runs a few steps with checkpointing, to compare
its memory with that of distca. If time is short, all curves have fewer steps.
"""

from __future__ import annotations

import statistics
import time
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from transformers import LlamaForCausalLM

from gpu_models import Packed, list_pairs
from gpu_setting import Setting, free, synchronize
from gpu_training import arguments, build
from part_checkpointing import set_checkpointing

RATE, WARMUP = 3e-4, 20  # largest learning rate, and the steps until it is reached
FOLLOWED = 0.8  # share of words that follow from the word before


class Batch(NamedTuple):
    """The tokens of one step as one packed row, and the bounds of its documents."""

    row: dict[str, Any]
    documents: list[tuple[int, int]]


class Run(NamedTuple):
    """One training: its attention, the order of documents, and the expected seconds of a step."""

    attention: str
    order: int
    seconds: float


RUNS = {
    "distca": Run("distca", 1, 0.65),
    "sdpa": Run("sdpa", 1, 0.6),
    "sdpa, other order": Run("sdpa", -1, 0.6),
}


def make_batches(setting: Setting, model: LlamaForCausalLM, steps: int) -> list[Batch]:
    """Make one document of half the tokens and two of a quarter each. Most words are always
    followed by the same word, so that there is something to learn.
    """
    tokens = setting.size(quick=128, cpu=512, gpu=16384)
    lengths = [tokens // 2, tokens // 4, tokens // 4]
    cuts = [0, *accumulate(lengths)]
    draw, words = torch.Generator().manual_seed(0), min(1024, model.config.vocab_size)
    follower = torch.randperm(words, generator=draw)
    packed = Packed(setting, model.model, lengths, embedded=False)
    batches = []
    for _ in range(steps):
        ids = torch.randint(words, (tokens,), generator=draw)
        is_follower = torch.rand(tokens, generator=draw) < FOLLOWED
        # A word of a chain needs the word before it; chains are short.
        for place in is_follower.nonzero()[:, 0].tolist():
            if place:
                ids[place] = follower[ids[place - 1]]
        labels = ids.clone()
        labels[cuts[:-1]] = -100
        row = {"input_ids": ids[None].to(setting.device), "labels": labels[None].to(setting.device)}
        batches.append(Batch({"packed": packed, **row}, list(pairwise(cuts))))
    return batches


def list_rows(batch: Batch) -> list[torch.Tensor]:
    """List the documents of a step; those of equal length are rows of one batch."""
    ids = batch.row["input_ids"][0]
    documents = [ids[begin:end] for begin, end in batch.documents]
    return [documents[0][None], torch.stack(documents[1:])]


def run_step(model: LlamaForCausalLM, batch: Batch, run: Run) -> float:
    """Run forward and backward of a step; return its loss."""
    device = batch.row["input_ids"].device.type
    if run.attention != "sdpa":
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(**arguments(batch.row, run.attention)).loss
        loss.backward()
        return float(loss.detach())
    targets = batch.documents[-1][1] - len(batch.documents)
    total = 0.0
    for rows in list_rows(batch)[:: run.order]:
        ids = rows if run.order > 0 else rows.flip(0)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, num_items_in_batch=targets).loss
        loss.backward()
        total += float(loss.detach())
    return total


def train(setting: Setting, batches: list[Batch], run: Run) -> dict[str, Any]:
    """Train from the same weights until the steps or the time are over."""
    model = build(setting)
    model.set_attn_implementation(run.attention)
    set_checkpointing(model, run.attention != "sdpa")
    gpu = setting.device.type == "cuda"
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=gpu)
    losses: list[float] = []
    norms: list[float] = []
    seconds: list[float] = []
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    for step, batch in enumerate(batches):
        if setting.left() < 1.0:
            break
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        started = time.perf_counter()
        losses.append(run_step(model, batch, run))
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        synchronize(setting.device)
        seconds.append(time.perf_counter() - started)
    found = {"losses": losses, "gradient_norms": norms}
    found["seconds"] = statistics.median(seconds[3:] or seconds or [0.0])
    if gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
    found["weights"] = sum(p.numel() for p in model.parameters())
    return found


def run(setting: Setting) -> None:
    """Record each training as it ends, and the distances between the curves."""
    together = sum(run.seconds for run in RUNS.values())
    steps = setting.size(quick=3, cpu=6, gpu=min(200, int((setting.left() - 15) / together)))
    pair = list_pairs(setting)[-1]  # torch's kernel, which sdpa uses as well
    pair.use()
    model = build(setting)
    batches = make_batches(setting, model, steps)
    del model
    lengths = [end - begin for begin, end in batches[0].documents]
    setting.put(kernel=pair.kernel, documents=lengths, steps=steps)
    memory = train(setting, batches[:5], Run(pair.plain, 1, 0.6))
    setting.put(plain={"attention": pair.plain, **memory})
    free(setting.device)
    runs: dict[str, dict[str, Any]] = {}
    for name, one in RUNS.items():
        if not setting.has_time_for(name, gpu=one.seconds * steps / 2):
            continue
        runs[name] = train(setting, batches, one)
        setting.put(runs=runs, apart=measure_distances(runs))
        free(setting.device)


def measure_distances(runs: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Compute relative distances from sdpa's losses: median, largest, and first step."""
    apart = {}
    base = runs.get("sdpa", {"losses": []})["losses"]
    for name, found in runs.items():
        parts = [abs(a - b) / b for a, b in zip(found["losses"], base, strict=False)]
        if name != "sdpa" and parts:
            worst = {"largest": max(parts), "first": parts[0], "steps": len(parts)}
            apart[name] = {"median": statistics.median(parts), **worst}
    return apart
