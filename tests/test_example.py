"""The example of the README and the other examples, with small sizes."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import signal
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from datasets import Dataset

import scripts
from pages import ROOT, words_of
from turns import in_turn

LAUNCH = "accelerate launch --config_file configs/accelerate/cpu_2_processes.yaml examples/"
BALANCE = (
    "distca/imbalance_estimated_after",
    "distca/imbalance_measured_after",
    "distca/server_time_share",
)


def run_program(command: list[str], folder: Path, timeout: float) -> str:
    """Run a command as a user does, in a separate process group, which is killed as a whole at the
    timeout.
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {
        **os.environ,
        "PATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
    }
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    assert process.returncode == 0, output
    return output


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_example_trains_compares_and_draws(tmp_path: Path) -> None:
    data = ["--dataset_name", write_corpus(tmp_path / "corpus"), "--output_dir", "out"]
    small = "--max_length 4096 --tokens_per_rank 2048 --max_steps 2 --comparison_batches 1"
    command = words_of(LAUNCH + "finetune_long_documents.py")
    output = run_program([*command, *small.split(), *data], tmp_path, timeout=360)
    for text in (
        "balancing off",
        "balancing on",
        "dealt",
        "attention imbalance, measured",
        "distca/imbalance_estimated_after",
    ):
        assert text in output
    for picture in ("balance.png", "global_batch.png"):
        assert (tmp_path / "out" / picture).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "out" / "model.safetensors").exists()


# The other scripts, by the end of their launch command, with options that make them small and the
# files that they write.
WHOLE = "--max_length 1024 --tokens_per_batch 1024"
ADAPTERS = ["adapter_config.json", "adapter_model.safetensors"]
OTHERS = {
    "finetune_lora.py": (WHOLE, ADAPTERS),
    "finetune_lora.py --load_in_4bit": (WHOLE, ADAPTERS),
    "finetune_with_trl.py": ("--max_length 1024", ["model.safetensors"]),
    "train_with_accelerate.py": (
        f"{WHOLE} --gradient_accumulation_steps 2",
        ["model.safetensors", "tokenizer.json"],
    ),
    "finetune_gpt_oss.py": (
        "--max_length 1024 --tokens_per_rank 512 --comparison_batches 1",
        ["model.safetensors"],
    ),
    "pretrain_packed_tokens.py": (
        "--tokens_per_batch 1024 --save_steps 2",
        ["model.safetensors", "tokens.bin"],
    ),
}


def write_corpus(folder: Path) -> str:
    """Write a folder with a file of 40 documents, every fifth of them long, and return its path."""
    choose, words = random.Random(0), "alpha beta gamma for in return x y = +"
    lengths = [1200 if n % 5 == 0 else choose.randint(10, 200) for n in range(40)]
    folder.mkdir()
    lines = [
        json.dumps({"text": " ".join(choose.choices(words.split(), k=length))})
        for length in lengths
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return str(folder)


def read_longest(name: str) -> float:
    """Return the most seconds that a script claims to take with its default sizes."""
    text = (ROOT / "examples" / name.split()[0]).read_text().split("from __future__")[0]
    (minutes,) = re.findall(r"^Takes up to (\d+) minutes on two CPU cores", text, re.MULTILINE)
    return 60 * float(minutes)


def train(name: str, folder: Path, *more: str) -> list[dict[str, Any]]:
    """Run an example for two steps, or for as many as `more` gives, and return the row that it
    logged with each loss.
    """
    if "4bit" in name:
        pytest.importorskip("bitsandbytes", reason='QLoRA needs pip install -e ".[quantization]"')
    corpus = folder / "corpus"
    data = str(corpus) if corpus.exists() else write_corpus(corpus)
    options = f"--dataset_name {data} --max_steps 2 --logging_steps 1 --output_dir out"
    command = [*words_of(LAUNCH + name), *f"{options} {OTHERS[name][0]}".split(), *more]
    output = scripts.run(command, folder, timeout=read_longest(name))
    assert ("times faster, at best" in output) == ("sdpa" not in more)
    logged = [literal_eval(line) for line in re.findall(r"\{'loss'.*?\}", output)]
    return [{name: float(value) for name, value in row.items()} for row in logged]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "name",
    in_turn(
        [
            pytest.param(name, marks=[pytest.mark.slow] * ("4bit" in name or "trl" in name))
            for name in OTHERS
        ],
        6,
    ),
)
def test_the_other_examples_train_and_log_the_balance(name: str, tmp_path: Path) -> None:
    steps = 4 if "pretrain" in name else 2
    logged = train(name, tmp_path, "--max_steps", str(steps))
    assert len(logged) == steps
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert logged[-1].keys() >= set(BALANCE)
    for file in OTHERS[name][1]:
        assert (tmp_path / "out" / file).stat().st_size > 0, file
    if steps == 4:
        resumed = train(
            name, tmp_path, "--max_steps", "4", "--resume_from_checkpoint", "out/checkpoint-2"
        )
        assert [row["loss"] for row in resumed] == [row["loss"] for row in logged[2:]]


@pytest.mark.slow
@pytest.mark.timeout(700)
@pytest.mark.parametrize("name", ["finetune_long_documents.py", *OTHERS])
def test_examples_take_no_longer_than_they_claim(name: str, tmp_path: Path) -> None:
    if "4bit" in name:
        pytest.importorskip("bitsandbytes", reason='QLoRA needs pip install -e ".[quantization]"')
    output = scripts.run(words_of(LAUNCH + name), tmp_path, timeout=read_longest(name))
    assert "times faster, at best" in output


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that imports a module of examples/. `datasets` caches in tmp_path."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return importlib.import_module


TEXTS = ["a = 1\n\nb = 2", "one, two\n" * 30, 'with "quotes"', "x" * 7]


def write_texts(path: Path) -> None:
    """Write the texts in the format of the file's suffix. A .txt file is one document."""
    match path.suffix:
        case ".csv":
            Dataset.from_dict({"number": list(range(4)), "text": TEXTS}).to_pandas().to_csv(
                path, index=False
            )
        case ".json":
            path.write_text(json.dumps([{"text": text} for text in TEXTS]))
        case ".jsonl":
            path.write_text("\n".join(json.dumps({"text": text, "more": None}) for text in TEXTS))
        case ".txt":
            path.write_text(TEXTS[1])


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".txt", "a folder"])
def test_documents_from_a_file_or_a_folder_are_packed_whole(
    suffix: str, example: Callable[[str], Any], tmp_path: Path
) -> None:
    packing, arguments = example("packing"), example("arguments")
    folder = tmp_path / "data"
    folder.mkdir()
    file = folder / f"train{'.jsonl' if suffix == 'a folder' else suffix}"
    write_texts(file)
    source = {"dataset_name": str(folder)} if suffix == "a folder" else {"train_file": str(file)}
    data = arguments.PackingArguments(**source, max_length=60, tokens_per_batch=64)
    documents = packing.load_documents(data)
    assert list(documents["text"]) == (TEXTS[1:2] if suffix == ".txt" else TEXTS)

    tokenizer = example("stdlib_corpus").train_tokenizer(documents, vocabulary=300)
    rows = packing.pack(documents, tokenizer, data, ranks=1)
    packed = [document for n in range(len(rows)) for document in rows[n]["documents"]]
    assert all(sum(map(len, rows[n]["documents"])) <= 64 for n in range(len(rows)))
    wanted = [
        (tokenizer(text)["input_ids"] + [tokenizer.eos_token_id])[:60] for text in documents["text"]
    ]
    assert sorted(packed) == sorted(wanted)
    with pytest.raises(
        ValueError,
        match=rf"{len(rows)} row\(s\) of 64 tokens are too few for 9 ranks: lower --tokens",
    ):
        packing.pack(documents, tokenizer, data, ranks=9)


def test_small_model_is_made_for_any_text_column(
    example: Callable[[str], Any], tmp_path: Path
) -> None:
    packing, documents = example("packing"), Dataset.from_dict({"body": TEXTS})
    folder = packing.small_model(documents, "body", str(tmp_path), max_length=64, seed=0)
    config = json.loads(Path(folder, "config.json").read_text())
    assert config["max_position_embeddings"] == 64
    with pytest.raises(
        ValueError, match=r"without --model_name_or_path .* 'text', which is not among \['body'\]"
    ):
        packing.small_model(documents, "text", str(tmp_path), max_length=64, seed=0)


PACKING, TOKENS = ("arguments", "PackingArguments"), ("pretrain_packed_tokens", "TokenArguments")


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (PACKING, {"dataset_name": "a", "train_file": "b.csv"}, "exclude each other"),
        (PACKING, {"train_file": "b.parquet"}, "must end in one of .txt, .json, .jsonl, .csv"),
        (PACKING, {"max_length": 99, "tokens_per_batch": 98}, "at most --tokens_per_batch 98"),
        (("train_with_accelerate", "LoopArguments"), {"max_steps": 0}, "0 must be at least 1"),
        (TOKENS, {"index_file": "a"}, "needs the --token_file"),
        (TOKENS, {"tokens_per_batch": 1}, "must be at least 2"),
    ],
)
def test_options_that_exclude_each_other_are_refused(
    kind: tuple[str, str], options: dict[str, Any], message: str, example: Callable[[str], Any]
) -> None:
    module, name = kind
    with pytest.raises(ValueError, match=message):
        getattr(example(module), name)(**options)


DOCUMENTS = [[5, 6, 7, 0], [8, 0], [9] * 12 + [0], [4, 0]]  # 0 ends documents


def test_rows_of_a_token_file_consist_of_pieces_of_documents(
    example: Callable[[str], Any], tmp_path: Path
) -> None:
    tokens = example("token_file")
    lengths = [len(document) for document in DOCUMENTS]
    files = tmp_path / "tokens.bin", tmp_path / "tokens.idx"
    tokens.write_tokens(
        Dataset.from_dict({"input_ids": DOCUMENTS, "length": lengths}), *files, "uint16"
    )
    stream, ends = tokens.read_numbers(files[0], "uint16"), tokens.read_numbers(files[1], "int64")
    assert ends.tolist() == np.cumsum(lengths).tolist()
    pieces = [[[5, 6, 7, 0], [8, 0], [9]], [[9] * 7], [[9] * 4 + [0], [4, 0]]]
    for rows in (tokens.TokenRows(stream, 7, 10, 0), tokens.TokenRows(stream, 7, 10, None, ends)):
        assert [rows[n]["documents"] for n in range(len(rows))] == pieces
    assert len(tokens.TokenRows(stream, 8, 10, 0)) == 2, "the remaining tokens make no row"


def test_wrong_token_files_are_refused(example: Callable[[str], Any], tmp_path: Path) -> None:
    tokens = example("token_file")
    stream = np.array([1, 2, 300, 0], dtype=np.uint16)
    with pytest.raises(
        ValueError,
        match=r"row 1 of the token file holds the id 300, and the model's vocabulary has 300",
    ):
        tokens.TokenRows(stream, 2, 300, 0)[1]
    with pytest.raises(ValueError, match="no end-of-text token: give an --index_file"):
        tokens.TokenRows(stream, 2, 300, None)
    with pytest.raises(ValueError, match="the index ends at token 5 and the token file at 4"):
        tokens.TokenRows(stream, 2, 300, 0, np.array([2, 5]))
    with pytest.raises(ValueError, match="--token_file x needs --model_name_or_path"):
        example("pretrain_packed_tokens").prepare(
            example("arguments").ModelArguments(),
            example("pretrain_packed_tokens").TokenArguments(token_file="x"),
            None,
        )
    (tmp_path / "odd").write_bytes(b"123")
    with pytest.raises(
        ValueError, match="odd has 3 bytes, but a file of uint16 must have a positive multiple of 2"
    ):
        tokens.read_numbers(tmp_path / "odd", "uint16")


@pytest.mark.parametrize("name", ["options.json", "options.yaml"])
def test_options_are_read_from_a_json_or_yaml_file(
    name: str, example: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, file = example("arguments"), tmp_path / name
    # JSON is also YAML.
    file.write_text(
        json.dumps({"train_file": "a.csv", "max_length": 7, "attn_implementation": "sdpa"})
    )
    monkeypatch.setattr(sys, "argv", ["script.py", str(file)])
    model, data = arguments.parse((arguments.ModelArguments, arguments.PackingArguments))
    assert (model.attn_implementation, data.train_file, data.max_length) == ("sdpa", "a.csv", 7)
