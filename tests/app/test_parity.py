"""Runs › Parity and its colors on the Map, against numpy and scipy on log-probabilities made here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from scipy import stats

from binade.app.questions.map.question import MAP
from binade.app.questions.parity.compute import titles
from binade.app.questions.parity.question import NOTHING, PARITY
from binade.app.view import View
from binade.collector import Recorder, instrument
from binade.data.catalog import Catalog
from binade.data.experiment import experiment_files
from binade.data.parity import Policies, joined
from binade.data.parity_results import ALL, GroupGap, Parity, ParityStep, read_parity
from binade.data.parity_values import published_values
from binade.data.routing import RoutedLayer, Routing
from binade.data.runs import RunError, first_step, list_runs
from binade.data.verify import verify
from tests.app.planted import drawn
from tests.collector.small_model import batch, build
from tests.data.experiments import save_parity

SEQUENCES, TOKENS = 6, 50


def policies(size: float, seed: int = 0) -> Policies:
    random = np.random.default_rng(seed)
    training = -random.exponential(2.0, (SEQUENCES, TOKENS)) - 0.5
    rollout = training + size * random.uniform(-1, 1, training.shape)
    return Policies.of(rollout, training, np.ones(training.shape), np.arange(SEQUENCES)[:, None] + 0 * training)


STEPS = [policies(0.1 * step, step) for step in (1, 2, 3)]


def group(layer: int, module: str, pair: Policies) -> GroupGap:
    changes = tuple(pair.means(np.abs(pair.d)).tolist())
    return GroupGap("linear", layer, module, "", True, changes, tuple(x / 10 for x in changes))


def of_recipes() -> Parity:
    whole = policies(0.4)
    changes = tuple(whole.means(np.abs(whole.d)).tolist())
    gaps = [group(layer, module, policies(size, layer)) for layer, module, size in ((2, "fc1", 0.3), (1, "fc1", 0.03))]
    gaps.insert(0, GroupGap("", None, None, "", True, changes, tuple(x / 10 for x in changes)))
    return Parity("mxfp4", "bf16", "", (ParityStep.of(ALL, whole),), tuple(gaps))


def of_dumps() -> Parity:
    kept = [ParityStep.of(str(step), pair) for step, pair in enumerate(STEPS, 10)]
    whole = joined(STEPS)
    gap = GroupGap("", None, None, "", True, tuple(whole.means(np.abs(whole.d)).tolist()))
    return Parity("rollout engine", "trainer", "NeMo-RL", (ParityStep.of(ALL, whole), *kept), (gap,))


def saved(root: Path, result: Parity, name: str = "a") -> str:
    return save_parity(root, "parity", {"measures": {"name": name}}, result, STEPS if result.tool else [policies(0.4)])


def test_what_is_kept_is_what_was_measured(tmp_path: Path):
    endless = Policies.of(np.array([-1.0, -800.0]), np.array([-800.0, -1.0]), np.ones(2), np.zeros(2))
    result = Parity("a", "b", "", (ParityStep.of(ALL, endless),), (GroupGap("", None, None, "", True, (799.0,)),))
    run_id = save_parity(tmp_path, "parity", {"measures": {}}, result, [endless])
    found = read_parity(tmp_path / run_id)
    assert found == result and np.inf in [value.over_tokens for value in found.steps[0].values]
    run_id = saved(tmp_path, of_dumps())
    assert read_parity(tmp_path / run_id) == of_dumps()
    assert read_parity(tmp_path) is None
    for name in experiment_files(tmp_path / run_id):
        path = tmp_path / run_id / name
        path.write_bytes(path.read_bytes()[:-1] + b"2")
    with pytest.raises(RunError, match="CRC-32"):
        read_parity(tmp_path / run_id)
    with Catalog.open(tmp_path) as catalog:
        assert any("results" in line and run_id in line for line in catalog.refused)
        assert "CRC-32" in drawn(PARITY, catalog, parity=run_id).problems[0]
    assert [line for line in verify(tmp_path).damaged if run_id in line and "CRC-32" in line]


def test_groups_are_ranked_with_their_intervals(tmp_path: Path):
    result = of_recipes()
    saved(tmp_path, result)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(PARITY, catalog)
    table = shown.get("parity_groups").table
    assert table["group"].tolist() == ["all", "layer2 fc1 linear", "layer1 fc1 linear"]
    assert shown.scope.counts[0] == (SEQUENCES, "sequence") and shown.scope.runs == shown.scope.of_runs == 1
    for row, gap in zip(table.to_dict("records"), result.gaps, strict=True):
        low, high = stats.t.interval(0.95, SEQUENCES - 1, np.mean(gap.changes), stats.sem(gap.changes))
        assert (row["change"], row["low"], row["high"]) == pytest.approx((np.mean(gap.changes), low, high))
        assert row["divergence"] == pytest.approx(row["change"] / 10)
    assert "The largest change of log-probabilities is that of layer2 fc1 linear" in shown.verdict
    assert "KL(R‖T)" in shown.verdict and not shown.problems and shown.get("parity_steps") is None


def test_published_values_are_next_to_the_quantities(tmp_path: Path):
    result = of_recipes()
    saved(tmp_path, result)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(PARITY, catalog)
    values = {value.name: value for value in result.steps[0].values}
    table = shown.tables["parity_quantities"].set_index("name")
    assert set(table.index) == set(values)
    assert "0.003 nats" in table.loc["k3", "published"] and table.loc["pearson", "published"] == ""
    assert float(table.loc["abs_logprob", "over_tokens"]) == pytest.approx(values["abs_logprob"].over_tokens, rel=1e-2)
    against = shown.get("parity_published").table
    own = against[against["kind"] == "here"].set_index("quantity")["value"]
    assert own["KL(R‖T), k3"] == values["k3"].over_tokens
    limits = against[(against["quantity"] == "KL(R‖T), k3") & (against["kind"] == "limit")]["value"]
    assert set(limits) == {each.value for each in published_values() if each.quantity == "k3" and each.is_limit}
    assert (against["value"] > 0).all() and against["source"].all()


def test_dumps_have_a_chart_by_step(tmp_path: Path):
    result = of_dumps()
    saved(tmp_path, result)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(PARITY, catalog, quantity="abs_prob")
    steps = shown.get("parity_steps")
    assert steps.table["step"].tolist() == ["10", "11", "12"] and "probability" in steps.title
    expected = [next(each.over_tokens for each in step.values if each.name == "abs_prob") for step in result.steps[1:]]
    assert steps.table["value"].tolist() == expected
    assert shown.get("parity_groups") is None and "NeMo-RL" in steps.caption


def test_several_measurements_can_be_chosen(tmp_path: Path):
    first, second = saved(tmp_path, of_recipes()), saved(tmp_path, of_dumps(), "b")
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.parities()) == {first, second}
        assert titles(catalog) == {
            second: f"dumps of NeMo-RL · {second}", first: f"mxfp4 against bf16 · {first}",
        }  # fmt: skip
        assert drawn(PARITY, catalog, parity=first).get("parity_groups")
        assert drawn(PARITY, catalog, parity=second).get("parity_steps")
        assert "parity" in View("runs", {"view": ["parity"], "parity": ["none"]}).read(catalog).problems[0]


def test_routing_has_a_chart_and_what_replayed_routes_change(tmp_path: Path):
    random, whole = np.random.default_rng(0), of_recipes()
    layers = tuple(
        RoutedLayer(layer, "router", 16, 2, tuple(random.integers(0, 15, SEQUENCES) / TOKENS), (0.9,) * SEQUENCES,
                    (0.05,) * SEQUENCES, 0.01, 0.001)
        for layer in (2, 3)
    )  # fmt: skip
    changes = tuple(0.4 * np.array(whole.gaps[0].changes) + 0.001 * random.standard_normal(SEQUENCES))
    routed = Routing(layers, tuple(random.uniform(0.2, 0.4, SEQUENCES)), changes, changes, ("layer4.router",))
    saved(tmp_path, replace(whole, routing=routed))
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(PARITY, catalog)
    table = shown.get("parity_routing").table
    for row, layer in zip(table.to_dict("records"), layers, strict=True):
        low, high = stats.t.interval(0.95, SEQUENCES - 1, np.mean(layer.flips), stats.sem(layer.flips))
        assert (row["flips"], row["low"], row["high"]) == pytest.approx((np.mean(layer.flips), low, high))
    replayed = shown.tables["parity_replay"]
    own = np.array(whole.gaps[0].changes)
    assert replayed["disappears"][0] == pytest.approx(1 - np.mean(changes) / own.mean())
    difference = stats.ttest_1samp(np.array(changes) - own, 0).confidence_interval(0.95)
    assert f"{difference.low:.3g}".replace("-", "−") in replayed["difference"][0]
    assert "differ in at least one layer" in shown.verdict
    assert "Lower than the gap with own routes: the gap with the rollout’s routes in training" in shown.verdict
    assert any("layer4.router" in text for text in shown.sentences)


@pytest.mark.thorough
def test_the_map_colors_products_by_the_change_of_log_probabilities(tmp_path: Path):
    model = build(2)
    tokens, labels = batch()
    with Recorder(tmp_path, scores=("mxfp4",)) as recorder, instrument(model, "bf16", recorder, backend="torch"):
        recorder.log(F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()))
        recorder.step()
    (run,), _ = list_runs(tmp_path)
    with Catalog.open(tmp_path) as catalog:
        assert "binade parity" in drawn(MAP, catalog, metric="parity_change").problems[0]
        weights = {"sha256": json.loads(first_step(run.directory))["weights_sha256"]}
        facts = {"model": run.config.get("model"), "weights": weights, "measures": {}}
        result = of_recipes()
        run_id = save_parity(tmp_path, "parity", facts, result)
        save_parity(tmp_path, "parity", facts | {"weights": {"sha256": "other"}, "measures": {"name": "other"}}, result)
        catalog.sync()
        shown = drawn(MAP, catalog, metric="parity_change")
        table = shown.get("map").table
        assert table["product"].tolist() == ["fc1", "fc1"] and set(table["gemm"]) == {"forward"}
        for gap in result.gaps[1:]:
            (cell,) = table[table["layer_index"] == gap.layer_index].itertuples()
            low, high = stats.t.interval(0.95, SEQUENCES - 1, np.mean(gap.changes), stats.sem(gap.changes))
            assert (cell.value, cell.low, cell.high) == pytest.approx((np.mean(gap.changes), low, high))
        assert shown.problems == (f"Rollout mxfp4, training bf16: {run_id}.",)
        across = drawn(MAP, catalog, metric="parity_change", across="iteration").problems
        assert across == ("The change of log-probabilities is that of one set of weights, not shown by iteration.",)


def test_a_root_without_parity_says_what_to_do(tmp_path: Path):
    tmp_path.mkdir(exist_ok=True)
    with Catalog.open(tmp_path) as catalog:
        assert drawn(PARITY, catalog).problems == (NOTHING,)
