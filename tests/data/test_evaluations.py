"""What runs evaluated while they trained: what is written is read."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from binade.data.exchange import bundle
from binade.data.index.catalog import Catalog
from binade.data.run.directory import RunError
from binade.data.run.evaluations import GradientTwin, HeldOut, Twin, read_held_out, read_twins
from binade.data.run.experiment import check_experiment, cut_results, experiment_files
from tests.data.builder import assorted, make_run
from tests.data.experiments import add_evaluations

STEP = GradientTwin("step", None, None, None, 2.0, 0.1, 0.09, 0.01, 0.2, 0.01, 0.98)
FC1 = GradientTwin("layers.0.fc1.weight", 1, "fc1", 3, 1.0, 0.1, 0.1, 0.0, 0.0, 0.0, 0.99)


def twin(iteration: int, *changes: float) -> Twin:
    return Twin(iteration, 5.0, changes or (0.25,), len(changes) > 1, (STEP, FC1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path, assorted(1)).directory


def test_what_is_written_is_read(run: Path):
    assert read_twins(run) == [] and read_held_out(run) == {}
    first, again, later = HeldOut(0, (1.0, 2.0), "a"), HeldOut(0, (1.5, 2.0), "a", 64), HeldOut(3, (1.0, 1.5), "a")
    evaluated = twin(3), first, twin(0, 0.5, -0.25), later, again, twin(3, 1.0)
    for each in evaluated:
        add_evaluations(run, each)
    assert read_twins(run) == [twin(0, 0.5, -0.25), twin(3, 1.0)] and read_held_out(run) == {0: again, 3: later}
    check_experiment(run)
    cut_results(run, 3)
    assert read_twins(run) == [twin(0, 0.5, -0.25)] and read_held_out(run) == {0: again}
    cut_results(run, 0)
    assert read_twins(run) == [] and read_held_out(run) == {}


def test_what_is_not_finite_is_read(run: Path):
    gradient = GradientTwin("step", None, None, None, math.nan, math.inf)
    add_evaluations(run, Twin(0, math.inf, (math.nan,), False, (gradient,)), HeldOut(0, (math.nan, 1.0), "a"))
    ((read,), held_out) = read_twins(run), read_held_out(run)
    assert math.isinf(read.loss) and math.isnan(read.changes[0]) and math.isnan(read.step.norm)
    assert read.step.bias == math.inf and read.step.variance is None
    assert math.isnan(held_out[0].losses[0]) and held_out[0].losses[1] == 1.0


def test_the_index_has_the_effect_of_a_recipe_on_held_out_sequences(run: Path):
    """Against numpy. Maps of a model's weights do not show what was measured on those of a later iteration."""
    exact, rounded = np.random.default_rng(0).normal(5, 1, (2, 6))
    add_evaluations(run, HeldOut(4, tuple(rounded), "a"), exact=exact.tolist())
    add_evaluations(run, twin(4, 0.5, -0.25), HeldOut(8, tuple(rounded), "a"))
    with Catalog.open(run.parent) as catalog:
        effect = catalog.ask("FROM effect").loc[0]
        assert catalog.effects([run.name]).empty and len(catalog.ask("FROM effect")) == 1
    change = rounded - exact
    assert (effect["iteration"], effect["sequences"], effect["format"]) == (4, 6, "mxfp8")
    assert effect["loss"] == pytest.approx(exact.mean()) and effect["change"] == pytest.approx(change.mean())
    assert effect["change_error"] == pytest.approx(change.std(ddof=1) / math.sqrt(6))


def test_tables_that_another_program_wrote_are_refused(run: Path):
    """Whose checksums hold, but whose rows are no evaluations."""
    add_evaluations(run, replace(twin(3), changes=(0.5,)), HeldOut(3, (1.0,), "a"))
    (gradients,) = (run / name for name in experiment_files(run) if "gradients" in name)
    gradients.unlink()
    with pytest.raises(RunError, match="its experiment is damaged"):
        read_twins(run)


def test_a_bundle_keeps_them(run: Path, tmp_path: Path):
    add_evaluations(run, twin(3), twin(9, 0.5, 0.25), HeldOut(3, (2.0,), "a"), HeldOut(9, (1.0,), "a"))
    bundle.write(tmp_path, tmp_path / "bundle.zip", [run.name], None)
    bundle.import_runs(tmp_path / "new", tmp_path / "bundle.zip")
    copied = tmp_path / "new" / run.name
    assert read_twins(copied) == read_twins(run) and len(read_twins(copied)) == 2
    assert read_held_out(copied) == read_held_out(run) and len(read_held_out(copied)) == 2
