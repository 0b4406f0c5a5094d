"""Write and read flat files of token ids and of document ends, and cut tokens into rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset


class TokenRows(TorchDataset[dict[str, list[list[int]]]]):
    """Rows of exactly `length` tokens, cut from a stream of tokens and split at document ends.

    Only rows that are used are read from disk. Tokens after the last full row are left out.

    Args:
        tokens: (tokens,) ids.
        length: number of tokens per row.
        vocabulary: size of the vocabulary.
        end_of_text: the id that ends documents, if `ends` is None.
        ends: (documents,) ascending ends of documents in the stream, or None.
    """

    def __init__(
        self,
        tokens: np.ndarray,
        length: int,
        vocabulary: int,
        end_of_text: int | None,
        ends: np.ndarray | None = None,
    ) -> None:
        if ends is None and end_of_text is None:
            raise ValueError(
                "the tokenizer has no end-of-text token: give an --index_file with the ends of"
                " documents."
            )
        if ends is not None and len(ends) and ends[-1] > len(tokens):
            raise ValueError(
                f"the index ends at token {ends[-1]} and the token file at {len(tokens)}: give"
                " the index of this token file."
            )
        self.tokens, self.length, self.vocabulary = tokens, length, vocabulary
        self.end_of_text, self.ends = end_of_text, ends

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, list[list[int]]]:
        begin = index * self.length
        row = np.asarray(self.tokens[begin : begin + self.length])
        if row.max() >= self.vocabulary:
            raise ValueError(
                f"row {index} of the token file holds the id {row.max()}, and the model's"
                f" vocabulary has {self.vocabulary} ids: give the tokenizer and the --token_dtype"
                " with which the file was written."
            )
        if self.ends is None:
            cuts = np.flatnonzero(row == self.end_of_text) + 1
        else:
            inside = np.searchsorted(self.ends, [begin, begin + self.length], side="right")
            cuts = self.ends[slice(*inside)] - begin
        return {"documents": [piece.tolist() for piece in np.split(row, cuts) if len(piece)]}


def smallest_dtype(vocabulary: int) -> str:
    """Return the smallest type for the ids of a vocabulary of this size."""
    return "uint16" if vocabulary <= 2**16 else "uint32"


def write_tokens(documents: Dataset, token_file: Path, index_file: Path, dtype: str) -> None:
    """Write the `input_ids` of all documents to one file, and their ends as int64 to another."""
    token_file.parent.mkdir(parents=True, exist_ok=True)
    with token_file.open("wb") as file:
        for batch in documents.iter(batch_size=64):
            np.concatenate(batch["input_ids"]).astype(dtype).tofile(file)
    np.cumsum(documents["length"], dtype=np.int64).tofile(index_file)


def read_numbers(path: Path, dtype: str) -> np.ndarray:
    """Map the file to an array that stays on disk.

    Raises:
        ValueError: if the file is empty, or if its size does not fit `dtype`.
    """
    size, width = path.stat().st_size, np.dtype(dtype).itemsize
    if size == 0 or size % width:
        raise ValueError(
            f"{path} has {size} bytes, but a file of {dtype} must have a positive multiple of"
            f" {width} bytes: give another file or type."
        )
    return np.memmap(path, dtype=dtype, mode="r")
