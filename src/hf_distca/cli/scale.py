"""Options that the verbs share which predict: model, devices and their arrangement, and lengths."""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from hf_distca.cli.files import name_of, read

if TYPE_CHECKING:
    from hf_distca.simulate import setting as kinds
    from hf_distca.simulate.setting import Setting

__all__ = [
    "Batches",
    "Checkpointing",
    "CheckpointingName",
    "Column",
    "HardwareName",
    "InJson",
    "Lengths",
    "LinkGbps",
    "MaxLength",
    "MicroBatches",
    "Model",
    "Profile",
    "Ranks",
    "RanksPerNode",
    "Seed",
    "Sharding",
    "ShardingName",
    "Stages",
    "Tensor",
    "TokensPerRank",
    "setting_of",
]


class ShardingName(StrEnum):
    """How weights are kept."""

    auto = "auto"
    fsdp = "fsdp"
    zero1 = "zero1"
    ddp = "ddp"


class CheckpointingName(StrEnum):
    """What is repeated in backward."""

    auto = "auto"
    none = "none"
    selective = "selective"
    full = "full"


Lengths = Annotated[
    str,
    typer.Option(
        help="Document lengths: a JSON list, - for standard input, a .parquet file or saved data set, or pretrain, prolong, "
        "equal:TOKENS, lognormal:MEDIAN:SIGMA.",
        show_default=False,
    ),
]
Ranks = Annotated[int, typer.Option(help="Devices, 1 to 65536.", show_default=False)]
TokensPerRank = Annotated[int, typer.Option(help="Tokens of a micro-batch on a rank, or on its tensor-parallel group.")]
Model = Annotated[str, typer.Option(help="A known shape by name, or a config.json or its folder.")]
HardwareName = Annotated[str, typer.Option("--hardware", help="h100, h200 or a100.")]
Tensor = Annotated[int, typer.Option("--tp", help="Tensor-parallel degree.")]
Stages = Annotated[int, typer.Option("--pp", help="Pipeline stages.")]
MicroBatches = Annotated[int, typer.Option(help="Micro-batches of a step.")]
RanksPerNode = Annotated[int, typer.Option(help="Devices of a node.")]
LinkGbps = Annotated[float | None, typer.Option(help="Gigabits per second of a device between nodes, instead of the hardware's.")]
Profile = Annotated[Path | None, typer.Option(help="A cost model of attention and exchange in JSON, instead of the hardware's.")]
Column = Annotated[str, typer.Option(help="Column of a data set that holds tokens, or their number.")]
MaxLength = Annotated[int | None, typer.Option(help="Documents are cut off at this length.")]
Batches = Annotated[int, typer.Option(help="Global batches to predict; figures are means.")]
Seed = Annotated[int, typer.Option(help="Seed of the drawn documents.")]
InJson = Annotated[bool, typer.Option("--json", help="Write everything as JSON.")]
Sharding = Annotated[ShardingName, typer.Option(help="How weights and optimizer are kept; auto: fsdp, with --tp or --pp zero1.")]
Checkpointing = Annotated[
    CheckpointingName, typer.Option(help="What backward repeats; auto: nothing if that fits in memory, else everything.")
]


def setting_of(
    model: str,
    hardware: str,
    ranks: int,
    tokens_per_rank: int,
    *,
    tensor: int,
    stages: int,
    micro_batches: int,
    ranks_per_node: int,
    link_gbps: float | None,
    profile: Path | None,
    sharding: ShardingName,
    checkpointing: CheckpointingName,
) -> Setting:
    """The setting that options describe.

    Raises:
        ConfigError: if one is out of its range.
    """
    from hf_distca.errors import ConfigError
    from hf_distca.schedule.cost import CostModel
    from hf_distca.simulate.hardware import find_hardware
    from hf_distca.simulate.memory import peak_bytes
    from hf_distca.simulate.models import find_model
    from hf_distca.simulate.setting import Setting

    device = find_hardware(hardware)
    if link_gbps is not None:
        device = replace(device, link_gbps=link_gbps)
    measured = None
    if profile is not None:
        try:
            measured = CostModel.from_json(read(profile).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name_of(profile)} is not text: {error}.") from error
    default = "fsdp" if tensor == stages == 1 else "zero1"
    setting = Setting(
        find_model(model),
        device,
        ranks,
        tokens_per_rank,
        tensor,
        stages,
        micro_batches,
        ranks_per_node,
        cast("kinds.Sharding", default if sharding is ShardingName.auto else sharding.value),
        cast("kinds.Checkpointing", "none" if checkpointing is CheckpointingName.auto else checkpointing.value),
        measured,
    )
    _ = setting.shape  # says which degrees heads do not allow
    full = checkpointing is CheckpointingName.auto and peak_bytes(setting, tokens_per_rank, 0.0) > device.memory_bytes
    return replace(setting, checkpointing="full") if full else setting
