"""A user without a home directory, and terminals and locales without UTF-8."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from binade.quant import cache_directory
from tests.conftest import PROJECT

pytestmark = pytest.mark.slow

LOCALE = {"PATH": os.environ["PATH"], "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_a_terminal_without_utf_8_is_given_escapes(tmp_path: Path):
    """A name that is not text in this locale is refused in one line."""
    for encoding in ("ascii", "latin-1"):
        environment = LOCALE | {"PYTHONIOENCODING": encoding, "HOME": str(tmp_path)}
        command = [sys.executable, "-m", "binade"]
        done = subprocess.run([*command, "list", "formats"], cwd=PROJECT, env=environment, capture_output=True)
        assert done.returncode == 0 and not done.stderr and done.stdout
        done = subprocess.run([*command, "verify", "大きさ"], cwd=PROJECT, env=environment, capture_output=True)
        assert done.returncode == 2 and re.fullmatch(rb"binade: .* is not valid Unicode: .*\n", done.stderr)


@pytest.mark.thorough
def test_every_text_file_of_the_package_is_read_in_utf_8(tmp_path: Path):
    """Python itself warns of a text file that is opened in the locale's encoding, in any module that this imports."""
    code = "import pkgutil, importlib, binade.app.main, binade.data.index.intake as i, binade.app.cli; i.schema()"
    environment = LOCALE | {"HOME": str(tmp_path), "PYTHONWARNDEFAULTENCODING": "1"}
    command = [sys.executable, "-W", "error::EncodingWarning:binade", "-c", code]
    done = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]


def test_the_temporary_cache_is_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("BINADE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is for a user that the system does not know
    cache_directory.temporary_cache.cache_clear()
    own = cache_directory.cache_directory()
    assert own.parent == tmp_path and stat.S_IMODE(own.stat().st_mode) == 0o700
    cache_directory.temporary_cache.cache_clear()
    assert cache_directory.cache_directory() == own
    for hostile in (lambda: own.chmod(0o777), lambda: (own.rmdir(), own.symlink_to("/tmp"))):
        hostile()
        cache_directory.temporary_cache.cache_clear()
        assert cache_directory.cache_directory() != own
    cache_directory.temporary_cache.cache_clear()
