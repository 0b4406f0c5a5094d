"""Load documents, tokenize them, and pack whole documents into rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Sized
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset, load_dataset
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerBase

from arguments import FILE_FORMATS, DocumentArguments, PackingArguments
from stdlib_corpus import load_corpus, write_initial_model

# First-fit tries at most this many unfinished rows for each document, so that the time of packing
# stays linear in the number of documents.
OPEN_ROWS = 256


class PackedRows(TorchDataset[dict[str, list[list[int]]]]):
    """Rows of at most `tokens_per_batch` tokens, filled first-fit with whole documents in order.

    Ranks get about equally many tokens, but not equal attention, because the attention of a
    document grows with the square of its length.
    """

    def __init__(self, documents: Dataset, tokens_per_batch: int) -> None:
        self.documents = documents
        self.rows: list[list[int]] = []
        unfinished: deque[tuple[int, int]] = deque(maxlen=OPEN_ROWS)  # (row, free tokens)
        for document, length in enumerate(documents["length"]):
            for place, (row, free) in enumerate(unfinished):
                if length <= free:
                    self.rows[row].append(document)
                    unfinished[place] = (row, free - length)
                    break
            else:
                unfinished.append((len(self.rows), tokens_per_batch - length))
                self.rows.append([document])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[list[int]]]:
        return {"documents": self.documents[self.rows[index]]["input_ids"]}


def load_documents(data: DocumentArguments) -> Dataset:
    """Load the documents as a dataset with a text column."""
    if data.train_file:
        kind = FILE_FORMATS[Path(data.train_file).suffix]
        options: dict[str, Any] = {"sample_by": "document"} if kind == "text" else {}
        documents = load_dataset(kind, data_files=data.train_file, split="train", **options)
    elif data.dataset_name:
        documents = load_dataset(data.dataset_name, data.dataset_config_name, split="train")
    else:
        documents = load_corpus()
    if data.text_column not in documents.column_names:
        raise ValueError(
            f"--text_column {data.text_column!r} is not among the columns {documents.column_names}:"
            " give one of them."
        )
    return documents


def tokenize(
    batch: dict[str, list[str]],
    tokenizer: PreTrainedTokenizerBase,
    text_column: str,
    max_length: int | None,
) -> dict[str, list[Any]]:
    """Tokenize documents, append the end-of-text token to each, and cut them at `max_length`."""
    ids: list[list[int]] = tokenizer(batch[text_column], verbose=False)["input_ids"]
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    cut = [(document + end)[:max_length] for document in ids]
    return {"input_ids": cut, "length": [len(document) for document in cut]}


def tokenized(
    documents: Dataset,
    tokenizer: PreTrainedTokenizerBase,
    data: DocumentArguments,
    max_length: int | None = None,
) -> Dataset:
    """Tokenize all documents into the columns `input_ids` and `length`, with a progress bar."""
    options = {"tokenizer": tokenizer, "text_column": data.text_column, "max_length": max_length}
    tokens = documents.map(
        tokenize,
        batched=True,
        batch_size=64,
        fn_kwargs=options,
        remove_columns=documents.column_names,
        desc="Tokenizing",
    )
    return tokens.filter(
        lambda length: length > 1, input_columns="length", desc="Dropping empty documents"
    )


def pack(
    documents: Dataset, tokenizer: PreTrainedTokenizerBase, data: PackingArguments, ranks: int
) -> PackedRows:
    """Tokenize documents and pack them into rows.

    Raises:
        ValueError: if there are fewer rows than ranks.
    """
    rows = PackedRows(tokenized(documents, tokenizer, data, data.max_length), data.tokens_per_batch)
    check_rows(rows, data.tokens_per_batch, ranks)
    return rows


def check_rows(rows: Sized, tokens_per_batch: int, ranks: int) -> None:
    """Raise ValueError if there are fewer rows than ranks, because every rank needs a row."""
    if len(rows) < ranks:
        raise ValueError(
            f"{len(rows)} row(s) of {tokens_per_batch} tokens are too few for {ranks} ranks: lower"
            " --tokens_per_batch."
        )


def small_model(
    documents: Dataset, text_column: str, output: str, *, max_length: int, seed: int
) -> str:
    """Write a small new model and its tokenizer in the main process, and return their folder."""
    if text_column not in documents.column_names:
        raise ValueError(
            f"without --model_name_or_path a tokenizer is trained on the column {text_column!r},"
            f" which is not among {documents.column_names}: name the column with text."
        )
    folder = Path(output, "initial_model")
    if PartialState().is_main_process:
        write_initial_model(
            folder, documents, max_length=max_length, seed=seed, text_column=text_column
        )
    return str(folder)
