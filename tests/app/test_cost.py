"""Runs › Cost and its colors on the Map, against numpy and scipy on losses and log-probabilities made here; what it
queues, and the advice that follows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch.nn.functional as F
from scipy import stats

from binade.app.questions.cost.compute import titles
from binade.app.questions.cost.question import COST, NOTHING, NOTHING_OF_FILTER
from binade.app.questions.map.question import MAP
from binade.app.view.view import View
from binade.collector import Recorder, instrument, jobs
from binade.collector.jobs import queue
from binade.collector.recipes.files import read_recipe
from binade.data.compare.parity import Policies, joined
from binade.data.compare.routing import RoutedLayer, Routing
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, RunError, list_runs
from binade.data.run.effects import Measured
from binade.data.run.experiment import (
    EXPERIMENT,
    NONE,
    BatchResult,
    BlockError,
    EffectGroup,
    ExperimentWriter,
    TreatmentKey,
    experiment_files,
)
from binade.data.run.losses import first_step
from binade.data.run.parity_results import ALL, CHANGE, DIVERGENCE, TRAINER, Parity, ParityStep, read_parity
from binade.data.run.run_writer import RunWriter
from binade.data.run.verify import verify
from binade.data.words.filter import Filter
from tests.app import roots
from tests.app.planted import drawn
from tests.app.test_pages import Visit, rerun, words
from tests.collector.small_model import batch, build
from tests.collector.test_jobs import end_all
from tests.data.experiments import Effect, append_effect, save_parity

SEQUENCES, TOKENS = 6, 50


def policies(size: float, seed: int = 0) -> Policies:
    random = np.random.default_rng(seed)
    training = -random.exponential(2.0, (SEQUENCES, TOKENS)) - 0.5
    rollout = training + size * random.uniform(-1, 1, training.shape)
    return Policies.of(rollout, training, np.ones(training.shape), np.arange(SEQUENCES)[:, None] + 0 * training)


STEPS = [policies(0.1 * step, step) for step in (1, 2, 3)]


def gap(key: TreatmentKey, pair: Policies) -> Measured:
    changes = tuple(pair.means(np.abs(pair.d)).tolist())
    divergences = () if key.base == TRAINER else tuple(x / 10 for x in changes)
    return Measured(key, changes, divergences, of_change=CHANGE, of_divergence=DIVERGENCE)


def group(layer: int, module: str, pair: Policies) -> Measured:
    return gap(TreatmentKey("mxfp4", "", EffectGroup("linear", layer, module), base=NONE), pair)


def of_recipes() -> Parity:
    whole = policies(0.4)
    gaps = [group(layer, module, policies(size, layer)) for layer, module, size in ((2, "fc1", 0.3), (1, "fc1", 0.03))]
    gaps.insert(0, gap(TreatmentKey("mxfp4", base=NONE), whole))
    return Parity("mxfp4", "bf16", "", (ParityStep.of(ALL, whole),), tuple(gaps))


def of_dumps() -> Parity:
    kept = [ParityStep.of(str(step), pair) for step, pair in enumerate(STEPS, 10)]
    whole = joined(STEPS)
    gaps = (gap(TreatmentKey("NeMo-RL", base=TRAINER), whole),)
    return Parity("rollout engine", "trainer", "NeMo-RL", (ParityStep.of(ALL, whole), *kept), gaps)


def saved(root: Path, result: Parity, name: str = "a") -> str:
    return save_parity(root, "parity", {"measures": {"name": name}}, result, STEPS if result.tool else [policies(0.4)])


def test_what_is_kept_is_what_was_measured(tmp_path: Path):
    endless = Policies.of(np.array([-1.0, -800.0]), np.array([-800.0, -1.0]), np.ones(2), np.zeros(2))
    found = gap(TreatmentKey("a", base=TreatmentKey("b")), endless)._replace(divergences=())
    result = Parity("a", "b", "", (ParityStep.of(ALL, endless),), (found,))
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
        assert "CRC-32" in drawn(COST, catalog, measured=run_id).problems[0]
    assert [line for line in verify(tmp_path).damaged if run_id in line and "CRC-32" in line]


def test_groups_are_ranked_with_their_intervals(tmp_path: Path):
    result = of_recipes()
    saved(tmp_path, result)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(COST, catalog)
    table = shown.get("cost").table
    assert table["group"].tolist() == ["all", "layer2 fc1 linear", "layer1 fc1 linear"]
    assert shown.scope.counts[0] == (SEQUENCES, "sequence") and shown.scope.runs == shown.scope.of_runs == 1
    for row, gap in zip(table.to_dict("records"), result.gaps, strict=True):
        low, high = stats.t.interval(0.95, SEQUENCES - 1, np.mean(gap.changes), stats.sem(gap.changes))
        assert (row["change"], row["low"], row["high"]) == pytest.approx((np.mean(gap.changes), low, high))
        assert row["divergence"] == pytest.approx(row["change"] / 10)
    assert "The largest |Δ log-probability| in mxfp4 against bf16 is that of layer2 fc1 linear" in shown.verdict
    assert "KL(R‖T)" in shown.verdict and not shown.problems and shown.get("cost_steps") is None


def test_the_quantities_of_tokens_are_in_a_table(tmp_path: Path):
    result = of_recipes()
    saved(tmp_path, result)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(COST, catalog)
    values = {value.measure.name: value for value in result.steps[0].values}
    table = shown.tables["quantities"].set_index("name")
    assert set(table.index) == set(values)
    assert float(table.loc["abs_logprob", "over_tokens"]) == pytest.approx(values["abs_logprob"].over_tokens, rel=1e-2)


def test_dumps_have_a_chart_by_step(tmp_path: Path):
    result = of_dumps()
    saved(tmp_path, result)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(COST, catalog, quantity="abs_prob")
    steps = shown.get("cost_steps")
    assert steps.table["step"].tolist() == ["10", "11", "12"] and "probability" in steps.title
    expected = [
        next(each.over_tokens for each in step.values if each.measure.name == "abs_prob") for step in result.steps[1:]
    ]
    assert steps.table["value"].tolist() == expected
    assert shown.get("cost") is None and "NeMo-RL" in steps.caption


def test_several_measurements_can_be_chosen(tmp_path: Path):
    first, second = saved(tmp_path, of_recipes()), saved(tmp_path, of_dumps(), "b")
    with Catalog.open(tmp_path) as catalog:
        assert set(catalog.parities()) == {first, second}
        assert titles(catalog) == {
            second: f"dumps of NeMo-RL · {second}", first: f"mxfp4 against bf16 · {first}",
        }  # fmt: skip
        assert drawn(COST, catalog, measured=first).get("cost")
        assert drawn(COST, catalog, measured=second).get("cost_steps")
        assert "measured 'none'" in View("runs", {"view": ["cost"], "measured": ["none"]}).read(catalog).problems[0]


def test_measurements_are_those_of_the_filters_runs(tmp_path: Path):
    """Of two trained runs with checkpoints, the first was measured twice and the second once; a third not at all."""
    trained = []
    for recipe in ("bf16", "mxfp8", "nvfp4"):
        facts = {"model": "toy", "recipe": recipe, "seed": len(trained)}
        trained.append(RunWriter.create(tmp_path, recipe, facts))
        trained[-1].finish(DONE)
    first, second, third = (run.run_id for run in trained)
    of = {}
    for number, run_id in enumerate((first, second, first)):
        facts = {"kind": "experiment", "model": "toy", "measured_run": run_id, "measures": {"name": number}}
        facts["weights"] = {"sha256": f"{run_id}/checkpoint"}
        of[save_parity(tmp_path, "measure", facts, of_recipes())] = run_id
    with Catalog.open(tmp_path) as catalog:
        assert titles(catalog).keys() == of.keys()
        for run_id, label in ((first, "bf16"), (second, "mxfp8")):
            own = {name for name, measured_run in of.items() if measured_run == run_id}
            shown = titles(catalog, [run_id])
            assert shown.keys() == own and all(f" · of {label}" in text for text in shown.values())
            answer = drawn(COST, catalog, Filter(run_id=[run_id]))
            assert answer.scope.where.run_id[0] in own and answer.scope.of_runs == len(own)
            for name in own:  # also if one of another run is chosen
                asked = drawn(COST, catalog, Filter(run_id=[run_id]), measured=name)
                assert asked.scope.where.run_id == (name,)
                other = next(each for each in of if each not in own)
                assert drawn(COST, catalog, Filter(run_id=[run_id]), measured=other).scope.where.run_id[0] in own
        assert drawn(COST, catalog, Filter(run_id=[third])).problems == (NOTHING_OF_FILTER,)
        chosen = next(iter(of))
        assert chosen in titles(catalog, [chosen])


def test_own_and_inherited_errors_are_two_lines_over_depth(tmp_path: Path):
    """Against numpy. Layer 2 has the largest own error in every sequence; layer 1 passes nothing on."""
    random = np.random.default_rng(0)
    own = np.array([0.01, 0.05, 0.01]) + random.uniform(0, 1e-3, (SEQUENCES, 3))
    errors = np.sqrt((own**2).cumsum(1))
    run = RunWriter.create(tmp_path, "measure", {"model": "mine", "kind": EXPERIMENT})
    losses = tuple(random.normal(3, 1, SEQUENCES))
    blocks = tuple(tuple(map(BlockError, (1, 2, 3), *pair)) for pair in zip(errors, own, strict=True))
    writer, key = ExperimentWriter(run.directory), TreatmentKey("mxfp4", "", EffectGroup("linear"), base=NONE)
    for each in (NONE, key):
        writer.add(BatchResult(each, 0, losses, (9,) * SEQUENCES, blocks=blocks if each.base else ()))
    run.finish(DONE)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(COST, catalog)
    table = shown.get("cost_blocks").table.set_index(["group", "layer"])
    for name, values in (("linear in mxfp4", errors), ("linear in mxfp4, own", own)):
        for layer in (1, 2, 3):
            row, column = table.loc[name, layer], 100 * values[:, layer - 1]
            low, high = stats.t.interval(0.95, SEQUENCES - 1, column.mean(), stats.sem(column))
            assert (row["value"], row["low"], row["high"]) == pytest.approx((column.mean(), low, high))
    assert "The largest own error with linear in mxfp4 is that of layer2" in shown.verdict
    assert f"the output of the last block has an error of {100 * errors[:, 2].mean():.3g}%" in shown.verdict


def test_routers_have_a_table_and_a_sentence_says_what_replayed_routes_change(tmp_path: Path):
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
        shown = drawn(COST, catalog)
    table = shown.tables["routers"]
    for row, layer in zip(table.to_dict("records"), layers, strict=True):
        low, high = stats.t.interval(0.95, SEQUENCES - 1, np.mean(layer.flips), stats.sem(layer.flips))
        assert (row["flips"], row["low"], row["high"]) == pytest.approx((np.mean(layer.flips), low, high))
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


def test_a_root_without_a_measurement_says_what_to_do(tmp_path: Path):
    tmp_path.mkdir(exist_ok=True)
    with Catalog.open(tmp_path) as catalog:
        assert drawn(COST, catalog).problems == (NOTHING,)


def measured(root: Path, changes: dict[tuple[str, EffectGroup], np.ndarray]) -> str:
    """A run of `binade measure` of these changes of the loss, in two batches."""
    run = RunWriter.create(root, "measure", {"kind": "experiment", "model": "toy"})
    for (fmt, group), values in changes.items():
        for number, part in enumerate(np.split(values, 2)):
            exact = tuple((5 + 0 * part).tolist())
            append_effect(run.directory, Effect(number, fmt, *group, exact, tuple((5 + part).tolist())))
    run.finish(DONE)
    return run.run_id


def changes_of(means: dict[EffectGroup, float], noise: float) -> dict[tuple[str, EffectGroup], np.ndarray]:
    random = np.random.default_rng(0)
    return {("mxfp4", group): mean + noise * random.standard_normal(8) for group, mean in means.items()}


SITES = {EffectGroup("linear", layer, "fc1"): mean for layer, mean in ((1, 0.01), (2, 0.05), (3, 0.02))}


@pytest.mark.parametrize("noise", [0.001, 1.0])
def test_effects_are_scipys_and_nothing_within_the_noise_is_named(tmp_path: Path, noise: float):
    changes = changes_of(SITES | {EffectGroup(): 0.1, EffectGroup("linear", 2): 0.06}, noise)
    run_id = measured(tmp_path, changes)
    with Catalog.open(tmp_path) as catalog:
        shown = drawn(COST, catalog)
        layers = drawn(COST, catalog, groups="layer").get("cost").table
    table = shown.tables["cost"]
    assert table["group"].iloc[0] == "all" and set(table["group"][1:]) == {str(group) for group in SITES}
    assert layers["group"].tolist() == ["all", "layer2 linear"]
    by_name = {str(group): values for (_, group), values in changes.items()}
    for row in table.to_dict("records"):
        low, high = stats.ttest_1samp(by_name[row["group"]], 0).confidence_interval(0.95)
        found = [row["change"], row["low"], row["high"]]
        assert found == pytest.approx([by_name[row["group"]].mean(), low, high], rel=1e-9, abs=1e-12)
        assert row["sequences"] == 8
    assert "3 groups in mxfp4, one at a time: " in shown.verdict
    named = "The largest measured loss change in mxfp4 is that of layer2 fc1 linear" in shown.verdict
    assert named == (noise < 0.1) and ("cannot be named: 8 sequences do not tell" in shown.verdict) != named
    assert shown.scope.counts == ((8, "sequence"),) and run_id in shown.get("cost").caption


@pytest.mark.slow
def test_a_click_queues_the_measurement_that_is_shown(visit: Visit, collected: Path, tmp_path: Path):
    root = roots.copy(collected, tmp_path / "runs")
    at = visit(root, "cost")
    at.text_input(key="cost_formats").set_value("mxfp4, no_format")
    try:
        at.button(key="cost_measure").click()
        rerun(at)
        assert "unknown recipe" in at.error[0].value and not queue.read_jobs(root)
        at.text_input(key="cost_formats").set_value("mxfp4")
        at.button(key="cost_measure").click()
        rerun(at)
        assert not at.exception and any(each.value.startswith("Job 1 is ") for each in at.success)
        rerun(at)  # as when the page draws itself again
        assert any(each.value.startswith("Job 1 is ") for each in at.success)
        (job,) = queue.read_jobs(root)
        options = ("--formats", "mxfp4", "--by", "part,site", "--sequences", "8")
        assert job.command == ("measure", at.selectbox(key="cost_run").value, *options)
        assert any(f"binade {' '.join(job.command)} " in code.value for code in at.code)
    finally:
        for job in queue.read_jobs(root):
            if jobs.view_of(root, job).active:
                jobs.cancel(root, job.id)
        end_all(root)


@pytest.mark.slow
def test_the_advice_is_said_and_its_button_queues_the_runs(visit: Visit, measured_root: Path, tmp_path: Path):
    root = roots.copy(measured_root, tmp_path / "runs")
    at = visit(root, "cost")
    at.selectbox(key="advise_budget").set_value(6.0)
    rerun(at)
    assert "nvfp4 alone" in words(at) and "measured loss changes add up to" in words(at)
    at.text_input(key="advise_name").set_value("mine")
    at.number_input(key="advise_seeds").set_value(2)
    at.number_input(key="advise_iterations").set_value(2)
    try:
        next(button for button in at.button if button.label == "Verify").click()
        rerun(at)
        (said,) = (success.value for success in at.success)
        assert said.startswith("6 jobs: ") and said.endswith(". When they are done, Runs › Recipes compares them.")
        saved_recipe = root / ".recipes" / "mine.toml"
        recipe = read_recipe(saved_recipe, "mine")
        sites = [recipe.linear, *(part for _, part in recipe.modules)]
        assert {part.rounded_to(field) for part in sites for field in ("forward_a", "forward_b")} == {"nvfp4"}
        queued = [(job.config.recipe, job.config.train_iters, job.tags) for job in queue.read_jobs(root)]
        assert queued == [(name, 2, ("advice mine",)) for name in ["bf16", "linear_nvfp4", str(saved_recipe)] * 2]
        next(button for button in at.button if button.label == "Verify").click()
        rerun(at)
        assert len(at.error) == 1 and "exists" in at.error[0].value
    finally:
        for job in reversed(queue.read_jobs(root)):
            jobs.cancel(root, job.id)
        end_all(root)


@pytest.mark.slow
def test_a_measurement_without_the_sizes_of_operands_says_what_to_measure(visit: Visit, tmp_path: Path):
    """As one of an earlier version."""
    measured(tmp_path, changes_of(SITES, 0.01))
    said = [info.value.replace("\\", "") for info in visit(tmp_path, "cost").info]
    assert any("has no effects with the sizes of operands: measure them with binade advise" in each for each in said)


@pytest.mark.slow
def test_without_a_measurement_one_command_says_how_to_make_one(visit: Visit, collected: Path):
    """And there is nothing to advise from."""
    at = visit(collected, "cost")
    assert [code.value.partition(" 2")[0] for code in at.code] == ["binade measure"]
    assert words(at).count("binade measure") == 1 and not [each for each in at.expander if "Advise" in each.label]
