"""Reading text that others wrote: its lines, CSV, JSON lines and JSON. All raise ConfigError for what is not one."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from binade.collector.errors import ConfigError, raising
from binade.collector.imports.readers.series import Notes, Rows
from binade.data.store import read_file, regular

LONGEST_LINE = 1 << 20
LARGEST_JSON = 64 << 20


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
    reader = csv.reader(text_lines(path, notes), strict=True)
    header: list[str] | None = None
    while True:
        place = f"{path}, line {reader.line_num + 1}"
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
            raise ConfigError(
                f"{place}: there are {which} values than columns: expected {len(header)} with commas between them"
            )
        yield place, dict(zip(header, cells, strict=True))


def csv_header(line: str) -> list[str]:
    """The cells of a first line; none if it is not CSV."""
    try:
        return next(csv.reader([line], strict=True), [])
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
        yield place, row


def json_object(line: str) -> dict[str, Any]:
    """A line as a JSON object; an empty one if it is not one."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


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
