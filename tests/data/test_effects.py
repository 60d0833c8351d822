"""Measured effects on disk and in the index, against numpy and scipy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE
from binade.data.run.effects import measured_effects, recipe_sha256
from binade.data.run.experiment import EXPERIMENT, EffectGroup, read_results
from binade.data.run.run_writer import RunWriter
from tests.data.experiments import Effect, append_effect

FC1 = EffectGroup("linear", 3, "fc1")
EXACT = ((2.0, 3.0), (2.5,))


def effect(batch: int, fmt: str = "mxfp4", group: EffectGroup = FC1, rise: float = 0.1) -> Effect:
    losses = tuple(loss + rise * (at + batch + 1) for at, loss in enumerate(EXACT[batch]))
    return Effect(batch, fmt, *group, EXACT[batch], losses, tuple(0.01 for _ in losses), 0.5)


@pytest.fixture
def run(tmp_path: Path) -> RunWriter:
    config = {"model": "mine", "size": "tiny", "seed": 7, "kind": EXPERIMENT}
    return RunWriter.create(tmp_path, "measure_mine", config)


def test_batches_are_joined_in_their_order(run: RunWriter):
    for each in (effect(1), effect(0), effect(0, "nvfp4"), effect(0, group=EffectGroup())):
        append_effect(run.directory, each)
    first, *others = measured_effects(read_results(run.directory))
    assert [(row.format, row.group) for row in others] == [("nvfp4", FC1), ("mxfp4", EffectGroup())]
    assert first.changes == pytest.approx((0.1, 0.2, 0.2)) and first.exact == (2.0, 3.0, 2.5)
    low, high = stats.t.interval(0.95, 2, np.mean(first.changes), stats.sem(first.changes))
    assert (first.change.low, first.change.high) == pytest.approx((low, high))


def test_a_file_that_has_changed_is_another_format(run: RunWriter):
    for at, sha256 in ((0, "a"), (1, "a"), (0, "b")):
        append_effect(run.directory, replace(effect(at, "mine.toml"), recipe_sha256=sha256))
    assert [(len(row.changes), row.key.recipe_sha256) for row in measured_effects(read_results(run.directory))] == [
        (3, "a"),
        (2, "b"),
    ]


def test_recipes_that_round_the_same_have_the_same_hash():
    recipe = (
        '[linear]\nforward.input = "mxfp4"\nforward.weight = "nvfp4"\n\n'
        '[[schedule]]\nfrom = "90%"\nlinear.forward = "bf16"\n'
    )
    moved = '[linear.forward]\nweight = "nvfp4"\ninput = "mxfp4"\n\n' + recipe.partition("\n\n")[2]
    assert recipe_sha256(recipe) == recipe_sha256('title = "mine"\nsource = ["a", "b"]\n' + moved)
    for other in (recipe.replace("90%", "80%"), recipe.replace("nvfp4", "mxfp8"), recipe.partition("\n\n")[0]):
        assert recipe_sha256(other) != recipe_sha256(recipe)


def test_the_index_has_the_rows_of_the_same_weights(run: RunWriter):
    for each in (effect(0), effect(1), effect(0, group=EffectGroup())):
        append_effect(run.directory, each)
    run.finish(DONE)
    root = run.directory.parent
    same = RunWriter.create(root, "same", {"model": "mine", "size": "tiny", "seed": 7})
    other = RunWriter.create(root, "other", {"model": "mine", "size": "tiny", "seed": 8})
    for writer in (same, other):
        writer.finish(DONE)
    with Catalog.open(root) as catalog:
        catalog.sync()
        rows = catalog.effects([same.run_id])
        assert catalog.effects([other.run_id]).empty and len(rows) == 2
        row = rows[rows["part"] == "linear"].iloc[0]
        assert (row["layer_index"], row["module"], row["sequences"]) == (3, "fc1", 3)
        assert row["change"] == pytest.approx(0.5 / 3) and row["divergence"] == pytest.approx(0.01)
        assert row["change_error"] == pytest.approx(stats.sem([0.1, 0.2, 0.2]))
        before = catalog.version
        append_effect(run.directory, effect(1, group=EffectGroup()))
        catalog.sync()
        assert catalog.version != before
        assert catalog.effects([same.run_id])["sequences"].tolist() == [3, 3]
        assert catalog.table("effect").num_rows == 2
