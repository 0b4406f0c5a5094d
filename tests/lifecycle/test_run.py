"""`hf-distca run` and `python -m hf_distca.tools.run` with a script that imports no hf_distca."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import cli_runs
import hf_distca
import scripts
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.tools.run import Options, find_command, read_options
from pages import ROOT, words_of

SCRIPT = """
import argparse, sys
from neighbour import write
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import Trainer, TrainingArguments, default_data_collator

def collate(rows):
    return default_data_collator(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--attn_implementation")
    parser.add_argument("--output")
    parser.add_argument("--own_collator", action="store_true")
    options = parser.parse_args()
    config = LlamaConfig(
        hidden_size=32, intermediate_size=32, vocab_size=31,
        num_hidden_layers=1, num_attention_heads=2,
        attn_implementation=options.attn_implementation,
    )
    arguments = TrainingArguments(
        options.output, max_steps=2, per_device_train_batch_size=2, use_cpu=True,
        report_to="none", save_strategy="no",
    )
    tokens = [{"input_ids": list(range(1, 9)), "labels": list(range(1, 9))} for _ in range(4)]
    own = {"data_collator": collate} if options.own_collator else {}
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=tokens, **own)
    trainer.train()
    attention = trainer.model.config._attn_implementation
    seen = {"argv": sys.argv, "attention": attention, "world": arguments.world_size}
    seen["customized"] = hasattr(sys, "was_customized")
    seen["tokens"] = [len(row["input_ids"]) for row in trainer.train_dataset]
    if "hf_distca.integration.current_session" in sys.modules:
        config = sys.modules["hf_distca.integration.current_session"].current_session().config
        cost_model = getattr(config.cost_model, "name", None)
        seen["settings"] = [config.balance, config.tolerance, cost_model]
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


@pytest.mark.parametrize(
    ("ours", "given", "attention", "said"),
    [
        ("", "distca", "distca", ""),
        ("--attn-implementation distca", "", "distca", ""),
        (
            "--attn-implementation distca",
            "sdpa",
            "sdpa",
            "hf-distca run --instead-of sdpa balances them",
        ),
        (
            "--instead-of flash_attention_2",
            "flash_attention_2",
            "flash_attention_2",
            'distca stands in for attn_implementation="flash_attention_2"',
        ),
    ],
)
def test_option_sets_the_attention_of_an_unmodified_script(
    ours: str, given: str, attention: str, said: str, script: Path, tmp_path: Path
) -> None:
    """A default keeps the attention that a script names, and prints the option that balances it."""
    options = ["--attn_implementation", given] if given else []
    options += ["--output", str(tmp_path)]
    run = [*words_of("python -m hf_distca.tools.run"), *ours.split()]
    output = scripts.run([*run, str(script), *options], tmp_path)
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["argv"], seen["attention"]) == ([str(script), *options], attention)
    assert said in output
    assert ("balances them" in output) == ("balances them" in said)


def test_help_of_the_module_names_its_launch_command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["hf_distca.tools.run", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("hf_distca.tools.run", run_name="__main__")
    assert ended.value.code == 0
    assert "accelerate launch -m hf_distca.tools.run" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_child_interpreters_of_a_command_train_under_distca(script: Path, tmp_path: Path) -> None:
    """Four levels of interpreters: hf-distca, the command, accelerate's launcher, and two ranks.
    The script names no attention.
    """
    starter = Path(__file__).with_name("starts_accelerate.py")
    (tmp_path / "distca.yaml").write_text(
        "tolerance: 0.1\ntokens_per_rank: 4\ncost_model: costs.json\n"
    )
    cost = CostModel.make_analytic(AttentionShape(8, 2, 64, 64, 4), device_type="cpu")
    (tmp_path / "costs.json").write_text(cost.to_json())
    config = str(ROOT / "configs/accelerate/cpu_2_processes.yaml")
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\n")
    ours = words_of("hf-distca run --attn-implementation distca accelerate launch train.py")[2:-3]
    ours += words_of("hf-distca run --config distca.yaml accelerate launch train.py")[2:-3]
    command = [*ours, str(starter), config, str(script), "--output", str(tmp_path)]
    path = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    done = run_in_interpreter(*command, folder=tmp_path, timeout=180, PYTHONPATH=path)
    assert done.returncode == 0, done.stdout + done.stderr
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["world"], seen["attention"], seen["customized"]) == (2, "distca", True)
    assert (seen["settings"], set(seen["tokens"])) == ([True, 0.1, "analytic cpu"], {4})
    assert done.stderr.count("micro-batches on 2 ranks") == 1, done.stderr
    assert "in kernel cpu" in done.stderr


def test_command_line_overrides_the_settings_file(script: Path, tmp_path: Path) -> None:
    """accelerate starts two ranks, and each reads the file."""
    command = words_of(
        "hf-distca run --config distca.yaml --set balance=false --tokens-per-rank 8192 accelerate"
        " launch train.py"
    )
    _, _, *ours, launcher, verb, _ = command
    settings = (
        "attn_implementation: distca\ntokens_per_rank: 3\ncollator: replace\n"
        "tolerance: 0.1\nbalance: true"
    )
    (script.parent / "distca.yaml").write_text(settings)
    ours[ours.index("8192")] = "4"
    config = str(ROOT / "configs/accelerate/cpu_2_processes.yaml")
    launch = [launcher, verb, "--config_file", config, "-m", "hf_distca.tools.run"]
    said = scripts.run(
        [*launch, *ours, script.name, "--own_collator", "--output", str(tmp_path)], script.parent
    )
    assert "hf_distca.deal replaces collate with PackingCollator" in said
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert (seen["world"], seen["attention"]) == (2, "distca")
    assert (seen["settings"], set(seen["tokens"])) == ([False, 0.1, None], {4})
    assert "distca deals 4 documents of 32 tokens" in said


@pytest.mark.parametrize(
    ("written", "words", "said"),
    [
        (
            "pingpong: true",
            "",
            "distca.yaml: there is no setting 'pingpong'; the nearest is 'ping_",
        ),
        (
            'tokens_per_rank: "2048"',
            "",
            "must be a whole number. Numbers in quotes are text",
        ),
        ("attn_implementation: sdpa", "", "attn_implementation='sdpa' must be 'distca'."),
        ("instead_of: flex_attention", "", "distca cannot stand in for 'flex_attention'"),
        ("summary: 3", "", "summary=3 must be True or False."),
        ("collator: mine", "", "collator='mine' must be 'check' or 'replace'."),
        ("tile: 8", "--set tile=0", "--set: tile=0 must be at least 1"),
        ("tile: 8", "--set ping_pong", "must be NAME=VALUE, such as --set ping_pong=true."),
        ("servers: 1.5", "", "servers=1.5 must be a whole number of at least 0."),
        ("server_wait: .nan", "", "server_wait=nan must be a number of seconds from 1"),
        ("server_address: a:1", "", "there is no setting 'server_address'; the nearest is 'server"),
        ("tile: 8", "--server-address a:1", "No such option: --server-address"),
        ("tile: 8", "--observ", "No such option: --observ"),
        ("tile: 8", "--tokens-per-rank 0", "--tokens-per-rank"),
        (None, "", "distca.yaml: No such file or directory."),
    ],
)
def test_wrong_settings_are_a_one_line_error_before_the_script_starts(
    written: str | None, words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("raise SystemExit('this has started')")
    if written is not None:
        Path("distca.yaml").write_text(written)
    done = cli_runs.run("run", "--config", "distca.yaml", *words.split(), "train.py")
    cli_runs.check_one_line(done, said)


@pytest.mark.parametrize(
    ("around", "given"),
    [
        ({"summary": False, "collator": "replace"}, {"summary": True, "collator": "check"}),
        ({"observe": True, "server_wait": 9.0}, {"observe": False, "server_wait": 300.0}),
        ({"attn_implementation": "distca", "summary": False}, {"instead_of": "sdpa"}),
    ],
)
def test_child_processes_get_the_options_of_the_innermost_run(
    around: dict[str, Any], given: dict[str, Any]
) -> None:
    """An option of the inner run counts even if its value is the default."""
    outer = read_options(None, [], **around).make_environment({})
    child = Options.read(read_options(None, [], **given).make_environment(outer))
    assert child._asdict() == Options(**{**around, **given})._asdict()


def test_child_processes_get_the_options_of_the_innermost_file(tmp_path: Path) -> None:
    (tmp_path / "distca.yaml").write_text("summary: true\ncollator: check")
    outer = read_options(None, ["summary=false", "collator=replace"]).make_environment({})
    inner = read_options(tmp_path / "distca.yaml", [])
    assert Options.read(inner.make_environment(outer)) == Options()


@pytest.mark.parametrize("text", ['{"attn_implementation": "distca", "newer": 1}', "[1]"])
def test_options_of_another_version_are_refused_by_every_process(text: str, tmp_path: Path) -> None:
    """The error names the options. No process trains without them."""
    (tmp_path / "train.py").write_text("print('this has started')")
    child_start = Path(hf_distca.__file__).parent / "tools" / "cli" / "child_start"
    path = os.pathsep.join([str(child_start), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HF_DISTCA_RUN", text)
        run = cli_runs.run("run", tmp_path / "train.py")
    child = subprocess.run(
        [sys.executable, tmp_path / "train.py"],
        env=os.environ | {"HF_DISTCA_RUN": text, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    for status, said, output in (
        (run.exit_code, run.stderr, run.output),
        (child.returncode, child.stderr, child.stdout + child.stderr),
    ):
        assert (status, said.count("\n")) == (2, 1), output
        assert said.startswith("hf-distca: "), output
        assert f"HF_DISTCA_RUN={text!r} does not hold options of this version" in said, output
        assert "this has started" not in output


def test_empty_environment_variables_hold_no_options(tmp_path: Path) -> None:
    assert Options.read({"HF_DISTCA_RUN": ""}) == Options.read({}) == Options()
    made = Options("distca").make_environment({"HF_DISTCA_RUN": "", "PYTHONPATH": ""})
    assert Options.read(made) == Options("distca")


@pytest.mark.parametrize(
    ("words", "noted"),
    [
        (["--tokens-per-rank", "512", "train.py"], True),
        (["--set", "tokens_per_rank=512", "train.py", "--lr", "1"], True),
        (["--tokens-per-rank", "512", "--instead-of", "sdpa", "train.py"], False),
        (["--tokens-per-rank", "512", "--attn-implementation", "distca", "train.py"], False),
        (["--tokens-per-rank", "512", "train.py", "--attn_implementation=distca"], False),
        (["train.py"], False),
    ],
)
def test_dealing_without_distca_attention_prints_a_note_at_the_start(
    words: list[str], noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dealing alone is no error: the script may still load its model with distca."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    monkeypatch.setattr("hf_distca.tools.run.run_command", lambda *_: None)
    done = cli_runs.run("run", *words)
    assert done.exit_code == 0
    assert (
        "--instead-of sdpa" in done.stderr and "--attn-implementation distca" in done.stderr
    ) == noted
    assert "hf_distca." not in done.stderr


def test_script_may_replace_the_settings_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "distca.yaml").write_text("tolerance: 0.1")
    (tmp_path / "train.py").write_text(
        "import hf_distca, transformers.modeling_utils\n"
        "from hf_distca.integration.current_session import current_session\n"
        "print(current_session().config.tolerance)\n"
        "print(hf_distca.configure(hf_distca.DistCAConfig(tile=8)).tolerance)\n"
    )
    said = scripts.run(
        [*words_of("python -m hf_distca.tools.run"), "--config", "distca.yaml", "train.py"],
        tmp_path,
    )
    assert said.splitlines()[-2:] == ["0.1", "0.01"]


@pytest.mark.slow
def test_default_attention_applies_to_causal_models_of_proven_families() -> None:
    code = """
from transformers import BertConfig, BertModel, GPTNeoXConfig, GPTNeoXForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM
from transformers import MptConfig, MptForCausalLM
from hf_distca.tools.run import Options, begin
begin(Options("distca"))
small = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 31}
small |= {"num_hidden_layers": 1, "num_attention_heads": 2}
models = [
    LlamaForCausalLM(LlamaConfig(**small)),
    GPTNeoXForCausalLM(GPTNeoXConfig(**small)),
    BertModel(BertConfig(**small)),
    MptForCausalLM(MptConfig(d_model=32, n_heads=2, n_layers=1, vocab_size=31)),
]
print([model.config._attn_implementation for model in models])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == "['distca', 'distca', 'sdpa', 'eager']"
    assert "does not change the attention of mpt models" in done.stderr


def test_command_passes_arguments_to_the_script_and_returns_its_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "if 'fail' in sys.argv:\n"
        "    raise ValueError('no')\n"
        "print(sys.argv[1:])\n"
        "sys.exit(3)"
    )
    for arguments, status, said in (
        (["--help", "-x", "--", "a"], 3, "['--help', '-x', '--', 'a']"),
        (["fail"], 1, "ValueError: no"),
    ):
        done = run_in_interpreter(script, *arguments, folder=tmp_path)
        assert done.returncode == status
        assert said in done.stdout + done.stderr


def run_in_interpreter(
    *words: str | Path, folder: Path, path: str = "", timeout: float = 60, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Run `hf-distca run` with these words, in a new interpreter."""
    program = str(Path(sys.executable).with_name("hf-distca"))
    environment = os.environ | {"PATH": os.pathsep.join([path, os.environ["PATH"]])} | changes
    return subprocess.run(
        [program, "run", *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def write_executable(path: Path, *lines: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/bash", *lines, ""]))
    path.chmod(0o755)
    return path


def test_path_runs_a_file_and_bare_name_runs_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a shell, a command's name never runs a file of the current folder."""
    here, commands = tmp_path / "here", tmp_path / "commands"
    for name in ("tool", "train.sh", "other"):
        write_executable(here / name, "echo the file; exit 3")
    write_executable(commands / "tool", "echo the command")
    (here / "script.py").touch()
    (here / "other").chmod(0o644)
    for word, said, status in (("./train.sh", "the file", 3), ("tool", "the command", 0)):
        done = run_in_interpreter(word, folder=here, path=str(commands))
        assert (done.returncode, done.stdout.strip()) == (status, said), (word, done.stderr)
    monkeypatch.chdir(here)
    monkeypatch.setenv("PATH", str(commands))
    for word, path in (
        ("./tool", here / "tool"),
        ("tool", commands / "tool"),
        ("script.py", here / "script.py"),
        ("../commands/tool", commands / "tool"),
        (str(here / "train.sh"), here / "train.sh"),
    ):
        assert find_command(word).samefile(path), word
    for word in ("other", "train.sh"):
        with pytest.raises(
            FileNotFoundError,
            match=rf"no command '{word}' on the PATH.* The file in this folder is \./{word}\.",
        ):
            find_command(word)


def test_script_without_a_shebang_runs_in_a_shell(tmp_path: Path) -> None:
    """The Python processes that the script starts get the options, too."""
    script = tmp_path / "train.sh"
    script.write_text(
        f"echo $1 $BASH_VERSION; {sys.executable} -c 'import sitecustomize as s;"
        " print(s.__file__)'; exit 3\n"
    )
    script.chmod(0o755)
    done = run_in_interpreter("./train.sh", "argument", folder=tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("argument ")
    assert "child_start" in done.stdout


def test_command_that_cannot_run_is_a_one_line_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "plain.sh").write_text("echo")
    write_executable(tmp_path / "binary").write_bytes(b"\x7fELF, but no program")
    os.mkfifo(tmp_path / "pipe.py")
    for words, said in (
        (["./plain.sh"], "Permission denied"),
        (["./binary"], "Exec format error"),
        (["./pipe.py"], "no file"),
        (["-m", "no_such.module"], "no module 'no_such.module'"),
        (["-m", "importlib"], "no module 'importlib.__main__'"),
        (["train.py", "--help"], f"no file 'train.py' in {tmp_path}, and no such command"),
        (["--instead-of", "flex_attention", "train.py"], "cannot stand in for 'flex_attention'"),
        ([], "Missing argument 'script'"),
    ):
        cli_runs.check_one_line(cli_runs.run("run", *words), said)


def test_module_runs_under_its_name_with_its_arguments(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in ("module", "__main__"):
        (package / f"{name}.py").write_text("import package, sys\nprint(__name__, sys.argv)")
    for name, file in (("package.module", "module.py"), ("package", "__main__.py")):
        done = run_in_interpreter("-m", name, "-m", "--help", folder=tmp_path)
        assert done.stdout.strip() == f"__main__ ['{package / file}', '-m', '--help']", done.stderr


@pytest.mark.parametrize(
    "wrong",
    ["open('no such file')", "raise EOFError('no more')", "raise BrokenPipeError(32, 'no reader')"],
)
def test_error_of_the_script_ends_in_its_traceback(wrong: str, tmp_path: Path) -> None:
    """The traceback also appears for errors that typer handles for its own commands."""
    (tmp_path / "script.py").write_text(wrong)
    done = run_in_interpreter("script.py", folder=tmp_path)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert wrong in done.stderr


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_command_and_leaves_no_files(stop: signal.Signals, tmp_path: Path) -> None:
    write_executable(tmp_path / "long.sh", "echo $$", "exec sleep 100")
    program = str(Path(sys.executable).with_name("hf-distca"))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    command_line = [program, "run", "./long.sh"]
    # Tests that run in the background may ignore interrupts, and children inherit that.
    heeding = partial(signal.signal, stop, signal.SIG_DFL)
    with subprocess.Popen(
        command_line, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, preexec_fn=heeding
    ) as process:
        assert process.stdout is not None
        command = int(process.stdout.readline())
        process.send_signal(stop)
        assert process.wait(20) == -stop
        with pytest.raises(ProcessLookupError):
            os.kill(command, 0)
    assert not list(temporary.iterdir())


CLEANS_UP = """import time
try:
    print("begun", flush=True)
    time.sleep(100)
finally:
    print("cleaned up", flush=True)
"""


@pytest.mark.parametrize("module", [False, True])
def test_script_handles_an_interrupt_itself(module: bool, tmp_path: Path) -> None:
    """The script can clean up. An interrupt that it does not catch ends it."""
    (tmp_path / "script.py").write_text(CLEANS_UP)
    words = ["-m", "script"] if module else ["script.py"]
    heeding = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    command = [str(Path(sys.executable).with_name("hf-distca")), "run", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=tmp_path, preexec_fn=heeding, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        said, error = process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGINT  # the status that a shell returns
    assert said == "cleaned up\n"
    assert 'script.py", line' in error
    assert error.endswith("KeyboardInterrupt\n")


SLEEPER = """
import os, time
from pathlib import Path

if __name__ == "__main__":
    Path(os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(100)
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_every_rank_of_a_launcher(stop: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SLEEPER)
    program, *ours = words_of("hf-distca run --config distca.yaml accelerate launch train.py")
    (tmp_path / "distca.yaml").write_text("tile: 64")
    ours[-1:-1] = ["--config_file", str(ROOT / "configs/accelerate/cpu_2_processes.yaml")]
    heeding = partial(
        signal.signal, stop, signal.default_int_handler if stop == signal.SIGINT else signal.SIG_DFL
    )
    command = [str(Path(sys.executable).with_name(program)), *ours]
    ranks = [tmp_path / "0", tmp_path / "1"]
    with subprocess.Popen(
        command, cwd=tmp_path, preexec_fn=heeding, stderr=subprocess.DEVNULL
    ) as process:
        try:
            wait_for(lambda: all(rank.is_file() and rank.read_text() for rank in ranks), 90)
            process.send_signal(stop)
            assert process.wait(30) != 0
            wait_for(
                lambda: not any(Path("/proc", rank.read_text()).exists() for rank in ranks), 10
            )
        finally:
            process.kill()
            for rank in ranks:
                if rank.is_file() and Path("/proc", rank.read_text() or "none").exists():
                    os.kill(int(rank.read_text()), signal.SIGKILL)


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_start_code_of_child_processes_lies_in_the_package(tmp_path: Path) -> None:
    """Processes that outlive the run keep the folder in PYTHONPATH, so it must lie where nobody
    else can add files.
    """
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text("import sys\nsys.was_customized = True\n")
    child = (
        "import os, sys, hf_distca.tools.run as r; print(sys.was_customized,"
        " r.Options.read(os.environ), os.environ['PYTHONPATH'])"
    )
    write_executable(tmp_path / "starts.sh", f'exec {sys.executable} -c "{child}"')
    before = os.pathsep.join([str(hidden), os.environ.get("PYTHONPATH", "")])
    options = "--attn-implementation distca --no-summary --instead-of sdpa --tokens-per-rank 64"
    command = [*options.split(), "--set", "tile=64", "./starts.sh"]
    gone = str(tmp_path / "none")
    done = run_in_interpreter(*command, folder=tmp_path, TMPDIR=gone, PYTHONPATH=before)
    package = Path(hf_distca.__file__).parent
    customized, begun = done.stdout.split(maxsplit=1)[0], done.stdout.partition(" ")[2]
    assert customized == "True", done.stderr
    assert begun.startswith(
        "Options(attn_implementation='distca', summary=False, instead_of='sdpa',"
        " tokens_per_rank=64, settings={'tile': 64}, "
    )
    added = begun.split()[-1].removesuffix(before).rstrip(os.pathsep).split(os.pathsep)
    assert all(Path(path).is_relative_to(package) for path in added), added
