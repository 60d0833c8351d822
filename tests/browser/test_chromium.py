"""Finding a browser, and saying what to do where there is none."""

from __future__ import annotations

import os
from pathlib import Path

from tests.browser import chromium
from tests.conftest import Done, run_python


def run(**environment: str) -> Done:
    return run_python("-m", "tests.browser.chromium", env=environment)


def program(directory: Path, name: str) -> Path:
    path = directory / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_the_first_name_on_the_path(tmp_path: Path):
    later, earlier = program(tmp_path, "google-chrome-stable"), program(tmp_path, "chromium-browser")
    found = run(PATH=str(tmp_path), CHROMIUM="")
    assert (found.returncode, found.stdout) == (0, f"{earlier}\n")
    earlier.unlink()
    assert run(PATH=str(tmp_path), CHROMIUM="").stdout == f"{later}\n"


def test_the_given_one_comes_first(tmp_path: Path):
    program(tmp_path, "chromium")
    given = program(tmp_path, "mine")
    assert run(PATH=str(tmp_path), CHROMIUM=str(given)).stdout == f"{given}\n"


def test_one_line_says_what_to_install(tmp_path: Path):
    """Neither a browser nor apt-get on the path."""
    missing = run(PATH=str(tmp_path), CHROMIUM="")
    assert missing.returncode == 1 and missing.stdout == ""
    assert missing.stderr.count("\n") == 1 and "install Chromium" in missing.stderr


def test_a_wrong_setting_is_not_passed_over(tmp_path: Path):
    program(tmp_path, "chromium")
    wrong = run(PATH=str(tmp_path), CHROMIUM="/no/such")
    assert wrong.returncode == 1 and "'/no/such'" in wrong.stderr and wrong.stderr.count("\n") == 1


def test_debians_package_is_installed_as_root(tmp_path: Path, monkeypatch):
    """apt-get is a stand-in that notes what it was asked for and brings a program."""
    program(tmp_path, "apt-get").write_text(
        '#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> "$0.log"\n'
        f'[ "$1" = install ] && printf "#!/bin/sh\\n" > {tmp_path}/chromium\n'
        f'[ "$1" = install ] && /bin/chmod +x {tmp_path}/chromium\nexit 0\n'
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert chromium.install() == str(tmp_path / "chromium")
    assert (tmp_path / "apt-get.log").read_text().splitlines() == [
        "noninteractive update",
        "noninteractive install -y --no-install-recommends chromium",
    ]
