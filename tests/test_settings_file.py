"""Settings in a file, on a command line, and with the file of a cost model."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest
from transformers import HfArgumentParser, TrainingArguments

from hf_distca import ConfigError, DistCAConfig
from hf_distca.agreement.announce import PlanKey, collect_shared_settings, hash_settings
from hf_distca.integration.layer_kinds import make_initial_cost
from hf_distca.schedule.cost import AttentionShape, CostModel
from pages import ROOT

COST = CostModel.make_analytic(AttentionShape(8, 2, 64, 64, 4), device_type="cpu").scale(2.0)
COST_FILE = "costs.json"
# A value of each field that is not the default, as users write it.
OTHERS: dict[str, Any] = {
    "balance": False,
    "tolerance": 0.05,
    "min_gain": 0.0,
    "tile": 64,
    "head_groups": 1,
    "kernel": "cpu",
    "cost_model": COST_FILE,
    "measured_rates": False,
    "documents_span_ranks": True,
    "balance_evaluation": True,
    "serve_in_place": False,
    "ping_pong": True,
    "max_transient_bytes": 1000000,
    "group_size": 4,
    "timeout_seconds": 30.0,
}


@pytest.fixture(autouse=True)
def _write_cost_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path(COST_FILE).write_text(COST.to_json())


def make_config() -> DistCAConfig:
    config = DistCAConfig(**{**OTHERS, "cost_model": COST})
    default = DistCAConfig()
    for name in (field.name for field in fields(config)):
        assert getattr(config, name) != getattr(default, name), (
            "OTHERS needs a value that is not the default"
        )
    return config


def test_settings_page_has_every_field_with_its_default() -> None:
    page = (ROOT / "docs" / "settings.md").read_text()
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(#\1\) \| `(.*?)` \|", page, flags=re.MULTILINE))
    defaults = {field.name: repr(field.default).replace("'", '"') for field in fields(DistCAConfig)}
    assert rows == defaults, "a row of a table in docs/settings.md for each field, with its default"
    missing = {f"## {name}" for name in defaults} - set(page.splitlines())
    assert not missing, "a section of docs/settings.md for each field"


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("pingpong: true", "there is no setting 'pingpong'; the nearest is 'ping_pong'."),
        ("tolerance: 2", "tolerance=2 must be in [0, 1)"),
        (
            "tolerance: 1e-2",
            "tolerance='1e-2' must be a number. Numbers in quotes are text, and YAML takes 1e-2",
        ),
        ('tile: "16"', "tile='16' must be a whole number. Numbers in quotes are text, and"),
        ("balance: 1", "balance=1 must be True or False."),
        ("kernel: fast", "kernel='fast' must be one of 'auto', 'reference',"),
        ("cost_model: 3", "cost_model=3 must be 'analytic', a CostModel, or the path of a"),
        ("cost_model: none.json", "a JSON file with a CostModel: none.json: [Errno 2]"),
        ("cost_model: distca.yaml", "distca.yaml: the text is no cost model in JSON"),
        ("cost_model: calibrated", "Give a file that CostModel.to_json wrote; profiles are"),
        ("- ping_pong", "['ping_pong'] should be names and values of settings"),
        ("ping_pong: [", "while parsing a flow node"),
    ],
)
def test_wrong_setting_in_a_file_is_a_one_line_error(
    written: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("distca.yaml").write_text(written)
    with pytest.raises(ConfigError) as error:
        DistCAConfig.from_file("distca.yaml")
    assert str(error.value).startswith("distca.yaml: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_error_names_the_settings_file_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "distca.json"
    broken.write_text("{'tile': 1}")
    files = {
        tmp_path / "none.yaml": "No such file",
        tmp_path: "Is a directory",
        broken: "Expecting property name",
    }
    for path, said in files.items():
        with pytest.raises(ConfigError, match=said) as error:
            DistCAConfig.from_file(path)
        assert str(error.value).startswith(f"{path}: ")


def write_all(folder: Path) -> dict[str, Path]:
    files = {suffix: folder / f"distca.{suffix}" for suffix in ("yaml", "json")}
    lines = [f"{name}: {json.dumps(value)}  # why" for name, value in OTHERS.items()]
    files["yaml"].write_text("\n".join(lines))
    files["json"].write_text(json.dumps(OTHERS, indent="\t"))
    return files


def test_settings_file_can_set_every_field(tmp_path: Path) -> None:
    for file in write_all(tmp_path).values():
        assert DistCAConfig.from_file(file) == DistCAConfig.from_file(str(file)) == make_config()
    empty = tmp_path / "empty.yaml"
    empty.write_text("# nothing yet\n")
    assert DistCAConfig.from_file(empty) == DistCAConfig()


def test_parser_of_transformers_accepts_every_field(tmp_path: Path) -> None:
    parser, files = HfArgumentParser(DistCAConfig), write_all(tmp_path)
    words: list[str] = []
    for name, value in OTHERS.items():
        words += [f"--no_{name}" if value is False else f"--{name}"]
        words += [] if isinstance(value, bool) else [str(value)]
    for (config,) in (
        parser.parse_args_into_dataclasses(words, look_for_args_file=False),
        parser.parse_json_file(files["json"]),
        parser.parse_yaml_file(files["yaml"]),
    ):
        assert config == make_config()


def test_parser_accepts_settings_together_with_training_arguments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = HfArgumentParser((TrainingArguments, DistCAConfig))
    ours = f"--ping_pong --cost_model {COST_FILE} --no_balance"
    words = ["--output_dir", str(tmp_path), "--use_cpu", *ours.split()]
    args, config = parser.parse_args_into_dataclasses(words, look_for_args_file=False)
    assert args.output_dir == str(tmp_path)
    assert config == DistCAConfig(ping_pong=True, cost_model=COST, balance=False)
    _, default = parser.parse_args_into_dataclasses(words[:3], look_for_args_file=False)
    assert default == DistCAConfig()
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--kernel", "fast"], look_for_args_file=False)
    assert "invalid choice: 'fast'" in capsys.readouterr().err


def test_ranks_may_read_their_cost_model_from_different_paths(tmp_path: Path) -> None:
    """Ranks agree on the content: on the settings, and on the cost models made from them."""
    same, other = tmp_path / "same.json", tmp_path / "other.json"
    same.write_text(COST.to_json())
    other.write_text(COST.scale(2.0).to_json())
    key = PlanKey(replace(COST.shape, head_dim=32), "cpu")

    def announced(source: Any) -> int:
        config = DistCAConfig(cost_model=source)
        cost = make_initial_cost(key, config)
        assert cost.shape == key.shape
        return hash_settings(collect_shared_settings(config, (cost,)))

    assert announced(COST) == announced(same) == announced(str(same))
    assert announced(COST) != announced(other)
    assert DistCAConfig(cost_model=same).cost_model == COST


def test_settings_with_a_cost_model_can_be_written_as_json() -> None:
    recorded = json.loads(json.dumps(asdict(DistCAConfig(cost_model=COST))))
    assert recorded["cost_model"]["shape"]["query_heads"] == 8
