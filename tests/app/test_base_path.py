"""The path that a reverse proxy serves the app under."""

from __future__ import annotations

import re

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from binade.app.frame.base_path import WithBasePath, WithoutBasePath, base_path_of
from binade.app.frame.one_address import OneAddress
from binade.app.frame.sharing import SharingError, sharing_of
from binade.app.sessions.share_view import address_without_page

PAGE = "<html><head></head><body>{}</body></html>"


def test_a_request_with_and_without_the_path_reaches_the_same_route():
    """The routes of Streamlit have the path, the checks of the app do not; the page knows how deep it lies."""
    path = "/team/binade"

    async def page(request: Request) -> HTMLResponse:
        return HTMLResponse(PAGE.format(request.url.path))

    app = Starlette(
        routes=[Route(path + name, page) for name in ("/", "/runs")],
        middleware=[
            Middleware(WithoutBasePath, path=path),
            Middleware(OneAddress),
            Middleware(WithBasePath, path=path),
        ],
    )
    client = TestClient(app)
    for asked, home, levels in (("/", "true", 1), ("/runs", "false", 1)):
        for prefix in ("", path):
            answer = client.get(prefix + asked, headers={"accept": "text/html"})
            assert answer.status_code == 200 and f"{path}{asked}" in answer.text
            assert f"if ({home} &&" in answer.text and f"slice(0, -{levels})" in answer.text
    assert client.get("/team/binadex/runs").status_code == 404


@pytest.mark.parametrize("text", ["/team/binade", "team/binade/", "/user/ada@lab/proxy/8501", "/a.b/~c", "", "/"])
def test_paths(text: str):
    assert base_path_of(text) == ("/" + text.strip("/")).rstrip("/")
    assert sharing_of("127.0.0.1", 8501, base_path=text).base_path == base_path_of(text)


@pytest.mark.parametrize("text", ["/a b", "/a/../b", "//a//b", "/a?b", "/<x>", "/./a", "https://x.org/a", "/ä"])
def test_what_is_no_path_is_refused_in_one_line(text: str):
    with pytest.raises(SharingError, match=re.escape(f"--base-path {text}: expected a path")):
        sharing_of("127.0.0.1", 8501, base_path=text)


def test_the_link_to_a_session_keeps_the_path():
    for here in ("https://x.org", "https://x.org/team/binade", "http://127.0.0.1:8501"):
        for page in ("", "/", "/runs", "/explore/", "/home"):
            assert address_without_page(f"{here}{page}?a=b") == here
