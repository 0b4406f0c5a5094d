"""`hf-distca run` and `python -m hf_distca.run` in front of a script that knows nothing of hf_distca."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
        options.output, max_steps=2, per_device_train_batch_size=2, use_cpu=True, report_to="none", save_strategy="no"
    )
    tokens = [{"input_ids": list(range(1, 9)), "labels": list(range(1, 9))} for _ in range(4)]
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=tokens)
    trainer.train()
    seen = {"argv": sys.argv, "attention": trainer.model.config._attn_implementation, "world": arguments.world_size}
    seen["customized"] = hasattr(sys, "was_customized")
    if arguments.process_index == 0:
        write(options.output, {**seen, "loss": trainer.state.log_history[-1]["train_loss"]})
"""
NEIGHBOUR = """
import json
import os
import subprocess
import sys
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
    for arguments, named in (([], "script"), (["train.py", "--help"], f"no file 'train.py' in {tmp_path}, and no such command")):
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


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_what_a_command_starts_afresh_runs_under_distca(script: Path, tmp_path: Path) -> None:
    """Real interpreters: ours, the command's, accelerate's launcher, two ranks. The script has no attention given."""
    starter = Path(__file__).with_name("starts_accelerate.py")
    config = str(ROOT / "configs/accelerate/cpu_2_processes.yaml")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\n")
    program, *ours = words_of("hf-distca run --attn-implementation distca accelerate launch train.py")[:-3]
    command = [*ours, str(starter), config, str(script), "--output", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *command],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["world"], seen["attention"], seen["customized"]) == (2, "distca", True)
    assert done.stderr.count("micro-batches on 2 ranks") == 1, done.stderr
    assert "in kernel cpu" in done.stderr


@pytest.mark.parametrize("given", [[], ["--attn_implementation", "eager"]])
def test_the_default_leaves_a_named_attention_alone(given: list[str], script: Path, tmp_path: Path) -> None:
    options = ["--attn-implementation", "distca", str(script), "--output", str(tmp_path), *given]
    scripts.run([*words_of("python -m hf_distca.run"), *options], tmp_path)
    assert json.loads((tmp_path / "seen.json").read_text())["attention"] == (given[-1] if given else "distca")


@pytest.mark.slow
def test_the_default_is_for_causal_models_of_proven_families() -> None:
    code = """
from transformers import BertConfig, BertModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers import MptConfig, MptForCausalLM
from hf_distca.run import Options, begin
begin(Options("distca"))
small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}
models = [
    LlamaForCausalLM(LlamaConfig(**small)),
    GPTNeoXForCausalLM(GPTNeoXConfig(**small)),
    BertModel(BertConfig(**small)),
    MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=31)),
]
print([model.config._attn_implementation for model in models])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "['distca', 'distca', 'sdpa', 'eager']"
    assert "leaves mpt models" in done.stderr


def test_the_script_gets_its_arguments_and_gives_its_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nif 'fail' in sys.argv:\n    raise ValueError('no')\nprint(sys.argv[1:])\nsys.exit(3)")
    program = str(Path(sys.executable).with_name("hf-distca"))
    for arguments, status, said in (
        (["--help", "-x", "--", "a"], 3, "['--help', '-x', '--', 'a']"),
        (["fail"], 1, "ValueError: no"),
    ):
        done = subprocess.run([program, "run", str(script), *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == status
        assert said in done.stdout + done.stderr
    missing = subprocess.run([program, "run", "none.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1
    assert f"there is no file 'none.py' in {tmp_path}" in missing.stderr


def test_a_command_that_is_no_python_is_run_beside(tmp_path: Path) -> None:
    from hf_distca.run import Options, run_command

    with pytest.raises(SystemExit) as ended:
        run_command(
            "bash", ["-c", f'echo "$PYTHONPATH" > {tmp_path}/path; cp "${{PYTHONPATH%%:*}}"/* {tmp_path}; exit 3'], Options()
        )
    assert ended.value.code == 3
    folder = Path((tmp_path / "path").read_text().split(os.pathsep)[0].strip())
    assert not folder.exists(), "what children begin with is gone at the end"
    assert "begin(Options(None, True, None))" in (tmp_path / "sitecustomize.py").read_text()
    assert os.environ.get("PYTHONPATH", "").split(os.pathsep)[0] != str(folder)


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
