"""Runs › Recipes: the measured change of the loss beside the gaps."""

from __future__ import annotations

from pathlib import Path

import pytest
from scipy import stats

from binade.app.view.view import View
from binade.cli import main
from binade.collector import jobs
from binade.collector.cli.compare import cells, sections
from binade.collector.recipes.files import to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.data.compare.comparison import RECIPE_FIELDS
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE
from binade.data.run.effects import recipe_sha256
from binade.data.run.run_writer import RunWriter
from tests.app import roots
from tests.app.test_gap_bands import train
from tests.collector.test_jobs import end_all
from tests.data.builder import CONFIG
from tests.data.experiments import Effect, append_effect

pytestmark = pytest.mark.slow
LOSS = View("runs", {"view": ["recipes"], "of": ["cost"]})
EXACT, ROUNDED = (5.0, 5.2, 4.9, 5.1), (5.3, 5.6, 5.1, 5.5)


def measured(root: Path, recipe: str, group: str, seed: int = 0, **config: object) -> None:
    """A run of `binade measure` with weights drawn with a seed."""
    known = {name: CONFIG[name] for name in ("model", "size", "dataset")}
    run = RunWriter.create(root, "measure", known | {"kind": "experiment", "seed": seed} | config)
    sha256 = recipe_sha256(to_toml(parse_recipe(recipe)))
    append_effect(run.directory, Effect(0, recipe, group, None, None, EXACT, ROUNDED, recipe_sha256=sha256))
    run.finish(DONE)


def test_the_measured_change_is_beside_the_gaps(tmp_path: Path):
    for recipe, gap in (("bf16", 0.0), ("mxfp4", 0.5), ("mxfp8", 0.1)):
        operands = [] if recipe == "bf16" else [f"linear.input {recipe}"]
        train(tmp_path, recipe, 0, gap, operands=operands, recipe_toml=to_toml(parse_recipe(recipe)))
    measured(tmp_path, "mxfp4", "")
    measured(tmp_path, "mxfp8", "linear")  # a part is not the whole recipe
    measured(tmp_path, "mxfp8", "", seed=7)  # other weights
    with Catalog.open(tmp_path) as opened:
        drawn = LOSS.draw(opened)
        (section,) = (each for each in sections(opened) if each.compared)
    table = drawn.tables["recipes"].set_index("label")
    changes = [after - before for after, before in zip(ROUNDED, EXACT, strict=True)]
    low, high = stats.ttest_1samp(changes, 0).confidence_interval(0.95)
    row = table.loc["mxfp4"]
    assert [row["effect"], row["effect_low"], row["effect_high"]] == pytest.approx([sum(changes) / 4, low, high])
    assert row["effect_on"] == "weights before training" and row["effect_sequences"] == 4
    assert row["alone"] != row["alone"] and table["effect"].isna()["mxfp8"]
    assert "Measured change of the loss by rounding alone" in drawn.verdict
    shown = cells(section.recipes, [field for field in RECIPE_FIELDS if "effect" in field.name], "")
    assert shown.rows[0][0] == f"+{sum(changes) / 4:.4f}"


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        pytest.param({"mxfp4": '[linear]\nforward = "nvfp4"\n'}, [], id="the same name, other content"),
        pytest.param({"other": "mxfp4"}, ["mxfp4"], id="another name, the same content"),
        pytest.param({"mxfp4": '[linear]\nforward = "nvfp4"\n', "other": "mxfp4"}, ["mxfp4"], id="both"),
    ],
)
def test_a_measurement_is_that_of_the_recipe_that_rounds_the_same(
    tmp_path: Path, written: dict[str, str], shown: list[str]
):
    for recipe, gap in (("bf16", 0.0), ("mxfp4", 0.5)):
        operands = [] if recipe == "bf16" else [f"linear.input {recipe}"]
        train(tmp_path / "runs", recipe, 0, gap, operands=operands, recipe_toml=to_toml(parse_recipe(recipe)))
    for name, content in written.items():
        path = tmp_path / f"{name}.toml"
        path.write_text(
            f'title = "{name} of mine"\n' + (to_toml(parse_recipe(content)) if "\n" not in content else content)
        )
        measured(tmp_path / "runs", str(path), "")
    with Catalog.open(tmp_path / "runs") as opened:
        table = LOSS.draw(opened).tables["recipes"].set_index("label")
    assert table.index[table["effect"].notna()].tolist() == shown


@pytest.mark.thorough
def test_a_queued_measurement_is_made_and_its_job_is_done(tmp_path: Path):
    """The real runner and the real command."""
    root = tmp_path / "runs"
    line = "run --quantization mxfp4 --layers 1 --train-iters 1 --sequence-length 16 --no-save-tensors"
    assert main([*line.split(), "--tensor-save-dir", str(root)]) == 0
    (run,) = roots.runs_of(root)
    words = ("measure", run.name, "--formats", "mxfp4", "--by", "model", "--sequences", "2")
    (job,) = jobs.add_runs(root, [words], titles=["measure"])
    from binade.collector.jobs.runner import serve

    serve(root)
    view = jobs.view_of(root, job)
    assert (view.state, view.reason) == (jobs.JobState.DONE, None) and view.run.config["kind"] == "experiment"
    assert view.run.run_id == job.run_id
    with Catalog.open(root) as opened:
        effects = opened.effects([run.name])
    assert effects["format"].tolist() == ["mxfp4"] and effects["sequences"].tolist() == [2]
    assert jobs.retry(root, job.id).command == words
    end_all(root)
