"""tests/gpu/all.sh runs every part at a tiny size where there is no GPU, and goes on with what is left."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import PROJECT
from tests.gpu.all import PARTS, gpu_test_files, tables

NAMES = [part.name for part in PARTS]
# What a training environment need not have.
HIDE = """
import sys

HIDDEN = {"duckdb", "streamlit", "altair", "vl_convert", "pandas", "gfloat", "en_dtypes"}

class Hide:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = map(Hide, sys.meta_path)
"""


@pytest.fixture(scope="module")
def hidden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH that hides packages from every process that has it."""
    place = tmp_path_factory.mktemp("hidden")
    (place / "sitecustomize.py").write_text(HIDE)
    return place


def run(hidden: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(hidden)}
    command = ["bash", PROJECT / "tests/gpu/all.sh", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd="/")


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("parts", [["device", "quantize"], pytest.param(NAMES, marks=pytest.mark.thorough)], ids=len)
def test_every_part_at_a_tiny_size_without_the_packages_of_the_app(tmp_path, hidden, parts):
    chosen = ("--device", "cpu", "--output", tmp_path, *(f"--part={name}" for name in parts))
    for name in ("duckdb", "pandas"):
        refused = subprocess.run(
            [sys.executable, "-c", f"import {name}"], env={**os.environ, "PYTHONPATH": str(hidden)}
        )
        assert refused.returncode == 1, "the packages are not hidden"
    done = run(hidden, *chosen)
    results = json.loads((tmp_path / "results.json").read_text())
    assert done.returncode == 0, done.stdout + json.dumps(results, indent=1)
    assert list(results) == parts
    for name, one in results.items():
        assert one["status"] == "passed" and one["device"].startswith("cpu: a tiny run"), one["output"]
        assert one["rows"] or name == "tests", f"{name} printed no table"
    written = (tmp_path / "results.md").read_text()
    assert all(f"| {name} | passed |" in written for name in parts) and "measures nothing" in written

    last = parts[-1]
    results[last]["status"] = "stopped after 150 s"
    (tmp_path / "results.json").write_text(json.dumps(results))
    again = run(hidden, *chosen, "--time", "1")  # no time for the part that is left
    assert again.returncode == 1 and again.stdout.count("skipped") == len(parts) - 1
    assert re.search(rf"{last}: .*: no time left\n", again.stdout) and f"left: {last};" in again.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_the_tests_for_a_gpu_import_nothing_of_the_app(hidden):
    """A file that does would end the whole part before its first test."""
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-m", "gpu"]
    environment = {**os.environ, "PYTHONPATH": str(hidden)}
    done = subprocess.run(
        [*collect, *gpu_test_files()], env=environment, capture_output=True, text=True, cwd=PROJECT, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.thorough
@pytest.mark.slow
def test_without_a_gpu_it_is_one_line(tmp_path, hidden):
    done = run(hidden, "--output", tmp_path / "none")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "no CUDA device" in done.stderr and not (tmp_path / "none").exists()


def test_tables_and_files():
    text = "a | b\n\n| x | y |\n|---|:-:|\n| 1 | two |\n\n| z |\n|---|\n| 3 |\n"
    assert tables(text) == [{"x": "1", "y": "two"}, {"z": "3"}]
    assert {"tests/quant/test_backends.py", "tests/collector/capture/test_writing.py"} <= set(gpu_test_files())
    assert "tests/quant/test_codes.py" not in gpu_test_files()
