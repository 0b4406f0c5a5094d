"""Commands of the pages: scripts run with small sizes, and commands print the output that pages
show.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

import scripts
from benchmark_modules import import_benchmark
from pages import PAGES, ROOT, commands, on_a_page, printed, words_of
from test_example import LAUNCH, run_program
from turns import in_turn

# Commands that need rights that not every machine grants.
NODES = "python benchmarks/network/networks.py"
PARTS_OF_CORES = "python benchmarks/steps/pipeline.py --stages 4 --core-share 0.45 --tokens 16384"
IN_STAGES = (
    "python benchmarks/network/overlap.py --stages --tokens 4096 --rounds 3 --latencies 0 20 80"
)
# A command that imports little, so it starts in a new interpreter, like for users.
AS_USERS_DO = "python benchmarks/schedule/one_factor.py"
PICTURE = "python benchmarks/gpu/balance_picture.py benchmarks/results --output balance.png"
# Options that make a command of the pages small enough for a test, without --json out.json. ALWAYS
# has the commands of every run.
ALWAYS = {AS_USERS_DO: "", PICTURE: ""}
# Commands that take seconds. A test run takes some of them.
IN_TURN = {
    "python benchmarks/host/host_time.py": (
        f"--ranks 8 --tokens 4096 --repeats 1 --documents 2 --before {ROOT}"
    ),
    "python benchmarks/steps/observe.py": "--tokens 128 --layers 1 --heads 2 --rounds 1",
    "python benchmarks/memory/call_memory.py": "--tokens 512 --heads 2 --ranks 2 --rounds 1",
    "python benchmarks/schedule/scheduler.py --placements benchmarks/placements": "--repeats 1",
    "python benchmarks/schedule/deal.py --placements benchmarks/placements": "--repeats 1",
    "python benchmarks/schedule/levels.py --placements benchmarks/placements": "",
    "python benchmarks/schedule/masks.py": "--ranks 8 --batches 1",
    "python benchmarks/host/block_layers.py": "--tokens 256 --turns 1",
    "python benchmarks/schedule/recurrent.py --placements benchmarks/placements": (
        "--heads 1 --tokens 16 --rounds 1"
    ),
    "python benchmarks/schedule/group_size.py": (
        "--ranks 16 --sizes 8 --tokens 8192 --longest 8192 --seeds 1"
    ),
    "python benchmarks/schedule/row_order.py": (
        "--sizes 16x2048 --accumulation 2 --micro-batches 2 --seeds 1"
    ),
    (
        "python benchmarks/schedule/context_parallel.py --placement"
        " benchmarks/placements/long_tail_8_ranks.json"
    ): "",
    "python benchmarks/steps/loss_curve.py": (
        "--steps 2 --tokens 128 --layers 1 --picture curves.png"
    ),
    "python benchmarks/steps/dealt_step_time.py": "--tokens 512 --layers 1 --heads 2 --rounds 1",
    "python benchmarks/steps/dealt_step_time.py --hybrid --layers 4 --tokens 4096": (
        "--tokens 512 --heads 2 --rounds 1"
    ),
}
# Commands that take long even with small sizes.
LONG = {
    "python benchmarks/steps/step_time.py": (
        "--tokens 512 --layers 1 --heads 2 --rounds 1 --sdpa-rounds 0"
    ),
    "python benchmarks/network/overlap.py": (
        "--tokens 512 --layers 1 --heads 2 --rounds 1 --latencies 0"
    ),
    IN_STAGES: "--tokens 512 --layers 2 --heads 2 --rounds 1 --latencies 0",
    NODES: "--tokens 256 --layers 1 --heads 2 --rounds 1 --batches 1 --rates 200",
    "python benchmarks/memory/peak_memory.py": "--cases 0",
    "python benchmarks/steps/rates.py": "--ranks 2 --tokens 256 --layers 1 --heads 2 --steps 14",
    "python benchmarks/steps/pool_step.py": "--tokens 512 --layers 1 --heads 2 --rounds 1",
    "python benchmarks/steps/pipeline.py": (
        "--tokens 64 --micro-batches 2 --layers 2 --heads 2 --rounds 1"
    ),
    PARTS_OF_CORES: "--tokens 64 --micro-batches 4 --rounds 1",
    "python tests/engines/matrix.py --quick": "--engine FSDP1",
    "python tests/engines/equal_training.py": '--only "Trainer, DDP, 2 ranks" --steps 2',
}
SMALL = ALWAYS | IN_TURN | LONG

PRINTED = [(page, *shown) for page in PAGES for shown in printed(page)]


@pytest.mark.parametrize(
    ("page", "block", "text"),
    [pytest.param(*shown, id=f"{shown[0]} {shown[1][-1]}") for shown in PRINTED],
)
def test_commands_print_the_output_shown_on_the_page(
    page: str, block: list[str], text: str, tmp_path: Path
) -> None:
    """Run the commands of a block in one folder. The output is that of the last command, and may be
    only a part of it.
    """
    for command in block[:-1]:
        run_program(["bash", "-c", on_a_page(command)], tmp_path, 60)
    lines = scripts.run(words_of(block[-1]), tmp_path).splitlines()
    assert f"\n{text}\n" in "\n".join(["", *(line.rstrip() for line in lines), ""]), (
        f"{page} shows other output"
    )


def test_pages_with_shown_output_are_found() -> None:
    assert {"docs/api.md", "docs/is_it_worth_it.md"} <= {page for page, *_ in PRINTED}


def test_extras_that_pages_install_exist() -> None:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    installing = r'pip install (?:-c constraints\.txt )?-e "\.\[([\w,]+)\]"'
    named = {found[1] for command in commands() if (found := re.fullmatch(installing, command))}
    assert named
    assert {extra for names in named for extra in names.split(",")} <= {
        *setup["options.extras_require"]
    }


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "command",
    in_turn(
        [pytest.param(one, marks=[pytest.mark.slow] * (one in LONG)) for one in SMALL],
        15,
        ALWAYS,
    ),
)
def test_command_of_a_page_runs_with_small_sizes(command: str, tmp_path: Path) -> None:
    if command in (NODES, PARTS_OF_CORES):
        _has_rights_or_skip(command)
    words = words_of(command)
    run = run_program if command == AS_USERS_DO else scripts.run
    written = [] if command == PICTURE else ["--json", "out.json"]
    run([*words, *shlex.split(SMALL[command]), *written], tmp_path, timeout=180)
    if command == PICTURE:
        assert (tmp_path / words[-1]).read_bytes().startswith(b"\x89PNG")
    else:
        assert json.loads((tmp_path / "out.json").read_text())


def _has_rights_or_skip(command: str) -> None:
    try:
        with (
            import_benchmark("nodes").two_nodes()
            if command == NODES
            else import_benchmark("core_share").core_shares(1, 0.5)
        ):
            pass
    except RuntimeError as error:
        pytest.skip(str(error))


def test_page_of_benchmarks_lists_every_script() -> None:
    """Each row has the purpose and the duration of a script that exists."""
    listed = re.findall(
        r"^\| `(?:python )?benchmarks/([\w/]+\.py)[^`]*` \| .+ \| .+ \|$",
        (ROOT / "benchmarks" / "README.md").read_text(),
        flags=re.MULTILINE,
    )
    folder = ROOT / "benchmarks"
    scripts_of = [path for path in folder.rglob("*.py") if "__main__" in path.read_text()]
    assert len(scripts_of) > 30
    assert sorted(listed) == sorted(str(path.relative_to(folder)) for path in scripts_of)


def test_modules_of_benchmarks_have_unique_names() -> None:
    """Scripts import each other by name, from any folder."""
    names = [path.stem for path in (ROOT / "benchmarks").rglob("*.py")]
    assert len(names) == len(set(names))


def test_shipped_placements_equal_the_output_of_their_script(tmp_path: Path) -> None:
    words = words_of("python benchmarks/placements/make.py")
    scripts.run([*words, "--out", str(tmp_path)], tmp_path, timeout=60)
    shipped = sorted((ROOT / "benchmarks/placements").glob("*.json"))
    assert [path.read_bytes() for path in sorted(tmp_path.glob("*.json"))] == [
        path.read_bytes() for path in shipped
    ]
    assert len(shipped) == 3


def test_ci_runs_the_checks_of_make_test() -> None:
    checks = (ROOT / ".ci" / "run").read_text()
    assert "make --no-print-directory test " in checks
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


def test_make_example_runs_the_example() -> None:
    path = {"PATH": os.environ["PATH"]}  # without the settings of a make that runs these tests
    make = ["make", "-Bn", "example"]
    done = subprocess.run(make, cwd=ROOT, env=path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == LAUNCH + "finetune_long_documents.py"


def test_pre_commit_accepts_its_configuration(tmp_path: Path) -> None:
    pytest.importorskip("pre_commit", reason='needs pip install -e ".[dev]"')
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    run_program(["git", "init", "--quiet"], tmp_path, 20)
    run_program(["pre-commit", "validate-config"], tmp_path, 60)
    run_program(words_of("pre-commit install"), tmp_path, 60)
    assert "pre-commit" in (tmp_path / ".git" / "hooks" / "pre-commit").read_text()


def test_plan_command_of_the_pages_writes_tasks(tmp_path: Path) -> None:
    lengths = [[16384], [2048] * 8]
    write = on_a_page(f"""echo '{{"lengths": {lengths}}}' > placement.json""")
    run_program(["bash", "-c", write], tmp_path, 60)
    scripts.run(words_of("hf-distca plan placement.json --output plan.json"), tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["tasks"]
