"""Driving the app: start it, start a browser, wait until a page has come to rest."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, Playwright

from tests.browser.chromium import ARGUMENTS, install

PROJECT = Path(__file__).parents[2]
STARTUP = 60  # seconds that the app may take to answer

# At rest: the script has ended, nothing is stale, no skeleton is left, every chart has its canvas.
AT_REST = """() => {
    const app = document.querySelector('[data-testid=stApp]');
    if (!app || app.dataset.testScriptState !== 'notRunning') return false;
    if (!document.querySelector('h1')) return false;
    if (document.querySelector('[data-testid=stSkeleton], [data-stale=true]')) return false;
    const charts = [...document.querySelectorAll('[data-testid=stVegaLiteChart]')];
    return charts.every(chart => chart.querySelector('canvas, svg.marks'));
}"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(root: Path) -> Iterator[str]:
    """The real app on a root, in a process of its own; yields its address. Where a test fails meanwhile, what the app
    said is printed."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as output:  # a pipe that nobody reads would fill up and stop it
        app = subprocess.Popen(
            [sys.executable, "-m", "binade", "serve", "--port", str(port)],
            cwd=PROJECT,
            env={**os.environ, "TENSOR_SAVE_DIR": str(root)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            wait_for_health(app, address)
            yield address
        except BaseException:
            output.seek(0)
            print(f"the app said:\n{output.read()[-10_000:]}")
            raise
        finally:
            app.terminate()
            try:
                app.wait(timeout=20)
            except subprocess.TimeoutExpired:
                app.kill()
                app.wait()


def wait_for_health(app: subprocess.Popen[bytes], address: str) -> None:
    """Return when the app answers; fail if it ends before."""
    for _ in range(STARTUP * 5):
        try:
            with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            pass
        try:
            app.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"the app ended with exit status {app.returncode}")
    raise AssertionError(f"the app did not answer at {address} within {STARTUP} s")


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=install(), args=list(ARGUMENTS))


def settle(page: Page) -> None:
    """Wait until the page is at rest, and still is after the browser has drawn twice."""
    page.wait_for_function(AT_REST, timeout=60_000)
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.wait_for_function(AT_REST, timeout=60_000)
