"""``hf-distca profile``, and what reads profiles."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

import forks
import scripts
from hf_distca.config import DistCAConfig
from hf_distca.errors import ConfigError
from hf_distca.measure import machine_profile
from hf_distca.runtime.group import AttentionGroup
from hf_distca.schedule.cost import AttentionShape
from hf_distca.schedule.profiles import Profile
from hf_distca.tools.cli.profile import format_rates
from ranks import RankPool
from test_cli_deal import run

SMALL = ("--dtype", "float32", "--width", 16, "--heads", "2:1", "--batch-seconds", 0)
WANTED = machine_profile.ProfileRequest(
    torch.device("cpu"), (torch.float32,), (16,), ((2, 1),), batch_seconds=0.0
)


def test_kernels_are_measured_and_their_errors_told(tmp_path: Path) -> None:
    result = run("profile", *SMALL, "--name", "small", "--output", tmp_path / "own.json")
    assert result.exit_code == 0, result.output
    profile = Profile.load(tmp_path / "own.json")
    (rates,) = profile.kernels
    assert (profile.name, profile.device, rates.kernel, rates.head_dim, rates.element_bytes) == (
        "small",
        "cpu",
        "cpu",
        16,
        4,
    )
    assert (profile.inside, profile.between) == (None, None)
    assert rates.fitted > rates.kept_aside > 0
    assert set(rates.errors) == {
        f"{way}_{what}" for way in ("forward", "backward") for what in ("median", "largest")
    }
    assert profile.versions["torch"] == torch.__version__
    assert profile.date.startswith(time.strftime("%Y-", time.gmtime()))
    assert "cpu, 4 bytes, width 16" in result.stdout
    assert "hf-distca" in profile.made_by


def exchanges(rank: int) -> str | None:
    said: list[str] = []
    profile = machine_profile.measure_on_these_ranks(WANTED, 1, "two", "a test", said.append)
    assert len(said) == WANTED.count_steps(2) - (0 if rank == 0 else 2)
    return None if profile is None else profile.to_json()


def test_ranks_of_a_launcher_time_their_exchanges(rank_pool: Callable[[int], RankPool]) -> None:
    first, second = rank_pool(2)(exchanges)
    assert second is None
    link = Profile.from_json(first).inside
    assert link is not None
    assert link.ranks == 2
    assert link.bytes_per_second > 0
    assert set(link.errors) == {"exchange_median", "exchange_largest"}
    assert Profile.from_json(first).between is None


def exchanges_of_nodes(rank: int) -> str | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        patch.setenv("GROUP_RANK", str(rank))
        return exchanges(rank)


def test_nodes_are_told_apart_as_in_training(rank_pool: Callable[[int], RankPool]) -> None:
    """Also those that have one host's name, by the number that a launcher gave them."""
    profile = Profile.from_json(rank_pool(2)(exchanges_of_nodes)[0])
    assert profile.inside is None
    assert profile.between is not None


@pytest.mark.slow
def test_ranks_are_started_where_asked(tmp_path: Path) -> None:
    program = "from hf_distca.tools.cli import app\nif __name__ == '__main__':\n    app()\n"
    (tmp_path / "program.py").write_text(program)
    words = [
        "python",
        str(tmp_path / "program.py"),
        "profile",
        *map(str, SMALL),
        "--ranks",
        "2",
        "--output",
        "own.json",
    ]
    scripts.run(words, tmp_path, timeout=120)
    assert Profile.load(tmp_path / "own.json").inside is not None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "int8"), "int8"),
        (("--heads", "many"), "--heads many"),
        (("--heads", "3:2"), "query_heads a multiple"),
        (("--device", "toaster"), "toaster"),
        (("--device", "meta"), "none here"),
        (("--output", "nowhere/own.json"), "nowhere/own.json: there is no folder nowhere"),
        (("--output", "."), ".: Is a directory"),
    ],
)
def test_mistakes_end_in_one_line(options: tuple[str, str], said: str) -> None:
    result = run("profile", *options, "--batch-seconds", 0)
    assert result.exit_code == 2
    (line,) = [line for line in result.output.splitlines() if "hf-distca:" in line]
    assert said in line
    assert "Traceback" not in result.output


def test_batches_that_would_never_end() -> None:
    result = run("profile", "--batch-seconds", "inf")
    assert result.exit_code == 2
    assert "Invalid value for '--batch-seconds'" in result.stderr


def test_a_rate_that_nothing_limits_is_no_number() -> None:
    """Where bytes alone explain the seconds, the fit has no limit for flops."""
    found = Profile.load(Profile.list_shipped()[0])
    backward = replace(found.kernels[0].backward, flops_per_second=float("inf"))
    line = format_rates(
        replace(found, kernels=(replace(found.kernels[0], backward=backward),))
    ).splitlines()[1]
    assert "Gflop/s forward, as fast as bytes come backward" in line


def test_plan_and_deal_take_a_profile(tmp_path: Path) -> None:
    name = Profile.list_shipped()[0]
    (tmp_path / "lengths.json").write_text(json.dumps([3072, 1024]))
    dealt = tmp_path / "dealt.json"
    words = [
        "deal",
        tmp_path / "lengths.json",
        "--ranks",
        2,
        "--tokens-per-rank",
        2048,
        "--output",
        dealt,
        "--cost-model",
        name,
    ]
    for command in (
        words,
        ["plan", dealt, "--output", tmp_path / "plan.json", "--cost-model", name],
    ):
        result = run(*command)
        assert result.exit_code == 0, result.output
        assert f"profile {name}" in result.stdout
        assert "slowest rank, estimated" in result.stdout
    result = run("plan", dealt, "--cost-model", "nowhere.json")
    assert result.exit_code == 2
    assert "nowhere.json: neither a profile" in result.output
    result = run("plan", dealt, "--cost-model", dealt)
    assert result.exit_code == 2
    assert f"{dealt}: the text is no profile" in result.output


def test_shipped_profiles_say_how_they_were_made() -> None:
    for name in Profile.list_shipped():
        profile = Profile.load(name)
        assert profile.name == name
        published = bool(profile.sources)
        assert profile.made_by.startswith(
            "python benchmarks/simulated/published_timings.py "
            if published
            else "hf-distca profile "
        )
        assert profile.inside is not None
        assert all(rates.kept_aside and rates.errors for rates in profile.kernels)
        cost = DistCAConfig(cost_model=profile).cost_model
        assert isinstance(cost, Profile)
        assert (
            cost.make_cost_model(AttentionShape(8, 2, 64, 64, 4)).estimate_seconds(512, 1024)[0] > 0
        )


def test_no_other_cost_model_is_taken() -> None:
    with pytest.raises(ConfigError, match="cost_model="):
        DistCAConfig(cost_model="own.json")  # type: ignore[arg-type]


def test_a_group_of_one_has_no_exchanges() -> None:
    profile = machine_profile.measure_on_these_ranks(WANTED, None, "one", "a test", lambda _: None)
    assert AttentionGroup.create().size == 1
    assert profile is not None
    assert profile.inside is None


def listening() -> set[str]:
    """Addresses that this process listens on, as /proc/net has them."""
    own: set[str] = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # other threads close theirs
            own.add(str(path.readlink()))
    rows = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path("/proc/net", name).read_text().splitlines()[1:]
    ]
    return {row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own}


def addresses_of_new_ranks(rank: int, folder: Path) -> None:
    heard: list[str] = []
    with patch.object(
        machine_profile, "measure_on_these_ranks", lambda *_: heard.extend(listening())
    ):
        machine_profile._run_rank(rank, 2, folder, WANTED, 1, "", "", heard.append)
    (folder / f"heard {rank}").write_text(" ".join(heard))


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="of Linux")
def test_new_ranks_listen_where_only_this_machine_reaches(tmp_path: Path) -> None:
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    changes = {"GLOO_SOCKET_IFNAME": others[0]} if others else {}  # as clusters set it
    processes = [forks.start(addresses_of_new_ranks, rank, tmp_path, **changes) for rank in (0, 1)]
    for process in processes:
        process.join(60)
        process.kill()
    heard = [(tmp_path / f"heard {rank}").read_text().split() for rank in (0, 1)]
    assert heard == [["0100007F"], ["0100007F"]]  # 127.0.0.1
