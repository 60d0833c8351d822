"""What the collector's tests share: small runs, made in this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from binade.data.run.directory import RunInfo, list_runs

# One layer, 32 tokens, operands quantized by torch: a second or less.
SMALL = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--scores", "")


@pytest.fixture
def collect(command, tmp_path: Path) -> Callable[..., RunInfo]:
    """`run` with SMALL options and more: the run it made."""

    def call(*arguments: str) -> RunInfo:
        known = {run.run_id for run in list_runs(tmp_path / "runs")[0]}
        assert command("run", *SMALL, *arguments) == 0
        (made,) = [run for run in list_runs(tmp_path / "runs")[0] if run.run_id not in known]
        return made

    return call
