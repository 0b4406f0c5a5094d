"""``hf-distca advise``: what hf-distca would buy on documents of your own, or that it would buy nothing."""

from __future__ import annotations

import json

import typer

from hf_distca.cli import scale
from hf_distca.cli.files import errors_in_one_line
from hf_distca.cli.simulate import predicted, report, show_predictions

__all__ = ["advise"]


def advise(
    lengths: scale.Lengths,
    ranks: scale.Ranks,
    tokens_per_rank: scale.TokensPerRank = 65536,
    model: scale.Model = "llama-3-8b",
    hardware: scale.HardwareName = "h100",
    tensor: scale.Tensor = 1,
    stages: scale.Stages = 1,
    micro_batches: scale.MicroBatches = 1,
    ranks_per_node: scale.RanksPerNode = 8,
    link_gbps: scale.LinkGbps = None,
    profile: scale.Profile = None,
    sharding: scale.Sharding = scale.ShardingName.auto,
    checkpointing: scale.Checkpointing = scale.CheckpointingName.auto,
    column: scale.Column = "input_ids",
    max_length: scale.MaxLength = None,
    batches: scale.Batches = 10,
    seed: scale.Seed = 0,
    as_json: scale.InJson = False,
) -> None:
    """Say what hf-distca would buy on your documents against the best alternative, or that it would buy nothing.

    The figures are predictions: `hf-distca simulate` with the same options prints what they assume.
    """
    from hf_distca.cli.lengths import documents_of
    from hf_distca.simulate.advice import advise as advised
    from hf_distca.simulate.assumptions import assumptions
    from hf_distca.simulate.strategies import STRATEGIES

    with errors_in_one_line():
        setting = scale.setting_of(
            *(model, hardware, ranks, tokens_per_rank),
            tensor=tensor,
            stages=stages,
            micro_batches=micro_batches,
            ranks_per_node=ranks_per_node,
            link_gbps=link_gbps,
            profile=profile,
            sharding=sharding,
            checkpointing=checkpointing,
        )
        documents = documents_of(lengths, column, max_length)
        found = predicted(setting, documents, list(STRATEGIES), batches, seed)
        advice = advised(setting, found)
        if as_json:
            facts = assumptions(setting, documents)
            typer.echo(
                json.dumps({"advice": advice.to_dict(), **report(setting, documents, found, facts, batches, seed)}, indent=1)
            )
            return
        typer.echo(f"{advice.text}\n")
        if advice.settings:
            typer.echo("Settings")
            typer.echo("".join(f"  {line}\n" for line in advice.settings))
        show_predictions(setting, documents, found, batches)
