"""Driving the app: start it, start a browser, wait until a page has come to rest."""

from __future__ import annotations

import re
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit
from weakref import WeakKeyDictionary

import psutil
from playwright.sync_api import Browser, BrowserContext, Page, Playwright, WebSocket
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

from binade.app.frame.address import RESOLVED
from tests.browser.chromium import ARGUMENTS, install
from tests.conftest import start_binade, until

PATIENCE = 120  # seconds: on busy cores a page may take long
# At rest: the script has ended, nothing is stale, no skeleton is left, every chart and the Map are drawn.
AT_REST = """() => {
    const app = document.querySelector('[data-testid=stApp]');
    if (!app || app.dataset.testScriptState !== 'notRunning') return false;
    if (!document.querySelector('h1')) return false;
    if (document.querySelector('[data-testid=stSkeleton], [data-stale=true]')) return false;
    const parts = [...document.querySelectorAll('[data-testid=stBidiComponentIsolated]')].map(part => part.shadowRoot);
    if (!parts.every(part => part && part.querySelector('.map')?.childElementCount !== 0)) return false;
    return [...document.querySelectorAll('.chart, .explore, .export')].every(part => part.dataset.state !== 'drawing');
}"""


# To scroll closes a list: the page is told of it in the next frame.
SCROLL = """input => new Promise(done => {
    input.scrollIntoView({block: 'center'});
    requestAnimationFrame(() => requestAnimationFrame(done));
})"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


PORTS: list[int] = []  # of apps that have ended: a browser has the scripts of an app at the same address compiled


@contextmanager
def serving(root: Path, *options: str, port: int | None = None, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """The real app on a root, in a process of its own; yields its address. Where a test fails meanwhile, what the app
    said is printed. options: of `binade serve`. With env, which a module may read when it is imported, it is the true
    command, else a fork of `template`."""
    port = port or (PORTS.pop() if PORTS else free_port())
    address = f"http://127.0.0.1:{port}"
    with tempfile.NamedTemporaryFile("w+") as output:  # a pipe that nobody reads would fill up and stop it
        streams = {"stdout": output, "stderr": subprocess.STDOUT}
        app = start_binade("serve", "--port", str(port), *options, root=root, env=env, **streams)
        try:
            until(lambda: answers(app.pid, address), f"the app to answer at {address}")
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
            PORTS.append(port)


def answers(pid: int, address: str) -> bool:
    assert psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE, "the app has ended"
    try:
        with urllib.request.urlopen(f"{address}/_stcore/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError as refusal:
        return refusal.code == 403  # it answers its proxy only
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def launch(playwright: Playwright) -> Browser:
    return playwright.chromium.launch(executable_path=install(), args=list(ARGUMENTS))


class Unanswered:
    """Whether the browser has asked the app for a run of its script that has not ended yet.

    The page itself cannot say so: between a click and the app's first answer its script state is still `notRunning`.
    """

    def __init__(self, page: Page):
        self.sent = self.started = False
        page.on("websocket", self._listen)

    def __bool__(self) -> bool:
        return self.sent or self.started

    def _listen(self, socket: WebSocket) -> None:
        socket.on("framesent", self._sent)
        socket.on("framereceived", self._received)

    def _sent(self, frame: bytes | str) -> None:
        if isinstance(frame, bytes) and BackMsg.FromString(frame).HasField("rerun_script"):
            self.sent = True

    def _received(self, frame: bytes | str) -> None:
        message = ForwardMsg.FromString(frame) if isinstance(frame, bytes) else ForwardMsg()
        if message.HasField("new_session"):
            self.sent, self.started = False, True
        elif message.HasField("script_finished"):
            self.started = message.script_finished == ForwardMsg.FINISHED_EARLY_FOR_RERUN  # then it starts again


WATCHED: WeakKeyDictionary[Page, Unanswered] = WeakKeyDictionary()


def new_page(context: BrowserContext) -> Page:
    """A page whose traffic with the app is watched, so that `settle` knows whether an answer is due."""
    page = context.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    WATCHED[page] = Unanswered(page)
    return page


def settle(page: Page) -> None:
    """Wait until every run of the script that the browser asked for has ended, and the page is at rest."""
    for _ in range(2):  # what is drawn last may ask again
        page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        until(lambda: not WATCHED[page] or page.wait_for_timeout(100), "the app to answer")  # frames come meanwhile
        page.wait_for_function(AT_REST)


def turn_to(page: Page, title: str, part: str = "") -> None:
    """Open a page from the navigation, and one of its parts."""
    page.locator(".st-key-header").get_by_role("link", name=title, exact=True).click()
    page.get_by_role("heading", name=re.compile(f"^{title} › ")).wait_for()
    settle(page)
    if part:
        press(page, part)
        page.get_by_role("heading", name=f"{title} › {part}", exact=True).wait_for()


def chosen(page: Page) -> dict[str, list[str]]:
    """The parameters of the address without those that the view leaves open."""
    query = parse_qs(urlsplit(page.url).query)
    left_open = query.pop(RESOLVED, [""])[0].split(",")
    return {name: texts for name, texts in query.items() if name not in left_open}


def press(page: Page, title: str) -> None:
    """Choose one of a segmented control."""
    page.get_by_role("radio", name=title, exact=True).click()
    settle(page)


def pick(page: Page, title: str, value: str) -> None:
    """Choose a value of a list as a user does: open it, click."""
    box = page.get_by_test_id("stSelectbox").filter(has=page.get_by_text(title, exact=True)).locator("input")
    box.evaluate(SCROLL)
    box.click()
    page.get_by_role("option", name=value, exact=True).click()
    settle(page)


def choose(page: Page, title: str, value: str) -> None:
    """Choose a value of a field of the filter: open its chip, click the value, close the chip."""
    chip = page.get_by_role("button", name=re.compile(rf"^{re.escape(title)}(: .*)? ▾$"))
    listed = page.locator(".st-key-chip_values")
    chip.click()
    listed.get_by_role("button", name=value, exact=True).click()
    page.get_by_role("button", name=re.compile(rf"^{re.escape(title)}: .*{re.escape(value)}.* ▾$")).wait_for()
    settle(page)
    chip.click()
    listed.wait_for(state="hidden")
    settle(page)
