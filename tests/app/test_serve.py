"""Streamlit's settings: passed on the command line, so that they apply from any working directory."""

from __future__ import annotations

import re
import sys

import pytest
from click.testing import CliRunner
from starlette.staticfiles import StaticFiles
from starlette.testclient import TestClient
from streamlit import config
from streamlit.web import bootstrap, cli

from binade.app.cli import _options, _settings
from binade.app.frame.first_scripts import STATIC, links
from binade.app.frame.one_address import OneAddress
from binade.app.frame.sharing import SharingError, address_of, sharing_of
from binade.cli import main
from binade.collector.cli.jobs import add_line
from binade.data.run import access
from tests.browser.driver import free_port


def test_streamlit_takes_every_setting(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    passed: dict[str, object] = {}
    monkeypatch.setattr(cli, "check_credentials", lambda: None)
    monkeypatch.setattr(bootstrap, "load_config_options", lambda flag_options: passed.update(flag_options))
    monkeypatch.setattr(bootstrap, "run", lambda *_, **__: None)
    (tmp_path / "page.py").touch()
    options = _options(_settings())
    CliRunner().invoke(cli.main, ["run", "page.py", *options], catch_exceptions=False)
    chosen = {name.replace("_", "."): value for name, value in passed.items() if value is not None}
    names = [name.removeprefix("--") for name in options[::2]]
    assert set(names) <= set(config._config_options_template) and set(names) <= set(chosen)
    assert chosen["server.headless"] is True and chosen["browser.gatherUsageStats"] is False
    assert chosen["theme.dark.primaryColor"] == "#7578f5" and chosen["client.toolbarMode"] == "minimal"


def test_a_root_that_is_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").touch()
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "runs"))
    assert main(["serve", "--port", str(free_port())]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"binade: {tmp_path / 'runs'} is a file: the root of the runs must be a directory"
    ]


def test_a_page_is_not_kept_by_the_browser_when_the_styles_change(tmp_path):
    """The page that Streamlit serves is a file with a tag, which stays the same when the app's styles change."""
    (tmp_path / "index.html").write_text("<html><head></head><body>page</body></html>")
    (tmp_path / "data.json").write_text("{}")
    files = StaticFiles(directory=tmp_path, html=True)
    browser, plain = TestClient(OneAddress(files)), TestClient(files)
    html = {"accept": "text/html"}
    kept = plain.get("/", headers=html).headers["etag"]
    again = browser.get("/", headers=html | {"if-none-match": kept})
    assert again.status_code == 200 and "etag" not in again.headers and "<style>" in again.text
    assert plain.get("/", headers=html | {"if-none-match": kept}).status_code == 304
    assert browser.get("/data.json", headers={"accept": "*/*"}).headers["etag"]


PROXIED = {"header": "X-User", "proxy": "10.0.0.1"}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"host": "0.0.0.0"}, "ssh -L 8501:127.0.0.1:8501 MACHINE"),
        ({"host": "::"}, "ssh -L"),
        ({"host": "192.0.2.1", "operators": "ada"}, "ssh -L"),
        ({"host": "machine"}, "--host machine"),
        ({"header": "X-User"}, "--proxy ADDRESS"),
        ({"proxy": "10.0.0.1"}, "--trust-proxy-header NAME"),
        ({"header": "X-User", "proxy": "10.0.0.0/8"}, "--proxy 10.0.0.0/8"),
        ({"login": True, **PROXIED}, "choose one"),
        ({"operators": "ada"}, "give --login or --trust-proxy-header"),
        ({"operators": "./none", **PROXIED}, "no such file"),
        ({"operators": " , ", **PROXIED}, "the list is empty"),
        ({"operators": "", **PROXIED}, "--operators is empty"),
        ({"host": "0.0.0.0", "header": "", "proxy": ""}, "--trust-proxy-header is empty"),
        ({"operators": "a" * 300, **PROXIED}, "name too long"),
        ({"operators": sys.executable, **PROXIED}, "expected a text file in UTF-8"),
    ],
)
def test_options_that_would_let_anybody_in_are_refused(options, named):
    with pytest.raises(SharingError, match=named):
        sharing_of(**{"host": "127.0.0.1", "port": 8501} | options)


def test_hosts_and_operators(tmp_path):
    shared = sharing_of("192.0.2.1", 80, ("Runs.Example",), **PROXIED, operators="ada, bob")
    assert {"192.0.2.1", "127.0.0.1", "runs.example"} <= {*shared.hosts} and shared.operators == {"ada", "bob"}
    assert "[2001:db8::1]:81" in sharing_of("2001:db8::1", 81, **PROXIED).hosts
    (tmp_path / "names").write_text("# of the team\nada\n\nbob@example.org  # on leave\n")
    assert sharing_of("::1", 81, **PROXIED, operators=str(tmp_path / "names")).operators == {"ada", "bob@example.org"}
    many = [f"user{number}@example.org" for number in range(300)]
    assert sharing_of("::1", 81, **PROXIED, operators=",".join(many)).operators == {*many}
    assert str(address_of("::ffff:10.0.0.1")) == "10.0.0.1"


def test_a_viewer_can_launch_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(access, "_reason_of_user", str)
    access.restrict(lambda: "bob is a viewer")
    with pytest.raises(access.ReadOnlyError, match="bob is a viewer"):
        add_line(tmp_path, ["quick", "mxfp8"])
    assert not [*tmp_path.iterdir()]


def test_a_public_address_without_users(capsys):
    assert main(["serve", "--host", "0.0.0.0", "--port", str(free_port())]) == 2
    assert "docs/serving.md" in capsys.readouterr().err


@pytest.mark.parametrize(("page", "charts"), [("", False), ("explore", True), ("tensor", True), ("runs", False)])
def test_the_document_names_the_scripts_of_the_first_view(page: str, charts: bool):
    """Each exists, once, and is a script that the document does not name itself."""
    names = re.findall(r'href="\./([^"]+)"', links(page).decode())
    assert len(set(names)) == len(names) > 20
    ours = [name.rpartition("/")[2] for name in names if not name.startswith("static/")]
    assert ("vega.js" in ours) == charts
    theirs = [name for name in names if name.startswith("static/")]
    assert all((STATIC / name).is_file() for name in theirs)
    assert any("/BidiComponent." in name for name in theirs)
    document = (STATIC / "index.html").read_text()
    assert not any(name in document for name in theirs)
