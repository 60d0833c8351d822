"""Tables as text and Markdown, and the options and the file of a command that prints them."""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from binade.data.words.text import csv_cell, markdown_table, markdown_text
from binade.terminal import CliOption, print_text

WIDTH = 120
NOTHING = "–"


@dataclass(frozen=True)
class TextTable:
    """Formatted cells. The first `left` columns are words, aligned left, the others numbers."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1


def wrapped(text: str, first: str = "") -> str:
    """A paragraph of lines of WIDTH."""
    return textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent="  ", break_on_hyphens=False)


def aligned(table: TextTable) -> str:
    """A table as text, below its title."""
    lines = (table.header, *table.rows)
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = (
        "  ".join(
            cell.ljust(width) if place < table.left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
    return "\n".join([table.title, *text])


def markdown(table: TextTable) -> str:
    """A table in Markdown, below its title."""
    rows = [[markdown_text(cell) for cell in row] for row in table.rows]
    alignment = "l" * table.left + "r" * (len(table.header) - table.left)
    return f"{table.title}:\n\n{markdown_table([markdown_text(cell) for cell in table.header], rows, alignment)}"


def csv_text(rows: Sequence[Mapping[str, object]], columns: Iterable[str] = ()) -> str:
    """Rows as CSV, with the columns of the first one unless they are given. Lines end in CR LF."""
    written = io.StringIO(newline="")
    writer = csv.DictWriter(written, tuple(columns) or tuple(rows[0]))
    writer.writeheader()
    writer.writerows({name: csv_cell(value) for name, value in row.items()} for row in rows)
    return written.getvalue()


def output_options() -> list[click.Parameter]:
    """--format and --output."""
    return [
        CliOption(["--format", "kind"], type=click.Choice(("text", "csv", "markdown")), default="text",
               help="Format of the output"),
        CliOption(["--output"], type=Path, metavar="FILE", help="Write to FILE instead of the terminal"),
    ]  # fmt: skip


def print_or_write(text: str, output: Path | None, what: str) -> None:
    """Print a text, or write it to a file at once and print that `what` was written. Raises RunError."""
    from binade.data.run.directory import RunError  # imports pyarrow: --help does not wait for it
    from binade.data.run.store import write_atomic

    if output is None:
        print_text(text.removesuffix("\n"))
        return
    target = output.resolve()  # writes through a link instead of replacing it
    try:
        if target.exists() and not target.is_file():
            raise RunError(f"{output} is not a regular file: choose another path for --output")
        write_atomic(target, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise RunError(f"cannot write {output}: {error.strerror or error}; give another file to --output") from error
    print_text(f"{what} written to {output}")
