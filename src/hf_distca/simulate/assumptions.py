"""What a prediction assumes, with where it comes from."""

from __future__ import annotations

from collections.abc import Iterable

from hf_distca.simulate.document_lengths import DocumentSource
from hf_distca.simulate.setting import Setting
from hf_distca.simulate.strategies import STRATEGIES

__all__ = ["assumptions"]

_SHARDING = {
    "fsdp": "weights, gradients and optimizer are sharded over the attention group; weights are gathered for both directions of "
    "every micro-batch, a layer ahead (FSDP2, ZeRO-3)",
    "zero1": "the optimizer is sharded over the attention group; gradients are reduced in float32 beside backward, weights are "
    "gathered beside forward, once a step (ZeRO-1, Megatron's distributed optimizer)",
    "ddp": "nothing is sharded; gradients are reduced in float32 beside backward, once a step",
}
_CHECKPOINTING = {
    "none": "no activation checkpointing",
    "selective": "linear layers are repeated in backward, attention is not",
    "full": "layers are repeated in backward, attention and its messages included; hf-distca and the published planner keep "
    "attention's output",
}


def assumptions(setting: Setting, documents: DocumentSource, names: Iterable[str] = STRATEGIES) -> list[tuple[str, str]]:
    """Pairs of what is assumed about, and what."""
    model, hardware = setting.model, setting.hardware
    facts = [
        ("lengths", f"{documents.name}: {documents.source}"),
        (
            "model",
            f"{model.name}: {model.parameters / 1e9:.1f} billion weights, {model.layers} layers, bf16",
        ),
        *((f"hardware, {what}", text) for what, text in hardware.sources),
        ("exchange", _exchange(setting)),
        (
            "linear layers",
            "the longer of arithmetic and memory traffic for each product (roofline), norms, rotary embedding and activation by "
            "memory traffic; backward twice as long",
        ),
        ("weights", _SHARDING[setting.sharding]),
        ("checkpointing", _CHECKPOINTING[setting.checkpointing]),
    ]
    if setting.profile is not None:
        facts.append(
            ("profile", f"attention and exchange by the cost model {setting.profile.name!r}, not by the hardware's figures")
        )
    if setting.tensor > 1:
        facts.append(("tensor parallelism", "with sequence parallelism, four exchanges a layer and direction, hidden by nothing"))
    if setting.stages > 1:
        facts.append(
            (
                "pipeline",
                f"{setting.stages} stages of equally many layers, 1F1B; hf-distca and the published planner run the same phase "
                "on all stages, 2 (m + p - 1) ticks for m micro-batches and p stages, of which the first holds 2 p - 1 "
                "micro-batches; stages without a micro-batch compute attention; hf-distca has no ping-pong in stages",
            )
        )
    facts += [
        ("all", "nothing but what is said here takes time: no host overhead, no fragmentation, no noise, no data loading"),
        *((STRATEGIES[name].title, STRATEGIES[name].about) for name in names),
    ]
    return facts


def _exchange(setting: Setting) -> str:
    cost = setting.cost()
    inside = setting.nodes.seen_by(cost).per_node
    rates = f"{cost.exchange_bytes_per_second / 1e9:.0f} GB/s from each rank"
    if inside is not None and cost.node_bytes_per_second is not None:
        rates += f" to other nodes, {cost.node_bytes_per_second / 1e9:.0f} GB/s to the {inside} of its own, both at once"
    groups = setting.group // setting.shared
    shared = f"{setting.shared} ranks share attention"
    return f"{rates}; {shared}{f', {groups} groups of hf-distca have documents of their own' if groups > 1 else ''}"
