"""The advisor: its choice against every choice there is, its recipe as trained, and what it refuses."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from binade.collector import Recorder, instrument, jobs
from binade.collector.advice import choice
from binade.collector.advice.advice import AdviceRequest, advise, placed
from binade.collector.advice.costs import FORWARD, OPERAND, AdviceError, Costs, costs
from binade.collector.jobs import store
from binade.collector.models.site import Site
from binade.collector.recipes.files import read_recipe, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.data.reliability import reliability
from binade.quant.specs import OPERAND_FIELDS
from tests.collector.cli.test_cli import one_line
from tests.collector.small_model import build, step
from tests.collector.test_jobs import end_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(collected: Path) -> Costs:
    with Catalog.open(collected) as catalog:
        return costs(catalog, parts=("linear",))


def every_choice(options: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each choice of a row per group: its cost, its share, and how many layers it leaves in bf16."""
    groups = [list(own.index) for _, own in options.groupby("group")]
    rows = np.array(list(itertools.product(*groups)))
    cost, share, layer = (options[name].to_numpy()[rows] for name in ("cost", "share", "layer"))
    high = np.where((options["a"] == "bf16").to_numpy()[rows], layer, -1)
    return cost.sum(1), share.sum(1), sum((high == number).any(1) for number in options["layer"].unique())


@pytest.mark.parametrize("timed", [False, True], ids=["bits", "seconds"])
@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_cheaper(seed, timed):
    """Of bits, or of random times: a format of fewer bits may take longer, and so may one than bf16."""
    random = np.random.default_rng(seed)
    rows = [
        {"group": f"g{group}", "layer": group // 2, "a": spec, "b": spec,
         "cost": 0.0 if spec == "bf16" else 10 ** random.uniform(-7, -3),
         "used": random.uniform(0.3, 1.2) * 1e-5 if timed and spec != "bf16" else
                 10.0 * (group + 1) * bits * (1e-8 if timed else 1)}
        for group in range(5)
        for spec, bits in (("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp8", 8.25), ("bf16", 16.0))
    ]  # fmt: skip
    options = pd.DataFrame(rows)
    options["share"] = options["used"] / options.loc[options["a"] == "bf16", "used"].sum()
    costs, shares, high = every_choice(options)
    reached = np.quantile(shares, [0.02, 0.2, 0.6, 1])
    for share, most in zip(reached, (None, None, 1, 0), strict=True):
        allowed = costs[(shares <= share + 1e-9) & (high <= (math.inf if most is None else most))]
        best = choice.choose(options, share=share, most_bf16=most)
        assert best["share"].sum() <= share + 1e-4 and best["group"].is_unique
        assert best["cost"].sum() == pytest.approx(min(allowed), rel=1e-3)
    limit = float(np.median(costs))
    least = shares[costs <= limit].min()
    assert choice.choose(options, cost=limit)["share"].sum() == pytest.approx(least, rel=1e-3)


def test_costs_are_the_predicted_changes_and_noises_that_were_recorded(collected, found):
    runs = Filter(run_id=found.runs)
    with Catalog.open(collected) as catalog:
        changes = catalog.loss_changes("mxfp4", ("layer_index", "module", "tensor_name"), runs)
        scores = catalog.scores(Filter(run_id=found.runs, tensor_name=("weight",), module=("fc1",), layer_index=(1,)))
    keys = ["layer_index", "module", "tensor_name"]

    def changed(part: pd.DataFrame, least: float = -math.inf) -> pd.Series:
        first = part.groupby(keys)["first"].agg(["mean", "sem", "count"])
        limit = stats.t.ppf(0.975, first["count"] - 1)
        counts = (first["mean"].abs() > limit * first["sem"]) & (first["mean"] > least)
        return first["mean"].where(counts, 0) + part.groupby(keys)["second"].mean()

    expected = changed(changes)
    rows = found.table.query("gemm == 'forward' and spec == 'mxfp4'").set_index(keys)
    table = rows["change"]
    assert rows["cost"].to_dict() == pytest.approx(changed(changes, 0).loc[table.index].to_dict(), rel=1e-9)
    assert (rows["cost"] >= table).all() and (rows["cost"] > 0).all()
    lists = np.array(rows["by_sequence"].tolist())
    between = stats.spearmanr(lists[:, ::2].mean(1), lists[:, 1::2].mean(1)).statistic
    assert found.specs[0] == "mxfp4" and found.reliability.halves.value == pytest.approx(between)
    assert lists.mean(1) == pytest.approx(table.to_numpy(), rel=1e-9) and found.sequences == lists.shape[1]
    assert table.to_dict() == pytest.approx(expected.loc[table.index].to_dict(), rel=1e-9)
    own = scores[scores["format"] == "mxfp4"]
    noise = (own["mse"] * own["finite"]).sum() / (own["rms"] ** 2 * own["finite"]).sum()
    weight = found.table.query(
        "spec == 'mxfp4' and tensor_name == 'weight' and module == 'fc1' and layer_index == 1 and gemm == 'forward'"
    )
    assert weight["noise"].item() == pytest.approx(noise, rel=1e-12)


@pytest.mark.thorough
def test_nothing_is_advised_from_costs_that_cannot_be_relied_on(found):
    """One sequence; and a mix is advised only if it is predicted to lose less than a single format."""
    once = replace(found, reliability=reliability([[1.0], [2.0], [3.0], [4.0]]))
    said = advise(once, AdviceRequest(6)).sentence
    assert said.startswith("One sequence cannot tell operands apart: ") and "not advised" in said
    alike = found.table.assign(by_sequence=found.table["by_sequence"].map(lambda each: [1.0, -1.0][: len(each)]))
    known = replace(found, table=alike, reliability=reliability(np.arange(1, 9)[:, None] * np.ones((8, 2))))
    said = advise(known, AdviceRequest(6)).sentence
    assert said.startswith("Advised: nvfp4 alone, 4.50 bits, ") and "which is not less (difference " in said


@pytest.mark.thorough
@pytest.mark.parametrize("by", choice.GROUPS)
def test_advice_keeps_its_limits(found, by):
    advice = advise(found, AdviceRequest(6, by=by))
    assert (
        advice.bits <= 6 + 1e-3
        and advice.forward["cost"].sum() >= 0
        and len(advice.chosen) == len(found.table.drop_duplicates(OPERAND))
    )
    for _, own in advice.chosen.groupby(["layer_index", "module", "gemm"]):
        assert own["spec"].map(choice.family).nunique() == 1  # both operands of a GEMM
    apart = {"site": ["layer_index", "module"], "layer": ["layer_index"], "module": ["module"], "model": []}[by]
    assert advice.chosen.groupby([*apart, "field"])["spec"].nunique().max() == 1
    uniform = found.table[found.table["gemm"] == FORWARD].groupby("spec")[["bits", "cost", "values"]].sum()
    uniform = uniform[uniform["bits"] <= 6 * uniform["values"]]
    assert by == "model" or advice.forward["cost"].sum() <= uniform["cost"].min() * 1.001
    costs = [advise(found, AdviceRequest(bits, by=by)).forward["cost"].sum() for bits in (5, 8, 12, 16)]
    assert (np.diff(costs) <= 1e-9).all() and costs[-1] == 0


def test_the_recipe_is_the_choice(found, tmp_path):
    """As a file, as it is placed, and as a model is quantized by it."""
    advice = advise(found, AdviceRequest(6))
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(advice.recipe("mine")))
    recipe = read_recipe(path, "mine")
    for row in advice.chosen.itertuples():
        part = recipe.linear_of(Site(row.layer_index, row.module))
        assert part.rounded_to(row.field) == row.spec
    assert placed(recipe, found) == pytest.approx((advice.bits, advice.change, advice.error))
    assert len({row.spec for row in advice.chosen.itertuples() if row.gemm == FORWARD}) > 1


def test_the_layers_of_a_module_can_differ(tmp_path):
    (tmp_path / "mine.toml").write_text(
        "[linear]\nforward = 'mxfp8'\n[modules.fc2]\nforward = 'nvfp4'\n[modules.'layer2.fc2']\nforward = 'mxfp4'\n"
    )
    with Recorder(tmp_path / "runs", label="mine", scores=()) as recorder:
        model = build(2)
        with instrument(model, str(tmp_path / "mine.toml"), recorder):
            step(model)
    with Catalog.open(tmp_path / "runs") as catalog:
        rows = catalog.tensors(Filter(tensor_name=("input",)))
    formats = {(row.layer_index, row.module): row.format for row in rows.itertuples()}
    assert (formats[1, "fc2"], formats[2, "fc2"], formats[2, "fc1"]) == ("nvfp4", "mxfp4", "mxfp8")


def test_published_recipes_are_placed_where_all_their_formats_were_scored(found):
    bits, change, error = placed(parse_recipe("linear_mxfp4"), found)
    uniform = advise(found, AdviceRequest(6)).frontier.query("name == 'mxfp4'").iloc[0]
    assert (bits, change, error) == pytest.approx(
        (uniform["bits"], uniform["change"], uniform["error"])
    ) and bits == 4.25
    assert placed(parse_recipe("mxfp4"), found) is None  # rounds attention too
    assert placed(parse_recipe("linear_nvint4"), found) is None  # not scored
    half = placed(parse_recipe("linear_mxfp4"), found, skip="first")
    operands = found.table.query("gemm == 'forward' and spec == 'mxfp4' and layer_index != 1")
    assert half[0] > bits and half[1] == pytest.approx(operands["change"].sum())


WRONG = {
    "two budgets": (("--budget", "5", "--loss", "0.1"), 2, "give one"),
    "two more": (("--budget", "5", "--memory", "1M"), 2, "give one"),
    "no size": (("--memory", "much"), 2, "'much'"),
    "too little memory": (("--memory", "0"), 1, "take at least 4.25 bits"),
    "no number": (("--budget", "many"), 2, "not a number above 0"),
    "too few bits": (("--budget", "2"), 1, "take at least 4.25 bits"),
    "an unknown format": (("--specs", "mxfp9"), 2, "mxfp9"),
    "a format that was not scored": (("--specs", "nvint4"), 1, "not scored on every operand: nvint4"),
    "an unknown part": (("--parts", "head"), 2, "linear, qk, pv, router"),
    "layers of all": (("--by", "module", "--max-bf16-layers", "1"), 1, "--max-bf16-layers does not apply"),
    "a file that exists": (("--output", "there.toml"), 2, "exists"),
    "no kind of file": (("--output", "mine.txt"), 2, "does not end in .toml or .yaml"),
    "a precision file": (("--output", "mine.yaml"), 2, "in a precision file it can be bf16, fp8_e4m3, "),
    "a test without a file": (("--verify", "2"), 2, "--output"),
    "a time without a device": (("--time", "0.1"), 2, "--device"),
    "a speedup of bits": (("--device", "H100", "--speedup", "2", "--budget", "5"), 2, "--budget and --speedup"),
    "no micro-batch": (("--device", "H100", "--batch", "8x"), 2, "'8x' is not a micro-batch"),
    "an unknown device": (("--device", "H900"), 2, "choose from H100, H200, B200, MI355X"),
    "devices that are not there": (("--device", "H100", "--devices", "no.toml"), 2, "no.toml: No such file"),
    "too little time": (("--device", "H100", "--time", "1e-12"), 1, "take at least 100.0% of bf16's time"),
    "a target without a test": (("--target", "gpu"), 2, "--verify"),
    "no tensors": (("--recipe", "nothing"), 1, "no run with recorded tensors"),
    "two recipes": (("--recipe", "mxfp4,mxfp8"), 1, "several recipes (mxfp4, mxfp8)"),
}


def test_bytes_are_bits_of_all_forward_values(command, capsys, collected, found):
    values = found.table[(found.table["gemm"] == FORWARD) & (found.table["spec"] == "mxfp4")]["values"].sum()
    assert command("advise", str(collected), "--memory", str(int(values * 6 / 8))) == 0
    in_bytes = capsys.readouterr().out
    assert command("advise", str(collected), "--budget", "6") == 0
    assert in_bytes == capsys.readouterr().out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(command, capsys, collected, tmp_path, monkeypatch, name):
    arguments, status, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").touch()
    assert command("advise", str(collected), *arguments) == status
    out, err = capsys.readouterr()
    assert one_line(err) and message in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_without_sbatch_no_recipe_is_written(command, capsys, collected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "binade.toml").write_text("[targets.gpu]\n")
    assert command("advise", str(collected), "--output", "mine.toml", "--verify", "2", "--target", "gpu") == 2
    out, err = capsys.readouterr()
    assert one_line(err) and "sbatch, which is not on this machine" in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["binade.toml"]


def test_gradients_that_were_not_recorded_or_are_not_finite_give_no_advice(collected, monkeypatch):
    with Catalog.open(collected) as catalog:
        table = catalog.operand_costs()
        holes = table.assign(second=table["second"].where(table["module"] != "fc2", math.nan))
        for changed, message in (
            (table.assign(first=np.nan, second=np.nan), "no gradient"),
            (holes, "such as that of L1 fc2"),
            (table.assign(noise=np.nan), "no spec was scored on every operand"),
            (table[~table["tensor_name"].isin(("weight", "key", "value"))], "record inputs and weights"),
        ):
            monkeypatch.setattr(catalog, "operand_costs", lambda where, changed=changed: changed)
            with pytest.raises(AdviceError, match=message):
                costs(catalog)


def test_the_command_writes_a_recipe_and_queues_its_test(command, capsys, tmp_path):
    small = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--seed", "5")
    scores = ("--scores", "mxfp4,mxfp8", "--collect-micro-batches", "2")
    assert command("run", "--quantization", "bf16", *small, *scores) == 0
    capsys.readouterr()
    root, path = tmp_path / "runs", tmp_path / "mine.toml"
    try:
        assert command("advise", "--budget", "6", "--output", str(path), "--verify", "2", "--train-iters", "3") == 0
        out, err = capsys.readouterr()
        assert err == "" and "4.25 bits" in out and f"written to {path}" in out and "HiGHS" not in out
        queued = store.read_jobs(root)
        expected = [(seed, recipe) for seed in (5, 6) for recipe in ("bf16", "linear_mxfp4", str(path))]
        assert [(job.config.seed, job.config.recipe) for job in queued] == expected
        settings = {(job.config.train_iters, job.config.save_tensors, job.config.layers) for job in queued}
        assert settings == {(3, False, 1)}
    finally:
        for job in reversed(store.read_jobs(root)):
            jobs.cancel(root, job.id)
        end_all(root)


@pytest.mark.thorough
def test_a_precision_file_gives_each_layer_the_recipe_of_its_forward_operands(command, capsys, tmp_path):
    small = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch")
    scores = ("--scores", "mxfp8(scale=rceil)", "--collect-micro-batches", "2")
    assert command("run", "--quantization", "bf16", *small, *scores) == 0
    assert command("advise", "--budget", "12", "--output", str(tmp_path / "mine.yaml")) == 0
    recipe = parse_recipe(str(tmp_path / "mine.yaml"))
    with Catalog.open(tmp_path / "runs") as catalog:
        chosen = advise(costs(catalog, parts=("linear",)), AdviceRequest(12)).forward
    assert chosen["spec"].nunique() == 2
    for row in chosen.itertuples():
        formats = recipe.linear_of(Site(row.layer_index, row.module)).formats
        assert {str(formats[name] or "bf16") for name in OPERAND_FIELDS} == {row.spec}
