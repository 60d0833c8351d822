"""How fast the Map and Explore answer in a real browser: from a click until what it asked for is drawn.

    python -m tests.bench.bench_map FOLDER [--tries 7]

FOLDER is a root, such as `tests.bench.make_root` makes. Of each action the median of several tries is printed, in
seconds, and its ratio to a click on a button of a Streamlit page that shows a counter, in the same browser and run:
what any click takes. Each try asks for something that was not shown before, as far as the root has it.

first      a new tab opens the address until the cells of the map are drawn; the ratio is to opening that page
format     another format is chosen in the bar until the map shows it
metric     another metric
cell       a cell is clicked until the panel shows it
iteration  the slider moves to another iteration until the map shows it

On Explore, until the script has ended and every chart is drawn:

explore    a new tab opens it; the ratio is to opening that page
operation  its filter is set to another operation
row        another row of the list is ticked; this and the next are timed by the browser itself
values     values are divided by σ, or not
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from playwright.sync_api import BrowserContext, Page, sync_playwright

from tests.bench.bench_pages import launch
from tests.browser.driver import AT_REST, answers, free_port, new_page, serving, settle
from tests.conftest import until

LEGEND, PANEL = ".map .legend", ".map .panel"
CELLS = ".map .cell[data-id] >> nth=0"
RUNNING = "() => document.querySelector('[data-testid=stApp]').dataset.testScriptState === 'running'"
FORMATS = ("mxfp8", "nvfp4", "hifp8", "mxfp4")
COUNTER = """import streamlit as st
st.session_state.n = st.session_state.get("n", 0)
st.button("more", on_click=lambda: st.session_state.update(n=st.session_state.n + 1))
st.title(f"{st.session_state.n}")
"""


@contextmanager
def counter() -> Iterator[str]:
    """The address of a Streamlit page with a button and a counter."""
    with tempfile.TemporaryDirectory() as folder:
        script, port = Path(folder) / "counter.py", free_port()
        script.write_text(COUNTER)
        options = ["--server.port", str(port), "--server.headless", "true", "--browser.gatherUsageStats", "false"]
        app = subprocess.Popen([sys.executable, "-m", "streamlit", "run", str(script), *options], cwd=folder)
        try:
            address = f"http://127.0.0.1:{port}"
            until(lambda: answers(app.pid, address), f"Streamlit to answer at {address}")
            yield address
        finally:
            app.terminate()
            app.wait()


def waited(page: Page, locator: str, act: Callable[[], object]) -> float:
    """Seconds from an action until the text of an element has changed."""
    element = page.locator(locator)
    before, start = element.inner_text(), time.monotonic()
    act()
    while element.inner_text() == before:
        page.wait_for_timeout(2)
        assert time.monotonic() - start < 60, f"nothing changed in {locator}"
    return time.monotonic() - start


def opened(context: BrowserContext, address: str, locator: str) -> tuple[Page, float]:
    page, start = new_page(context), time.monotonic()
    page.goto(address)
    page.locator(locator).wait_for()
    return page, time.monotonic() - start


def choose(page: Page, name: str, option: str) -> Callable[[], None]:
    """An action: another option of the bar. The list is open when it starts, at what begins like the option."""
    box = page.locator(f".st-key-filter_{name} input")
    box.click()
    box.fill(option)
    return page.get_by_role("option", name=option, exact=True).click


def drawn(page: Page, act: Callable[[], object]) -> float:
    """Seconds from an action until the script that it starts has ended and all is drawn."""
    start = time.monotonic()
    act()
    page.wait_for_function(RUNNING)
    page.wait_for_function(AT_REST)
    return time.monotonic() - start


# From an act in the page until its charts are drawn and shown: what the browser has is drawn without Python.
AT_ONCE = """async act => {
    const root = document.querySelector('.explore');
    const buttons = [...root.querySelectorAll('.segments button')];
    const find = { row: () => root.querySelector(`tbody tr[data-index="${act.row}"]`),
        values: () => buttons.find(button => button.textContent === act.values) };
    const start = performance.now();
    find['row' in act ? 'row' : 'values']().click();
    const frame = () => new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    await frame();
    while ([...root.querySelectorAll('.single .chart')].some(chart => chart.dataset.state !== 'drawn')) await frame();
    return (performance.now() - start) / 1000;
}"""
PAUSE = 1500  # milliseconds: until Python has heard of it, and the page is at rest again


def explored(context: BrowserContext, address: str, tries: int) -> dict[str, list[float]]:
    page, start = new_page(context), time.monotonic()
    page.goto(f"{address}/explore")
    page.locator(".chart svg").first.wait_for()
    page.wait_for_function(AT_REST)
    times = {"explore": [time.monotonic() - start]}
    settle(page)
    for attempt in range(tries):
        for name, act in (("row", attempt), ("values", ("raw", "÷ σ")[attempt % 2])):
            times.setdefault(name, []).append(page.evaluate(AT_ONCE, {name: act}))
            page.wait_for_timeout(PAUSE)
            settle(page)
    page.get_by_role("button", name="Operation ▾").click()
    settle(page)
    for number in range(min(tries, 2)):
        button = page.locator(".st-key-filter_operation button").nth(number)
        times.setdefault("operation", []).append(drawn(page, button.click))
        settle(page)
    page.close()
    return times


def measure(root: Path, tries: int) -> dict[str, tuple[list[float], list[float]]]:
    """By action: (seconds of each try, those of the page with the counter)."""
    times: dict[str, list[float]] = {}
    with sync_playwright() as playwright, counter() as plain, serving(root) as address:
        browser = launch(playwright)
        first, click = [], []
        for _ in range(tries):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            page, seconds = opened(context, plain, "h1")
            first.append(seconds)
            settle(page)
            click.append(waited(page, "h1", page.get_by_role("button", name="more").click))
            page, seconds = opened(context, address, CELLS)
            times.setdefault("first", []).append(seconds)
            settle(page)
            context.close()
        for _ in range(tries):
            context = browser.new_context(viewport={"width": 1440, "height": 900})
            for name, seconds in explored(context, address, 4).items():
                times.setdefault(name, []).extend(seconds)
            context.close()
        context = browser.new_context(viewport={"width": 1440, "height": 900})
        page, _ = opened(context, address, CELLS)
        settle(page)
        for attempt in range(tries):
            act = choose(page, "format", FORMATS[attempt % len(FORMATS)])
            times.setdefault("format", []).append(waited(page, LEGEND, act))
            settle(page)
        for metric in ("Flushed to zero", "Saturated", "absmax", "Crest factor", "Kurtosis", "rms", "SQNR")[:tries]:
            times.setdefault("metric", []).append(waited(page, LEGEND, choose(page, "metric", metric)))
            settle(page)
        cells = page.locator(".map .cell[data-id]")
        count = cells.count()
        for attempt in range(tries):
            cell = cells.nth((attempt + 1) * count // (tries + 2))
            times.setdefault("cell", []).append(waited(page, PANEL, cell.click))
            settle(page)
        slider = page.locator(".map .time input")
        if slider.count() and slider.is_enabled():
            slider.focus()
            back = False
            for _ in range(tries):
                back = slider.input_value() == "0" or (back and slider.input_value() != slider.get_attribute("max"))
                key = "ArrowRight" if back else "ArrowLeft"
                seconds = waited(page, LEGEND, partial(page.keyboard.press, key))
                times.setdefault("iteration", []).append(seconds)
                settle(page)
                slider.focus()
        browser.close()
    return {name: (seconds, first if name in ("first", "explore") else click) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path)
    parser.add_argument("--tries", type=int, default=7)
    args = parser.parse_args()
    for name, (seconds, base) in measure(args.root, args.tries).items():
        middle, plain = statistics.median(seconds), statistics.median(base)
        print(f"{name:10} {middle:.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), ratio {middle / plain:.2f}")


if __name__ == "__main__":
    main()
