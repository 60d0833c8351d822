"""The root of 200 runs: what the pages say of it, against numpy, scipy and the lines of loss.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from binade.app.questions.recipes.question import workloads_of
from binade.app.questions.runs.table import COLUMNS, data_of
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.bench.make_runs import ITERATIONS, LOST, PLACES, RECIPES, RUNS, SEEDS, make_runs

pytestmark = pytest.mark.slow
FIRST = "llama32-1b tiny, wikipedia"
Losses = dict[tuple[str, str, int, int], np.ndarray]


@pytest.fixture(scope="module")
def month(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_runs(tmp_path_factory.mktemp("month"))


@pytest.fixture(scope="module")
def opened(month: Path) -> Iterator[Catalog]:
    with Catalog.open(month) as catalog:
        yield catalog


@pytest.fixture(scope="module")
def data(opened: Catalog) -> dict[str, Any]:
    return data_of(opened, opened.runs(damaged=True))


@pytest.fixture(scope="module")
def losses(month: Path) -> Losses:
    """The losses from iteration 0 of the runs that were made for each place, by model, recipe, seed and tp; NaN where
    they are not finite."""
    found = {}
    for directory in month.glob("2*"):
        config = json.loads((directory / "run.json").read_text())
        if "run_config" not in config or config["seed"] not in SEEDS or config["learning_rate"] != 1e-3:
            continue
        lines = [json.loads(line) for line in (directory / "loss.jsonl").read_text().splitlines()]
        values = [np.nan if line["loss"] is None else line["loss"] for line in lines if line["iteration"] >= 0]
        found[config["model"], config["recipe"], config["seed"], config["tp"]] = np.array(values)
    return found


def group(data: dict[str, Any], workload: str, name: str) -> dict[str, Any]:
    groups = next(each["groups"] for each in data["workloads"] if each["name"] == workload)
    return next(each for each in groups if each["name"] == name)


def gaps_of(losses: Losses, model: str, recipe: str) -> np.ndarray:
    """[seeds, iterations]; to the newest bf16 run, which of the first model is the one on two ranks."""
    plain = 2 if model == PLACES[0][0] else 1
    return np.array([losses[model, recipe, seed, 1] - losses[model, "bf16", seed, plain] for seed in SEEDS])


def test_the_table_has_all_runs_in_groups_over_seeds(data: dict[str, Any]):
    names = [workload["name"] for workload in data["workloads"]]
    assert names[0] == FIRST and len(names) == 1 + len(PLACES)
    runs = [run["id"] for workload in data["workloads"] for each in workload["groups"] for run in each["runs"]]
    assert len(runs) == len({*runs}) == RUNS
    own = group(data, "llama31-8b tiny, dolma", "linear_mxfp8")
    assert [run["name"] for run in own["runs"]] == [f"seed {seed}" for seed in SEEDS]
    plain = group(data, FIRST, "bf16")
    assert [run["name"] for run in plain["runs"]] == [f"seed {s} · tp {tp}" for tp in (1, 2) for s in SEEDS]
    assert group(data, FIRST, "mxfp8 · imported")["origin"][0] == "upload_file"
    assert group(data, "MyTransformer, unnamed data", "mxfp8")["origin"][1].startswith("Instrumented")
    shown = {column["name"] for column in data["columns"]}
    assert {"state", "event", "loss", "gap", "interval"} <= shown <= set(COLUMNS) and not {"note", "unit"} & shown


def test_gaps_and_intervals_are_those_of_scipy(data: dict[str, Any], losses: Losses):
    for model, dataset in PLACES[1:]:
        for recipe in RECIPES[1:]:
            means = gaps_of(losses, model, recipe).mean(axis=1)
            cells = group(data, f"{model} tiny, {dataset}", recipe)["cells"]
            assert cells["gap"][1] == pytest.approx(means.mean())
            low, _ = stats.t.interval(0.95, len(SEEDS) - 1, means.mean(), stats.sem(means))
            assert cells["interval"][1] == pytest.approx(low)


def test_the_first_event_is_where_the_loss_is_lost(data: dict[str, Any], losses: Losses):
    for (recipe, seed), at in LOST.items():
        runs = group(data, FIRST, recipe)["runs"]
        text, place, _, link = next(run for run in runs if run["name"] == f"seed {seed}")["cells"]["event"]
        first = int(np.flatnonzero(np.isnan(losses[PLACES[0][0], recipe, seed, 1]))[0])
        assert (text, place, link["view"]) == (f"NaN at {at}", at, "provenance") and first == at


def test_a_recipe_leaves_bf16_where_numpy_says_so(opened: Catalog, losses: Losses):
    """The rule of data/compare/gap_bands.py, written once more."""
    model = PLACES[0][0]
    drawn = View("runs", {"view": ["recipes"], "workload": [FIRST]}).draw(opened)
    table = drawn.tables["recipes"].set_index("label")
    pairs = np.array([[losses[model, "bf16", seed, tp] for tp in (1, 2)] for seed in SEEDS])
    deviation = np.sqrt(((pairs - pairs.mean(axis=1, keepdims=True)) ** 2).sum(axis=(0, 1)) / len(SEEDS))
    limit = stats.t.ppf(1 - 0.025 / len(table), len(SEEDS)) * deviation * np.sqrt(2 / len(SEEDS))
    for recipe in RECIPES[1:]:
        if any(lost == recipe for lost, _ in LOST) or recipe not in table.index:
            continue
        out = np.abs(gaps_of(losses, model, recipe).mean(axis=0)) > limit
        start = ITERATIONS - int(np.argmin(out[::-1])) if not out.all() else 0
        expected = f"at iteration {start}" if ITERATIONS - start >= 3 else "no"
        assert table.loc[recipe, "left"] == expected, recipe


def test_the_chart_has_bf16_and_the_means_of_what_is_chosen(opened: Catalog, data: dict[str, Any], losses: Losses):
    model, dataset = PLACES[2]
    chosen = group(data, f"{model} tiny, {dataset}", "linear_mxfp4")
    figure = View("runs", {"chosen": [chosen["id"]]}).draw(opened).get("losses")
    assert figure and {*figure.table["group"]} == {"linear_mxfp4", "bf16"}
    for recipe in ("linear_mxfp4", "bf16"):
        values = np.array([losses[model, recipe, seed, 1] for seed in SEEDS])
        line = figure.table[figure.table["group"] == recipe]
        assert line["iteration"].tolist() == list(range(ITERATIONS))
        for column, expected in (("loss", values.mean(0)), ("low", values.min(0)), ("high", values.max(0))):
            assert line[column].tolist() == pytest.approx(expected.tolist())
    run = chosen["runs"][2]["id"]
    figure = View("runs", {"chosen": [run], "hidden": [chosen["runs"][0]["id"]]}).draw(opened).get("losses")
    assert figure and {*figure.table["group"]} == {"linear_mxfp4 · seed 3", "bf16"}


def test_recipes_are_compared_among_one_model_and_data(opened: Catalog):
    names = workloads_of(opened, Filter())
    assert {*names} == {f"{model} tiny, {dataset}" for model, dataset in PLACES}
    for workload in names:
        drawn = View("runs", {"view": ["recipes"], "workload": [workload]}).draw(opened)
        assert list(drawn.tables) == ["recipes"]
        bars = drawn.get("costs")
        assert bars and len(bars.table) == len(drawn.tables["recipes"]) >= len(RECIPES) - 1
        assert bars.table["gap"].dropna().is_monotonic_decreasing
