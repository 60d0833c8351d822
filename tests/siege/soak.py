"""A server that is clicked for minutes, or for four hours: python -m tests.siege --only soak --minutes 2400"""

from __future__ import annotations

import sys
import time
from statistics import median

import psutil
from playwright.sync_api import sync_playwright

from tests.app import roots
from tests.browser import driver
from tests.siege.attack import Attempt, attack

PAGES = (
    "", "explore", "worst", "tensor", "recipes", "runs", "jobs", "sessions", "explore?layer_index=1",
    "worst?format=mxfp4",
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


@attack(
    f"Memory use at the end is at most {GROWTH:.0%} above that after the first rounds",
    tries=1,
    seconds=6 * 3600,
    share=1.5,
)
def soak(attempt: Attempt) -> None:
    root = roots.copy(attempt.root, attempt.place / "runs")
    until, found = time.monotonic() + 60 * attempt.minutes / SHARE, list[float]()
    with driver.serving(root) as address, sync_playwright() as playwright:
        browser = driver.launch(playwright)
        port, clicks = int(address.rpartition(":")[2]), 0
        while time.monotonic() < until or clicks < 4 * len(PAGES):
            page = driver.new_page(browser.new_context())
            for _ in PAGES:  # a session
                page.goto(f"{address}/{attempt.random.choice(PAGES)}")
                driver.settle(page)
                clicks += 1
                found.append(_resident(port))
            page.context.close()
        browser.close()
    start, end = median(found[len(PAGES) : 2 * len(PAGES)]), median(found[-len(PAGES) :])
    attempt.case = f"{clicks} clicks, {start:.0f} to {end:.0f} MB: {sparkline(found)}"
    attempt.times = clicks
    print(f"soak: {attempt.case}", file=sys.stderr)
    assert end <= (1 + GROWTH) * start
