"""Fixtures shared by all tests: one root of real runs, collected once a session by the real command."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

try:
    from hypothesis import settings
except ImportError:  # where only kernels are run
    pass
else:
    # The same examples in every run; --hypothesis-profile=default looks for new ones.
    settings.register_profile("same", derandomize=True, database=None, deadline=None)
    settings.load_profile("same")

PROJECT = Path(__file__).parents[1]
RECIPES = ("bf16", "hifp8", "mxfp8", "mxfp4")


def run_collector(*arguments: str, root: Path, **options) -> subprocess.CompletedProcess[str]:
    """binade in a process of its own, output captured."""
    environment = {**os.environ, "TENSOR_SAVE_DIR": str(root), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-m", "binade", *arguments],
        cwd=PROJECT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        **options,
    )


@pytest.fixture(scope="session")
def collected(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with one run of each of RECIPES: tiny, 2 layers, 2 recorded iterations of 128 tokens. Read only."""
    root = tmp_path_factory.mktemp("runs")
    done = run_collector(
        "batch", "--quantization", ",".join(RECIPES), "--training-config", "fast",
        "--warmup-iterations", "2", "--control-iter", "2", root=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return root
