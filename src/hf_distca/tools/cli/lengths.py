"""Reads the document lengths that a verb gets as a JSON list, as a column of a data set, or as the
name of a distribution.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.input_files import check_file
from hf_distca.tools.cli.files import get_input_name, read

if TYPE_CHECKING:
    from hf_distca.tools.advise.document_lengths import DocumentSource

_TABLES = (".parquet", ".arrow")
_LINES = (".jsonl", ".ndjson")
# Default columns: _TEXT with a tokenizer; otherwise _TOKENS, or _LENGTH in files without _TOKENS.
_TOKENS, _LENGTH, _TEXT = "input_ids", "length", "text"


def read_lengths(path: Path) -> list[int]:
    """Read a list of lengths from a JSON file."""
    from hf_distca.schedule.placement import require_whole_number

    name = get_input_name(path)
    try:
        data = json.loads(read(path).decode("utf-8"))
    except ValueError as error:
        hint = " advise reads one row from each line of a .jsonl file." * (
            "Extra data" in str(error)
        )
        raise LayoutError(f"{name} is not JSON: {error}.{hint}") from error
    if not isinstance(data, list):
        raise LayoutError(
            f"{name} must hold a list of document lengths, but it holds {type(data).__name__}."
        )
    try:
        return [require_whole_number(value) for value in data]
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error


def open_documents(
    text: str, column: str, longest: int | None, tokenizer: str | None = None
) -> DocumentSource:
    """Make a source of document lengths from a file, a column of a data set, or the name of a
    distribution.

    With a tokenizer, the column may hold text, and the default column is ``text``.
    """
    from hf_distca.tools.advise.document_lengths import find_distribution, from_list

    path = Path(text)
    column = _TEXT if tokenizer is not None and column == _TOKENS else column
    if text and (path.suffix in (*_TABLES, *_LINES) or path.is_dir()):
        files = path.iterdir() if path.is_dir() else [path]
        tables = sorted(
            file
            for file in files
            # `Dataset.map` leaves files whose names begin with "cache-" in a data set's folder.
            if file.suffix in (*_TABLES, *_LINES) and not file.name.startswith("cache-")
        )
        return from_list(_count_column(path, tables, column, tokenizer), text, longest)
    if text == "-" or (text and path.exists()) or path.suffix == ".json":
        return from_list(read_lengths(path), get_input_name(path), longest)
    return find_distribution(text, 131072 if longest is None else longest)


def _count_column(path: Path, tables: list[Path], column: str, tokenizer: str | None) -> list[int]:
    """Return the number of tokens of each document in files, which are tables or have a JSON object
    on each line. A value in the column is a list of tokens, a text to tokenize, or a length.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.types as kinds
    except ImportError as error:
        raise UnsupportedError(
            f'reading {path} needs pyarrow: pip install "hf-distca[tables]", or write the lengths'
            " to a JSON file."
        ) from error
    if not tables:
        raise LayoutError(
            f"{path} has no {' or '.join(_TABLES)} files: name a folder that save_to_disk wrote, or"
            " a file of one of these types."
        )
    lengths = list[int]()
    for file in tables:
        check_file(file)  # pyarrow's own error does not name the file
        try:
            table = _read_table(file)
            names = table.column_names
        except (pa.ArrowException, ValueError) as error:  # including UnicodeDecodeError
            raise LayoutError(f"{file} cannot be read as a table: {error}.") from error
        name = _LENGTH if column == _TOKENS and not {_TOKENS} & {*names} else column
        if name not in names:
            raise LayoutError(
                f"{file} has no column {column!r}. Its columns:"
                f" {', '.join(map(repr, names)) or 'none'}. Name one with"
                " --column. For a column of text, also give --tokenizer."
            )
        values = table.column(name).drop_null()
        kind = values.type
        if kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_fixed_size_list(kind):
            values = pc.list_value_length(values)
        elif tokenizer is not None and (kinds.is_string(kind) or kinds.is_large_string(kind)):
            from hf_distca.tools.advise.counting import (
                count_tokens,  # takes seconds to import
            )

            values = pa.array(count_tokens(values.to_pylist(), tokenizer))
        elif not kinds.is_integer(kind):
            raise LayoutError(
                f"column {name!r} of {file} holds {kind}: it must hold lists of tokens, or"
                " lengths. With --tokenizer, it may also hold text."
            )
        lengths += values.to_pylist()
    # If a length is negative, keep zeros, so that the error names its place in the whole list.
    return lengths if min(lengths, default=0) < 0 else [length for length in lengths if length]


def _read_table(file: Path) -> Any:
    from pyarrow import ipc, json, parquet

    if file.suffix == ".parquet":
        return parquet.read_table(file)
    if file.suffix == ".arrow":
        return ipc.open_stream(file).read_all()
    # A block must hold at least one line, and the file may be a single line.
    block = min(max(file.stat().st_size, 2**20), 2**31 - 1)
    return json.read_json(file, json.ReadOptions(block_size=block))
