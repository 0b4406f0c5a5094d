"""``hf-distca simulate`` as a user runs it, and what it says to wrong input."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner, Result

from hf_distca.cli import app
from hf_distca.cli.lengths import open_documents
from hf_distca.schedule.cost import AttentionShape, CostModel
from hf_distca.schedule.profiles import Profile
from pages import on_a_page, words_of

SMALL = (
    "--ranks",
    8,
    "--tokens-per-rank",
    8192,
    "--batches",
    1,
    "--strategy",
    "plain",
    "--strategy",
    "dealt",
)


def run(*arguments: str | Path | float) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def lengths(path: Path, content: object) -> Path:
    file = path / "lengths.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_a_table_with_what_is_assumed(tmp_path: Path) -> None:
    result = run("simulate", "--lengths", lengths(tmp_path, [6000, *[500] * 20]), *SMALL)
    assert result.exit_code == 0, result.output
    for text in (
        "hf-distca, dealt",
        "packed rows",
        "llama-3-8b on 8 h100",
        "Assumptions",
        "ml-engineering",
        "21 lengths",
    ):
        assert text in result.stdout
    silent = run(
        "simulate", "--lengths", lengths(tmp_path, [6000, *[500] * 20]), *SMALL, "--no-assumptions"
    )
    assert "Assumptions" not in silent.stdout


def test_json_has_every_figure() -> None:
    result = run("simulate", "--lengths", "equal:1024", *SMALL, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["setting"]["checkpointing"] == "none"
    assert [one["strategy"] for one in found["strategies"]] == ["plain", "dealt"]
    for one in found["strategies"]:
        assert one["step_seconds"] > 0
        assert one["fits"]
    assert all(set(one) == {"about", "assumed"} for one in found["assumptions"])


def test_what_does_not_fit_is_checkpointed() -> None:
    found = json.loads(
        run(
            "simulate", "--lengths", "equal:1024", *SMALL, "--tokens-per-rank", 65536, "--json"
        ).stdout
    )
    assert found["setting"]["checkpointing"] == "full"


def test_a_column_of_a_table_and_standard_input(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {"input_ids": [[1] * 1000, [2] * 3000], "tokens": [500, 700], "text": ["a", "b"]}
    )
    pq.write_table(table, tmp_path / "data.parquet")
    for column, name in (("input_ids", "mean 2000"), ("tokens", "mean 600")):
        result = run("simulate", "--lengths", tmp_path / "data.parquet", "--column", column, *SMALL)
        assert result.exit_code == 0, result.output
        assert name in " ".join(result.stdout.split())
    with pa.ipc.new_stream(str(tmp_path / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "data.parquet").unlink()
    assert run("simulate", "--lengths", tmp_path, *SMALL).exit_code == 0
    one_line(run("simulate", "--lengths", tmp_path, "--column", "text", *SMALL), "holds string")
    one_line(
        run("simulate", "--lengths", tmp_path, "--column", "ids", *SMALL),
        "no column 'ids', only 'input_ids'",
    )
    (tmp_path / "data.arrow").write_bytes(b"no table")
    one_line(run("simulate", "--lengths", tmp_path, *SMALL), "cannot be read as a table")
    (tmp_path / "empty").mkdir()
    one_line(
        run("simulate", "--lengths", tmp_path / "empty", *SMALL), "no .parquet or .arrow files"
    )
    given = CliRunner().invoke(
        app, ["simulate", "--lengths", "-", *map(str, SMALL)], input="[3000, 4000]"
    )
    assert given.exit_code == 0, given.output


def test_a_model_is_counted_by_what_it_has(tmp_path: Path) -> None:
    """A hybrid model, with a number that JSON does not have, beside the same sizes with attention
    in every layer.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    kinds = {"bamba": {"attn_layer_indices": [9, 18, 27]}, "llama": {}}
    assumed = []
    for kind, changes in kinds.items():
        transformers.AutoConfig.for_model(kind, **sizes, **changes).save_pretrained(tmp_path / kind)
        options = (
            "--lengths",
            lengths(tmp_path, [65536]),
            *SMALL,
            "--checkpointing",
            "none",
            "--model",
            tmp_path / kind,
        )
        result = run("simulate", *options, "--json")
        assert result.exit_code == 0, result.output
        found = json.loads(result.stdout)
        assumed += [fact["assumed"] for fact in found["assumptions"] if fact["about"] == "model"]
    assert "32 layers, bf16; 3 times core attention" in assumed[0]
    assert "32 layers, bf16; 32 times core attention" in assumed[1]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "t5"}')
    one_line(
        run("advise", "--lengths", "equal:64", "--ranks", 2, "--model", tmp_path / "other"),
        "does not support t5 models",
    )


def test_rows_in_lines(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for rows, column, mean in (
        (
            [{"input_ids": [1] * 300, "text": "a"}, {"input_ids": []}, {"input_ids": [2] * 500}],
            "input_ids",
            400,
        ),
        ([{"length": 10}, {"length": 30}], "input_ids", 20),
        ([{"tokens": 5, "input_ids": [1]}], "tokens", 5),
    ):
        file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        assert open_documents(str(file), column, None).source.split(", ")[1] == f"mean {mean}"
    for text, message in (
        (
            '{"text": "a"}\n{"text": "b"}',
            "line 1: a row must have 'input_ids' or 'length', it has only 'text'. Name another one",
        ),
        (
            '{"input_ids": [1]}\n[1]',
            "line 2: a row must have 'input_ids' or 'length', it has but [1]",
        ),
        ('{"input_ids": [1]}\n{"input_ids": "a b"}', "line 2: 'a b' must be an integer"),
        ("{}\n", "it has only ."),
        ("{", "line 1: Expecting"),
        ("", "holds no document lengths"),
    ):
        file.write_text(text)
        one_line(run("advise", "--lengths", file, *SMALL[:6]), message)
    one_line(run("advise", "--lengths", tmp_path / "none.jsonl", *SMALL[:6]), "No such file")
    file.rename(tmp_path / "rows.json").write_text('{"text": "a"}\n{"text": "b"}')
    one_line(
        run("advise", "--lengths", tmp_path / "rows.json", *SMALL[:6]),
        "Rows, one a line, are read by advise and simulate, from a .jsonl",
    )


def test_texts_are_counted_by_their_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In lines and in a saved data set, each of another word; the command of the page."""
    datasets = pytest.importorskip("datasets")
    words = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = str(tmp_path / "model")
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    texts = ["a " * count for count in (10, 20, 30, 40)]
    file = tmp_path / "documents.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    datasets.Dataset.from_dict({"story": texts}).save_to_disk(tmp_path / "saved")
    for path, column in ((file, "input_ids"), (tmp_path / "saved", "story")):
        source = open_documents(str(path), column, None, folder).source
        assert source.startswith("4 lengths, mean 25, longest 40")
    monkeypatch.chdir(tmp_path)
    command = words_of("hf-distca advise --lengths documents.jsonl --tokenizer model --ranks 8")
    result = run(*command[1:], "--tokens-per-rank", 50, "--batches", 1)
    assert result.exit_code == 0, result.output
    assert "documents.jsonl, 1 batch" in result.stdout
    (tmp_path / "none").mkdir()
    one_line(run(*command[1:4], "--tokenizer", "none", "--ranks", 8), "--tokenizer none: ")


def test_advice_ends_in_the_lines_to_paste() -> None:
    result = run("advise", "--lengths", "prolong", "--ranks", 16, "--batches", 1)
    assert result.exit_code == 0, result.output
    *_, dealing, command = result.stdout.rstrip().splitlines()
    assert dealing == "  hf_distca.deal(trainer, tokens_per_rank=65536)"
    assert "--tokens-per-rank 65536 accelerate launch train.py" in command
    assert "per_device_train_batch_size x max_length" in result.stdout


def test_of_a_saved_data_set_only_its_own_files_count(tmp_path: Path) -> None:
    """Beside them `map` leaves what it cached."""
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict(
        {"input_ids": [[1] * 10, [1] * 20, [1] * 30, [1] * 40]}
    ).save_to_disk(saved, num_shards=2)
    loaded = datasets.load_from_disk(saved)
    loaded.map(lambda row: {"input_ids": row["input_ids"] * 100}, load_from_cache_file=False)
    assert list(saved.glob("cache-*.arrow"))
    for state in (None, "[]", "{"):  # as saved, or of something else
        if state is not None:
            (saved / "state.json").write_text(state)
        assert open_documents(str(saved), "input_ids", None).source.startswith(
            "4 lengths, mean 25, longest 40"
        )


def test_a_profile_is_read(tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    profile.write_text(
        CostModel.make_analytic(AttentionShape(1, 1, 64, 64, 2), device_type="cpu").to_json()
    )
    slow, fast = (
        json.loads(run("simulate", "--lengths", "equal:8192", *SMALL, *options, "--json").stdout)[
            "strategies"
        ][0]["step_seconds"]
        for options in (("--profile", profile), ())
    )
    assert slow > 10 * fast
    shipped = Profile.list_shipped()[0]
    profile.write_text(Profile.load(shipped).to_json())
    named, from_file = (
        json.loads(
            run("simulate", "--lengths", "equal:8192", *SMALL, "--profile", source, "--json").stdout
        )["strategies"]
        for source in (shipped, profile)
    )
    assert named == from_file
    for name, value, message in (
        ("exchange_seconds", 1e308, "no seconds that a device takes"),
        ("exchange_bytes_per_second", 5e-324, "no seconds that a device takes"),
        ("exchange_seconds", math.nan, "no cost model"),
    ):
        profile.write_text(
            json.dumps(
                {
                    **json.loads(
                        CostModel.make_analytic(AttentionShape(1, 1, 64, 64, 2)).to_json()
                    ),
                    name: value,
                }
            )
        )
        one_line(run("simulate", "--lengths", "equal:1024", *SMALL, "--profile", profile), message)
    profile.write_text('{"format": 99}')
    one_line(
        run("simulate", "--lengths", "equal:1024", *SMALL, "--profile", profile),
        "no profile in JSON",
    )
    profile.write_text("{}")
    one_line(
        run("simulate", "--lengths", "equal:1024", *SMALL, "--profile", profile),
        "no cost model in JSON",
    )
    one_line(
        run("simulate", "--lengths", "equal:1024", *SMALL, "--profile", profile),
        "profile.json: the text is no cost model",
    )
    profile.write_bytes(b"\xff\xfe\x00")
    one_line(
        run("simulate", "--lengths", "equal:1024", *SMALL, "--profile", profile), "is not text"
    )
    one_line(
        run("simulate", "--lengths", "equal:1024", *SMALL, "--profile", tmp_path / "none.json"),
        "No such file",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not JSON"),
        ("\x00", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        (f"[{'9' * 5000}]", "holds a number of thousands of digits"),
        ({"lengths": [1]}, "must hold a list of document lengths, it holds dict"),
        ([1.5], "1.5 must be an integer"),
        ("[NaN]", "nan must be an integer"),
        ([True], "True must be an integer"),
        ([10**30], "is too large"),
        ([2**40], "the limit is 2**32"),
        ([500, 0], "document 1 has length 0"),
        ([-5], "document 0 has length -5"),
        ([], "holds no document lengths"),
        ([100_000], "longer than a global batch of 65536"),
    ],
)
def test_bad_lengths(tmp_path: Path, content: object, message: str) -> None:
    one_line(run("simulate", "--lengths", lengths(tmp_path, content), *SMALL), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--ranks", 0), "ranks=0 must be a whole number from 1 to 65536"),
        (("--ranks", -4), "ranks=-4"),
        (("--ranks", 10**12), "ranks=1000000000000"),
        (("--tokens-per-rank", 0), "tokens_per_rank=0"),
        (("--tokens-per-rank", 10**15), "tokens_per_rank="),
        (("--model", "gpt-9"), "neither a config.json nor one of llama-3.2-1b"),
        (("--hardware", "abacus"), "hardware 'abacus' is not known"),
        (("--tp", 3), "must be a multiple of tensor"),
        (("--tp", 0), "tensor=0"),
        (("--pp", 64), "stages=64 must be a whole number from 1 to 32"),
        (("--link-gbps", "nan"), "link_gbps=nan must be a positive number"),
        (("--link-gbps", 0), "link_gbps=0.0"),
        (("--micro-batches", 0), "micro_batches=0"),
        (("--batches", 0), "batches=0"),
        (("--max-length", 0), "max_length=0"),
        (("--strategy", "hope"), "strategy 'hope' is not known"),
        (("--lengths", "none.json"), "none.json: No such file"),
        (("--lengths", ""), "lengths '' are neither a file"),
        (("--lengths", "zipf"), "lengths 'zipf' are neither a file nor one of pretrain, prolong"),
        (("--lengths", "equal:nan"), "lengths 'equal:nan'"),
        (
            ("--lengths", "equal:1", "--ranks", 65536, "--tokens-per-rank", 2**28),
            "would hold over 33554432 of these documents",
        ),
        (("--ranks-per-node", 0), "ranks_per_node=0"),
        (
            ("--hardware", "a100", "--kernel", "flash_attn_3"),
            "kernel 'flash_attn_3' has no published timings on a100",
        ),
        (("--seed", -1), "seed=-1"),
        (("--lengths", "none.parquet"), "none.parquet: No such file"),
        (("--ranks", "many"), "Invalid value for '--ranks'"),
        (("--sharding", "some"), "is not one of 'auto', 'fsdp', 'zero1', 'ddp'. See"),
        (("--hope", 1), "No such option: --hope"),
    ],
)
def test_bad_options(options: tuple[str | int, ...], message: str) -> None:
    one_line(run("simulate", "--lengths", "equal:1024", *SMALL, *options), message)


def test_advice_on_documents_of_ones_own(tmp_path: Path) -> None:
    arguments = (
        "advise",
        "--lengths",
        lengths(tmp_path, [32768, *[500] * 160]),
        "--ranks",
        16,
        "--tokens-per-rank",
        8192,
        "--batches",
        1,
    )
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    for text in ("times as long", "Settings", 'attn_implementation="distca"', "packed rows"):
        assert text in result.stdout
    found = json.loads(run(*arguments, "--json").stdout)
    assert found["advice"]["worthwhile"]
    assert len(found["strategies"]) > 10
    one_line(run(*arguments, "--ranks", 0), "ranks=0")
    one_line(run(*arguments, "--lengths", tmp_path / "none.json"), "No such file")


@pytest.mark.slow
def test_the_longest_document() -> None:
    """The commands of the page, which need no lengths."""
    words = words_of("hf-distca advise --longest --model qwen3-8b --ranks 8 --kernel flash_attn_3")
    printed = run(*words[1:])
    assert printed.exit_code == 0, printed.output
    for text in ("+ chunked loss", "tokens a rank", "exchange", "host", "full", "A rank has 80 GB"):
        assert text in printed.stdout
    told = json.loads(run(*words[1:], "--json").stdout)
    assert [row["way"] for row in told["longest"]] == [
        "checkpointing",
        "+ chunked loss",
        "+ offload",
        "+ fused layers",
    ]
    for row in told["longest"]:
        memory = row["step"]["memory"]
        assert row["step"]["peak_bytes"] == pytest.approx(sum(memory.values()) - memory["host"])
        assert f"{row['tokens']:,}" in printed.stdout
    assert (
        run(
            *words_of("hf-distca advise --longest --ranks 8 --hardware h200 --kernel flash_attn_3")[
                1:
            ]
        ).exit_code
        == 0
    )


@pytest.mark.slow
def test_the_longest_document_where_none_fits() -> None:
    one_line(
        run("advise", "--longest", "--ranks", 1),
        "llama-3-8b on 1 h100 with 80 GB each: a document of 1024 tokens a rank",
    )
    one_line(run("advise", "--longest", "--ranks", 0), "ranks=0 must be a whole number")
    one_line(run("advise", "--ranks", 2), "--lengths is missing")


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_advice_for_few_ranks(tmp_path: Path, ranks: int) -> None:
    """Of one rank every way of the loader is the same step; of few, one long document decides."""
    file = lengths(tmp_path, [900, 400, 20, 30, 50, 600])
    result = run(
        "advise",
        "--lengths",
        file,
        "--ranks",
        ranks,
        "--tokens-per-rank",
        1000,
        "--batches",
        1,
        "--json",
    )
    assert result.exit_code == 0, result.output
    seconds = {
        row["strategy"]: row["step_seconds"] for row in json.loads(result.stdout)["strategies"]
    }
    if ranks == 1:
        assert seconds["batch-rebalance"] == seconds["lpt"] == seconds["plain"]


def test_the_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(
        ["bash", "-c", on_a_page("echo '[90000, 40000, 2000, 3000, 5000]' > lengths.json")],
        check=True,
        timeout=60,
    )
    for words in (
        words_of("hf-distca advise --lengths prolong --ranks 64"),
        words_of("hf-distca advise --lengths lognormal:1000:0.5 --ranks 64"),
        words_of("hf-distca simulate --lengths lengths.json --ranks 64 --hardware h200"),
        words_of(
            "hf-distca simulate --lengths lengths.json --ranks 64 --hardware h100 --kernel"
            " flash_attn_3"
        ),
        words_of(
            "hf-distca simulate --lengths prolong --max-length 524288 --ranks 256 --tp 8"
            " --tokens-per-rank 131072 --hardware h200"
        ),
        words_of(
            "hf-distca simulate --lengths pretrain --ranks 64 --tp 8 --pp 2 --micro-batches 8"
            " --tokens-per-rank 131072 --hardware h200"
        ),
    ):
        result = run(*words[1:], "--batches", 1)
        assert result.exit_code == 0, result.output
        assert "hf-distca, dealt" in result.stdout


def test_no_torch_and_no_transformers() -> None:
    code = (
        "import sys\n"
        "from hf_distca.cli import app\n"
        "try:\n"
        "    app(['simulate', '--lengths', 'equal:64', '--ranks', '2', '--tokens-per-rank',"
        " '1024', '--batches', '1'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'accelerate')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


def one_line(result: Result, message: str) -> None:
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output
