"""Rows of jsonl and parquet files and of Hugging Face data sets, one after the other, each with its place for messages.

Nothing of a whole file is held in memory: DAPO as published has 1.8 million rows.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from a3po_megatron.errors import UserError

SUFFIXES = (".jsonl", ".parquet")
LOADED_AT_ONCE = 1000  # rows of a parquet file

PlacedRow = tuple[str, int, Mapping[str, Any]]  # (where, the number of the line or row, counted from 1, values)


def read_rows(path: str, subset: str, split: str) -> Iterator[PlacedRow]:
    """Yield every row of a file, of a Hugging Face folder or of a hub id such as `openai/gsm8k`.

    `split` and `subset` are those of a Hugging Face data set; a file has neither. Raises UserError naming the file and
    line of what cannot be read.
    """
    place = Path(path)
    if place.suffix == ".jsonl":
        return read_jsonl(place)
    if place.suffix == ".parquet":
        return read_parquet(place)
    if place.is_file():
        raise UserError(f"{path}: a file of problems ends with {' or '.join(SUFFIXES)}")
    return read_hugging_face(path, subset, split)


def read_jsonl(path: Path) -> Iterator[PlacedRow]:
    """Yield the objects of a file of JSON lines. Lines end at a newline, not at other separators inside a text."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}, line {number}"
                yield where, number, _parse_object(where, line)
            if file.tell() == 0:
                raise UserError(f"{path}: the file is empty")
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None


def read_parquet(path: Path) -> Iterator[PlacedRow]:
    """Yield the rows of a parquet file."""
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with path.open("rb") as file, pyarrow.parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=LOADED_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", number, row
    except pyarrow.ArrowException as error:  # of which none is an OSError; a missing file is one
        raise UserError(f"{path}: not a parquet file after row {number}: {' '.join(str(error).split())}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot read the file: {error.strerror}") from None
    if number == 0:
        raise UserError(f"{path}: the file is empty")


def read_hugging_face(path: str, subset: str, split: str) -> Iterator[PlacedRow]:
    """Yield the rows of a split of a data set: a folder (as `save_to_disk` writes it, or of data files) or a hub id."""
    import datasets

    folder = Path(path)
    if not folder.is_dir() and path.count("/") != 1:
        raise UserError(
            f"{path}: not there; expected a file that ends with {' or '.join(SUFFIXES)}, a Hugging Face folder or a hub id "
            "such as openai/gsm8k"
        )
    saved = any((folder / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if saved and subset:
        raise UserError(f"{path}: a data set as `save_to_disk` writes it has no subset {subset!r}; leave subset empty")
    try:
        if saved:
            data = datasets.load_from_disk(path)
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
        else:
            data = datasets.load_dataset(path, name=subset or None, split=split)
    except KeyError:
        raise UserError(f"{path}: there is no split {split!r}; name one of {', '.join(data)}") from None
    except Exception as error:  # datasets raises what its many readers raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{path}: cannot load split {split!r} of the data set: {reason}") from None
    for number, row in enumerate(data, start=1):
        yield f"{path} ({split}), row {number}", number, row


def value_at(row: Mapping[str, Any], column: str) -> Any:
    """Return the value at a dotted path: `prompt.0.content` is the content of the first entry of `prompt`.

    Raises KeyError when there is none.
    """
    value: Any = row
    for part in column.split("."):
        if isinstance(value, Mapping) and part in value:
            value = value[part]
        elif isinstance(value, Sequence) and not isinstance(value, str) and part.isdigit() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(column)
    return value


def _parse_object(where: str, line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object (a name and a value for every column)")
    return row
