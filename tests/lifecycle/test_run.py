"""`python -m hf_distca.run` in front of a script that knows nothing of hf_distca."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scripts
from pages import ROOT, words_of

SCRIPT = """
import argparse, sys
from neighbour import write
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--attn_implementation")
    parser.add_argument("--output")
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=31,
        attn_implementation=options.attn_implementation,
    )
    arguments = TrainingArguments(
        options.output, max_steps=1, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no"
    )
    tokens = [{"input_ids": list(range(1, 9)), "labels": list(range(1, 9))} for _ in range(4)]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=tokens)
    trainer.train()
    seen = {"argv": sys.argv, "attention": trainer.model.config._attn_implementation, "world": arguments.world_size}
    if arguments.process_index == 0:
        write(options.output, {**seen, "loss": trainer.state.log_history[-1]["train_loss"]})
"""
NEIGHBOUR = """
import json
from pathlib import Path

def write(folder, value):
    Path(folder, "seen.json").write_text(json.dumps(value))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "neighbour.py").write_text(NEIGHBOUR)
    path = folder / "train.py"
    path.write_text(SCRIPT)
    return path


def test_an_unmodified_script_takes_the_name(script: Path, tmp_path: Path) -> None:
    options = ["--attn_implementation", "distca", "--output", str(tmp_path)]
    scripts.run([*words_of("python -m hf_distca.run"), str(script), *options], tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["argv"] == [str(script), *options]
    assert seen["attention"] == "distca"


def test_help_and_a_missing_script(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_distca.run import main

    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    assert "accelerate launch -m hf_distca.run" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    for arguments, named in (([], "script"), (["train.py", "--help"], f"no file 'train.py' in {tmp_path}")):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert named in capsys.readouterr().err


def test_under_a_launcher(script: Path, tmp_path: Path) -> None:
    launch, command, *rest = words_of("accelerate launch -m hf_distca.run train.py --attn_implementation distca")
    config = str(ROOT / "configs/accelerate/cpu_2_processes.yaml")
    scripts.run([launch, command, "--config_file", config, *rest, "--output", str(tmp_path)], script.parent)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["world"] == 2
    assert seen["attention"] == "distca"


def test_distca_stands_in_for_what_a_script_knows(script: Path, tmp_path: Path) -> None:
    options = ["--attn_implementation", "flash_attention_2", "--output", str(tmp_path)]
    command = words_of("python -m hf_distca.run --instead-of flash_attention_2 train.py")
    said = scripts.run([*command[:-1], str(script), *options], tmp_path)
    assert 'distca stands in for attn_implementation="flash_attention_2"' in said
    assert json.loads((tmp_path / "seen.json").read_text())["attention"] == "flash_attention_2"


def test_what_distca_cannot_stand_in_for(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from hf_distca.run import main

    with pytest.raises(SystemExit) as ended:
        main(["--instead-of", "flex_attention", str(script)])
    assert ended.value.code == 2
    assert "cannot stand in for 'flex_attention'" in capsys.readouterr().err
