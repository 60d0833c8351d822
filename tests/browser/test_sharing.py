"""The app shared: behind a real nginx that authenticates, and with a real OpenID Connect provider."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from oidc_provider_mock import User, run_server_in_thread
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

from binade.collector import jobs
from tests.app.tab import Tab
from tests.browser.conftest import SIZE
from tests.browser.driver import free_port, new_page, serving, settle, turn_to
from tests.collector.test_jobs import end_all
from tests.conftest import until

pytestmark = [pytest.mark.browser, pytest.mark.slow]
PROXY = "127.0.0.2"  # where nginx connects from: other programs on this machine are 127.0.0.1
HEADER = "X-Forwarded-User"
CONF = """
pid {place}/pid; error_log {place}/error.log; daemon off; worker_processes 1;
events {{ }}
http {{
    access_log off; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/f; uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
    server {{
        listen 127.0.0.1:{port};
        auth_basic "Binade"; auth_basic_user_file {place}/users;
        client_max_body_size 100m;
        location / {{
            proxy_pass {app}; proxy_bind {proxy}; proxy_http_version 1.1;
            proxy_set_header Host $http_host;
            proxy_set_header X-Forwarded-User $remote_user;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection "upgrade";
        }}
    }}
}}
"""
UPGRADE = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "MDEyMzQ1Njc4OWFiY2RlZg==",
}


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "runs"
    place.mkdir()
    yield place
    end_all(place)


@contextmanager
def nginx(place: Path, port: int, app: str) -> Iterator[None]:
    """Debian's nginx in front of the app, with the users ada and bob, whose passwords are their names."""
    place.mkdir()
    (place / "users").write_text("ada:{PLAIN}ada\nbob:{PLAIN}bob\n")
    (place / "users").chmod(0o644)
    conf = place / "nginx.conf"
    conf.write_text("user root;\n" + CONF.format(place=place, port=port, app=app, proxy=PROXY))
    server = subprocess.Popen([shutil.which("nginx") or "nginx", "-p", place, "-c", conf])
    try:
        until(lambda: listens(port) or server.poll() is not None, "nginx")
        assert server.poll() is None, (place / "error.log").read_text()
        yield
    finally:
        server.terminate()
        server.wait()


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def status(address: str, path: str = "/", source: str = "127.0.0.1", **headers: str) -> int:
    with closing(HTTPConnection(urlsplit(address).netloc, timeout=30, source_address=(source, 0))) as connection:
        connection.request("GET", path, headers=headers)
        return connection.getresponse().status


@pytest.mark.thorough
@pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx: apt-get install nginx-light")
def test_behind_a_proxy(browser: Browser, root: Path, tmp_path: Path):
    """The proxy's users are known by the header that it sets, a viewer only looks, an operator launches, and whatever
    does not come from the proxy is refused."""
    port = free_port()
    own, named, stream = f"http://127.0.0.1:{port}", {HEADER: "ada"}, "/_stcore/stream"
    trust = ("--trust-proxy-header", HEADER, "--proxy", PROXY, "--allow-host", f"127.0.0.1:{port}")
    with serving(root, *trust, "--operators", "ada") as app, nginx(tmp_path / "nginx", port, app):
        for forged in ({}, named, named | {"X-Forwarded-For": PROXY}, named | {"Forwarded": f"for={PROXY}"}):
            assert status(app, **forged) == 403
            assert status(app, stream, Origin=app, **UPGRADE, **forged) == 403
        assert status(app, source=PROXY) == status(app, source=PROXY, **{HEADER: " "}) == 403
        assert status(app, source=PROXY, **named) == 200
        assert status(app, stream, PROXY, Origin=app, **UPGRADE, **named) == 101
        assert status(own) == 401
        for user, accepted in (("bob", 403), ("ada", 204)):
            with Tab(app, PROXY, **{HEADER: user}) as tab:
                tab.visit("notebook", "part=import")
                assert tab.put(b"x") == accepted
        with browser.new_context(
            viewport=SIZE, http_credentials=credentials("bob"), extra_http_headers=named
        ) as context:
            page = opened(context, own)  # the browser claims to be ada
            expect(page.get_by_text("bob · viewer")).to_be_visible()
            turn_to(page, "Runs")
            expect(part(page, "Jobs")).to_be_visible()
            expect(part(page, "New collection")).to_have_count(0)
        with browser.new_context(viewport=SIZE, http_credentials=credentials("ada")) as context:
            page = opened(context, own)
            expect(page.get_by_text("ada · operator")).to_be_visible()
            turn_to(page, "Runs", "New collection")
            page.get_by_role("button", name="Launch").click()
            expect(page.get_by_role("heading", name="Runs › Jobs")).to_be_visible()
            assert len(jobs.listing(root)) == 1


def credentials(user: str) -> dict[str, str]:
    return {"username": user, "password": user, "send": "always"}


def opened(context: BrowserContext, address: str) -> Page:
    page = new_page(context)
    page.goto(address)
    settle(page)
    return page


def part(page: Page, title: str) -> Locator:
    return page.get_by_role("radio", name=title, exact=True)


SECRETS = """[auth]
redirect_uri = "http://localhost:{port}/oauth2callback"
cookie_secret = "of the test"
client_id = "binade"
client_secret = "any"
server_metadata_url = "http://localhost:{provider}/.well-known/openid-configuration"
"""


@pytest.mark.thorough
def test_signing_in(browser: Browser, root: Path, tmp_path: Path):
    """Nobody sees a page before they have signed in with the provider; an address that it does not declare verified
    is not that of the operator."""
    claims = {"email": "ada@example.org"}
    users = [User(sub="ada", claims=claims | {"email_verified": True}), User(sub="eve", claims=claims)]
    port = free_port()
    with run_server_in_thread(user_claims=users) as provider:
        secrets = tmp_path / ".streamlit" / "secrets.toml"
        secrets.parent.mkdir()
        secrets.write_text(SECRETS.format(port=port, provider=provider.server_port))
        options = ("--host", "0.0.0.0", "--login", "--operators", "ada@example.org")
        with serving(root, *options, env={"HOME": str(tmp_path)}, port=port):
            with browser.new_context(viewport=SIZE) as context:
                for user, role in (("eve", "eve · viewer"), ("ada", "ada@example.org · operator")):
                    page = opened(context, f"http://localhost:{port}/runs?view=jobs")
                    expect(page.get_by_text("Sign in to see the runs.")).to_be_visible()
                    expect(page.get_by_text("No jobs yet.")).to_have_count(0)
                    page.get_by_role("button", name="Sign in").click()
                    page.get_by_role("button", name=user, exact=True).click()
                    expect(page.get_by_text(role)).to_be_visible()
                    turn_to(page, "Runs")
                    expect(part(page, "New collection")).to_have_count(int(user == "ada"))
                    context.clear_cookies()
