"""The advisor with measured effects, on costs and effects made by hand: against every choice there is."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from binade.collector.advice.advice import AdviceRequest, advise
from binade.collector.advice.costs import Costs, bits_of
from binade.collector.advice.measured import agreements, by_prediction, with_effects
from binade.data.effects import EffectGroup
from binade.data.reliability import reliability

SPECS = ("mxfp4", "nvfp4", "mxfp8")
PLACES = [(layer, module) for layer in (1, 2, 3) for module in ("fc1", "fc2")]
SEQUENCES = 6


def costs() -> Costs:
    """Predictions that are equal in all places."""
    rows: list[dict[str, Any]] = []
    for (layer, module), (field, name), spec in itertools.product(
        PLACES, (("forward_a", "input"), ("forward_b", "weight")), (*SPECS, "bf16")
    ):
        change = 0.0 if spec == "bf16" else 16 / bits_of(spec)
        rows.append(
            {"part": "linear", "layer_index": layer, "module": module, "gemm": "forward", "field": field,
             "tensor_name": name, "spec": spec, "values": 64.0, "bits": 64 * bits_of(spec),
             "change": change, "cost": change, "error": 0.0, "by_sequence": [change] * 4 * (spec != "bf16"),
             "noise": change, "tensor_id": f"{layer}{module}{name}"}
        )  # fmt: skip
    table = pd.DataFrame(rows)
    return Costs(table, ("run",), reliability(table.loc[table["spec"] == SPECS[0], "by_sequence"]), ())


def effect(
    spec: str, group: EffectGroup, changes: list[float], divergence: float | None = None, run: str = "a"
) -> dict[str, Any]:
    divergences = None if divergence is None else [divergence] * len(changes)
    return {
        "run_id": run, "format": spec,
        "part": group.part or None, "layer_index": group.layer_index, "module": group.module,
        "change": float(np.mean(changes)), "change_error": float(stats.sem(changes)), "divergence": divergence,
        "change_by_sequence": changes, "divergence_by_sequence": divergences,
    }  # fmt: skip


def effects(places: list[tuple[int, str]] = PLACES, specs: tuple[str, ...] = SPECS) -> pd.DataFrame:
    random = np.random.default_rng(3)
    rows = []
    for (layer, module), spec in itertools.product(places, specs):
        size = 10 ** random.uniform(-3, 0) * 4 ** -(bits_of(spec) - 4)
        rows.append(
            effect(spec, EffectGroup("linear", layer, module), list(random.normal(size, size, SEQUENCES)), size)
        )
    return pd.DataFrame(rows)


def test_the_choice_is_the_best_of_the_measured_ones():
    measured = effects()
    used = with_effects(costs(), measured, "site")
    assert used.predicted == () and len(used.measured) == len(PLACES) and used.sequences == SEQUENCES
    advice = advise(used, AdviceRequest(6.0))
    sizes = measured.set_index(["layer_index", "module", "format"])["divergence"].to_dict()
    best = min(
        sum(sizes.get((*place, spec), 0.0) for place, spec in zip(PLACES, specs, strict=True))
        for specs in itertools.product((*SPECS, "bf16"), repeat=len(PLACES))
        if np.mean([16 if spec == "bf16" else bits_of(spec) for spec in specs]) <= 6.0
    )
    assert advice.chosen["cost"].sum() == pytest.approx(best, rel=1e-3)
    assert advice.kind == "measured" and "measured loss change" in advice.sentence
    chosen = advice.chosen.groupby(["layer_index", "module"])["spec"].agg(["nunique", "first"])
    assert (chosen["nunique"] == 1).all()  # both operands of a GEMM, as they were measured
    by_place = {(row.layer_index, row.module, row.format): row for row in measured.itertuples()}
    taken = [by_place[(*place, row["first"])] for place, row in chosen.iterrows() if row["first"] != "bf16"]
    assert advice.change == pytest.approx(sum(row.change for row in taken))
    saved = {f"linear.{row.layer_index}.{row.module}.forward": by_place[row.layer_index, row.module, "mxfp4"].change
             - row.change for row in taken if row.format != "mxfp4"}  # fmt: skip
    listed = advice.deciding.set_index("place")["saved"].to_dict()
    assert {place: listed[place] for place in saved if saved[place] > 0} == pytest.approx(
        {place: change for place, change in saved.items() if change > 0}
    )
    together = np.sum([row.change_by_sequence for row in taken], axis=0)
    assert advice.error == pytest.approx(stats.sem(together))


def test_groups_that_were_not_measured_are_predicted_and_named():
    used = with_effects(costs(), effects(PLACES[:4]), "site")
    advice = advise(used, AdviceRequest(6.0))
    assert used.predicted == ("linear.3.fc1.forward", "linear.3.fc2.forward")
    assert advice.kind == "partly predicted"
    assert any("Only predicted" in doubt and "linear.3.fc1.forward" in doubt for doubt in advice.doubts)
    rows = advice.chosen[advice.chosen["layer_index"] == 3]
    predicted = costs().table.set_index(["layer_index", "module", "tensor_name", "spec"])["change"]
    keys = rows[["layer_index", "module", "tensor_name", "spec"]].itertuples(index=False, name=None)
    assert rows["change"].tolist() == [predicted[key] for key in keys]


def test_a_format_that_was_not_measured_in_a_group_is_not_chosen_there():
    used = with_effects(costs(), effects(specs=("nvfp4",)), "site")
    advice = advise(used, AdviceRequest(10.0))
    assert set(advice.chosen["spec"]) <= {"nvfp4", "bf16"}
    assert set(advice.frontier.query("kind == 'uniform'")["name"]) == {"nvfp4", "bf16"}


@pytest.mark.parametrize("by", ["layer", "module", "model"])
def test_a_group_is_measured_as_it_is_chosen(by: str):
    groups = {
        "layer": [EffectGroup("linear", layer) for layer in (1, 2, 3)],
        "module": [EffectGroup("linear", None, module) for module in ("fc1", "fc2")],
        "model": [EffectGroup("linear")],
    }[by]
    rows = [effect(spec, group, [0.1 / bits_of(spec)] * 3) for group in groups for spec in SPECS]
    used = with_effects(costs(), pd.DataFrame(rows), by)
    assert len(used.measured) == len(groups) and not used.predicted
    table = used.table[used.table["spec"] == "mxfp4"]
    assert table["change"].sum() == pytest.approx(len(groups) * 0.1 / 4.25)
    assert with_effects(costs(), pd.DataFrame(rows), "site").measured == ()


def test_a_change_below_zero_costs_nothing_where_no_divergence_is_known():
    used = with_effects(costs(), pd.DataFrame([effect("mxfp4", EffectGroup("linear"), [-0.2, -0.1])]), "model")
    own = used.table[used.table["spec"] == "mxfp4"]
    assert own["cost"].sum() == 0 and own["change"].sum() == pytest.approx(-0.15)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("factor", "agrees"), [(1.0, True), (1.45, True), (1.55, False), (0.5, False), (13.0, False)])
def test_predictions_that_do_not_agree_are_marked(factor: float, agrees: bool):
    predictions = costs()
    predicted = 16 / 4.25 * 2 * len(PLACES)
    changes = list(np.random.default_rng(1).normal(predicted / factor, 0.01, 5))
    found = pd.DataFrame([effect("mxfp4", EffectGroup("linear"), changes)])
    used = with_effects(predictions, found, "site")
    (agreement,) = agreements(predictions, found, used)
    assert agreement.predicted == pytest.approx(predicted) and agreement.agrees == agrees
    low, high = stats.t.interval(0.95, 4, np.mean(changes), stats.sem(changes))
    assert (agreement.measured.low, agreement.measured.high) == pytest.approx((low, high))
    assert math.isnan(agreement.added) and ("not reliable" in agreement.sentence) != agrees
    advice = advise(replace(used, agreement=(agreement.sentence,)), AdviceRequest(6.0))
    assert agreement.sentence in advice.doubts


def test_the_largest_prediction_is_measured_first():
    predictions = costs()
    table = predictions.table
    large = (table["layer_index"] == 2) & (table["module"] == "fc2") & (table["spec"] == "mxfp4")
    small = (table["layer_index"] == 3) & (table["module"] == "fc1") & (table["spec"] == "mxfp4")
    table["cost"] = table["cost"].where(~large, 9.0).where(~small, 0.5)
    order = by_prediction(predictions, "site")
    assert order[0] == EffectGroup("linear", 2, "fc2") and order[-1] == EffectGroup("linear", 3, "fc1")
    assert len(order) == len(PLACES)
    assert by_prediction(predictions, "layer")[0] == EffectGroup("linear", 2)


def test_effects_of_one_run_come_before_those_of_others():
    """The error of a sum is known for effects of the same sequences."""
    long = pd.DataFrame([effect("nvfp4", EffectGroup("linear", 1, "fc1"), [1.0] * 9, run="long")])
    used = with_effects(costs(), pd.concat([long, effects()], ignore_index=True), "site")
    assert used.sequences == SEQUENCES
    assert math.isfinite(advise(used, AdviceRequest(6.0)).error)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", ["layer", "part"])
def test_predictions_divide_what_was_measured_for_more(level: str):
    """Measured layers, or the whole part: the predictions within them are scaled, and keep their proportions."""
    groups = [EffectGroup("linear", layer) for layer in (1, 2, 3)] if level == "layer" else [EffectGroup("linear")]
    random = np.random.default_rng(5)
    rows = [
        effect(spec, group, list(random.normal(1, 0.2, 4) * (at + 1)), (at + 1) * 0.9)
        for at, group in enumerate(groups)
        for spec in SPECS
    ]
    predictions = costs()
    factors = predictions.table["module"].map({"fc1": 1.0, "fc2": 3.0})
    for name in ("change", "cost"):
        predictions.table[name] *= factors
    used = with_effects(predictions, pd.DataFrame(rows), "site")
    assert used.measured == () and len(used.scaled) == 1
    for row in rows:
        own = used.table[used.table["spec"] == row["format"]]
        own = own if row["layer_index"] is None else own[own["layer_index"] == row["layer_index"]]
        assert own["change"].sum() == pytest.approx(row["change"]) and own["cost"].sum() == pytest.approx(
            row["divergence"]
        )
        parts = own.groupby("module")["cost"].sum()
        assert parts["fc2"] / parts["fc1"] == pytest.approx(3)
        assert np.sum(own["by_sequence"].tolist(), axis=0) == pytest.approx(row["change_by_sequence"])
    advice = advise(used, AdviceRequest(6.0))
    assert any("only divide it among operands" in doubt for doubt in advice.doubts) and math.isfinite(advice.error)
