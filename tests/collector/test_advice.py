"""The advisor: its choice against every choice there is, its recipe as trained, and what it refuses."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from binade.collector import Recorder, instrument, jobs
from binade.collector.advice import choice
from binade.collector.advice.advice import GROUPS, AdviceRequest, read_advice
from binade.collector.jobs import queue
from binade.collector.models.site import Site
from binade.collector.recipes.files import read_recipe, to_toml
from binade.collector.recipes.parse import parse_recipe
from binade.data.index.catalog import Catalog
from binade.data.run.effects import measured_effects
from binade.data.run.experiment import read_results
from binade.data.words.filter import Filter
from binade.quant.specs import OPERAND_FIELDS
from tests.collector.cli.test_cli import one_line
from tests.collector.small_model import build, step
from tests.collector.test_jobs import end_all

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def measurement(measured_root: Path) -> Path:
    (path,) = measured_root.glob("*/experiment")
    return path.parent


def every_choice(options: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each choice of a row per group: its cost, its share, and how many layers it leaves in bf16."""
    groups = [list(own.index) for _, own in options.groupby("group")]
    rows = np.array(list(itertools.product(*groups)))
    cost, share, layer = (options[name].to_numpy()[rows] for name in ("cost", "share", "layer"))
    high = np.where((options["format"] == "bf16").to_numpy()[rows], layer, -1)
    return cost.sum(1), share.sum(1), sum((high == number).any(1) for number in options["layer"].unique())


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_is_cheaper(seed):
    random = np.random.default_rng(seed)
    rows = [
        {"group": f"g{group}", "layer": group // 2, "format": spec,
         "cost": 0.0 if spec == "bf16" else 10 ** random.uniform(-7, -3), "bits": 10.0 * (group + 1) * bits}
        for group in range(5)
        for spec, bits in (("mxfp4", 4.25), ("nvfp4", 4.5), ("mxfp8", 8.25), ("bf16", 16.0))
    ]  # fmt: skip
    options = pd.DataFrame(rows)
    options["share"] = options["bits"] / options.loc[options["format"] == "bf16", "bits"].sum()
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


def test_costs_are_the_measured_effects(measured_root, measurement):
    """From the rows of the experiment, and the sizes from the shapes of the model's weights and batches."""
    lines = [
        line for path in measurement.glob("experiment/results-*.parquet") for line in pq.read_table(path).to_pylist()
    ]
    exact = {(line["batch"], line["sequence"]): line["loss"] for line in lines if line["base"] is None}
    sums: dict[tuple[str, str], list[float]] = {}
    divergences: dict[tuple[str, str], list[float]] = {}
    for line in (line for line in lines if line["base"] and line["layer_index"] and line["module"]):
        key = f"layer{line['layer_index']} {line['module']} linear", line["text"]
        sums.setdefault(key, []).append(line["loss"] - exact[line["batch"], line["sequence"]])
        divergences.setdefault(key, []).append(line["kl"])
    advice = read_advice(measurement, AdviceRequest(6))
    rounded = advice.options[advice.options["format"] != "bf16"]
    assert len(rounded) == 3 * 2 * 4 == len(sums) and advice.sequences == 4 and advice.unmeasured == ()
    for row in rounded.itertuples():
        key = row.group, row.format
        assert row.change == pytest.approx(np.mean(sums[key])), key
        assert row.cost == pytest.approx(np.mean(divergences[key])), key
    with Catalog.open(measured_root) as catalog:
        tensors = catalog.tensors(Filter(tensor_name=("weight",), iteration=(1,)))
    weights = {(row.layer_index, row.module): row.numel for row in tensors.itertuples()}
    assert {(each.layer_index, each.module): each.b for each in advice.operands} == weights


@pytest.mark.parametrize("by", GROUPS)
def test_advice_keeps_its_limits(measurement, by):
    advice = read_advice(measurement, AdviceRequest(6, by=by))
    assert advice.bits <= 6 + 1e-3 and advice.chosen["group"].is_unique
    assert set(advice.chosen["group"]) == {str(each.group(by)) for each in advice.operands}
    uniform = advice.options.groupby("format")[["bits", "cost"]].sum()
    uniform = uniform[uniform["bits"] <= 6 * advice.values]
    assert advice.chosen["cost"].sum() <= uniform["cost"].min() * 1.001
    least = [read_advice(measurement, AdviceRequest(bits, by=by)).chosen["cost"].sum() for bits in (5, 8, 12, 16)]
    assert (np.diff(least) <= 1e-9).all() and least[-1] == 0


def test_the_recipe_is_the_choice(measurement, tmp_path):
    """As a file, and as a model is quantized by it."""
    advice = read_advice(measurement, AdviceRequest(6))
    assert advice.alone
    path = tmp_path / "mine.toml"
    path.write_text(to_toml(advice.recipe("mine")))
    recipe = read_recipe(path, "mine")
    for each in advice.operands:
        part = recipe.linear_of(Site(each.layer_index, each.module))
        assert part.rounded_to("forward_a") == part.rounded_to("forward_b") == "nvfp4"
    title = recipe.about.title
    assert "nvfp4 alone" in advice.sentence
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
    "an unknown format": (("--formats", "mxfp9"), 2, "mxfp9"),
    "a format that was not measured": (("--formats", "nvint4"), 1, "not measured: nvint4; choose from mxfp4, nvfp4, "),
    "a part that was not measured": (("--parts", "qk"), 1, "no group of qk by site was measured"),
    "an unknown part": (("--parts", "head"), 2, "expected linear, qk, pv, router"),
    "no choice of so little cost": (
        ("--loss", "1e-9", "--max-bf16-layers", "0"), 1, "no choice satisfies a measured cost of 1e-09 with at most 0",
    ),
    "layers of all": (("--by", "module", "--max-bf16-layers", "1"), 1, "--max-bf16-layers does not apply"),
    "a file that exists": (("--output", "there.toml"), 2, "exists"),
    "no kind of file": (("--output", "mine.txt"), 2, "does not end in .toml or .yaml"),
    "a precision file": (
        ("--budget", "4.25", "--output", "mine.yaml"), 2, "in a precision file it can be bf16, fp8_e4m3, ",
    ),
    "nvfp4 in a precision file": (
        ("--formats", "nvfp4", "--budget", "5", "--output", "mine.yaml"), 2,
        "choose from fp8_e4m3, mxfp8(scale=rceil) with --formats",
    ),
    "a test without a file": (("--verify", "2"), 2, "--output"),
    "a target without a test": (("--target", "gpu"), 2, "--verify"),
    "a test of one's own model": (("--verify", "2", "--output", "mine.toml"), 2, "has no settings of a training"),
}  # fmt: skip
OF_MODELS = {
    "too few bits, before anything is measured": (("--budget", "2"), 1, "the narrowest format takes 4.25 bits"),
    "a precision file, before anything is measured": (
        ("--formats", "fp8_e4m3,mxfp4", "--output", "mine.yaml"), 2, "mxfp4 cannot be in a precision file",
    ),
    "settings of a run": (("--layers", "3"), 2, "leave it out"),
}  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [*WRONG, *OF_MODELS])
def test_wrong_input_is_one_line(command, capsys, measured_root, measurement, tmp_path, monkeypatch, name):
    arguments, status, message = (WRONG | OF_MODELS)[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.toml").touch()
    (run,) = (path.parent for path in measured_root.glob("*/segments") if path.parent != measurement)
    of = measurement if name in WRONG else run
    assert command("advise", of.name, *arguments, "--tensor-save-dir", str(measured_root)) == status
    out, err = capsys.readouterr()
    assert one_line(err) and message in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]


def test_without_sbatch_nothing_is_measured_or_written(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "binade.toml").write_text("[targets.gpu]\n")
    assert command("advise", "--output", "mine.toml", "--verify", "2", "--target", "gpu") == 2
    out, err = capsys.readouterr()
    assert one_line(err) and "sbatch, which is not on this machine" in err and out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["binade.toml"]


SMALL = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--seed", "5")


def test_the_command_measures_what_is_missing_and_evaluates_the_recipe_whole(command, capsys, tmp_path):
    """Whole, the recipe changes the loss by what `binade measure` of its file says; the same command measures nothing
    again, and one more format is measured beside what is known."""
    root, path = tmp_path / "runs", tmp_path / "mine.toml"
    options = (*SMALL, "--sequences", "3", "--budget", "6")
    assert command("advise", *options, "--formats", "mxfp4,mxfp8", "--output", str(path)) == 0
    (directory,) = root.glob("*_measure_*")
    advice = read_advice(directory, AdviceRequest(6, formats=("mxfp4", "mxfp8"), parts=("linear",)))
    out = capsys.readouterr().out
    assert advice.whole and f"Evaluated whole, the advised recipe changes the loss by {advice.whole}." in out
    before = {each: each.stat().st_mtime_ns for each in directory.glob("experiment/*")}
    assert command("advise", *options, "--formats", "mxfp4,mxfp8") == 0
    assert before == {each: each.stat().st_mtime_ns for each in directory.glob("experiment/*")}
    known = len(measured_effects(read_results(directory)))
    assert command("advise", *options, "--formats", "mxfp4,nvfp4") == 0
    added = [each.format for each in measured_effects(read_results(directory))[known:]]
    assert added.count("nvfp4") == 5 and set(added[5:]) <= {"advised under 6 bits by site"}
    apart = ("--tensor-save-dir", str(tmp_path / "apart"))
    assert command("measure", *SMALL, "--sequences", "3", "--formats", str(path), "--by", "part", *apart) == 0
    (other,) = (tmp_path / "apart").glob("*_measure_*")
    (whole,) = measured_effects(read_results(other))
    own = [
        each for each in measured_effects(read_results(directory)) if each.key.recipe_sha256 == whole.key.recipe_sha256
    ]
    assert own[0].changes == whole.changes and own[0].divergences == whole.divergences


def test_the_command_writes_a_recipe_and_queues_its_test(command, capsys, tmp_path):
    root, path = tmp_path / "runs", tmp_path / "mine.toml"
    options = (
        "--formats",
        "mxfp4,mxfp8",
        "--budget",
        "6",
        "--output",
        str(path),
        "--verify",
        "2",
        "--train-iters",
        "3",
    )
    try:
        assert command("advise", *SMALL, *options) == 0
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
    formats = ("--formats", "mxfp8(scale=rceil)")
    assert command("advise", *SMALL, *formats, "--budget", "12") == 0
    (directory,) = (tmp_path / "runs").glob("*_measure_*")
    advice = read_advice(directory, AdviceRequest(12))
    half = float(advice.options["cost"].sum()) / 2  # so that no single format but bf16 is within the limit
    chosen = read_advice(directory, AdviceRequest(None, half)).chosen.set_index("group")["format"]
    assert command("advise", *SMALL, *formats, "--loss", str(half), "--output", str(tmp_path / "mine.yaml")) == 0
    recipe = parse_recipe(str(tmp_path / "mine.yaml"))
    assert chosen.nunique() == 2
    for each in advice.operands:
        formats_of = recipe.linear_of(Site(each.layer_index, each.module)).formats
        assert {str(formats_of[name] or "bf16") for name in OPERAND_FIELDS} == {chosen[str(each.group("site"))]}
