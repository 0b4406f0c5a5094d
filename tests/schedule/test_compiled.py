"""Plans and shares are the same compiled and interpreted, and outdated caches are not used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import hf_distca

# These plans and layouts pass through every compiled function: windows, byte bounds, head groups,
# relays, nodes, speeds, dealing.
CODE = """
import hashlib, json, random
from dataclasses import replace
from hf_distca.config import DistCAConfig
from hf_distca.schedule.balance import balance
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.deal import deal
from hf_distca.schedule.layout import Layout
from hf_distca.schedule.ranks import Ranks
from hf_distca.schedule.share import compute_share

shape = AttentionShape(32, 8, 128, 128, 2)
cost = CostModel.make_analytic(shape, device_type="cuda")
layout = Layout.from_lengths([[2**17], [2**16, 2**16], [2**15] * 4, *[[4096] * 32] * 13])
lengths = [2**18, 2**17, *[40000] * 9, *[3000] * 180, *[517] * 400]
lengths.append(-sum(lengths) % 16 + 16)
tokens = sum(lengths) // 16
windowed = replace(cost, window=16384)
plans = [
    balance(layout, cost, DistCAConfig()),
    balance(layout, cost, DistCAConfig(ping_pong=True)),
    balance(layout, cost, DistCAConfig(ping_pong=True, head_groups=1)),
    balance(layout, cost, DistCAConfig(max_transient_bytes=2**31)),
    balance(layout, windowed, DistCAConfig(ping_pong=True)),
    balance(layout, windowed, DistCAConfig(max_transient_bytes=2**30)),
    balance(layout, cost, DistCAConfig(), Ranks(per_node=4)),
    balance(layout, cost, DistCAConfig(), Ranks(speeds=(0.5, *[1.0] * 14, 1.5))),
    balance(deal(lengths, 16, tokens, cost), cost, DistCAConfig()),
    balance(deal(lengths, 16, tokens, windowed), windowed, DistCAConfig()),
]
# Small random layouts: only interpreted code raises an error for an index beyond an array.
random_ = random.Random(0)
for _ in range(150):
    ranks, rows = random_.randint(2, 6), [[] for _ in range(6)]
    for document in range(random_.randint(1, 9)):
        at = 0
        for _ in range(random_.choice((1, 1, 2, 5))):
            length = random_.choice((1, 60, 900, 7000, 40000))
            rows[random_.randrange(ranks)].append((document, at, length))
            at += length
    window = random_.choice((None, None, None, 800))
    config = DistCAConfig(
        ping_pong=random_.random() < 0.5,
        min_gain=0.0,
        tolerance=random_.choice((0.0, 0.05)),
        tile=random_.choice((1, 128)),
    )
    per_node = random_.choice([None, *(size for size in (2, 3, 4) if ranks % size == 0)])
    speeds = random_.choice((None, tuple(random_.choice((0.5, 1.0, 1.3)) for _ in range(ranks))))
    layout = Layout.from_segments(rows[:ranks])
    plans.append(balance(layout, replace(cost, window=window), config, Ranks(speeds, per_node)))
assert sum(plan.relays is not None for plan in plans[-150:]) > 10
assert sum(plan.layout.groups > 1 for plan in plans[-150:]) > 10
assert all((plan.home != plan.server).any() for plan in plans[:8])
shares = [
    compute_share(plan, rank)
    for plan in plans
    for rank in range(plan.layout.world_size)
]
text = hashlib.sha256(json.dumps(shares).encode()).hexdigest()
print(json.dumps([*(plan.digest for plan in plans), text]))
"""

# A modification time that is older than any compiled file.
LONG_AGO = 1_577_836_800


def collect_digests(**environment: str) -> list[str]:
    source = Path(hf_distca.__file__).parents[1]
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**os.environ, "PYTHONPATH": str(source), **environment},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert run.returncode == 0, run.stderr
    found: list[str] = json.loads(run.stdout)
    return found


@pytest.mark.slow
def test_compiled_and_interpreted_code_make_the_same_plans() -> None:
    compiled, interpreted = collect_digests(), collect_digests(NUMBA_DISABLE_JIT="1")
    assert len(set(compiled)) > 5
    assert compiled == interpreted


def run_in(folder: Path, code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a folder, with only the NUMBA_ variables of `environment`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(
        command,
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


# A module with a compiled function, and code that calls the function twice.
LOOP = """
from hf_distca.schedule.compiled import compile_function
def count(number: int) -> int:
    return number + 0
count = compile_function(count, keep=(__file__,))
"""
CALL = "import loop; print(loop.count(1)); print(loop.count(1))"


@pytest.fixture
def loop(tmp_path: Path) -> Path:
    """Write the module into a folder, with a modification time long ago."""
    folder = tmp_path / "schedule"
    folder.mkdir()
    source = folder / "loop.py"
    source.write_text(LOOP)
    os.utime(source, (LONG_AGO, LONG_AGO))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("elsewhere", [False, True])
def test_cached_code_of_changed_sources_is_not_used(
    tmp_path: Path, loop: Path, elsewhere: bool
) -> None:
    """`cp -p` and unpacked archives can change a file without a change of its size and time."""
    environment = {"NUMBA_CACHE_DIR": str(tmp_path / "kept")} if elsewhere else {}

    def call() -> list[str]:
        run = run_in(loop, CALL, **environment)
        assert run.returncode == 0, run.stderr
        return run.stdout.split()

    source = loop / "loop.py"
    source.write_text(LOOP.replace("+ 0", "+ 1"))
    os.utime(source, (LONG_AGO, LONG_AGO))
    assert call() == ["2", "2"]
    assert list(tmp_path.rglob("*.nbi"))
    source.write_text(LOOP.replace("+ 0", "+ 9"))
    os.utime(source, (LONG_AGO, LONG_AGO))
    assert call() == ["10", "10"]


@pytest.mark.slow
def test_cache_that_cannot_be_written_is_reported_once(tmp_path: Path, loop: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    (loop / "__pycache__").touch()
    folders = {name: str(taken / "cache") for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HOME")}
    run = run_in(loop, CALL, **folders)
    assert run.stdout.split() == ["1", "1"], run.stderr
    assert run.stderr.count("NUMBA_CACHE_DIR") == 1


def test_make_moves_stays_a_plain_function_if_jit_is_disabled() -> None:
    code = "from hf_distca.schedule.trial import make_moves; print(type(make_moves).__name__)"
    run = run_in(Path(hf_distca.__file__).parents[1], code, NUMBA_DISABLE_JIT="1")
    assert run.stdout.strip() == "function", run.stderr
