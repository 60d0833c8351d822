"""What a web page of another site can do to the app: nothing."""

from __future__ import annotations

from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser

from tests.browser.chromium import ARGUMENTS, install
from tests.conftest import until

pytestmark = pytest.mark.slow

OPENS = """address => new Promise(done => {
    const socket = new WebSocket(address);
    socket.onopen = () => done(true);
    socket.onerror = () => done(false);
})"""
FRAMED = """address => new Promise(done => {
    const frame = document.createElement('iframe');
    frame.onload = done;
    frame.src = address;
    document.body.append(frame);
})"""


def test_another_name_and_another_site(browser: Browser, app: str):
    """A site that rebinds its name to this machine gets no page and no websocket, nor does it for the app's own name;
    nor can it show the app in a frame."""
    own = urlsplit(app).netloc
    other = f"evil.example:{urlsplit(app).port}"
    rules = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    hostile = browser.browser_type.launch(executable_path=install(), args=[*ARGUMENTS, rules])
    try:
        page = hostile.new_page()
        page.goto(app)
        assert page.evaluate(OPENS, f"ws://{own}/_stcore/stream")  # the app's own page may
        answer = page.goto(f"http://{other}/")
        assert answer.status == 403 and f"--allow-host {other}" in answer.text()
        assert not page.evaluate(OPENS, f"ws://{other}/_stcore/stream")
        assert not page.evaluate(OPENS, f"ws://{own}/_stcore/stream")
        page.evaluate(FRAMED, app)
        until(lambda: page.frames[1].url.startswith("chrome-error:") or page.wait_for_timeout(100), "a refused frame")
    finally:
        hostile.close()


def test_what_names_no_host_or_no_page(app: str):
    """Requests that no browser sends."""
    own = urlsplit(app).netloc
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    upgrade["Sec-WebSocket-Key"] = "MDEyMzQ1Njc4OWFiY2RlZg=="

    def status(path: str, **headers: str) -> int:
        link = HTTPConnection(own, timeout=30)
        link.request("GET", path, headers=headers)
        found = link.getresponse()
        assert found.headers["X-Content-Type-Options"] == "nosniff" or "Upgrade" in headers
        link.close()
        return found.status

    assert status("/") == status("/", Host=own.replace("127.0.0.1", "LocalHost")) == 200
    for host in (f"{own}.evil.example", "evil.example", "localhost", "", f"{own}@evil.example"):
        assert status("/", Host=host) == 403
    assert status("/_stcore/stream", Origin=app, **upgrade) == 101
    for origin in (None, "", "null", "http://evil.example", app.replace("http", "file"), f"{app}.evil.example"):
        assert status("/_stcore/stream", **upgrade, **({} if origin is None else {"Origin": origin})) == 403
    assert status("/", Origin="http://evil.example") == 403
