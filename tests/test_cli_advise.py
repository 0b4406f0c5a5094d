"""`hf-distca advise` as a user runs it, and its errors for wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from cli_runs import check_one_line, run, run_well, write
from hf_distca.tools.cli.lengths import open_documents
from pages import words_of

SMALL = ("--ranks", 8, "--tokens-per-rank", 8192, "--batches", 1)


def test_advise_prints_a_table_and_lines_to_paste(tmp_path: Path) -> None:
    words = np.random.default_rng(0).lognormal(7.5, 1.5, 400).astype(int).clip(1, 65536)
    file = write(tmp_path / "lengths.json", words.tolist())
    arguments = ("--lengths", file, *SMALL, "--ranks", 32)
    result = run_well("advise", *arguments)
    for text in (
        "As it is, the slowest rank has",
        "llama-3-8b on 32 h100, 8192 tokens a rank",
        "samples balanced over ranks",
        "context parallel",
        "hf-distca, as given",
        "hf-distca, dealt",
        "per_device_train_batch_size x max_length",
        'attn_implementation="distca"',
        "\n  hf_distca.deal(trainer, tokens_per_rank=8192)\n",
        "--tokens-per-rank 8192 accelerate launch train.py",
    ):
        assert text in result.stdout
    found = json.loads(run("advise", *arguments, "--json").stdout)
    assert found["advice"]["worthwhile"]
    assert found["lengths"].startswith("400 lengths, ")
    assert len(found["ways"]) == 5
    assert {"title", "seconds", "attention", "kept"} <= found["ways"][0].keys()


def test_options_of_advise_change_the_estimated_seconds() -> None:
    def seconds(*options: object) -> dict[str, float]:
        result = run_well("advise", "--lengths", "prolong", *SMALL, "--json", *map(str, options))
        return {way["title"]: way["seconds"] for way in json.loads(result.stdout)["ways"]}

    usual = seconds("--max-length", 65536)
    for options, faster in (
        (("--hardware", "b200"), True),
        (("--kernel", "flash_attn_3"), True),
        (("--no-checkpointing",), True),
        (("--model", "llama-34b"), False),
        (("--ranks-per-node", 1, "--link-gigabytes", 0.5), False),
    ):
        changed = seconds("--max-length", 65536, *options)
        title = "hf-distca, dealt"
        assert (changed[title] < usual[title]) == faster, options


def test_lengths_come_from_a_column_of_a_table_or_standard_input(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    table = pa.table(
        {"input_ids": [[1] * 1000, [2] * 3000], "tokens": [500, 700], "text": ["a", "b"]}
    )
    pq.write_table(table, tmp_path / "data.parquet")
    for column, name in (("input_ids", "mean 2000"), ("tokens", "mean 600")):
        data = str(tmp_path / "data.parquet")
        result = run_well("advise", "--lengths", data, "--column", column, *SMALL, "--json")
        assert name in json.loads(result.stdout)["lengths"]
    with pa.ipc.new_stream(str(tmp_path / "data.arrow"), table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "data.parquet").unlink()
    run_well("advise", "--lengths", tmp_path, *SMALL)
    for column, said in (
        ("text", "holds string"),
        ("ids", "no column 'ids'. Its columns: 'input_ids'"),
    ):
        check_one_line(run("advise", "--lengths", tmp_path, "--column", column, *SMALL), said)
    (tmp_path / "data.arrow").write_bytes(b"no table")
    check_one_line(run("advise", "--lengths", tmp_path, *SMALL), "cannot be read as a table")
    (tmp_path / "data.arrow").unlink()
    check_one_line(run("advise", "--lengths", tmp_path, *SMALL), "no .parquet or .arrow files")
    run_well("advise", "--lengths", "-", *map(str, SMALL), given="[3000, 4000]")


def test_model_is_counted_from_its_config(tmp_path: Path) -> None:
    """A hybrid model takes less time than a model of the same sizes with attention in every layer.
    The hybrid model's config has a number that JSON lacks.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    }
    kinds = {"bamba": {"attn_layer_indices": [9, 18, 27]}, "llama": {}}
    seconds = []
    for kind, changes in kinds.items():
        transformers.AutoConfig.for_model(kind, **sizes, **changes).save_pretrained(tmp_path / kind)
        result = run_well(
            *("advise", "--lengths", write(tmp_path / "lengths.json", [65536]), *SMALL, "--json"),
            *("--model", tmp_path / kind),
        )
        seconds.append(json.loads(result.stdout)["ways"][-1]["seconds"])
    assert seconds[0] < 0.8 * seconds[1]


def test_lengths_come_from_the_lines_of_a_jsonl_file(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    ids = [{"input_ids": [1] * 300, "text": "a"}, {"input_ids": []}, {"input_ids": [2] * 500}]
    for rows, column, mean in (
        (ids, "input_ids", 400),
        ([{"length": 10}, {"length": 30}], "input_ids", 20),
        ([{"tokens": 5, "input_ids": [1]}], "tokens", 5),
    ):
        file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
        assert open_documents(str(file), column, None).source.split(", ")[1] == f"mean {mean}"
    for text, message in (
        (
            '{"text": "a"}\n{"text": "b"}',
            "has no column 'input_ids'. Its columns: 'text'. Name one with",
        ),
        ('{"input_ids": [1]}\n[1]', "cannot be read as a table: JSON parse error: "),
        ('{"input_ids": [1]}\n{"input_ids": "a b"}', "in row 1"),
        ('{"input_ids": "a b"}', "holds string: it must hold lists of tokens, or lengths"),
        ("{}\n", "has no column 'input_ids'. Its columns: none. Name"),
        ("{", "cannot be read as a table"),
        ("", "cannot be read as a table: Empty JSON file"),
    ):
        file.write_text(text)
        check_one_line(run("advise", "--lengths", file, *SMALL), message)
    check_one_line(run("advise", "--lengths", tmp_path / "none.jsonl", *SMALL), "No such file")
    file.rename(tmp_path / "rows.json").write_text('{"text": "a"}\n{"text": "b"}')
    check_one_line(
        run("advise", "--lengths", tmp_path / "rows.json", *SMALL),
        "advise reads one row from each line of a .jsonl file",
    )


def test_texts_are_counted_with_the_given_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts come from lines, or from a column of a saved dataset that has another name."""
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
    result = run_well(*command[1:], "--tokens-per-rank", 50, "--batches", 1)
    assert "documents.jsonl, 1 batch" in result.stdout
    (tmp_path / "none").mkdir()
    check_one_line(run(*command[1:4], "--tokenizer", "none", "--ranks", 8), "--tokenizer none: ")


def test_lengths_of_a_saved_dataset_exclude_cached_files(tmp_path: Path) -> None:
    """`map` leaves cached files in the same folder."""
    datasets = pytest.importorskip("datasets")
    saved = tmp_path / "saved"
    datasets.Dataset.from_dict(
        {"input_ids": [[1] * 10, [1] * 20, [1] * 30, [1] * 40]}
    ).save_to_disk(saved, num_shards=2)
    loaded = datasets.load_from_disk(saved)
    loaded.map(lambda row: {"input_ids": row["input_ids"] * 100}, load_from_cache_file=False)
    assert list(saved.glob("cache-*.arrow"))
    assert open_documents(str(saved), "input_ids", None).source.startswith(
        "4 lengths, mean 25, longest 40"
    )


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("[", "", "is not JSON"),
        ("[" * 100_000, "", "nested too deeply"),
        ({"lengths": [1]}, "", "must hold a list of document lengths, but it holds dict"),
        ([1.5], "", "1.5 must be an integer"),
        ([2**40], "", "from 1 to 2**32 tokens"),
        ([500, 0], "", "document 1 has length 0"),
        ([], "", "holds no document lengths"),
        ([100_000], "", "longer than a global batch of 65536"),
        ([9], "--ranks 0", "Invalid value for '--ranks'"),
        ([9], "--batches 0", "Invalid value for '--batches'"),
        ([9], "--model gpt-9", "neither a config.json nor one of llama-3.2-1b"),
        ([9], "--hardware abacus", "is not one of 'a100', 'h100'"),
        ([9], "--kernel flash_attn_9", "'flash_attn_9' has no published timings on h100"),
        ([9], "--link-gigabytes nan", "nan: a rate is a number from 1e-9 to 1e9"),
        ([9], "--lengths none.json", "none.json: No such file"),
        ([9], "--lengths zipf", "'zipf' are neither a file nor one of pretrain, prolong"),
        (
            [9],
            f"--lengths equal:1 --ranks 65536 --tokens-per-rank {2**28}",
            "would hold over 33554432 documents",
        ),
    ],
)
def test_bad_input_of_advise_is_a_one_line_error(
    tmp_path: Path, content: object, options: str, message: str
) -> None:
    file = write(tmp_path / "lengths.json", content)
    check_one_line(run("advise", "--lengths", file, *SMALL, *options.split()), message)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_advise_estimates_steps_of_few_ranks(tmp_path: Path, ranks: int) -> None:
    """On few ranks, one long document decides the time of a step."""
    file = write(tmp_path / "lengths.json", [900, 400, 20, 30, 50, 600])
    options = f"--ranks {ranks} --tokens-per-rank 1000 --batches 1 --json"
    result = run_well("advise", "--lengths", file, *options.split())
    assert json.loads(result.stdout)["ways"][-1]["seconds"] > 0
