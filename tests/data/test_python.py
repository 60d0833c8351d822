"""Another Python finds the binade that runs here, installed or not, from any directory."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
from pathlib import Path

from tests.conftest import PROJECT

PROBE = """
import json, subprocess, sys
from binade.data.exchange.python import package_environment, package_path
where = "import binade; print(binade.__file__)"
child = subprocess.run([sys.executable, "-P", "-c", where], env=package_environment(), capture_output=True, text=True)
print(json.dumps([str(package_path()), child.stdout.strip()]))
"""


def probe(python: str | Path, directory: Path, **environment: str) -> list[str]:
    done = subprocess.run(
        [python, "-P", "-c", PROBE], cwd=directory, env=environment, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


def test_a_checkout(tmp_path: Path):
    (tmp_path / "binade.py").write_text("raise SystemExit('the user has a file of this name')")
    assert probe(sys.executable, tmp_path, PYTHONPATH=str(PROJECT)) == [
        str(PROJECT),
        str(PROJECT / "binade" / "__init__.py"),
    ]


def test_an_installed_package(tmp_path: Path):
    venv.create(tmp_path / "env")
    (packages,) = (tmp_path / "env" / "lib").glob("python3*/site-packages")
    (packages / "binade").symlink_to(PROJECT / "binade")
    found = probe(tmp_path / "env" / "bin" / "python", tmp_path)
    assert found == ["None", str(packages / "binade" / "__init__.py")]
