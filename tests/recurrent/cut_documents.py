"""Layers over documents that are cut anywhere, and the float64 reference on whole documents."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from by_token import convolution_by_token, delta_rule_by_token, scan_by_token
from torch.nn.functional import conv1d, normalize, softplus

from hf_distca.hybrids.convolution import compute_causal_convolution
from hf_distca.hybrids.delta_rule import DeltaInputs, compute_gated_delta_rule, run_by_document
from hf_distca.hybrids.segments import Segments
from hf_distca.hybrids.state_space import ScanInputs, compute_mamba2, scan_by_document
from hf_distca.runtime.group import AttentionGroup
from hf_distca.runtime.meter import Meter
from hf_distca.runtime.outputs import LayerOutputs
from hf_distca.schedule.layout import Layout

Placement = Sequence[Sequence[tuple[int, int, int]]]
Tensors = dict[str, torch.Tensor]

KINDS = ("delta rule", "delta rule by channel", "mamba2", "convolution")
GROUPS, HEADS, KEY, VALUE, WIDTH = 2, 4, 6, 5, 4


def draw_tokens(kind: str, document: int, length: int) -> Tensors:
    """Draw a layer's inputs for a document, (length, ...) in float64, and its output's gradient."""
    generator = torch.Generator().manual_seed(document)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn((length, *shape), generator=generator, dtype=torch.float64)

    if kind == "convolution":
        return {"x": normal(HEADS), "gradient": normal(HEADS)}
    if kind == "mamba2":
        # States decay over tens of tokens, so a lost state shows.
        dt = softplus(normal(HEADS)) * 0.1
        small = {"B": normal(GROUPS, KEY), "C": normal(GROUPS, KEY)}
        return {"x": normal(HEADS, VALUE), "dt": dt, **small, "gradient": normal(HEADS, VALUE)}
    channels, key_heads = ((KEY,), HEADS) if "channel" in kind else ((), GROUPS)
    return {
        "query": normalize(normal(key_heads, KEY), dim=-1),
        "key": normalize(normal(key_heads, KEY), dim=-1),
        "value": normal(HEADS, VALUE),
        "decay": -0.1 * softplus(normal(HEADS, *channels)),
        "beta": normal(HEADS).sigmoid(),
        "gradient": normal(HEADS, VALUE),
    }


def make_weights(kind: str) -> Tensors:
    """Make the weights, which all tokens share."""
    if kind == "convolution":
        return {
            "weight": torch.linspace(-1, 1, HEADS * WIDTH, dtype=torch.float64).view(HEADS, WIDTH)
        }
    return {"A": -torch.linspace(0.2, 1.0, HEADS, dtype=torch.float64)} if kind == "mamba2" else {}


def compute_whole_document(kind: str, given: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Compute the output for a document from its tokens and weights, by the formula."""
    if kind == "convolution":
        return convolution_by_token(given["x"].t()[None], given["weight"])[0].t()
    row = {
        name: tensor if name == "A" else tensor[None]
        for name, tensor in given.items()
        if name != "gradient"
    }
    return (
        scan_by_token(ScanInputs(**row))
        if kind == "mamba2"
        else delta_rule_by_token(DeltaInputs(**row))
    ).output[0]


def kernel_by_token(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any
) -> Any:
    inputs = DeltaInputs(query, key, value, options["g"], options["beta"])
    return delta_rule_by_token(inputs, options["initial_state"])


def scan_kernel_by_token(*inputs: torch.Tensor, return_final_states: bool) -> Any:
    return scan_by_token(ScanInputs(*inputs))


def cut_row(
    kind: str,
    given: Mapping[str, torch.Tensor],
    segments: Segments,
    kernel: Callable[..., Any] | None = None,
    stored: LayerOutputs | None = None,
) -> torch.Tensor:
    """Compute the output for the tokens of a rank."""
    if kind == "convolution":
        weight = given["weight"]

        def convolve(x: torch.Tensor) -> torch.Tensor:
            return conv1d(x, weight[:, None], padding=WIDTH - 1, groups=HEADS)[..., : x.shape[2]]

        return compute_causal_convolution(
            given["x"].t()[None], kernel or convolve, WIDTH, segments, stored
        )[0].t()
    row = {
        name: tensor if name == "A" else tensor[None]
        for name, tensor in given.items()
        if name != "gradient"
    }
    if kind == "mamba2":
        return compute_mamba2(
            ScanInputs(**row), segments, scan_by_document(kernel or scan_kernel_by_token), stored
        )[0]
    return compute_gated_delta_rule(
        DeltaInputs(**row), segments, run_by_document(kernel or kernel_by_token), stored
    )[0]


class Results(NamedTuple):
    """Results of a layer: output and input gradients by token, weight gradients, and figures."""

    by_token: dict[str, np.ndarray]
    by_weight: dict[str, np.ndarray]
    meter: Meter


def run(
    kind: str,
    given: Tensors,
    layer: Callable[[Tensors], torch.Tensor],
    dtype: torch.dtype,
    meter: Meter,
) -> Results:
    """Run a layer forward and backward, with inputs in `dtype`."""
    leaves = {
        name: tensor.to(dtype).requires_grad_()
        for name, tensor in given.items()
        if name != "gradient"
    }
    output = layer(leaves)
    output.backward(given["gradient"].to(output.dtype))
    arrays = {
        name: leaf.grad.double().numpy() for name, leaf in leaves.items() if leaf.grad is not None
    }
    by_weight = {name: arrays.pop(name) for name in make_weights(kind)}
    return Results({"output": output.detach().double().numpy(), **arrays}, by_weight, meter)


def run_whole_documents(
    kind: str, layout: Layout
) -> tuple[dict[int, Results], dict[str, np.ndarray]]:
    """Run whole documents in float64; return their results and the sums of weight gradients."""
    documents = {}
    for document in layout.documents.tolist():
        length = int(layout.end[layout.document == document].max())
        given = draw_tokens(kind, document, length) | make_weights(kind)
        documents[document] = run(
            kind, given, lambda leaves: compute_whole_document(kind, leaves), torch.float64, Meter()
        )
    return documents, {
        name: sum(ran.by_weight[name] for ran in documents.values()) for name in make_weights(kind)
    }


def run_rank(
    kind: str, placement: Placement, group: AttentionGroup, dtype: torch.dtype, **options: Any
) -> Results:
    """Run one rank's part of a layer; `placement` lists (document, start, length) by rank."""
    layout = Layout.from_segments(placement)
    meter = Meter()
    segments = Segments.from_layout(layout, group, meter)
    parts = []
    for document, start, length in placement[group.rank]:
        whole = draw_tokens(kind, document, int(layout.end[layout.document == document].max()))
        parts.append({name: tensor[start : start + length] for name, tensor in whole.items()})
    empty = {name: tensor[:0] for name, tensor in draw_tokens(kind, 0, 1).items()}
    given = {
        name: torch.cat([part[name] for part in (empty, *parts)]) for name in empty
    } | make_weights(kind)
    return run(kind, given, lambda leaves: cut_row(kind, leaves, segments, **options), dtype, meter)


def measure_errors(kind: str, placement: Placement, ranks: Sequence[Results]) -> dict[str, float]:
    """Return differences from whole documents, relative to the largest value, at least 0.1."""
    layout = Layout.from_segments(placement)
    documents, weights = run_whole_documents(kind, layout)
    differences: dict[str, float] = {}
    for name in next(iter(documents.values())).by_token:
        scale = max(0.1, *(float(np.abs(ran.by_token[name]).max()) for ran in documents.values()))
        for held, ran in zip(placement, ranks, strict=True):
            rows = [
                documents[document].by_token[name][start : start + length]
                for document, start, length in held
            ]
            difference = (
                np.abs(np.concatenate(rows) - ran.by_token[name]).max() / scale if rows else 0.0
            )
            differences[name] = max(differences.get(name, 0.0), float(difference))
    for name, gradient in weights.items():
        total = sum(ran.by_weight[name] for ran in ranks)
        differences[name] = float(np.abs(total - gradient).max() / max(0.1, np.abs(gradient).max()))
    return differences


@dataclass(eq=False)
class ThreadChannel:
    """Stand in for `Channel` where ranks are threads."""

    world: ThreadWorld
    rank: int

    def start(
        self, received: Any, sent: Any, receive_bytes: Any, send_bytes: Any, purpose: str
    ) -> Any:
        starts = np.cumsum([0, *send_bytes.values()])
        messages = {
            target: sent[a : a + n]
            for (target, n), a in zip(send_bytes.items(), starts, strict=False)
        }
        self.world.boxes[self.rank] = purpose, messages
        self.world.barrier.wait()
        boxes = dict(self.world.boxes)
        self.world.barrier.wait()
        assert len({what for what, _ in boxes.values()}) == 1, "all ranks start the same exchange"
        arrived = [boxes[source][1][self.rank] for source in receive_bytes]
        assert [len(message) for message in arrived] == list(receive_bytes.values())
        received.copy_(torch.cat([received[:0], *arrived]))
        assert not set(send_bytes) & {self.rank}
        return self

    def wait(self) -> None:
        pass


@dataclass(eq=False)
class ThreadWorld:
    """Ranks that are threads of this process."""

    size: int
    boxes: dict[int, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=60)

    def group(self, rank: int) -> AttentionGroup:
        channel: Any = ThreadChannel(self, rank)
        return AttentionGroup(tuple(range(self.size)), rank, channel if self.size > 1 else None)

    def run(self, work: Callable[[AttentionGroup], Any]) -> list[Any]:
        """Run `work` on all ranks; return their results in order."""
        results: dict[int, Any] = {}

        def work_on_rank(rank: int) -> None:
            try:
                results[rank] = work(self.group(rank))
            except BaseException as error:
                self.barrier.abort()
                results[rank] = error

        threads = [
            threading.Thread(target=work_on_rank, args=(rank,), daemon=True)
            for rank in range(self.size)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        errors = [result for result in results.values() if isinstance(result, BaseException)]
        for error in sorted(
            errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)
        ):
            raise error
        return [results[rank] for rank in range(self.size)]
