"""The assumptions of predictions, with their sources."""

from __future__ import annotations

from collections.abc import Iterable

from hf_distca.tools.advise.document_lengths import DocumentSource
from simulator.model_shape import ModelShape
from simulator.setting import Setting
from simulator.strategies import STRATEGIES, Strategy, find_strategy

_SHARDING = {
    "fsdp": (
        "weights, gradients and optimizer are sharded over the attention group; weights are"
        " gathered for both directions of every micro-batch, a layer ahead (FSDP2, ZeRO-3)"
    ),
    "zero1": (
        "the optimizer is sharded over the attention group; gradients are reduced in float32 beside"
        " backward, weights are gathered beside forward, once a step (ZeRO-1, Megatron's"
        " distributed optimizer)"
    ),
    "ddp": "nothing is sharded; gradients are reduced in float32 beside backward, once a step",
}
_CHECKPOINTING = {
    "none": "no activation checkpointing",
    "selective": "linear layers are repeated in backward, attention is not",
    "full": (
        "layers are repeated in backward, attention and its messages included; hf-distca keeps"
        " attention's output"
    ),
}


def list_assumptions(
    setting: Setting, documents: DocumentSource, strategies: Iterable[str | Strategy] = STRATEGIES
) -> list[tuple[str, str]]:
    """List the assumptions of predictions, with sources: pairs of subject and text."""
    facts = [
        ("lengths", f"{documents.name}: {documents.source}"),
        ("model", _describe_model(setting.model)),
        *((f"hardware, {what}", text) for what, text in setting.hardware.sources),
        ("exchange", _describe_exchange(setting)),
        (
            "linear layers",
            (
                "the longer of arithmetic and memory traffic for each product (roofline), norms,"
                " rotary embedding and activation by memory traffic; backward twice as long"
            ),
        ),
        ("weights", _SHARDING[setting.sharding]),
        ("checkpointing", _CHECKPOINTING[setting.checkpointing]),
        ("memory", _describe_memory(setting)),
    ]
    if setting.profile is not None:
        facts.append(
            (
                "profile",
                (
                    f"attention and exchange by the cost model {setting.profile.name!r}, not by the"
                    " hardware's figures"
                ),
            )
        )
    if setting.tensor > 1:
        facts.append(
            (
                "tensor parallelism",
                (
                    "with sequence parallelism, four exchanges a layer and direction, hidden by"
                    " nothing"
                ),
            )
        )
    if setting.stages > 1:
        facts.append(
            (
                "pipeline",
                (
                    f"{setting.stages} stages of equally many layers, 1F1B; hf-distca runs the same"
                    " phase on all stages, 2 (m + p - 1) ticks for m micro-batches and p stages,"
                    " of which the first holds 2 p - 1 micro-batches; stages without a micro-batch"
                    " compute attention"
                ),
            )
        )
    return [
        *facts,
        (
            "all",
            (
                "nothing but what is said here takes time: no host overhead, no fragmentation, no"
                " noise, no data loading"
            ),
        ),
        *((strategy.title, strategy.about) for strategy in map(find_strategy, strategies)),
    ]


def _describe_model(model: ModelShape) -> str:
    text = (
        f"{model.name}: {model.parameters / 1e9:.1f} billion weights, {model.layers} layers, bf16"
    )
    if model.active is not None:
        text += (
            f"; {model.attending} times core attention, of which {model.windowed_layers} with a"
            f" window; a token meets {model.active / 1e9:.1f} billion weights of the layers,"
            " counted in the model of transformers. What layers have instead of attention is taken"
            " for linear layers; where heads differ, those of layers without a window count;"
            " experts are evenly used, and every rank has all of them"
        )
    return text


def _describe_memory(setting: Setting) -> str:
    loss = "of all tokens" if setting.loss_tokens is None else f"of {setting.loss_tokens} tokens"
    layers = "fused" if setting.fused else "transformers'"
    return (
        f"what autograd saves, with {layers} norms and gated activations; logits {loss} at a time;"
        " Adam in float32; nothing for fragmentation, libraries and communicators"
    )


def _describe_exchange(setting: Setting) -> str:
    cost = setting.make_cost_model()
    inside = setting.nodes.without_irrelevant_nodes(cost).per_node
    rates = f"{cost.exchange_bytes_per_second / 1e9:.0f} GB/s from each rank"
    if inside is not None and cost.node_bytes_per_second is not None:
        rates += (
            f" to other nodes, {cost.node_bytes_per_second / 1e9:.0f} GB/s to the {inside} of its"
            " own, both at once; documents are dealt to nodes first, and work is moved inside them"
            " first"
        )
    groups = setting.group // setting.shared
    apart = f", {groups} groups of hf-distca have documents of their own" if groups > 1 else ""
    return f"{rates}; {setting.shared} ranks share attention{apart}"
