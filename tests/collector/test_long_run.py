"""A watched run with a kill in its middle stays as small as it was: a short form of tests/bench/bench_long.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from binade.data.run.directory import DONE, list_runs
from binade.data.run.losses import read_losses
from tests.bench.bench_long import STEPS, measure

pytestmark = pytest.mark.slow


@pytest.mark.thorough
def test_memory_is_flat_and_rows_grow_with_the_iterations(tmp_path: Path):
    found = [*measure(tmp_path, 200, kill=True, samples=4)]
    (run,) = list_runs(tmp_path)[0]
    assert run.status.state == DONE and [r["iteration"] for r in read_losses(run.directory)] == list(range(200))
    assert found[3].resident < 1.1 * found[2].resident  # both after the kill
    each = (run.status.tensors - found[0].rows) / (200 - found[0].iteration)  # rows of an iteration
    for sample in found:
        assert abs(sample.rows - found[0].rows - each * (sample.iteration - found[0].iteration)) <= 2 * STEPS * each
