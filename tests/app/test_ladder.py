"""Runs › Recipes, its view Ablation: what it makes of several seeds, and what it says is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from binade.app.draw.figure import Drawn
from binade.app.questions.recipes.question import runs_of
from binade.app.sessions import pins
from binade.app.sessions.session import Pin
from binade.app.view.view import View
from binade.collector.recipes.ladder import ladder
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.app.test_pages import Visit, charts, words
from tests.compared import compared
from tests.data.builder import make_run

pytestmark = pytest.mark.slow
# The mean gap of each rung of te_nvfp4, in the order of the ladder, and its deviation over seeds.
GAPS = {
    "forward": (0.010, 0.0006),
    "+ dgrad": (0.012, 0.002),
    "+ wgrad": (0.050, 0.001),
    "without rounding": (0.090, 0.002),
    "without rotation": (0.049, 0.004),
    "without tiles": (0.020, 0.002),
}
RECIPE = {rung.title: rung.recipe for rung in ladder("te_nvfp4").rungs}
LADDER = View("runs", {"view": ["recipes"], "of": ["ladder"], "gradient": ["grad_weight"], "at": ["0"]})
SETTINGS = {"layers": 1, "warmup_iterations": 0, "micro_batches": 1, "learning_rate": 0.001}
GRADIENT = {"tensor_name": "grad_weight", "operation": "backward", "phase": "post"}


def noise(title: str, seeds: int) -> np.ndarray:
    """Of mean 0 and deviation 1."""
    values = np.random.default_rng(len(title)).normal(size=seeds)
    return (values - values.mean()) / values.std(ddof=1) if seeds > 1 else values * 0


def gradient(title: str, seed: int) -> torch.Tensor:
    """That of bf16, and for a rung as much noise beside it as its number in the ladder says."""
    random = torch.Generator().manual_seed(100 * seed)
    exact = torch.randn(16, 32, generator=random)
    random.manual_seed(100 * seed + len(title))
    return exact + 0.05 * list(RECIPE).index(title) * torch.randn(16, 32, generator=random)


def make_rung(root: Path, title: str, seed: int, gap: float, **config: Any) -> str:
    recipe = RECIPE[title]
    words = {"recipe": recipe, "quant_type": recipe}
    tensors = [(gradient(title, seed), GRADIENT | words)]
    if title != "bf16":
        operand = torch.linspace(-3, 3, 32 * 64).reshape(32, 64) * (seed + 1)
        tensors.append((operand, words | {"format": "nvfp4"}))
    run = make_run(root, tensors, **SETTINGS | {"recipe": recipe, "seed": seed} | config)
    for iteration in range(2):
        loss = 5.0 + seed - iteration + gap + (0.001 if iteration else -0.001) * (title != "bf16")
        run.append_loss({"iteration": iteration, "loss": loss, "time": 0.0})
    run.update(iteration=1)
    return run.run_id


def make_ladder(root: Path, seeds: Iterable[int], titles: Iterable[str] = GAPS, bf16: Iterable[int] = range(9)) -> None:
    listed = list(seeds)
    for title in titles:
        mean, deviation = GAPS[title]
        for seed, gap in zip(listed, mean + deviation * noise(title, len(listed)), strict=True):
            make_rung(root, title, seed, gap)
    for seed in set(listed) & set(bf16):
        make_rung(root, "bf16", seed, 0.0)


Draw = Callable[..., Drawn]


@pytest.fixture
def draw(tmp_path: Path) -> Draw:
    def of(where: Filter | None = None, **values: Any) -> Drawn:
        with Catalog.open(tmp_path) as opened:
            return LADDER.changed(**values).filtered(where or Filter()).draw(opened)

    return of


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ladder")
    make_ladder(place, range(4))
    return place


@pytest.fixture(scope="module")
def drawn(root: Path) -> Drawn:
    with Catalog.open(root) as opened:
        return LADDER.draw(opened)


class TestTable:
    def test_the_rungs_are_in_the_order_of_the_ladder_with_scipys_intervals(self, drawn):
        table = drawn.tables["ladder"].set_index("rung")
        assert list(table.index) == ["bf16", *GAPS] and set(table["seeds"]) == {4}
        for title, (mean, deviation) in GAPS.items():
            row = table.loc[title]
            gaps = mean + deviation * noise(title, 4)
            low, high = scipy.stats.t.interval(0.95, 3, gaps.mean(), scipy.stats.sem(gaps))
            assert [row["gap"], row["deviation"]] == pytest.approx([mean, deviation], rel=1e-6)
            assert [row["low"], row["high"]] == pytest.approx([low, high], abs=1e-5)
        assert table.loc["+ wgrad", "change"] == pytest.approx(0.038)
        assert table.loc["without tiles", "change"] == pytest.approx(-0.030)

    def test_rounding_and_gradient_errors_are_numpys(self, drawn, root):
        table = drawn.tables["ladder"].set_index("rung")
        for title in GAPS:
            pairs = [[gradient(name, seed).double().flatten() for name in ("bf16", title)] for seed in range(4)]
            cosines = [float(a @ b / a.norm() / b.norm()) for a, b in pairs]
            squared = [float((b - a).square().sum() / a.square().sum()) for a, b in pairs]
            assert table.loc[title, "cosine"] == pytest.approx(np.median(cosines), rel=1e-6)
            assert table.loc[title, "relative_squared_error"] == pytest.approx(np.median(squared), rel=1e-5)
        with Catalog.open(root) as opened:
            rows = opened.tensors(Filter(recipe=("te_nvfp4",), tensor_name=("input",)))
        assert len(rows) == 4
        expected = np.median(10 * np.log10(rows["rms"] ** 2 / rows["mse"]))
        assert table.loc["+ wgrad", "forward_sqnr_db"] == pytest.approx(expected, rel=1e-9)
        assert table.loc["bf16", ["cosine", "forward_sqnr_db"]].isna().all()

    def test_binade_compare_prints_the_same(self, drawn, root):
        (section,) = compared(root)
        ((name, found),) = section.ablations
        assert name == "te_nvfp4" and found.verdict == drawn.verdict
        pd.testing.assert_frame_equal(found.table, drawn.tables["ladder"])


class TestVerdict:
    def test_names_what_is_separated_and_what_is_not(self, drawn):
        told, rest = drawn.verdict.split(" By 4 seeds, ")
        assert told.startswith(
            "Statistically significant: forward is higher than bf16, +0.0100 nats (95% interval +0.0090 to "
        )
        assert [part.split(",")[0].removeprefix("Statistically significant: ") for part in told.split("; ")] == [
            "forward is higher than bf16",
            "+ wgrad is higher than + dgrad",
            "without rounding is higher than + wgrad",
            "without tiles is lower than + wgrad",
        ]
        assert rest == (
            "+ dgrad is not distinguishable from forward; without rotation is not distinguishable from + wgrad."
        )

    def test_changes_are_paired_by_seed(self, drawn):
        table = drawn.tables["ladder"].set_index("rung")
        judged = drawn.verdict.evidence[1]  # + wgrad
        a, b = (GAPS[title][0] + GAPS[title][1] * noise(title, 4) for title in ("+ wgrad", "+ dgrad"))
        assert judged.p == pytest.approx(scipy.stats.ttest_rel(a, b).pvalue, rel=1e-3)
        assert judged.value == pytest.approx(table.loc["+ wgrad", "change"])

    def test_nothing_is_missing(self, drawn):
        assert drawn.problems == ()

    def test_one_seed_separates_nothing(self, tmp_path, draw):
        make_ladder(tmp_path, [3])
        drawn = draw()
        assert (
            drawn.verdict.startswith("One seed tells no recipe from another.") and "te_nvfp4 --seeds" in drawn.verdict
        )
        table = drawn.tables["ladder"]
        assert table["deviation"][1:].isna().all() and not table["separated"].any()
        assert drawn.figures[0].spec["layer"]

    def test_wide_spreads_separate_nothing(self, tmp_path, draw):
        for seed, gap in ((0, -0.1), (1, 0.1), (2, 0.0)):
            make_rung(tmp_path, "+ wgrad", seed, gap)
            make_rung(tmp_path, "without tiles", seed, 2 * gap)
            make_rung(tmp_path, "bf16", seed, 0.0)
        assert draw().verdict == "3 seeds tell no step from the one that it is compared with."

    def test_what_is_missing_is_named(self, tmp_path, draw):
        make_ladder(tmp_path, [0, 1, 2], ["forward", "+ dgrad", "+ wgrad"], bf16=[0, 1])
        make_ladder(tmp_path, [0], ["without tiles"])
        drawn = draw()
        assert drawn.problems == (
            "There is no bf16 run on the same data for seed 2, so runs with that seed have no gap.",
            "Not every step has 2 seeds: without tiles 1.",
        )
        assert "without tiles is not distinguishable from + wgrad" in drawn.verdict

    def test_without_bf16_there_is_no_ladder(self, tmp_path, draw):
        make_ladder(tmp_path, [0, 1], bf16=[])
        drawn = draw()
        assert not drawn.items and "No bf16 run saw the same data" in drawn.problems[0]

    def test_without_an_ablation_it_says_how_to_get_one(self, tmp_path, draw):
        make_rung(tmp_path, "bf16", 0, 0.0)
        make_rung(tmp_path, "+ wgrad", 0, 0.1)
        drawn = draw()
        assert not drawn.items and "binade ablate" in drawn.problems[0]


def test_runs_of_other_settings_and_repeats_are_left_out_and_counted(tmp_path, draw):
    make_ladder(tmp_path, [0, 1])
    make_rung(tmp_path, "+ wgrad", 0, 5.0, learning_rate=0.1)
    make_rung(tmp_path, "bf16", 0, 0.0, learning_rate=0.1)
    make_rung(tmp_path, "without tiles", 1, 0.7)  # newer than that of the ladder
    drawn = draw()
    table = drawn.tables["ladder"].set_index("rung")
    first = GAPS["without tiles"][0] + GAPS["without tiles"][1] * noise("without tiles", 2)[0]
    assert table.loc["without tiles", "gap"] == pytest.approx((first + 0.7) / 2)
    assert table.loc["+ wgrad", "gap"] == pytest.approx(GAPS["+ wgrad"][0])
    assert any(text.startswith("2 runs of these recipes are left out") for text in drawn.sentences)


def test_the_filter_chooses_the_runs(root: Path, draw: Draw):
    with Catalog.open(root) as opened:
        recipes = ("te_nvfp4", "te_nvfp4(without=tiles)")
        drawn = LADDER.changed(ladder="te_nvfp4").filtered(Filter(recipe=recipes)).draw(opened)
    assert drawn.tables["ladder"]["rung"].tolist() == ["bf16", "full recipe", "without tiles"]


def test_the_page_shows_one_chart_one_table_and_the_sentence(visit: Visit, root: Path):
    at = visit(root, "runs", view="recipes", of="ladder")
    assert charts(at) == 1 and "Statistically significant: forward is higher than bf16" in words(at)
    assert at.dataframe[0].value.iloc[:, 0].tolist() == ["bf16", *GAPS]


def test_of_several_ablations_one_is_chosen(visit: Visit, tmp_path: Path):
    make_ladder(tmp_path, [0, 1], ["+ wgrad", "without tiles"])
    for recipe in ("linear_mxfp8", "linear_mxfp8(without=wgrad)"):
        run = make_run(tmp_path, **SETTINGS | {"recipe": recipe, "seed": 0})
        run.append_loss({"iteration": 0, "loss": 5.5, "time": 0.0})
    at = visit(tmp_path, "runs", view="recipes", of="ladder", ladder="te_nvfp4")
    assert at.selectbox(key="ladder").options == ["linear_mxfp8", "te_nvfp4"]
    assert at.dataframe[0].value["rung"].tolist() == ["bf16", "full recipe", "without tiles"]
    at.selectbox(key="ladder").set_value("linear_mxfp8").run()
    assert at.dataframe[0].value["rung"].tolist() == ["bf16", "without wgrad", "+ wgrad"]
    at = visit(
        tmp_path,
        "runs",
        view="recipes",
        of="ladder",
        ladder="linear_mxfp8",
        recipe=["te_nvfp4", RECIPE["without tiles"]],
    )
    assert at.dataframe[0].value["rung"].tolist() == ["bf16", "full recipe", "without tiles"]


def test_a_pin_draws_the_ladder_again(root: Path, drawn: Drawn):
    with Catalog.open(root) as opened:
        again = pins.draw(opened, Pin("runs", LADDER.params, "ladder"))
    (figure,) = again.figures
    assert figure.table.equals(drawn.figures[0].table) and again.verdict == drawn.verdict


def test_of_the_runs_that_are_filtered_out_only_those_in_bf16_stay(tmp_path: Path):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    kept = [
        make_run(tmp_path, [(x, {"quant_type": "bf16"})], recipe="bf16"),
        make_run(tmp_path, [(x, {"format": "mxfp8"})], recipe="mxfp8"),
    ]
    make_run(tmp_path, [(x, {"format": "mxfp4"})], recipe="bf16", pv_quant="mxfp4")
    make_run(tmp_path, [(x, {"format": "hifp8"})], recipe="hifp8")
    with Catalog.open(tmp_path) as opened:
        found = runs_of(opened, Filter(recipe=["mxfp8"]))
    assert set(found["run_id"]) == {run.run_id for run in kept}
