"""The table of runs says of a recipe what Recipes says, and its links lead to pages that have an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from binade.app.draw.figure import Table, Text
from binade.app.questions.runs.table import data_of
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.directory import now
from binade.data.run.events import Event, EventKind, append_event
from binade.data.run.experiment import EXPERIMENT
from binade.data.run.run_writer import RunWriter
from tests.app.test_pages import Visit, words
from tests.data.builder import make_run

RECIPES = View("runs", {"view": ["recipes"], "of": ["cost"]})
LENGTH = 8


def train(root: Path, recipe: str, seed: int, more: float = 0.0, **words: Any) -> RunWriter:
    """A run without tensors unless there are `segments`, whose loss is that of its seed plus `more`. lost: the
    iteration from which it is NaN; stop: the last iteration and 1."""
    segments, lost, stop = words.pop("segments", ()), words.pop("lost", LENGTH), words.pop("stop", LENGTH)
    operands = [] if recipe == "bf16" else ["linear.forward.input mxfp4"]
    run = make_run(root, *segments, recipe=recipe, seed=seed, operands=operands, **words)
    for at in range(stop):
        known = {"loss": 5 - 0.3 * at + 0.01 * seed + more} if at < lost else {"loss": None, "not_finite": True}
        run.append_loss({"iteration": at, "time": 0.0, "data_sha256": f"{seed} {at}"} | known)
    run.update(loss_last=5 - 0.3 * (min(lost, stop) - 1) + 0.01 * seed + more)
    return run


def group_of(opened: Catalog, name: str) -> dict[str, Any]:
    data = data_of(opened, opened.runs(damaged=True))
    return next(group for workload in data["workloads"] for group in workload["groups"] if group["name"] == name)


def test_a_diverged_recipe_has_no_gap_and_a_repeated_seed_counts_once(tmp_path: Path) -> None:
    gaps = {2: 0.3, 3: 0.35, 1: 0.2}
    for seed in gaps:
        train(tmp_path, "bf16", seed)
        train(tmp_path, "mxfp4", seed, 0.5, lost=4 if seed == 2 else LENGTH)
    train(tmp_path, "mxfp8", 1, 9.0)
    for seed, gap in gaps.items():
        train(tmp_path, "mxfp8", seed, gap)
    with Catalog.open(tmp_path) as opened:
        recipes = RECIPES.draw(opened).tables["recipes"].set_index("label")
        diverged, cells = group_of(opened, "mxfp4")["cells"], group_of(opened, "mxfp8")["cells"]
    assert not {"gap", "interval", "loss"} & {*diverged} and recipes.loc[["mxfp4"], "gap"].isna().all()
    found = stats.ttest_1samp([*gaps.values()], 0)
    assert cells["gap"][1] == pytest.approx(sum(gaps.values()) / 3) == recipes.loc["mxfp8", "gap"]
    assert cells["interval"][1] == pytest.approx(found.confidence_interval(0.95).low)
    assert cells["interval"][0] == recipes.loc["mxfp8", "gap_interval"]


def test_the_last_loss_of_a_group_is_of_runs_of_one_length(tmp_path: Path) -> None:
    for seed, stop in ((1, LENGTH), (2, LENGTH), (3, 3)):
        train(tmp_path, "bf16", seed, stop=stop)
    with Catalog.open(tmp_path) as opened:
        cells = group_of(opened, "bf16")["cells"]
    assert cells["loss"][1] == pytest.approx(5 - 0.3 * (LENGTH - 1) + 0.015)


def test_an_interval_that_no_recipe_has_is_no_column(tmp_path: Path) -> None:
    for seed in (1, 2):
        train(tmp_path, "bf16", seed)
        train(tmp_path, "mxfp4", seed, 0.5)
    with Catalog.open(tmp_path) as opened:
        (shown,) = [item for item in RECIPES.draw(opened).items if isinstance(item, Table)]
    assert {"gap", "gap_interval"} <= {*shown.columns} and not [name for name in shown.columns if "alone" in name]


def test_runs_and_recipes_name_the_same_recipes_that_leave_bf16(tmp_path: Path) -> None:
    """Of several seeds, of one seed, and where a run of the recipe has diverged later."""
    for seed in (1, 2):
        train(tmp_path, "bf16", seed)
        train(tmp_path, "bf16", seed, 0.001 * seed)
        train(tmp_path, "mxfp4", seed, 0.5)
        train(tmp_path, "hifp8", seed, 0.6, lost=6 if seed == 2 else LENGTH)
    one = train(tmp_path, "nvfp4", 1, 0.7)
    with Catalog.open(tmp_path) as opened:
        recipes = RECIPES.draw(opened).tables["recipes"].set_index("label")["left"]
        said = str(View("runs", {}).draw(opened).verdict)
        part = str(View("runs", {"chosen": [group_of(opened, "mxfp4")["runs"][0]["id"]]}).draw(opened).verdict)
        alone = str(View("runs", {"chosen": [one.run_id]}).draw(opened).verdict)
        events = {name: group_of(opened, name)["cells"]["event"] for name in ("mxfp4", "hifp8", "nvfp4")}
    assert recipes.to_dict() == dict.fromkeys(("mxfp4", "hifp8", "nvfp4"), "at iteration 0")
    sentence = said[said.index("Leaves bf16") :]
    assert all(f"{name} at iteration 0" in sentence for name in events)
    assert {event[1] for event in events.values()} == {0}
    assert [event[0] for event in events.values()] == [
        "leaves bf16 at 0", "leaves bf16 at 0; diverged at 6", "leaves bf16 at 0"
    ]  # fmt: skip
    assert "Leaves bf16" not in part and "nvfp4 at iteration 0" in alone


@pytest.mark.parametrize("with_tensors", [(), ("bf16",), ("bf16", "mxfp4")])
def test_an_event_leads_to_difference_only_if_both_runs_have_tensors(
    tmp_path: Path, with_tensors: tuple[str, ...]
) -> None:
    segments = {name: [[(torch.eye(32), {"recipe": name})]] for name in with_tensors}
    first = train(tmp_path, "bf16", 1, 0.001)
    reference = train(tmp_path, "bf16", 1, segments=segments.get("bf16", ()))
    run = train(tmp_path, "mxfp4", 1, 0.5, lost=6, segments=segments.get("mxfp4", ()))
    with Catalog.open(tmp_path) as opened:
        group = group_of(opened, "mxfp4")
    assert first.run_id != reference.run_id
    for cells in (group["cells"], group["runs"][0]["cells"]):
        link = cells["event"][3]
        if len(with_tensors) < 2:
            assert link is None
        else:
            assert (link["view"], link["run_a"], link["run_b"]) == ("difference", reference.run_id, run.run_id)


def test_the_first_nan_of_a_run_without_tensors_has_a_page(tmp_path: Path, visit: Visit) -> None:
    run = train(tmp_path, "bf16", 1, lost=3)
    append_event(run.directory, Event(EventKind.NON_FINITE, 3, "fc1 forward: NaN", now(), place="fc1", order=1))
    with Catalog.open(tmp_path) as opened:
        link = dict(group_of(opened, "bf16")["cells"]["event"][3])
        drawn = View("runs", {"view": [link["view"]], "run": [link["run"]]}).draw(opened)
    assert not drawn.problems and "Iteration 3: fc1 forward: NaN" in str(drawn.verdict)
    page = visit(tmp_path, "runs", view="provenance", run=run.run_id)
    assert not page.exception and "Iteration 3: fc1 forward: NaN" in words(page)


def test_a_measurement_is_a_row_that_opens_what_rounding_costs(tmp_path: Path, visit: Visit) -> None:
    run = make_run(tmp_path, kind=EXPERIMENT, recipe=None)
    with Catalog.open(tmp_path) as opened:
        data = data_of(opened, opened.runs(damaged=True))
        (row,) = [group for workload in data["workloads"] for group in workload["groups"]]
        drawn = View("runs", {"chosen": [row["id"]]}).draw(opened)
    assert row["name"] == f"Loss · llama32-1b · {run.run_id}"
    assert (row["link"]["view"], row["link"]["measured"]) == ("cost", run.run_id)
    page = visit(tmp_path, "runs", chosen=row["id"])
    assert "The chosen rows have no losses." in words(page) and not page.exception
    assert [item.text for item in drawn.items if isinstance(item, Text)] == ["The chosen rows have no losses."]


def test_the_line_of_what_was_used_is_of_the_chosen_rows(tmp_path: Path, visit: Visit) -> None:
    for recipe, gap in (("bf16", 0.0), ("mxfp4", 0.5), ("mxfp8", 0.2)):
        for seed in (1, 2):
            train(tmp_path, recipe, seed, gap)
    with Catalog.open(tmp_path) as opened:
        chosen = group_of(opened, "mxfp4")["id"]
    for query, said in (({}, "3 lines · 6 runs"), ({"chosen": chosen}, "2 lines · 4 of 6 runs")):
        page = visit(tmp_path, "runs", **query)
        assert [each.value for each in page.caption if said in each.value]
