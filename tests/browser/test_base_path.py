"""The app under a path of another host: behind the nginx of the docs, which keeps the path, and one that removes it."""

from __future__ import annotations

import re
import shutil
import subprocess
import textwrap
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Response, expect

from tests.browser.conftest import SIZE
from tests.browser.driver import free_port, new_page, serving, settle, turn_to
from tests.browser.test_sharing import listens
from tests.conftest import PROJECT, until

pytestmark = [pytest.mark.browser, pytest.mark.thorough]
CONF = """
pid {place}/pid; error_log {place}/error.log; daemon off; worker_processes 1; user root;
events {{ }}
http {{
    access_log off; client_body_temp_path {place}/body; proxy_temp_path {place}/proxy;
    fastcgi_temp_path {place}/f; uwsgi_temp_path {place}/u; scgi_temp_path {place}/s;
    server {{
        listen 127.0.0.1:{port};
        {location}
    }}
}}
"""
UPSTREAM = "http://127.0.0.1:8501"  # in the docs


def documented() -> str:
    """The location of the docs."""
    found = re.search(
        r"^    location /team/binade/ \{.*?^    \}", (PROJECT / "docs/serving.md").read_text(), re.M | re.S
    )
    assert found and UPSTREAM in found[0]
    return textwrap.dedent(found[0])


@pytest.mark.skipif(not shutil.which("nginx"), reason="needs nginx: apt-get install nginx-light")
@pytest.mark.parametrize(
    ("path", "keeps", "option"),
    [("/team/binade", True, True), ("/team/binade", False, True), ("/user/ada/proxy/8501", False, False)],
    ids=["kept", "removed", "removed_without_the_option"],
)
def test_under_a_path(browser: Browser, collected: Path, tmp_path: Path, path: str, keeps: bool, option: bool):
    """Every page opens, by a click and by its address, Back returns, and nothing is asked for outside of the path."""
    port = free_port()
    options = ["--allow-host", f"127.0.0.1:{port}", *(["--base-path", path] if option else [])]
    with serving(collected, *options) as app:
        location = documented().replace("/team/binade/", f"{path}/").replace(UPSTREAM, app if keeps else f"{app}/")
        (tmp_path / "nginx.conf").write_text(CONF.format(place=tmp_path, port=port, location=location))
        server = subprocess.Popen(["nginx", "-p", tmp_path, "-c", tmp_path / "nginx.conf"])
        try:
            until(lambda: listens(port) or server.poll() is not None, "nginx")
            with browser.new_context(viewport=SIZE) as context:
                page, failed, outside = new_page(context), [], []

                def answered(response: Response) -> None:
                    if response.url.startswith("http"):
                        failed.extend([response.url] * (response.status >= 400))
                        outside.extend([response.url] * (f":{port}{path}/" not in response.url))

                page.on("response", answered)
                home = f"http://127.0.0.1:{port}{path}"
                page.goto(f"{home}/")
                settle(page)
                turn_to(page, "Runs")
                assert re.match(rf"{home}/runs(\?|$)", page.url)
                turn_to(page, "Explore")
                page.go_back()
                expect(page.get_by_role("heading", name=re.compile("^Runs"))).to_be_visible()
                page.goto(f"{home}/tensor?view=why")
                settle(page)
                expect(page.get_by_role("heading", name=re.compile("^Tensor"))).to_be_visible()
                assert not failed and not outside
        finally:
            server.terminate()
            server.wait()
