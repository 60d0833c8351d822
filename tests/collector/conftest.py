"""What the collector's tests share: the command line called in this process, on small runs."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from binade.cli import main
from binade.data.runs import RunInfo, list_runs

# One layer, 32 tokens, operands quantized by torch: a second or less.
SMALL = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--scores", "")


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """binade in this process, on the root tmp_path/"runs": its exit status."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "runs"))

    def call(*arguments: str) -> int:
        try:
            return main(arguments)
        except SystemExit as end:
            return end.code

    yield call
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.fixture
def collect(command, tmp_path: Path) -> Callable[..., RunInfo]:
    """`run` with SMALL options and more: the run it made."""

    def call(*arguments: str) -> RunInfo:
        known = {run.run_id for run in list_runs(tmp_path / "runs")[0]}
        assert command("run", *SMALL, *arguments) == 0
        (made,) = [run for run in list_runs(tmp_path / "runs")[0] if run.run_id not in known]
        return made

    return call


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tmpfs of the size that the test asks for."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    until = time.monotonic() + 30
    while subprocess.run(["umount", str(place)], capture_output=True).returncode:
        assert time.monotonic() < until, f"a process still uses {place}"
        time.sleep(0.1)  # one that was told to end may be on its way
