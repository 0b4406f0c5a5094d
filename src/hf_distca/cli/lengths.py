"""Document lengths that verbs read: a list in JSON, a column of a data set, or the name of a
distribution.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hf_distca.cli.files import get_input_name, read
from hf_distca.errors import LayoutError, UnsupportedError
from hf_distca.input_files import check_file

if TYPE_CHECKING:
    from hf_distca.simulate.document_lengths import DocumentSource

_TABLES = (".parquet", ".arrow")
_LINES = (".jsonl", ".ndjson")
# Columns that are looked for: the last one if there is a tokenizer.
_TOKENS, _LENGTH, _TEXT = "input_ids", "length", "text"


def read_lengths(path: Path) -> list[int]:
    """Read the lengths of a JSON file with a list of them."""
    from hf_distca.schedule.placement import require_whole_number

    name = get_input_name(path)
    try:
        data = json.loads(read(path).decode("utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        hint = " Rows, one a line, are read by advise and simulate, from a .jsonl file." * (
            "Extra data" in str(error)
        )
        raise LayoutError(f"{name} is not JSON: {error}.{hint}") from error
    except ValueError as error:
        raise LayoutError(
            f"{name} holds a number of thousands of digits: lengths are below 2**48."
        ) from error
    if not isinstance(data, list):
        raise LayoutError(
            f"{name} must hold a list of document lengths, it holds {type(data).__name__}."
        )
    try:
        return [require_whole_number(value) for value in data]
    except LayoutError as error:
        raise LayoutError(f"{name}: {error}") from error


def open_documents(
    text: str, column: str, longest: int | None, tokenizer: str | None = None
) -> DocumentSource:
    """Open documents of a file, of a data set's column, or of a distribution by name.

    With a tokenizer, the column may hold text; it is ``text`` if it is not named.
    """
    from hf_distca.simulate.document_lengths import find_distribution, from_list

    path = Path(text)
    column = _TEXT if tokenizer is not None and column == _TOKENS else column
    tables = [path] if path.suffix in _TABLES else _list_tables(path) if path.is_dir() else []
    if text and (tables or path.is_dir()):
        counts = _count_column(path, tables, column, tokenizer)
        return from_list(counts, f"{text}, column {column!r}", longest)
    if path.suffix in _LINES:
        return from_list(_count_rows(path, column, tokenizer), get_input_name(path), longest)
    if text == "-" or (text and path.exists()) or path.suffix == ".json":
        return from_list(read_lengths(path), get_input_name(path), longest)
    return find_distribution(text, 131072 if longest is None else longest)


def _count_texts(texts: list[str], tokenizer: str) -> list[int]:
    from hf_distca.doctor.counting import count_tokens  # imports transformers, in seconds

    return count_tokens(texts, tokenizer)


def _count_rows(path: Path, column: str, tokenizer: str | None) -> list[int]:
    """Count the tokens of each row of a file with one row a line: lists are counted, texts are
    tokenized, numbers are lengths.
    """
    from hf_distca.schedule.placement import require_whole_number

    check_file(path)
    lengths, texts = list[int](), list[str]()
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                value = row[_LENGTH if column == _TOKENS and _TOKENS not in row else column]
                if isinstance(value, str) and tokenizer is not None:
                    texts.append(value)
                else:
                    lengths.append(
                        len(value) if isinstance(value, list) else require_whole_number(value)
                    )
            except (KeyError, TypeError) as error:
                has = (
                    f"only {', '.join(map(repr, row))}"
                    if isinstance(row, dict)
                    else f"but {row!r:.40}"
                )
                raise LayoutError(
                    f"{path}, line {number}: a row must have"
                    f" {column!r}{f' or {_LENGTH!r}' * (column == _TOKENS)}, it has {has}. Name"
                    " another one with --column. Of text, name its tokenizer, too: --tokenizer."
                ) from error
            except ValueError as error:
                raise LayoutError(f"{path}, line {number}: {error}") from error
    if texts and tokenizer is not None:
        lengths += _count_texts(texts, tokenizer)
    return [length for length in lengths if length != 0]


def _list_tables(folder: Path) -> list[Path]:
    """List the files of a data set: those that it names, if `datasets` saved it, because its cached
    files lie beside them.
    """
    try:
        return [
            folder / file["filename"]
            for file in json.loads(read(folder / "state.json"))["_data_files"]
        ]
    except (OSError, KeyError, TypeError, ValueError):  # another folder
        return sorted(
            file
            for kind in _TABLES
            for file in folder.glob(f"*{kind}")
            if not file.name.startswith("cache-")
        )


def _count_column(path: Path, tables: list[Path], column: str, tokenizer: str | None) -> list[int]:
    """Count the tokens of each document of parquet or Arrow files: lists are counted, texts are
    tokenized, numbers are lengths.
    """
    try:
        import pyarrow as pa
        import pyarrow.compute as pc
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UnsupportedError(
            f'reading {path} needs pyarrow: pip install "hf-distca[tables]", or write the lengths'
            " to a JSON file."
        ) from error
    if not tables:
        raise LayoutError(
            f"{path} has no {' or '.join(_TABLES)} files: name a data set saved by save_to_disk, or"
            " one such file."
        )
    lengths = list[int]()
    for file in tables:
        check_file(file)  # pyarrow's own error names no file
        try:
            table = (
                pq.read_table(file)
                if file.suffix == ".parquet"
                else pa.ipc.open_stream(file).read_all()
            )
            names = table.column_names
        except (pa.ArrowException, ValueError) as error:  # UnicodeDecodeError among them
            raise LayoutError(f"{file} cannot be read as a table: {error}.") from error
        if column not in names:
            raise LayoutError(
                f"{file} has no column {column!r}, only {', '.join(map(repr, names))}: name one"
                " with --column."
            )
        values = table.column(column)
        kind = values.type
        if (
            pa.types.is_list(kind)
            or pa.types.is_large_list(kind)
            or pa.types.is_fixed_size_list(kind)
        ):
            values = pc.list_value_length(values)
        elif tokenizer is not None and (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            values = pa.array(_count_texts(values.drop_null().to_pylist(), tokenizer))
        elif not pa.types.is_integer(kind):
            raise LayoutError(
                f"column {column!r} of {file} holds {kind}: it must hold lists of tokens, or their"
                " numbers; or text, with --tokenizer."
            )
        lengths += values.drop_null().to_pylist()
    # A negative one is named by its place among all.
    return lengths if min(lengths, default=0) < 0 else [length for length in lengths if length]
