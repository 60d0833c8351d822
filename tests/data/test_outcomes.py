"""Runs that diverged or ended early: where, and what comparisons make of them. The losses are written by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import pytest

from binade.data.compare.comparison import Comparison, compare
from binade.data.compare.outcomes import Outcome, outcome_of
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import losses_of, runs_with_references
from tests.compared import printed
from tests.data.builder import make_run

NAN, INF = math.nan, math.inf
PLAIN = [4 - at / 20 for at in range(60)]


def lines(losses: Iterable[float | None], every: int = 1) -> list[dict]:
    """As Binade writes them: what is not finite is None, and so is what is unknown."""
    return [
        {"iteration": at * every, "time": 0.0}
        | {"loss": loss if loss is not None and math.isfinite(loss) else None}
        | ({"recorded": True} if loss is None else {})
        for at, loss in enumerate(losses)
    ]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([3.0, 2.0, 1.0], Outcome(2)),
        ([3.0, 7.0, 2.0], Outcome(2)),  # it came back
        ([3.0, 2.0, 7.0, 9.0], Outcome(3, 1, 2)),
        ([3.0, 2.0, NAN], Outcome(2, 1, 2, True)),
        ([3.0, 2.0, INF, NAN], Outcome(3, 1, 2, True)),
        ([3.0, NAN, 6.5, NAN], Outcome(3, 1, 1, True)),
        ([3.0, NAN, 2.0], Outcome(2, 1, None, False, 1)),
        ([NAN, 3.0, 7.0], Outcome(2, 1, 2, False, 1)),
        ([3.0, 6.0], Outcome(1)),  # twice the first is not above it
        ([NAN, NAN], Outcome(1, 1, 0, True)),
        ([3.0, 2.0, None, None], Outcome(3)),  # recorded in full, but not logged
        ([-0.1, 0.3], Outcome(1)),  # no cross entropy
        ([], Outcome()),
    ],
)
def test_diverged_is_lost_up_to_the_last_iteration(losses: list[float | None], expected: Outcome):
    assert outcome_of(lines(losses)) == expected
    assert outcome_of(lines(losses)[::-1]) == expected


def test_a_loss_of_another_unit_may_grow():
    assert outcome_of(lines([0.1, 0.5]), grows=False).diverged is None
    assert outcome_of(lines([0.1, NAN]), grows=False).diverged == 1


def add(root: Path, recipe: str, losses: list[float], seed: int = 1, every: int = 1) -> str:
    operands = [] if recipe == "bf16" else [f"linear.forward.input {recipe}"]
    run = make_run(root, recipe=recipe, seed=seed, operands=operands)
    for line in lines(losses, every):
        run.append_loss(line)
    return run.run_id


def compared(root: Path) -> Comparison:
    with Catalog.open(root) as opened:
        table = runs_with_references(opened.runs(), opened.parts())
        return compare(table, losses_of(opened, table["run_id"], lost=True))


def plus(gap: float, until: int = 60, then: float | None = None) -> list[float]:
    return [loss + gap for loss in PLAIN[:until]] + ([then] * (60 - until) if then is not None else [])


def test_what_diverged_is_last_and_what_ended_early_says_so(tmp_path: Path):
    add(tmp_path, "bf16", PLAIN)
    add(tmp_path, "mxfp4", plus(0.3))
    add(tmp_path, "mxfp8", plus(0.1, 30))
    add(tmp_path, "nvfp4", plus(0.0005, 10, NAN))
    add(tmp_path, "hifp8", plus(-0.2, 0, INF))  # at the first iteration
    add(tmp_path, "mxfp6", [*plus(0.02, 20), NAN, *plus(0.02)[21:]])  # and comes back
    add(tmp_path, "mxint8", plus(0.05)[::10], every=10)  # another spacing of the log
    add(tmp_path, "fp8", plus(0.0, 40) + [90.0] * 20)  # finite, but far above the first
    found = compared(tmp_path)
    assert [recipe.label for recipe in found.recipes][-3:] == ["fp8", "nvfp4", "hifp8"]
    table = found.recipe_table.set_index("label")
    assert table.loc["nvfp4", "outcome"] == "diverged at iteration 10" and math.isnan(table.loc["nvfp4", "gap"])
    assert table.loc["hifp8", "outcome"] == "diverged at iteration 0"
    assert table.loc["fp8", "outcome"] == "diverged at iteration 40" and table.loc["fp8", "gap"] > 20
    assert table.loc["mxfp8", "outcome"] == "ended after iteration 29 of 59"
    assert table.loc["mxfp6", "outcome"] == "no finite loss in 1 iteration"
    assert table.loc[["mxint8", "mxfp4"], "outcome"].isna().all()
    expected = {"mxfp4": 0.3, "mxfp8": 0.1, "mxfp6": 0.02, "mxint8": 0.05}
    assert {name: table.loc[name, "gap"] for name in expected} == pytest.approx(expected)
    said = str(found.verdict)
    assert found.verdict.headline == "Diverged: hifp8 at iteration 0, nvfp4 at iteration 10 and fp8 at iteration 40."
    assert "both have: mxfp8 (ended after iteration 29 of 59)" in said
    text = printed(tmp_path)
    assert "nvfp4 diverged at iteration 10 1 – one seed" in text


def test_one_seed_of_three_that_diverged_counts(tmp_path: Path):
    for seed in (1, 2, 3):
        add(tmp_path, "bf16", PLAIN, seed)
        add(tmp_path, "mxfp4", plus(0.01 * seed, 25 if seed == 2 else 60, NAN), seed)
        add(tmp_path, "nvfp4", plus(0.01 * seed, 5 + seed, NAN), seed)
        add(tmp_path, "mxfp8", plus(0.01 * seed), seed)
    found = compared(tmp_path)
    assert [recipe.label for recipe in found.recipes] == ["mxfp8", "mxfp4", "nvfp4"]
    table = found.recipe_table.set_index("label")
    assert table.loc["mxfp4", "outcome"] == "1 of 3 seeds diverged, the first at iteration 25"
    assert table.loc["nvfp4", "outcome"] == "3 of 3 seeds diverged, the first at iteration 6"
    assert table["gap"].isna().tolist() == [False, True, True] and table["seeds"].tolist() == [3, 3, 3]
    assert "nvfp4 at iteration 6 (3 of 3 seeds) and mxfp4 at iteration 25 (1 of 3 seeds)" in str(found.verdict)


def test_a_baseline_that_diverged_is_compared_before(tmp_path: Path):
    baseline = add(tmp_path, "bf16", plus(0.0, 10, NAN))
    add(tmp_path, "mxfp8", plus(0.1))
    (found,) = (costs := compared(tmp_path)).costs.to_dict("records")
    assert found["iterations"] == 10 and found["gap"] == pytest.approx(0.1)
    assert found["outcome"] == "bf16 diverged at iteration 10" and baseline in set(costs.gaps["reference"])
    assert "Compared in part: mxfp8 (bf16 diverged at iteration 10)" in str(costs.verdict)
    add(tmp_path, "bf16", PLAIN)  # one that did not diverge has more to compare
    (found,) = compared(tmp_path).costs.to_dict("records")
    assert found["iterations"] == 60 and found["outcome"] is None
