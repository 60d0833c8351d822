"""Streamlit's settings: passed on the command line, so that they apply from any working directory."""

from __future__ import annotations

from click.testing import CliRunner
from streamlit import config
from streamlit.web import bootstrap, cli

from binade.app.cli import _options, _settings
from binade.cli import main
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
    assert chosen["theme.dark.primaryColor"] == "#7073f3" and chosen["client.toolbarMode"] == "minimal"


def test_a_root_that_is_a_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs").touch()
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "runs"))
    assert main(["serve", "--port", str(free_port())]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"binade: {tmp_path / 'runs'} is a file: the root of the runs must be a directory"
    ]
