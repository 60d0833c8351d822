"""Faults in a package of two functions, of which only one has a test that looks at its result."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.conftest import PROJECT, run_python
from tests.faults.fault import Kind, faults_of

CODE = "def double(x):\n    return x * 2\n\n\ndef half(x):\n    return x / 2\n"
TESTS = """import quant.code


def test_double():
    assert quant.code.double(3) == 6


def test_half():
    quant.code.half(3)
"""
FILES = {
    "pyproject.toml": "[tool.pytest.ini_options]\n",
    "quant/__init__.py": "",
    "quant/code.py": CODE,
    "tests/quant/test_code.py": TESTS,
}


@pytest.mark.slow
def test_what_tests_look_at_is_found(tmp_path: Path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    tests = {f"tests/quant/test_code.py::{name}": 0.1 for name in ("test_double", "test_half")}
    lines = {"quant/code.py": {"2": [0], "6": [1]}}
    (tmp_path / "quant.json").write_text(json.dumps({"seconds": tests, "modules": [], "lines": lines}))
    double, half = (fault for fault in faults_of("quant/code.py", CODE.encode()) if fault.kind is Kind.ARITHMETIC)
    faults = double, half, replace(half, statement="return x / 3")
    (tmp_path / "faults").write_text(json.dumps([asdict(fault) for fault in faults]))

    path = os.pathsep.join(map(str, (tmp_path, PROJECT)))
    command = "-m", "tests.faults", "plant", "--part", "quant", "--maps", ".", "--from", "faults"
    done = run_python(*command, cwd=tmp_path, env={"PYTHONPATH": path})

    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| quant")]
    assert [row[4] for row in rows] == [next(iter(tests)), "not found", "gone"]
    assert rows[0][2] == "`return x * 2`: `x * 2` → `(x / 2)`"
    assert (tmp_path / "quant/code.py").read_text() == CODE
