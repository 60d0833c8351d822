"""Progress of a command: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from binade.terminal import print_text

if TYPE_CHECKING:
    from tqdm import tqdm


@dataclass
class Console:
    """A progress bar on a terminal, plain lines elsewhere."""

    bar: tqdm[NoReturn] | None = None
    brief: bool = False  # leave single iterations out of the lines

    def title(self, text: str) -> None:
        """Print what comes next, on the bar or on a separate line."""
        if self.bar is None:
            print_text(text)
        else:
            self.bar.set_description(text)

    def say(self, line: str) -> None:
        if self.bar is None:
            if not (self.brief and line.startswith("iteration")):
                print_text(line)
        elif line.startswith("iteration"):
            self.bar.set_postfix_str(line.rpartition(": ")[2], refresh=False)

    def print(self, line: str) -> None:
        """Print a line of the command's output; a bar stays below it."""
        with self.bar.external_write_mode() if self.bar is not None else nullcontext():
            print_text(line)

    def progress(self, done: int, total: int) -> None:
        if self.bar is not None:
            self.bar.total = total
            self.bar.update(done - self.bar.n)


@contextmanager
def console(
    desc: str, unit: str, total: int | None = None, *, bar: bool = True, brief: bool = False
) -> Iterator[Console]:
    """A Console with a bar if stderr is a terminal and `bar` is true."""
    if not (bar and sys.stderr.isatty()):
        yield Console(brief=brief)
        return
    from tqdm import tqdm

    with tqdm(desc=desc, total=total, unit=unit, smoothing=0) as shown:  # 0: time left from the average
        yield Console(shown)
