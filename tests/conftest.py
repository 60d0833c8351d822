"""Shared by all tests: real runs, collected once by the real command; one thread per process; the slow files first.

Several workers (`pytest -n 2 --dist loadfile`, as `make test` does) each take whole files.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from filelock import FileLock

# Before torch is imported, and for every process that a test starts: tensors here are too small to share.
os.environ["OMP_NUM_THREADS"] = "1"

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first, so that no worker is left with a long one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell that starts pytest in the background has it ignore SIGINT, and every process of a test with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
    """A root with one run of each of RECIPES: tiny, 2 layers, 2 recorded iterations of 128 tokens. Read only.

    One worker collects; each has a copy, since only one process at a time can own a root's index.
    """
    own = tmp_path_factory.getbasetemp()
    first = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "collected"
    with FileLock(f"{first}.lock"):
        if not first.exists():
            partial = first.with_name("collecting")
            done = run_collector(
                "batch", "--quantization", ",".join(RECIPES), "--training-config", "fast",
                "--warmup-iterations", "2", "--control-iter", "2", root=partial,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
            partial.rename(first)
    return shutil.copytree(first, own / "runs", copy_function=os.link)
