"""The advisor: its choice against every choice there is, its recipe as trained, and what it refuses."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from scipy import stats

from binade.collector import Recorder, instrument, jobs
from binade.collector.advice import choice
from binade.collector.advice.advice import AdviceRequest, advise
from binade.collector.advice.costs import FORWARD, GROUPS, OPERAND, AdviceError, Costs, costs, operands_of
from binade.collector.jobs import queue
from binade.collector.models.site import Site
from binade.collector.recipes.files import read_recipe, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from binade.quant.specs import OPERAND_FIELDS
from tests.collector.cli.test_cli import one_line
from tests.collector.small_model import build, step
from tests.collector.test_jobs import end_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(measured_root: Path) -> Costs:
    with Catalog.open(measured_root) as catalog:
        return costs(catalog, operands_of(catalog, parts=("linear",)), "site")


def every_choice(options: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each choice of a row per group: its cost, its share, and how many layers it leaves in bf16."""
    groups = [list(own.index) for _, own in options.groupby("group")]
    rows = np.array(list(itertools.product(*groups)))
    cost, share, layer = (options[name].to_numpy()[rows] for name in ("cost", "share", "layer"))
    high = np.where((options["a"] == "bf16").to_numpy()[rows], layer, -1)
    return cost.sum(1), share.sum(1), sum((high == number).any(1) for number in options["layer"].unique())


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_cheaper(seed):
    random = np.random.default_rng(seed)
    rows = [
        {"group": f"g{group}", "layer": group // 2, "a": spec, "b": spec,
         "cost": 0.0 if spec == "bf16" else 10 ** random.uniform(-7, -3), "bits": 10.0 * (group + 1) * bits}
        for group in range(5)
        for spec, bits in (("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp8", 8.25), ("bf16", 16.0))
    ]  # fmt: skip
    options = pd.DataFrame(rows)
    options["share"] = options["bits"] / options.loc[options["a"] == "bf16", "bits"].sum()
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


def test_costs_are_the_measured_effects_and_the_noises_that_were_recorded(measured_root, found):
    """The effects from the rows of the experiment; the noise of a backward operand from its score."""
    (path,) = measured_root.glob("*/experiment/results-*.parquet")
    lines = pq.read_table(path).to_pylist()
    exact = {(line["batch"], line["sequence"]): line["loss"] for line in lines if line["base"] is None}
    sums: dict[tuple[str, int, str], list[float]] = {}
    divergences: dict[tuple[str, int, str], list[float]] = {}
    for line in (line for line in lines if line["base"]):
        key = line["text"], line["layer_index"], line["module"]
        sums.setdefault(key, []).append(line["loss"] - exact[line["batch"], line["sequence"]])
        divergences.setdefault(key, []).append(line["kl"])
    groups = found.forward[found.forward["spec"] != "bf16"].groupby(["spec", "layer_index", "module"])
    assert len(groups) == 3 * 2 * 4 and found.sequences == 4 and found.unmeasured == ()
    for key, rows in groups:
        assert rows["change"].sum() == pytest.approx(np.mean(sums[key])), key
        assert rows["cost"].sum() == pytest.approx(np.mean(divergences[key])), key
        assert rows["error"].sum() == pytest.approx(stats.sem(sums[key])), key
    with Catalog.open(measured_root) as catalog:
        scores = catalog.scores(Filter(tensor_name=("grad_output",), module=("fc1",), layer_index=(1,)))
    own = scores[scores["format"] == "mxfp4"]
    noise = (own["mse"] * own["finite"]).sum() / (own["rms"] ** 2 * own["finite"]).sum()
    row = found.table.query(
        "spec == 'mxfp4' and tensor_name == 'grad_output' and module == 'fc1' and layer_index == 1 and gemm == 'dgrad'"
    )
    assert row["noise"].item() == pytest.approx(noise, rel=1e-12)


@pytest.mark.parametrize("by", GROUPS)
def test_advice_keeps_its_limits(measured_root, by):
    with Catalog.open(measured_root) as catalog:
        found = costs(catalog, operands_of(catalog, parts=("linear",)), by)
    advice = advise(found, AdviceRequest(6, by=by))
    assert advice.bits <= 6 + 1e-3 and len(advice.chosen) == len(found.table.drop_duplicates(OPERAND))
    for _, own in advice.chosen.groupby(["layer_index", "module", "gemm"]):
        assert own["spec"].map(choice.family).nunique() == 1  # both operands of a GEMM
    apart = {"site": ["layer_index", "module"], "layer": ["layer_index"], "module": ["module"], "model": []}[by]
    assert advice.chosen.groupby([*apart, "field"])["spec"].nunique().max() == 1
    uniform = found.forward.groupby("spec")[["bits", "cost", "values"]].sum()
    uniform = uniform[uniform["bits"] <= 6 * uniform["values"]]
    assert advice.forward["cost"].sum() <= uniform["cost"].min() * 1.001
    least = [advise(found, AdviceRequest(bits, by=by)).forward["cost"].sum() for bits in (5, 8, 12, 16)]
    assert (np.diff(least) <= 1e-9).all() and least[-1] == 0


def test_the_recipe_is_the_choice(found, tmp_path):
    """As a file, and as a model is quantized by it."""
    advice = advise(found, AdviceRequest(6))
    assert advice.alone
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(advice.recipe("mine")))
    recipe = read_recipe(path, "mine")
    for row in advice.advised.itertuples():
        part = recipe.linear_of(Site(row.layer_index, row.module))
        assert part.rounded_to(row.field) == row.spec
    forward, title = {row.spec for row in advice.advised.itertuples() if row.gemm == FORWARD}, recipe.about.title
    assert forward == {"nvfp4"} and "nvfp4 alone" in advice.sentence
    assert title.startswith("Advised under 6 bits: forward operands in nvfp4 alone, ") and " at 4.50 bits" in title


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


WRONG = {
    "two budgets": (("--budget", "5", "--loss", "0.1"), 2, "give one"),
    "two more": (("--budget", "5", "--memory", "1M"), 2, "give one"),
    "no size": (("--memory", "much"), 2, "'much'"),
    "too little memory": (("--memory", "0"), 1, "takes at least 4.25 bits"),
    "no number": (("--budget", "many"), 2, "not a number above 0"),
    "too few bits": (("--budget", "2"), 1, "takes at least 4.25 bits"),
    "an unknown format": (("--specs", "mxfp9"), 2, "mxfp9"),
    "a format that was not measured": (("--specs", "nvint4"), 1, "not measured: nvint4; choose from mxfp4, nvfp4, "),
    "a part that was not measured": (("--parts", "qk"), 1, "--by part,site --parts qk "),
    "an unknown part": (("--parts", "head"), 2, "linear, qk, pv, router"),
    "no choice of so little cost": (
        ("--loss", "1e-9", "--max-bf16-layers", "0"), 1, "no choice satisfies a measured cost of 1e-09 with at most 0",
    ),
    "layers of all, before anything is measured": (
        ("--measure", "--by", "model", "--max-bf16-layers", "1"), 1, "--max-bf16-layers does not apply",
    ),
    "layers of all": (("--by", "module", "--max-bf16-layers", "1"), 1, "--max-bf16-layers does not apply"),
    "a file that exists": (("--output", "there.toml"), 2, "exists"),
    "no kind of file": (("--output", "mine.txt"), 2, "does not end in .toml or .yaml"),
    "a precision file": (
        ("--specs", "mxfp4", "--output", "mine.yaml"), 2, "in a precision file it can be bf16, fp8_e4m3, ",
    ),
    "a precision file, before anything is measured": (
        ("--measure", "--specs", "fp8_e4m3,mxfp4", "--output", "mine.yaml"), 2, "mxfp4 cannot be in a precision file",
    ),
    "nvfp4 in a precision file": (
        ("--specs", "nvfp4", "--budget", "5", "--output", "mine.yaml"), 2,
        "choose from fp8_e4m3, mxfp8(scale=rceil) with --specs",
    ),
    "a test without a file": (("--verify", "2"), 2, "--output"),
    "a target without a test": (("--target", "gpu"), 2, "--verify"),
    "no tensors": (("--recipe", "nothing"), 1, "no run with recorded tensors"),
}  # fmt: skip


def test_bytes_are_bits_of_all_forward_values(command, capsys, measured_root, found):
    values = found.forward.loc[found.forward["spec"] == "mxfp4", "values"].sum()
    assert command("advise", str(measured_root), "--memory", str(int(values * 6 / 8))) == 0
    in_bytes = capsys.readouterr().out
    assert command("advise", str(measured_root), "--budget", "6") == 0
    assert in_bytes == capsys.readouterr().out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_line(command, capsys, measured_root, tmp_path, monkeypatch, name):
    arguments, status, message = WRONG[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").touch()
    assert command("advise", str(measured_root), *arguments) == status
    out, err = capsys.readouterr()
    assert one_line(err) and message in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_without_sbatch_no_recipe_is_written(command, capsys, measured_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "binade.toml").write_text("[targets.gpu]\n")
    assert command("advise", str(measured_root), "--output", "mine.toml", "--verify", "2", "--target", "gpu") == 2
    out, err = capsys.readouterr()
    assert one_line(err) and "sbatch, which is not on this machine" in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["binade.toml"]


def test_runs_of_several_recipes_give_no_advice(collected):
    with Catalog.open(collected) as catalog, pytest.raises(AdviceError, match=r"several recipes \(mxfp4, mxfp8\)"):
        operands_of(catalog, Filter(recipe=("mxfp4", "mxfp8")))


def test_operands_that_were_not_recorded_or_scored_give_no_advice(measured_root, monkeypatch):
    with Catalog.open(measured_root) as catalog:
        table = catalog.scored_operands()
        for changed, message in (
            (table.assign(noise=np.nan), "no spec was scored on every operand"),
            (table[~table["tensor_name"].isin(("weight", "key", "value"))], "record inputs and weights"),
        ):
            monkeypatch.setattr(catalog, "scored_operands", lambda where, changed=changed: changed)
            with pytest.raises(AdviceError, match=message):
                operands_of(catalog)


def test_the_command_writes_a_recipe_and_queues_its_test(command, capsys, tmp_path):
    small = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--seed", "5")
    scores = ("--scores", "mxfp4,mxfp8", "--collect-micro-batches", "2")
    assert command("run", "--quantization", "bf16", *small, *scores) == 0
    capsys.readouterr()
    root, path = tmp_path / "runs", tmp_path / "mine.toml"
    try:
        assert (
            command(
                "advise", "--measure", "--budget", "6", "--output", str(path), "--verify", "2", "--train-iters", "3"
            )
            == 0
        )
        out, err = capsys.readouterr()
        assert err == "" and "4.25 bits" in out and f"written to {path}" in out and "HiGHS" not in out
        queued = queue.read_jobs(root)
        expected = [(seed, recipe) for seed in (5, 6) for recipe in ("bf16", "linear_mxfp4", str(path))]
        assert [(job.config.seed, job.config.recipe) for job in queued] == expected
        settings = {(job.config.train_iters, job.config.save_tensors, job.config.layers) for job in queued}
        assert settings == {(3, False, 1)}
    finally:
        for job in reversed(queue.read_jobs(root)):
            jobs.cancel(root, job.id)
        end_all(root)


@pytest.mark.thorough
def test_a_precision_file_gives_each_layer_the_recipe_of_its_forward_operands(command, capsys, tmp_path):
    small = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch")
    scores = ("--scores", "mxfp8(scale=rceil)", "--collect-micro-batches", "2")
    assert command("run", "--quantization", "bf16", *small, *scores) == 0
    assert command("advise", "--measure", "--budget", "12") == 0
    with Catalog.open(tmp_path / "runs") as catalog:
        found = costs(catalog, operands_of(catalog, parts=("linear",)), "site")
    half = float(found.forward["cost"].sum()) / 2  # so that no single format but bf16 is within the limit
    chosen = advise(found, AdviceRequest(None, half)).forward
    assert command("advise", "--loss", str(half), "--output", str(tmp_path / "mine.yaml")) == 0
    recipe = parse_recipe(str(tmp_path / "mine.yaml"))
    assert chosen["spec"].nunique() == 2
    for row in chosen.itertuples():
        formats = recipe.linear_of(Site(row.layer_index, row.module)).formats
        assert {str(formats[name] or "bf16") for name in OPERAND_FIELDS} == {row.spec}
