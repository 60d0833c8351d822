"""Click through the app for minutes or hours, and measure the memory of its server.

    python -m tests.siege.soak --minutes 240 [--pause SECONDS] [--seed N] [--svg FILE]

Prints the memory of the server and its children, and plots it; Ctrl-C ends it early.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import altair as alt
import pandas as pd
import psutil
import vl_convert
from playwright.sync_api import sync_playwright

from tests.app import roots
from tests.browser import driver
from tests.conftest import collect_recipes
from tests.siege.attack import Attempt, attack

PAGES = (
    "", "explore", "tensor", "runs?view=recipes", "runs?view=loss", "runs", "runs?view=jobs", "notebook",
    "explore?layer_index=1", "?format=mxfp4&metric=flush_to_zero",
)  # fmt: skip
SHARE = 10  # of the siege's minutes
GROWTH = 0.15  # of the memory after the first round
BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float], width: int = 60) -> str:
    """The values as bars from the lowest to the highest, the medians of `width` parts."""
    size = max(1, len(values) // width)
    shown = [median(values[at : at + size]) for at in range(0, len(values), size)]
    low, spread = min(shown), max(max(shown) - min(shown), 1.0)
    return "".join(BARS[int((value - low) / spread * (len(BARS) - 1))] for value in shown)


def _resident(port: int) -> float:
    """MB of the server at this port and its children."""
    for connection in psutil.net_connections("tcp"):
        if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
            server = psutil.Process(connection.pid)
            return sum(each.memory_info().rss for each in [server, *server.children(recursive=True)]) / 1e6
    raise AssertionError("no server listens")


def clicked(root: Path, minutes: float, chance: random.Random, pause: float = 0.0) -> Iterator[tuple[float, float]]:
    """Click through a root's app in one session after another, with so many seconds between a page and the next click;
    after each click the minutes since the start and the server's megabytes."""
    start, clicks = time.monotonic(), 0
    with driver.serving(root, env={}) as address, sync_playwright() as playwright:
        browser = driver.launch(playwright)
        port = int(address.rpartition(":")[2])
        while time.monotonic() < start + 60 * minutes or clicks < 4 * len(PAGES):
            page = driver.new_page(browser.new_context())
            for _ in PAGES:  # a session
                page.goto(f"{address}/{chance.choice(PAGES)}")
                driver.settle(page)
                clicks += 1
                yield (time.monotonic() - start) / 60, _resident(port)
                page.wait_for_timeout(1000 * pause)
            page.context.close()
        browser.close()


def ends(memory: list[float]) -> tuple[float, float]:
    """Megabytes after the first sessions, and at the end."""
    return median(memory[len(PAGES) : 2 * len(PAGES)]), median(memory[-len(PAGES) :])


@attack(
    f"Memory use at the end is at most {GROWTH:.0%} above that after the first rounds",
    tries=1,
    seconds=6 * 3600,
    share=1.5,
)
def soak(attempt: Attempt) -> None:
    root = roots.copy(attempt.root, attempt.place / "runs")
    memory = [megabytes for _, megabytes in clicked(root, attempt.minutes / SHARE, attempt.random)]
    start, end = ends(memory)
    attempt.case = f"{len(memory)} clicks, {start:.0f} to {end:.0f} MB: {sparkline(memory)}"
    attempt.times = len(memory)
    print(f"soak: {attempt.case}", file=sys.stderr)
    assert end <= (1 + GROWTH) * start


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.siege.soak", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=240)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds between a page and the next click")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--svg", type=Path, help="draw the memory there")
    args = parser.parse_args()
    clicks = list[tuple[float, float]]()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        root = Path(folder) / "runs"
        collect_recipes(root)
        clicks.extend(clicked(root, args.minutes, random.Random(args.seed), args.pause))
    found = pd.DataFrame(clicks, columns=["minutes", "megabytes"])
    memory = found["megabytes"].tolist()
    start, end = ends(memory)
    said = f"{len(memory):,} clicks in {found['minutes'].iloc[-1]:.0f} minutes: {start:.0f} to {end:.0f} MB"
    print(f"{said}, at most {max(memory):.0f} MB ({end / start - 1:+.0%})\n{sparkline(memory)}")
    if args.svg:
        x, y = alt.X("minutes:Q", title="Minutes"), alt.Y("megabytes:Q", title="Resident memory (MB)")
        with alt.data_transformers.enable("default", max_rows=None):
            drawn = alt.Chart(found, title=said, width=640, height=240).mark_line().encode(x, y).to_dict()
        args.svg.write_text(vl_convert.vegalite_to_svg(drawn) + "\n")


if __name__ == "__main__":
    main()
