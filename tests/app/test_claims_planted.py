"""Sentences name planted effects, and depend on nothing else. `python -m tests.bench.bench_claims` also counts how
often they name a difference between runs that have none."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app.planted import EFFECTS, INVARIANCES, Effect, Invariance

pytestmark = pytest.mark.slow


@pytest.mark.sampled(1)
@pytest.mark.parametrize("check", [*EFFECTS, *INVARIANCES], ids=lambda check: check.what)
def test_planted(check: Effect | Invariance, tmp_path: Path):
    assert not check.problem(tmp_path)
