"""Reading text that others wrote: its lines, CSV, JSON lines and JSON. All raise ConfigError for what is not one."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from binade.collector.errors import ConfigError, raising
from binade.collector.imports.readers.series import Notes, Rows
from binade.data.run.store import read_file, regular

LONGEST_LINE = 1 << 20
LARGEST_JSON = 64 << 20
WRAPPERS = ("data", "metrics", "log", "logs", "scalars")  # keys of the object that has all metrics of a step


def text_lines(path: Path, notes: Notes, errors: str = "strict") -> Iterator[str]:
    """The lines of a text, without a last one that has no line break: it may be incomplete while a training writes."""
    with (
        raising(ConfigError, f"{path} is not UTF-8", UnicodeDecodeError),
        open(path, encoding="utf-8-sig", errors=errors, newline="", opener=regular) as file,
    ):
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise ConfigError(f"{path} has a line of more than {LONGEST_LINE:,} characters")
            if line.endswith(("\n", "\r")):
                yield line
            else:
                notes.cut.append("the last line has no line break, so it may be cut")


def csv_rows(path: Path, notes: Notes) -> Rows:
    """The rows of a CSV file by the columns of its first line."""
    lines, blank = text_lines(path, notes), 0
    for first in lines:
        if first.strip():
            break
        blank += 1
    else:
        return
    delimiter = delimiter_of(first)
    notes.decimal_comma = delimiter == ";"
    reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        place = f"{path}, line {blank + reader.line_num + 1}"
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{place} is not CSV ({error}): is a quote not closed?") from None
        if cells is None:
            return
        if any("\n" in cell or "\r" in cell for cell in cells):  # which would swallow the rows in between
            raise ConfigError(f"{place}: a value contains a line break, as if a quote is not closed: expected one line")
        if not any(map(str.strip, cells)):
            continue
        if header is None:
            header = cells
            if len(set(header)) < len(header):
                raise ConfigError(f"{path} has a column name twice in its first line")
            continue
        if len(cells) != len(header):
            which = "more" if len(cells) > len(header) else "fewer"
            expected = f"expected {len(header)} with {delimiter!r} between them"
            raise ConfigError(f"{place}: there are {which} values than columns: {expected}")
        yield place, dict(zip(header, cells, strict=True))


def delimiter_of(line: str) -> str:
    """What separates the columns of a first line: a comma, unless another one of these makes more of them."""
    columns = {delimiter: len(csv_header(line, delimiter)) for delimiter in ",;\t"}
    best = max(columns, key=lambda delimiter: columns[delimiter])
    return best if columns[best] > 1 else ","


def csv_header(line: str, delimiter: str | None = None) -> list[str]:
    """The cells of a first line; none if it is not CSV."""
    try:
        return next(csv.reader([line], delimiter=delimiter or delimiter_of(line), strict=True), [])
    except csv.Error:
        return []


def json_rows(path: Path, notes: Notes) -> Rows:
    """The objects of JSON lines."""
    for number, line in enumerate(text_lines(path, notes), 1):
        if line.isspace():
            continue
        place = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise ConfigError(f"{place} is not JSON") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{place} is not a JSON object")
        yield place, flat(row)


def flat(row: dict[str, Any], depth: int = 3) -> dict[str, Any]:
    """A row without objects in it: their values have names such as `train/loss`, those of WRAPPERS their own."""
    if not any(isinstance(value, dict) for value in row.values()):
        return row
    found: dict[str, Any] = {}
    for name, value in row.items():
        if isinstance(value, dict) and depth:
            prefix = "" if name in WRAPPERS else f"{name}/"
            found |= {f"{prefix}{below}": inner for below, inner in flat(value, depth - 1).items()}
        else:
            found[name] = value
    return found


def json_document(path: Path) -> Any:
    """The content of a JSON file."""
    with raising(ConfigError, f"{path} cannot be read", OSError):
        content = read_file(path, LARGEST_JSON)
    try:
        return json.loads(content)
    except RecursionError:
        raise ConfigError(f"{path} is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}): is it cut?") from None
