"""Options shared by the verbs that predict: model, devices and their arrangement, and lengths."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from hf_distca.cli.files import get_input_name, read
from hf_distca.errors import ConfigError
from hf_distca.model_shape import KNOWN_MODELS, ModelShape, find_model

if TYPE_CHECKING:
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.profiles import Profile as MeasuredProfile
    from hf_distca.simulate.document_lengths import DocumentSource
    from hf_distca.simulate.predict import Prediction
    from hf_distca.simulate.setting import Setting


@dataclass(frozen=True, slots=True)
class Scale:
    """Inputs of a prediction: documents, a model, devices and their arrangement."""

    ranks: Annotated[int, typer.Option(help="Devices, 1 to 65536.", show_default=False)]
    lengths: Annotated[
        str | None,
        typer.Option(
            help=(
                "Document lengths: a file with a JSON list, - for standard input, a .jsonl or"
                " .parquet file or saved data set, or pretrain, prolong, equal:TOKENS,"
                " lognormal:MEDIAN:SIGMA."
            ),
            show_default=False,
        ),
    ] = None
    tokens_per_rank: Annotated[
        int,
        typer.Option(help="Tokens of a micro-batch on a rank, or on its tensor-parallel group."),
    ] = 65536
    model: Annotated[
        str, typer.Option(help="A known shape by name, or a config.json or its folder.")
    ] = "llama-3-8b"
    hardware: Annotated[str, typer.Option(help="a100, h100, h200, b200, or gb200 for NVL72.")] = (
        "h100"
    )
    kernel: Annotated[
        str | None,
        typer.Option(
            help="Attention kernel, as flash_attn_3 on h100.",
            show_default="flash_attn_2, on b200 flash_attn_4",
        ),
    ] = None
    tensor: Annotated[int, typer.Option("--tp", help="Tensor-parallel degree.")] = 1
    stages: Annotated[int, typer.Option("--pp", help="Pipeline stages.")] = 1
    micro_batches: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1
    ranks_per_node: Annotated[
        int | None, typer.Option(help="Devices of a node.", show_default="8, of gb200 72")
    ] = None
    link_gbps: Annotated[
        float | None,
        typer.Option(
            help="Gigabits per second of a device between nodes, instead of the hardware's."
        ),
    ] = None
    profile: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Rates of attention and exchange instead of the hardware's: a file of hf-distca"
                " profile, or a shipped profile."
            )
        ),
    ] = None
    sharding: Annotated[
        Literal["auto", "fsdp", "zero1", "ddp"],
        typer.Option(
            help="How weights and optimizer are kept; auto: fsdp, with --tp or --pp zero1."
        ),
    ] = "auto"
    checkpointing: Annotated[
        Literal["auto", "none", "selective", "full"],
        typer.Option(
            help="What backward repeats; auto: nothing if that fits in memory, else everything."
        ),
    ] = "auto"
    column: Annotated[
        str, typer.Option(help="Column of a data set that holds tokens, or their number.")
    ] = "input_ids"
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Tokenizer of a column of text, as from_pretrained takes it."),
    ] = None
    max_length: Annotated[
        int | None, typer.Option(help="Documents are cut off at this length.")
    ] = None
    batches: Annotated[int, typer.Option(help="Global batches to predict; figures are means.")] = 10
    seed: Annotated[int, typer.Option(help="Seed of the drawn documents.")] = 0

    def make_setting(self) -> Setting:
        """Make the setting that the options describe; raise for options out of their ranges."""
        from hf_distca.simulate.hardware import find_hardware
        from hf_distca.simulate.memory import find_fullest_moment
        from hf_distca.simulate.setting import Setting

        device = find_hardware(self.hardware, self.kernel)
        if self.link_gbps is not None:
            device = replace(device, link_gbps=self.link_gbps)
        by_degrees: Literal["fsdp", "zero1"] = (
            "fsdp" if self.tensor == self.stages == 1 else "zero1"
        )
        setting = Setting(
            _find_shape(self.model),
            device,
            self.ranks,
            self.tokens_per_rank,
            self.tensor,
            self.stages,
            self.micro_batches,
            device.ranks_per_node if self.ranks_per_node is None else self.ranks_per_node,
            by_degrees if self.sharding == "auto" else self.sharding,
            "none" if self.checkpointing == "auto" else self.checkpointing,
            None if self.profile is None else _read_profile(self.profile),
        )
        if self.checkpointing == "auto" and (
            find_fullest_moment(setting, self.tokens_per_rank).total > device.memory_bytes
        ):
            return replace(setting, checkpointing="full")
        return setting

    def predict(self, names: list[str]) -> tuple[Setting, DocumentSource, list[Prediction]]:
        """Predict these strategies, with a progress bar if it takes over a second.

        Return the setting and the documents, too.
        """
        from tqdm import tqdm

        from hf_distca.cli.lengths import open_documents
        from hf_distca.simulate.predict import simulate

        if self.lengths is None:
            raise ConfigError(
                "--lengths is missing: give the lengths of your documents, or a distribution such"
                " as prolong."
            )
        setting = self.make_setting()
        documents = open_documents(self.lengths, self.column, self.max_length, self.tokenizer)
        documents = replace(documents, seed=self.seed)
        total = max(self.batches, 0) * len(names)
        with tqdm(total=total, desc="predicting", unit=" steps", delay=1.0, leave=False) as bar:
            predictions = simulate(setting, documents, names, batches=self.batches, told=bar.update)
        return setting, documents, predictions


def _find_shape(model: str) -> ModelShape:
    """Return a known shape by name, or that of a config.json, given as the file or its folder."""
    path = Path(model)
    if model.lower() in KNOWN_MODELS or not (path.is_file() or (path / "config.json").is_file()):
        return find_model(model)
    from hf_distca.doctor.counting import count_model  # imports transformers, in seconds

    return count_model(path)


def _read_profile(source: Path) -> CostModel | MeasuredProfile:
    """Read a profile, shipped or in a file, or the JSON of a cost model."""
    from hf_distca.schedule.cost import CostModel
    from hf_distca.schedule.profiles import Profile

    if str(source) in Profile.list_shipped():
        return Profile.load(source)
    try:
        text = read(source).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{get_input_name(source)} is not text: {error}.") from error
    try:
        return Profile.from_json(text) if '"format"' in text else CostModel.from_json(text)
    except ConfigError as error:
        raise ConfigError(f"{get_input_name(source)}: {error}") from error
