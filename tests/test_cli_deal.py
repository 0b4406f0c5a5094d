from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import Result

from cli_runs import check_one_line, run, write


def deal(path: Path, content: object, *options: str | int, tokens: int = 4096) -> Result:
    file = write(path / "lengths.json", content)
    return run(
        "plan",
        file,
        "--deal",
        tokens,
        "--output",
        path / "placement.json",
        *options,
    )


def rows(path: Path) -> list[list[list[int]]]:
    found: list[list[list[int]]] = json.loads((path / "placement.json").read_text())[
        "rank_segments"
    ]
    return found


def test_the_verb_of_its_own_names_the_option() -> None:
    assert " deal " not in run("--help").output
    check_one_line(
        run("deal", "lengths.json", "--ranks", 4), "hf-distca plan LENGTHS --deal TOKENS_PER_RANK"
    )


@pytest.mark.parametrize("cost", ["pairs", "cpu", "cuda"])
def test_a_placement_that_plan_reads(tmp_path: Path, cost: str) -> None:
    result = deal(tmp_path, [10000, *[1000] * 6, 384], "--cost", cost)
    assert result.exit_code == 0, result.output
    assert "4096 on each rank" in result.stdout
    assert ("imbalance of seconds" in result.stdout) == (cost != "pairs")
    ranks = rows(tmp_path)
    assert [sum(end - start for _, start, end, _ in rank) for rank in ranks] == [4096] * 4
    covered = sorted(
        position
        for rank in ranks
        for d, start, end, n in rank
        if d == 0
        for position in range(start, end)
    )
    assert covered == list(range(10000))
    assert {(d, n) for rank in ranks for d, _, _, n in rank} >= {(0, 10000), (7, 384)}
    planned = run(
        "plan", tmp_path / "placement.json", "--output", tmp_path / "plan.json", "--cost", cost
    )
    assert planned.exit_code == 0, planned.output


def test_plan_counts_what_deal_dealt_by_unless_told_otherwise(tmp_path: Path) -> None:
    dealt = deal(tmp_path, [10000, *[1000] * 6, 384])
    planned = run("plan", tmp_path / "placement.json", "--output", tmp_path / "plan.json")
    assert dealt.stdout.splitlines()[0] == planned.stdout.splitlines()[0]
    for line in ("imbalance of seconds", "slowest rank, estimated"):
        told = [
            [text for text in result.stdout.splitlines() if line in text]
            for result in (dealt, planned)
        ]
        assert told[0] == told[1] != []


def test_nano_batches_share_no_document(tmp_path: Path) -> None:
    result = deal(tmp_path, [6000, *[500] * 20, 384], "--ping-pong")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("nano-batch  ") == 2
    first = json.loads((tmp_path / "placement.json").read_text())["first_nano_batch"]
    halves: tuple[set[int], set[int]] = set(), set()
    for rank, tokens in zip(rows(tmp_path), first, strict=True):
        at = 0
        for document, start, end, _ in rank:
            halves[at >= tokens].add(document)
            at += end - start
            assert at <= tokens or at - (end - start) >= tokens, "a segment crosses the cut"
        assert at == 4096
    assert not halves[0] & halves[1]


def test_options(tmp_path: Path) -> None:
    options = (
        "--tile",
        256,
        "--query-heads",
        8,
        "--key-value-heads",
        2,
        "--head-dim",
        64,
        "--ranks-per-node",
        2,
        "--window",
        512,
    )
    result = deal(tmp_path, [6144, *[1024] * 10], *options)
    assert result.exit_code == 0, result.output
    assert (
        len(
            {
                rank // 2
                for rank, row in enumerate(rows(tmp_path))
                for document, *_ in row
                if document == 0
            }
        )
        == 1
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"lengths": [1]}, "must hold a list of document lengths, but it holds dict"),
        ([16384, 0], "document 1 has length 0"),
        ([16383], "1 documents have 16383 tokens, but 3 ranks have room for 12288"),
        ([], "0 documents have 0 tokens"),
    ],
)
def test_bad_lengths(tmp_path: Path, content: object, message: str) -> None:
    check_one_line(deal(tmp_path, content), message)
    assert not (tmp_path / "placement.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks-per-node", 3), "ranks_per_node=3 must divide ranks=4"),
        (("--node-gigabytes", "nan"), "--node-gigabytes nan"),
        (("--ranks-per-link", 0), "ranks_per_link=0"),
    ],
)
def test_bad_options(tmp_path: Path, options: tuple[str | int, ...], message: str) -> None:
    check_one_line(deal(tmp_path, [16384], *options), message)


def test_links_of_nodes(tmp_path: Path) -> None:
    """The rates are those that were given, and what goes between nodes is said."""
    said = []
    for gigabytes in (40, 4):
        options = ("--ranks-per-node", 2, "--node-gigabytes", 300, "--link-gigabytes", gigabytes)
        dealt = deal(tmp_path, [12288, 1024, 1024, 1024, 1024], *options)
        assert dealt.exit_code == 0, dealt.output
        assert "between nodes" in dealt.stdout
        said.append(float(dealt.stdout.split("slowest rank, estimated")[1].split()[0]))
    assert said[1] > 2 * said[0]
    planned = run(
        "plan",
        "-",
        "--cost",
        "cuda",
        "--ranks-per-node",
        "2",
        given='{"lengths": [[65536], [512], [65536], [512]]}',
    )
    assert planned.exit_code == 0, planned.output
    assert "between nodes              0.0 of" in planned.stderr
    wrong = run("plan", "-", "--ranks-per-node", "3", given='{"lengths": [[8], [8]]}')
    check_one_line(wrong, "2 ranks cannot be divided into nodes of 3")


def test_standard_input_and_output() -> None:
    dealt = run("plan", "-", "--deal", "4096", given="[8192,4096,4096]")
    assert dealt.exit_code == 0, dealt.output
    assert "4096 on each rank" in dealt.stderr
    planned = run("plan", "-", given=dealt.stdout)
    assert planned.exit_code == 0, planned.output


def test_bad_numbers(tmp_path: Path) -> None:
    check_one_line(
        deal(tmp_path, [10**9], tokens=1),
        "--deal 1: 1000000000 tokens would need 1000000000 ranks, but the limit is 65536",
    )
    for tokens in (0, -1):
        check_one_line(deal(tmp_path, [8], tokens=tokens), f"tokens_per_rank={tokens}")
    check_one_line(
        run("plan", write(tmp_path / "lengths.json", [8]), "--ping-pong"), "also give --deal TOKENS"
    )


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    options = ("--deal", 8, "--output")
    check_one_line(
        run("plan", tmp_path / "none.json", *options, tmp_path / "placement.json"), "No such file"
    )
    check_one_line(
        run(
            "plan",
            write(tmp_path / "lengths.json", [8]),
            *options,
            tmp_path / "none" / "placement.json",
        ),
        "No such file",
    )
