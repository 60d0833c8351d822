"""One-line messages, numbers for people, file names, and tables in Markdown and CSV."""

from __future__ import annotations

import math
import re
import signal
import unicodedata
from collections.abc import Iterable, Sequence, Sized
from decimal import Decimal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Text that a spreadsheet would treat as a formula: it begins like one, and is not a number. Both follow `_Visible`.
_FORMULA = re.compile(r" *[=@;]|[\t\r\n]| *[+-](?!(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$|inf$)", re.IGNORECASE)
# The same behind what separates cells in other locales than the file's; a list of numbers is none.
_INSIDE = re.compile(r"(?<=[;\t\r\n])( *)(?=[=@]|[+-](?!\.?\d|inf))", re.IGNORECASE)
FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters that show nothing
_CELLS = re.compile(r"([,;])")  # separators of cells in different locales


def one_line(message: object, longest: int = 400) -> str:
    """A message without line breaks, terminal colors and the statement that DuckDB repeats after its own."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(message).split("\n\nLINE")[0])
    return " ".join(text.split())[:longest]


def plain_name(text: str) -> str:
    """A spec or another text as part of a file name: nvfp4_block_16x16 for nvfp4(block=16x16)."""
    return re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII).strip("_")


def describe(error: BaseException) -> str:
    """An exception as one readable line: its first line, the system's message for an OSError, or its type."""
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror.lower()}{where}"
    if isinstance(error, MemoryError):
        return "out of memory"
    return (str(error) or type(error).__name__).splitlines()[0]


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def superscript(exponent: int | str) -> str:
    """⁻¹² for -12."""
    return str(exponent).translate(str.maketrans("-.0123456789", "⁻·⁰¹²³⁴⁵⁶⁷⁸⁹"))


def number_text(value: float | None, format: str = ".3g") -> str:
    """A number for people: "0.0123", "1,230", "−3.0·10⁴", "∞", and "–" for None and NaN.

    format  "d" for a whole number, ".2f" for two decimals, ".3g" for three significant digits; "+.3g" marks positive
            numbers. With significant digits, numbers below 0.001 and from 10,000 are written as powers, with two digits
            for ".3g".
    """
    if value is None or math.isnan(value):
        return "–"
    value = float(value)
    sign, digits, kind = format.startswith("+"), int(format.strip("+.dfg") or 0), format[-1]
    if math.isinf(value):
        return "−∞" if value < 0 else "∞"
    if kind == "g":
        rounded = Decimal(f"{value:.{digits}g}")
        if not value or -3 <= rounded.adjusted() < 4:
            text = f"{rounded:,f}"
            text = text.rstrip("0").rstrip(".") if "." in text else text
        else:
            mantissa, power = f"{value:.{1 if digits <= 3 else digits - 1}e}".split("e")
            text = f"{mantissa}·10{superscript(int(power))}"
    else:
        value = round(value, digits)
        text = f"{value:,.{digits}f}"
    text = text if value else text.removeprefix("-")  # no "−0.0"
    return f"{'+' * (sign and value > 0)}{text}".replace("-", "−")


def counted(number: int, noun: str) -> str:
    """ "1 run", "1,024 runs"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def and_more(names: Sized) -> str:
    """ " and 3 more" after the first of four names; "" after a single one."""
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def spans(numbers: Iterable[int]) -> str:
    """ "1, 3-5" for 1, 3, 4, 5."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, span)) for span in ranges)


def markdown_text(text: str) -> str:
    """Escape a text for Markdown, on one line: no cell, link, tag, character reference or emphasis is made of it."""
    return "".join(f"\\{c}" if c in "\\|*_`[]<>#&" else c for c in " ".join(text.split()))


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """A table in Markdown, of cells that are Markdown already. align: "l" or "r" for each column, all left if empty."""
    rule = [{"l": ":--", "r": "--:"}[side] for side in align or "l" * len(header)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, rule, *rows))


class _Visible(dict[int, str]):
    """For str.translate: what a spreadsheet may skip in front of a formula becomes a space (controls, formats, spaces,
    marks and fillers), and other forms of the signs that begin one, such as ＝, become these signs."""

    def __missing__(self, code: int) -> str:
        char = chr(code)
        plain = unicodedata.normalize("NFKC", char)
        if char not in "\t\r\n" and (unicodedata.category(char)[0] in "CZM" or char in FILLERS):
            char = " "
        elif plain in ("=", "+", "-", "@") and char not in plain:
            char = "@"  # no number begins like this
        elif char == "−":
            char = "-"
        self[code] = char
        return char


_visible = _Visible()


def csv_cell(value: object) -> object:
    """A value as a cell of CSV. Text that a spreadsheet would treat as a formula gets an apostrophe in front."""
    if not isinstance(value, str):
        return value
    visible, text, start = value.translate(_visible), "", 0
    for formula in _INSIDE.finditer(visible):
        text, start = f"{text}{value[start : formula.end()]}'", formula.end()
    text += value[start:]
    return f"'{text}" if _FORMULA.match(visible) else text


def csv_table(frame: pd.DataFrame, comment: str = "") -> str:
    """A table in CSV, without its index, after the lines of a comment."""
    lines = "".join(
        f"# {''.join(part if part in ('', ',', ';') else str(csv_cell(part)) for part in _CELLS.split(line))}\n"
        for line in comment.splitlines()
    )
    cells = frame.copy(deep=False)
    for name in frame.select_dtypes(exclude="number"):
        cells[name] = frame[name].map(csv_cell)
    return lines + cells.rename(columns=csv_cell).to_csv(index=False)


def natural(text: str) -> tuple[tuple[int, str], ...]:
    """A key that sorts names by their numbers: layer2 before layer10."""
    parts = re.split(r"([0-9]+)", text)  # text and digits in turn
    digits = [part.lstrip("0") for part in parts]
    return tuple((len(digits[i]), digits[i]) if i % 2 else (0, part) for i, part in enumerate(parts))
