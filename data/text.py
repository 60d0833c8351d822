"""Text for people."""

from __future__ import annotations

LONGEST = 400


def one_line(error: BaseException | str) -> str:
    """An exception's message in one line, or its type if it has none."""
    # DuckDB repeats the statement after a blank line, with a caret below the word that is wrong.
    text = str(error).split("\n\nLINE")[0]
    return " ".join(text.split())[:LONGEST] or type(error).__name__
