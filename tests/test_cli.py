"""`hf-distca plan`, which plans a placement or deals lengths, and verbs that were removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import Result

import hf_distca
from cli_runs import check_one_line, run, run_well, write
from hf_distca.schedule.plan import Plan

SEGMENTS = [[[0, 0, 30000, 60000]], [[0, 30000, 60000, 60000]], [[1, 0, 100, 100]]]
DEALT = [10000, *[1000] * 6, 384]


def test_help_lists_plan_but_no_removed_verb() -> None:
    said = run("--help").output
    assert "plan" in said
    assert " deal " not in said
    assert run("--version").stdout == f"hf-distca {hf_distca.__version__}\n"


@pytest.mark.parametrize(
    ("command", "instead"),
    [
        ("deal lengths.json --ranks 4", "hf-distca plan LENGTHS --deal TOKENS_PER_RANK"),
        ("profile --ranks 2", "write a CostModel to a file"),
        ("simulate", "python benchmarks/simulated/simulate.py"),
        ("simulate --lengths prolong --tp 8", "python benchmarks/simulated/simulate.py"),
    ],
)
def test_removed_verbs_name_their_replacement(command: str, instead: str) -> None:
    check_one_line(run(*command.split()), instead)


@pytest.mark.parametrize("cost", ["pairs", "cpu", "cuda"])
def test_plan_of_segments_covers_every_row_once(tmp_path: Path, cost: str) -> None:
    file = write(tmp_path / "placement.json", {"rank_segments": SEGMENTS, "name": "any"})
    output = tmp_path / "plan.json"
    whole, split = f"--output {output} --cost {cost} --head-groups 1", f"-o {output} --cost {cost}"
    result = run_well("plan", file, *whole.split())
    assert "imbalance of causal pairs" in result.stdout
    tasks = json.loads(output.read_text())["tasks"]
    covered = sorted((task[0], position) for task in tasks for position in range(*task[1:3]))
    assert covered == [(0, n) for n in range(60000)] + [(1, n) for n in range(100)]
    assert Plan.from_json(output.read_text()).layout.world_size == 3
    run_well("plan", file, *split.split())
    plan = Plan.from_json(output.read_text())
    assert plan.layout.groups == (1 if cost == "pairs" else 4)
    assert (plan.heads * (plan.end - plan.start)).sum() == 60100


def test_plan_of_lengths_splits_at_the_given_tile(tmp_path: Path) -> None:
    file = write(tmp_path / "placement.json", {"lengths": [[65536], [1024] * 64, []]})
    options = "--tolerance 0.05 --min-gain 0.1 --tile 256 --query-heads 8 --key-value-heads 2"
    result = run_well("plan", file, *options.split(), "--head-dim", 64, "--head-groups", 1)
    ends = [task.end for task in Plan.from_json(result.stdout).tasks if task.document == 0]
    assert len(ends) > 1
    assert all(end % 256 == 0 for end in ends)


@pytest.mark.parametrize("window", [1024, 65536])
def test_plan_ignores_a_window_as_long_as_any_document(tmp_path: Path, window: int) -> None:
    file = write(tmp_path / "placement.json", {"lengths": [[65536], [512] * 128]})
    result = run_well("plan", file, "--window", window)
    assert f"{window} keys" in result.stderr
    # No document is longer than the longer of the two.
    assert ("as long as any document" in result.stderr) == (window == 65536)
    assert Plan.from_json(result.stdout).window == (1024 if window == 1024 else None)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("{", "", "is not JSON"),
        ([], "", "either 'rank_segments' or 'lengths'"),
        ({}, "", "it has neither"),
        ({"lengths": [[1]], "rank_segments": []}, "", "it has ['rank_segments', 'lengths']"),
        ({"lengths": [1]}, "", "one list per rank"),
        ({"lengths": [[1.5]]}, "", "1.5 must be an integer"),
        ({"lengths": [[0]]}, "", "length 0"),
        ({"lengths": [[10**30], [2048]]}, "", f"{10**30} is too large"),
        ({"rank_segments": [[3]]}, "", "segment 3 must be"),
        ({"rank_segments": [[[0, 1, 2]]]}, "", "starts at 1, but position 0 is next"),
        (
            {"rank_segments": [[[0, 0, 10, 5]]]},
            "",
            "segment [0, 0, 10, 5] ends at 10, but the document has only 5 tokens",
        ),
        ({"lengths": [[1]]}, "--tile 0", "tile=0"),
        ({"lengths": [[1]]}, "--window 0", "window=0"),
        ({"lengths": [[1]]}, "--tolerance 1.5", "tolerance=1.5"),
        ({"lengths": [[1]]}, "--cost-model h100_flash_attn_3", "a file that CostModel.to_json"),
        ({"lengths": [[1]]}, "--link-gigabytes inf", "inf: a rate is a number from 1e-9 to 1e9"),
        ({"lengths": [[8], [8]]}, "--ranks-per-node 3", "2 ranks cannot be divided into nodes"),
        ([8], "--ping-pong", "also give --deal TOKENS"),
        ({"lengths": [1]}, "--deal 4096", "must hold a list of document lengths, but it holds di"),
        ([16384, 0], "--deal 4096", "document 1 has length 0"),
        ([16383], "--deal 4096", "1 documents have 16383 tokens, but 3 ranks have room for 12288"),
        ([], "--deal 4096", "0 documents have 0 tokens"),
        ([16384], "--deal 4096 --ranks-per-node 3", "ranks_per_node=3 must divide ranks=4"),
        ([16384], "--deal 4096 --node-gigabytes nan", "--node-gigabytes nan"),
        ([16384], "--deal 4096 --ranks-per-link 0", "ranks_per_link=0"),
        ([8], "--deal 0", "tokens_per_rank=0"),
        ([8], "--deal -1", "tokens_per_rank=-1"),
        ([10**9], "--deal 1", "tokens would need 1000000000 ranks, but the limit is 65536"),
        ([8], "--deal 8 --output none/placement.json", "No such file"),
        ({"lengths": [[1]]}, "--output none/plan.json", "No such file"),
    ],
)
def test_bad_input_of_plan_is_a_one_line_error_without_output(
    tmp_path: Path, content: object, options: str, message: str
) -> None:
    output = tmp_path / "output.json"
    file = write(tmp_path / "input.json", content)
    check_one_line(run("plan", file, "--output", output, *options.split()), message)
    assert not output.exists()


@pytest.mark.parametrize("options", ["", "--deal 8"])
def test_missing_file_is_a_one_line_error(tmp_path: Path, options: str) -> None:
    check_one_line(run("plan", tmp_path / "none.json", *options.split()), "No such file")


def test_plan_reads_standard_input_and_writes_standard_output(tmp_path: Path) -> None:
    """Without --output, the plan goes to standard output and the messages to standard error. `plan`
    reads the output of `plan --deal`.
    """
    dealt = run_well("plan", "-", "--deal", "4096", given="[8192,4096,4096]")
    assert "4096 on each rank" in dealt.stderr
    for options in ((), ("--output", "-")):
        result = run_well("plan", "-", *options, given=dealt.stdout)
        assert Plan.from_json(result.stdout).layout.world_size == 4
        assert "imbalance of causal pairs" in result.stderr
    check_one_line(run("plan", "-", given="{"), "standard input is not JSON")


def test_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    file = tmp_path / "placement.json"
    file.write_text('{"lengths": [[16384], [2048]]}', encoding="utf-8-sig")
    run_well("plan", file)


def test_closed_standard_output_is_no_error(tmp_path: Path) -> None:
    """`hf-distca plan FILE | head -1` closes the output before the end."""
    file = write(tmp_path / "placement.json", {"lengths": [[16384], [2048] * 8]})
    read, written = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "hf_distca.tools.cli", "plan", str(file)]
    with os.fdopen(written, "wb") as closed:
        done = subprocess.run(
            words, stdout=closed, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert "hf-distca:" not in done.stderr
    assert "Traceback" not in done.stderr


def test_seconds_are_printed_only_with_the_costs_of_a_device(tmp_path: Path) -> None:
    """Counts of pairs are no seconds."""
    file = write(tmp_path / "placement.json", {"lengths": [[16384], [2048] * 8]})
    for cost, said in (("pairs", False), ("cuda", True)):
        result = run("plan", file, "--cost", cost)
        assert ("slowest rank, estimated" in result.stderr) == said
        assert "with no move at all" not in result.stderr
    assert "on 1 rank," in run("plan", write(file, {"lengths": [[5]]})).stderr


def deal(path: Path, lengths: list[int], *options: str | float) -> Result:
    """Deal lengths to ranks of 4096 tokens."""
    file = write(path / "lengths.json", lengths)
    result = run_well("plan", file, "--deal", 4096, "-o", path / "placement.json", *options)
    return result


def rows(path: Path) -> list[list[list[int]]]:
    found: list[list[list[int]]] = json.loads((path / "placement.json").read_text())[
        "rank_segments"
    ]
    return found


@pytest.mark.parametrize("cost", ["pairs", "cpu", "cuda"])
def test_dealt_documents_have_every_token_once(tmp_path: Path, cost: str) -> None:
    result = deal(tmp_path, DEALT, "--cost", cost)
    assert "4096 on each rank" in result.stdout
    assert ("imbalance of seconds" in result.stdout) == (cost != "pairs")
    ranks = rows(tmp_path)
    assert [sum(end - start for _, start, end, _ in rank) for rank in ranks] == [4096] * 4
    first = [segment[1:3] for rank in ranks for segment in rank if segment[0] == 0]
    assert sorted(position for ends in first for position in range(*ends)) == list(range(10000))
    assert {(d, n) for rank in ranks for d, _, _, n in rank} >= {(0, 10000), (7, 384)}


def test_plan_uses_the_costs_of_deal_by_default(tmp_path: Path) -> None:
    dealt = deal(tmp_path, DEALT)
    planned = run("plan", tmp_path / "placement.json", "--output", tmp_path / "plan.json")
    assert dealt.stdout.splitlines()[0] == planned.stdout.splitlines()[0]
    for line in ("imbalance of seconds", "slowest rank, estimated"):
        shown = [
            [text for text in result.stdout.splitlines() if line in text]
            for result in (dealt, planned)
        ]
        assert shown[0] == shown[1] != []


def test_nano_batches_share_no_document(tmp_path: Path) -> None:
    result = deal(tmp_path, [6000, *[500] * 20, 384], "--ping-pong")
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


def test_ranks_per_node_keeps_a_dealt_document_on_one_node(tmp_path: Path) -> None:
    options = "--tile 256 --query-heads 8 --key-value-heads 2 --head-dim 64 --window 512"
    deal(tmp_path, [6144, *[1024] * 10], *options.split(), "--ranks-per-node", 2)
    placed = enumerate(rows(tmp_path))
    assert len({rank // 2 for rank, row in placed for document, *_ in row if document == 0}) == 1


def test_link_rates_set_the_seconds_between_nodes(tmp_path: Path) -> None:
    """The output includes the bytes between nodes."""
    said = []
    for gigabytes in (40, 4):
        options = ("--ranks-per-node", 2, "--node-gigabytes", 300, "--link-gigabytes", gigabytes)
        dealt = deal(tmp_path, [12288, 1024, 1024, 1024, 1024], *options)
        assert "between nodes" in dealt.stdout
        said.append(float(dealt.stdout.split("slowest rank, estimated")[1].split()[0]))
    assert said[1] > 2 * said[0]
    lengths = '{"lengths": [[65536], [512], [65536], [512]]}'
    planned = run_well("plan", "-", "--cost", "cuda", "--ranks-per-node", "2", given=lengths)
    assert "between nodes              0.0 of" in planned.stderr
