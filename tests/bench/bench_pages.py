"""How long the app's pages take in a real browser, and what this costs the server and the browser.

    python -m tests.bench.bench_pages [--rounds 5] [--pause 3] [--pages map,explore] ROOT

Each round starts `binade serve` on the root and a browser with nothing in its cache. It opens the Map --pause
seconds after the app first answers (0 if not given), then each page twice, of which it measures the second. The table
has the medians of the rounds: seconds until the page is at rest, and CPU seconds of the server and of the browser
meanwhile. "start" is from the command until the app answers, "load" that of the machine at the end. The root is not
changed, except for its index.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
from playwright.sync_api import Browser, Playwright, sync_playwright

from tests.bench.bench_users import server
from tests.browser.chromium import ARGUMENTS, install
from tests.browser.driver import choose, new_page, settle

PAGES = ("map", "explore", "tensor", "runs?view=recipes", "runs")
Times = dict[str, list[tuple[float, float, float]]]


def launch(playwright: Playwright) -> Browser:
    """Chromium as the tests drive it, but with its last compiler, as users have it."""
    arguments = [given for given in ARGUMENTS if not given.startswith("--js-flags")]
    return playwright.chromium.launch(executable_path=install(), args=arguments)


def cpu(processes: list[psutil.Process]) -> float:
    spent = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            spent += times.user + times.system
    return spent


def measure(times: Times, name: str, app: psutil.Process, call: Callable[[], object]) -> None:
    def browser() -> list[psutil.Process]:
        return [each for each in psutil.Process().children(recursive=True) if "chrom" in each.name()]

    start, served, drawn = time.perf_counter(), cpu([app]), cpu(browser())
    call()
    spent = time.perf_counter() - start, cpu([app]) - served, cpu(browser()) - drawn
    times.setdefault(name, []).append(spent)


def one_round(playwright: Playwright, root: Path, pages: list[str], pause: float, times: Times) -> None:
    browser = launch(playwright)
    start = time.perf_counter()
    with server(root) as (address, app):
        urllib.request.urlopen(f"http://{address}/_stcore/health", timeout=60).close()
        times.setdefault("start", []).append((time.perf_counter() - start, cpu([app]), 0.0))
        time.sleep(pause)
        page = new_page(browser.new_context(viewport={"width": 1280, "height": 900}))

        def visit(name: str) -> None:
            page.goto(f"http://{address}/{name if name != 'map' else ''}")
            settle(page)

        measure(times, "first page", app, lambda: visit("map"))
        for name in pages:
            visit(name)
            measure(times, f"{name}, reload", app, lambda name=name: visit(name))
            if name == "explore":
                measure(times, "explore, filter", app, lambda: choose(page, "Operation", "forward"))
        times.setdefault("memory, MB", []).append((app.memory_info().rss / 1e6, 0.0, 0.0))
        times.setdefault("load", []).append((os.getloadavg()[0], 0.0, 0.0))
    browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--pages", type=lambda text: text.split(","), default=PAGES)
    args = parser.parse_args()
    times: Times = {}
    with sync_playwright() as playwright:
        for number in range(args.rounds):
            one_round(playwright, args.root, args.pages, args.pause, times)
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
    print("| | s | server, CPU s | browser, CPU s |\n| --- | --- | --- | --- |")
    for name, found in times.items():
        print(
            "|", " | ".join([name, *(f"{statistics.median(column):.2f}" for column in zip(*found, strict=True))]), "|"
        )


if __name__ == "__main__":
    main()
