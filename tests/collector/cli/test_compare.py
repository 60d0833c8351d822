"""The comparison of recipes, against losses, segments and raw tensors read and summed here."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import scipy.stats
import torch
from markdown_it import MarkdownIt

from binade.cli import main
from binade.collector.cli.compare import Comparison, Row, compare
from binade.collector.cli.tables import render
from binade.data.runs import CRASHED, DONE, FAILED, RUNNING, RunWriter
from binade.quant import fake_quantize
from tests.conftest import RECIPES, run_collector
from tests.data.builder import add_segment, assorted, make_run, reseal

pytestmark = pytest.mark.slow

SIDES = {
    ("linear", "forward"): "linear_forward",
    ("linear", "backward"): "linear_gradients",
    ("FA", "forward"): "fa_forward",
    ("FA", "backward"): "fa_gradients",
}
LAST, MEAN = "gap_at_common_iteration_nats", "gap_mean_nats"
BITS = {"mxfp8": 8.25, "mxfp8_e5m2": 8.25, "mxfp4": 4.25, "hifp8": 8.0, None: 16.0}
# (largest exponent, largest value) of the elements of a block format
ELEMENTS = {"mxfp8": (8, 448.0), "mxfp8_e5m2": (15, 57344.0), "mxfp4": (2, 6.0)}


def read_csv(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def losses(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def copy(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collected root without its index."""
    target = tmp_path_factory.mktemp("compared") / "runs"
    return shutil.copytree(collected, target, ignore=shutil.ignore_patterns("index.duckdb*"), copy_function=os.link)


@pytest.fixture(scope="module")
def printed(copy: Path) -> dict[str, str]:
    """What the real command prints, by format: of text in a process of its own."""
    done = run_collector("compare", "--format", "text", root=copy)
    assert (done.returncode, done.stderr) == (0, "")
    found = {"text": done.stdout}
    for kind in ("csv", "markdown"):
        assert main(("compare", str(copy), "--format", kind, "--output", str(copy.with_name(kind)))) == 0
        found[kind] = copy.with_name(kind).read_text()
    return found


@pytest.fixture(scope="module")
def by_recipe(printed) -> dict[str, dict[str, str]]:
    return {row["recipe"]: row for row in read_csv(printed["csv"])}


def operands(run: Path) -> list[dict]:
    """The rows of a run's operands as pyarrow reads them."""
    rows = []
    for file in sorted((run / "segments").glob("*/tensor.parquet")):
        rows += [row for row in pq.read_table(file).to_pylist() if row["contracted_axis"] is not None]
    return rows


def gradients(run: Path) -> dict[tuple[int, str], np.ndarray]:
    """The weights' gradients of iteration 0, flattened, by layer and module."""
    files = sorted((run / "segments").glob("*/tensor.parquet"))
    rows = [row for file in files for row in pq.read_table(file).to_pylist()]
    return {
        (row["layer_index"], row["module"]): torch.load(run / row["path"], weights_only=True)["tensor"]
        .double()
        .flatten()
        .numpy()
        for row in rows
        if row["tensor_name"] == "grad_weight" and row["iteration"] == 0
    }


def saturated(x: np.ndarray, fmt: str, axis: int) -> int:
    """How many values lie beyond the format's largest, after the block's scale 2^(floor(log2 absmax) - emax)."""
    if fmt == "hifp8":
        return int((np.abs(x) > 32768).sum())
    emax, largest = ELEMENTS[fmt]
    x = np.abs(np.moveaxis(x, axis, -1))
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % 32)]).reshape(*x.shape[:-1], -1, 32)
    exponent = np.frexp(x.max(-1, keepdims=True))[1] - 1
    return int((x > np.ldexp(largest, exponent - emax)).sum())


class TestRealRuns:
    def test_a_row_is_a_recipe(self, by_recipe, copy):
        assert sorted(by_recipe) == sorted(RECIPES)
        for recipe, row in by_recipe.items():
            assert (row["state"], row["runs"], row["iterations"]) == ("done", "1", "2")
            (run,) = copy.glob(f"*_{recipe}_*")
            assert row["run_id"] == run.name

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_losses_and_gaps_are_those_of_the_files(self, by_recipe, copy, recipe):
        row = by_recipe[recipe]
        own, bf16 = (losses(copy / by_recipe[name]["run_id"]) for name in (recipe, "bf16"))
        assert [record["iteration"] for record in own] == [-2, -1, 0, 1]
        assert float(row["loss_nats"]) == own[-1]["loss"]
        names = [name for name in row if "gap" in name or "common" in name or name == "perplexity_ratio"]
        assert len(names) == 13
        if recipe == "bf16":
            assert all(row[name] == "" for name in names)
            return
        assert [r["loss"] for r in own[:2]] == [r["loss"] for r in bf16[:2]]  # warm-up
        gaps = [own[i]["loss"] - bf16[i]["loss"] for i in (2, 3)]
        assert all(gaps)
        assert (row["common_iterations"], row["common_iteration"]) == ("2", "1")
        assert float(row["loss_at_common_iteration_nats"]) == own[-1]["loss"]
        assert float(row["bf16_loss_at_common_iteration_nats"]) == bf16[-1]["loss"]
        assert float(row["gap_at_common_iteration_nats"]) == gaps[1]
        assert float(row["gap_mean_nats"]) == pytest.approx(sum(gaps) / 2, rel=1e-12)
        assert float(row["gap_before_training_nats"]) == gaps[0]  # after an equal warm-up
        assert float(row["gap_added_by_training_nats"]) == pytest.approx(gaps[1] - gaps[0], rel=1e-9)
        assert float(row["gap_deviation_nats"]) == pytest.approx(abs(gaps[1] - gaps[0]) / math.sqrt(2), rel=1e-9)
        assert float(row["perplexity_ratio"]) == pytest.approx(math.e ** (sum(gaps) / 2), rel=1e-12)
        assert (row["gap_seeds"], row["gap_mean_over_seeds_nats"]) == ("1", row["gap_mean_nats"])
        assert row["gap_deviation_over_seeds_nats"] == ""

    @pytest.mark.sampled
    @pytest.mark.parametrize("recipe", RECIPES)
    @pytest.mark.parametrize("side", SIDES, ids=SIDES.values())
    def test_errors_are_those_of_the_raw_tensors(self, by_recipe, collected, recipe, side):
        row, name = by_recipe[recipe], SIDES[side]
        keys = [f"{name}_{key}" for key in ("sqnr_db", "flush_to_zero_share", "saturated_share", "operands")]
        run = collected / row["run_id"]
        chosen = [r for r in operands(run) if (r["component"], r["operation"]) == side and r["format"]]
        if recipe == "bf16":
            assert chosen == [] and [row[key] for key in keys] == [""] * 4
            return
        chosen = [r for r in chosen if r["iteration"] == 1]  # the last
        own = []
        for r in chosen:
            tensor = torch.load(run / r["path"], weights_only=True)["tensor"]
            axis = r["contracted_axis"]
            x, q = tensor.double().numpy(), fake_quantize(tensor, r["format"], axis).double().numpy()
            flushed = ((x != 0) & (q == 0)).sum() / (x != 0).sum()
            sqnr = 10 * np.log10((x**2).sum() / ((q - x) ** 2).sum())
            own.append((sqnr, flushed, saturated(x, r["format"], axis) / x.size))
        expected = [*np.median(own, 0), len(chosen)]
        assert [float(row[key]) for key in keys] == pytest.approx(expected, rel=1e-9)
        assert len(chosen) == {"linear_forward": 16, "linear_gradients": 8, "fa_forward": 8, "fa_gradients": 4}[name]

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_gradient_errors_are_those_of_the_raw_tensors(self, by_recipe, copy, recipe):
        row = by_recipe[recipe]
        names = ("iteration", "pairs", "cosine", "relative_squared_error")
        if recipe == "bf16":
            assert {row[f"gradient_{name}"] for name in names} == {""}
            return
        own, bf16 = (gradients(copy / by_recipe[name]["run_id"]) for name in (recipe, "bf16"))
        pairs = [(own[site], bf16[site]) for site in own]
        cosines = [float(a @ b) / math.sqrt(float(a @ a) * float(b @ b)) for a, b in pairs]
        squared = [float(((a - b) ** 2).sum() / (b @ b)) for a, b in pairs]
        assert (row["gradient_iteration"], row["gradient_pairs"]) == ("0", str(len(pairs))) and len(pairs) == 8
        assert [float(row[f"gradient_{name}"]) for name in names[2:]] == pytest.approx(
            [np.median(cosines), np.median(squared)], rel=1e-6
        )

    @pytest.mark.parametrize("recipe", RECIPES)
    def test_sizes_are_those_of_the_formats(self, by_recipe, copy, recipe):
        row = by_recipe[recipe]
        rows = operands(copy / row["run_id"])
        values = sum(math.prod(r["shape"]) for r in rows)
        bits = sum(math.prod(r["shape"]) * BITS[r["format"]] for r in rows)
        assert (int(row["operands"]), int(row["operand_values"])) == (len(rows), values) and len(rows) == 72
        assert float(row["operand_bits_per_value"]) == pytest.approx(bits / values, rel=1e-12)
        assert float(row["operand_bits_per_value"]) == BITS[{"bf16": None}.get(recipe, recipe)]
        assert float(row["operand_bytes"]) == bits / 8 and float(row["operand_bytes_in_bf16"]) == 2 * values

    def test_times_are_the_medians_of_the_files(self, by_recipe, copy):
        for row in by_recipe.values():
            records = [record for record in losses(copy / row["run_id"]) if record["iteration"] >= 0]
            assert all(record["recorded"] for record in records)
            expected = statistics.median(record["seconds"] for record in records)
            assert float(row["recorded_iteration_median_seconds"]) == expected
            assert row["recorded_iterations_timed"] == "2"
            assert row["unrecorded_iteration_median_seconds"] == row["unrecorded_iterations_timed"] == ""

    def test_csv_is_rfc_4180(self, printed):
        assert printed["csv"].count("\n") == 1 + len(RECIPES)  # text mode turned CR LF into LF
        (header, *rows) = csv.reader(io.StringIO(printed["csv"]), strict=True)
        assert len(set(header)) == len(header) and {len(row) for row in rows} == {len(header)}

    def test_text_is_aligned_and_says_the_same(self, printed, by_recipe):
        lines = printed["text"].splitlines()
        assert max(map(len, lines)) <= 120
        shown = shown_tables(printed["text"])
        assert [table[0][0] for table in shown] == ["recipe"] * 4 and [len(table) for table in shown] == [5, 5, 4, 5]
        check_shown(shown, by_recipe)
        for table in blocks_of_tables(printed["text"]):
            assert len({len(line) for line in table}) == 1  # the last column is right-aligned

    def test_markdown_is_read_as_the_same_tables(self, printed, by_recipe):
        shown, alignments = markdown_tables(printed["markdown"])
        check_shown(shown, by_recipe)
        for table, alignment in zip(shown, alignments, strict=True):
            words = 2 if table[0][1] == "state" else 1
            assert alignment == ["left"] * words + ["right"] * (len(table[0]) - words)


def blocks_of_tables(text: str) -> list[list[str]]:
    """Lines of each aligned table, its title left out."""
    blocks = [block.splitlines() for block in text.split("\n\n")]
    return [block[1:] for block in blocks if len(block) > 1 and block[1].startswith("recipe ")]


def shown_tables(text: str) -> list[list[list[str]]]:
    """Cells of the aligned tables: two blanks or more part them."""
    return [
        [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in block]
        for block in blocks_of_tables(text)
    ]


def markdown_tables(text: str) -> tuple[list[list[list[str]]], list[list[str]]]:
    """Cells of each table and the alignment of its columns, as a Markdown parser sees them."""
    found: list[list[list[str]]] = []
    alignments: list[list[str]] = []
    for token in MarkdownIt("commonmark").enable("table").parse(text):
        if token.type == "table_open":
            found.append([])
            alignments.append([])
        elif token.type == "tr_open":
            found[-1].append([])
        elif token.type == "th_open":
            alignments[-1].append(token.attrs["style"].removeprefix("text-align:"))
        elif token.type == "inline" and found and token.level == 4:
            found[-1][-1].append("".join(child.content for child in token.children))
    return found, alignments


def check_shown(shown: list[list[list[str]]], by_recipe: dict[str, dict[str, str]]) -> None:
    """The tables of one section against the CSV."""
    loss, rounding, gradient, cost = (
        {row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]} for table in shown
    )
    assert list(loss) == list(rounding) == list(cost) == list(by_recipe) == ["bf16", *gradient]
    for recipe, row in by_recipe.items():
        for title, cell in list(gradient.get(recipe, {}).items())[1:]:
            name = {"rel. sq. error": "relative_squared_error"}.get(title, title)
            assert float(cell) == pytest.approx(float(row[f"gradient_{name}"]), rel=5.1e-3, abs=0.5001e-4)
        expected = {
            "loss": "loss_nats",
            "loss (common)": "loss_at_common_iteration_nats",
            "bf16 (common)": "bf16_loss_at_common_iteration_nats",
            "gap": "gap_at_common_iteration_nats",
            "mean gap": "gap_mean_nats",
            "sd": "gap_deviation_nats",
            "perplexity": "perplexity_ratio",
        }
        for title, name in expected.items():
            cell = loss[recipe][title]
            assert (cell == "–") == (row[name] == "")
            assert cell == "–" or float(cell) == pytest.approx(float(row[name]), abs=0.5001e-4)
        for title, name in zip(list(rounding[recipe])[1:], SIDES.values(), strict=True):
            cell = rounding[recipe][title]
            assert title.lower().replace(" ", "_") == name and (cell == "–") == (recipe == "bf16")
            if cell == "–":
                continue
            sqnr, *shares = cell.split(" / ")
            assert float(sqnr) == pytest.approx(float(row[f"{name}_sqnr_db"]), abs=0.5001e-2)
            for share, key in zip(shares, ("flush_to_zero_share", "saturated_share"), strict=True):
                exact = 100 * float(row[f"{name}_{key}"])
                assert (share == "<0.01") == (0 < exact < 0.005)
                assert share == "<0.01" or float(share) == pytest.approx(exact, abs=0.5001e-2)
        assert cost[recipe]["bits/value"] == f"{float(row['operand_bits_per_value']):.2f}"
        assert cost[recipe]["MB"] == f"{float(row['operand_bytes']) / 1e6:.2f}"
        assert float(cost[recipe]["ratio"]) == pytest.approx(float(row["operand_bits_per_value"]) / 16, abs=0.5001e-3)
        assert cost[recipe]["s recorded"] == f"{float(row['recorded_iteration_median_seconds']):.3f}"
        assert cost[recipe]["s unrecorded"] == "–"


Made = Callable[..., RunWriter]
TENSOR = torch.linspace(-3, 3, 64 * 64).reshape(64, 64).bfloat16()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a run in tmp_path/"runs": made(recipe, [loss, ...], state=DONE, tensors=[(x, words)], **config)."""

    def make(recipe: str, loss: list[float], state: str = DONE, tensors=(), **config) -> RunWriter:
        writer = make_run(tmp_path / "runs", *([tensors] if tensors else []), recipe=recipe, **config)
        for iteration, value in enumerate(loss):
            writer.append_loss({"iteration": iteration, "loss": value, "time": 0.0})
        reason = "it broke" if state == FAILED else None
        writer.update(iteration=len(loss) - 1, state=RUNNING if state == CRASHED else state, reason=reason)
        if state == CRASHED:
            writer.update(pid_started=1.0)
        return writer

    return make


@pytest.fixture
def compared(tmp_path: Path) -> Callable[[], Comparison]:
    return lambda: compare(tmp_path / "runs")


def only(comparison: Comparison) -> dict[str, Row]:
    """The rows of the only section."""
    (section,) = comparison.sections
    return {row.label: row for row in section.rows}


class TestGap:
    def test_taken_where_both_have_finished(self, made, compared):
        made("bf16", [5.0, 4.0, 3.0, 2.5])
        made("mxfp8", [5.1, 4.2, 3.3])
        made("mxfp4", [5.5, 4.5, 3.5, 3.5, 3.0])
        rows = only(compared())
        shorter, longer = rows["mxfp8"], rows["mxfp4"]
        names = ("loss_nats", "common_iteration", "loss_at_common_iteration_nats", "bf16_loss_at_common_iteration_nats")
        assert [shorter.figures[name] for name in names] == [3.3, 2, 3.3, 3.0]
        assert shorter.figures[LAST] == pytest.approx(0.3) and shorter.figures[MEAN] == pytest.approx(0.2)
        assert (longer.figures["loss_nats"], longer.iterations, longer.figures["common_iterations"]) == (3.0, 5, 4)
        assert longer.figures[LAST] == pytest.approx(1.0) and longer.figures[MEAN] == pytest.approx(2.5 / 4)
        assert longer.figures["perplexity_ratio"] == pytest.approx(math.exp(0.625))
        assert longer.figures["gap_deviation_nats"] == pytest.approx(np.std([0.5, 0.5, 0.5, 1.0], ddof=1))
        assert not [name for name in rows["bf16"].figures if "gap" in name or "common" in name or "perplexity" in name]

    def test_warm_up_does_not_count(self, made, compared):
        for recipe, offset in (("bf16", 0.0), ("hifp8", 0.25)):
            run = made(recipe, [5.0 + offset, 4.0 + offset])
            run.append_loss({"iteration": -1, "loss": 9.0 + 4 * offset, "seconds": 50.0, "recorded": False})
        row = only(compared())["hifp8"]
        assert (row.figures["common_iterations"], row.figures[MEAN], row.iterations) == (2, 0.25, 2)
        assert "unrecorded_iterations_timed" not in row.figures

    def test_without_bf16_there_is_none(self, made, compared):
        made("mxfp8", [5.0])
        made("bf16", [], FAILED)
        comparison = compared()
        assert comparison.sections[0].reference is None and MEAN not in only(comparison)["mxfp8"].figures
        assert "No bf16 run with these settings finished an iteration" in render(comparison, "text")

    def test_a_bf16_run_that_is_not_done_serves_when_there_is_no_other(self, made, compared):
        made("bf16", [5.0, 4.0], CRASHED)
        made("bf16", [9.0], FAILED)
        made("mxfp8", [5.5, 4.5, 4.0])
        assert only(compared())["mxfp8"].figures[MEAN] == 0.5
        assert "The bf16 run is crashed" in render(compared(), "text")
        made("bf16", [5.25])
        rows = only(compared())
        assert rows["mxfp8"].figures[MEAN] == 0.25 and rows["bf16 (crashed)"].figures[MEAN] == -0.25
        assert MEAN not in rows["bf16"].figures
        assert "The bf16 run is" not in render(compared(), "text")

    def test_bf16_with_another_format_by_option_is_not_bf16(self, made, compared):
        made("bf16", [5.0], linear_quant="mxfp4")
        made("bf16", [4.0])
        made("linear_mxfp8", [4.5], pv_quant="hifp8", router_quant="mxfp4")
        rows = only(compared())
        assert list(rows) == ["bf16", "bf16, linear mxfp4", "linear_mxfp8, PV hifp8, router mxfp4"]
        assert [row.figures.get(LAST) for row in rows.values()] == [None, 1.0, 0.5]

    def test_beyond_what_a_float_holds(self, made, compared):
        made("bf16", [1.0])
        made("mxfp4", [1001.0])
        figures = only(compared())["mxfp4"].figures
        assert figures["perplexity_ratio"] == math.inf and "gap_deviation_nats" not in figures
        assert read_csv(render(compared(), "csv"))[1]["perplexity_ratio"] == "inf"


# The mean gap of each rung, and its deviation over seeds. The spread is scaled to be exactly that.
RUNGS = {
    "te_nvfp4(without=dgrad+wgrad)": (0.010, 0.001),
    "te_nvfp4(without=wgrad)": (0.011, 0.001),
    "te_nvfp4": (0.050, 0.001),
    "te_nvfp4(without=rounding)": (0.090, 0.002),
    "te_nvfp4(without=rotation)": (0.049, 0.004),
    "te_nvfp4(without=tiles)": (0.020, 0.002),
}


def make_ladder(made: Made, seeds: int) -> dict[str, list[float]]:
    """Runs of every rung and seed, in a mixed order; the mean gap of each seed, by recipe. Each seed's losses lie one
    nat above the last seed's: a gap to another seed's bf16 run would show."""
    gaps = {}
    for recipe, (mean, deviation) in {"te_nvfp4(without=tiles)": RUNGS["te_nvfp4(without=tiles)"], **RUNGS}.items():
        noise = np.random.default_rng(len(recipe)).normal(size=seeds)
        noise = (noise - noise.mean()) / noise.std(ddof=1) if seeds > 1 else noise * 0
        gaps[recipe] = (mean + deviation * noise).tolist()
        for seed, gap in enumerate(gaps[recipe]):
            made(recipe, [5.0 + seed + gap - 0.001, 4.0 + seed + gap + 0.001], seed=seed)
    for seed in range(seeds):
        made("bf16", [5.0 + seed, 4.0 + seed], seed=seed)
    return gaps


def ablation(text: str) -> dict[str, list[str]]:
    """The cells of the table of an ablation by rung: two blanks or more part them."""
    (block,) = [block for block in text.split("\n\n") if block.startswith("Ablation of te_nvfp4: ")]
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in block.splitlines()[1:]]
    assert lines[0] == ["step", "seeds", "mean gap", "sd", "95% interval", "change", "verdict"]
    return {line[0]: line[1:] for line in lines[1:]}


class TestSeeds:
    def test_a_row_is_a_recipe_over_all_seeds(self, made, compared):
        gaps = make_ladder(made, 4)
        rows = only(compared())
        assert list(rows) == ["bf16", *RUNGS]  # in the order of the ladder
        for recipe, expected in gaps.items():
            figures = rows[recipe].figures
            assert rows[recipe].seeds == (0, 1, 2, 3) and figures["gap_seeds"] == 4
            assert figures["gap_mean_over_seeds_nats"] == pytest.approx(statistics.fmean(expected), rel=1e-9)
            assert figures["gap_mean_over_seeds_nats"] == pytest.approx(RUNGS[recipe][0], rel=1e-9)
            assert figures["gap_deviation_over_seeds_nats"] == pytest.approx(statistics.stdev(expected), rel=1e-9)
            assert figures[MEAN] == pytest.approx(expected[rows[recipe].seed])
        assert not rows["bf16"].gaps and len({row.seed for row in rows.values()}) == 1
        assert [row["seeds"] for row in read_csv(render(compared(), "csv"))] == ["0 1 2 3"] * 7

    def test_what_the_spread_separates_is_ordered_and_nothing_else(self, made, compared):
        gaps = make_ladder(made, 4)
        text = render(compared(), "text")
        table = ablation(text)
        assert {rung: cells[-1] for rung, cells in table.items()} == {
            "bf16": "–",
            "forward": "higher than bf16",
            "+ dgrad": "not distinguishable from forward",
            "+ wgrad": "higher than + dgrad",
            "without rounding": "higher than + wgrad",
            "without rotation": "not distinguishable from + wgrad",
            "without tiles": "lower than + wgrad",
        }
        for recipe, (rung, cells) in zip(RUNGS, list(table.items())[1:], strict=True):
            low, high = scipy.stats.t.interval(0.95, 3, np.mean(gaps[recipe]), scipy.stats.sem(gaps[recipe]))
            assert cells[:3] == ["4", f"{RUNGS[recipe][0]:+.4f}", f"{RUNGS[recipe][1]:.4f}"], rung
            assert [float(each) for each in cells[3].split(" to ")] == pytest.approx([low, high], abs=1.1e-4)
        assert [table[rung][-2] for rung in ("+ dgrad", "+ wgrad", "without tiles")] == [
            "+0.0010",
            "+0.0390",
            "-0.0300",
        ]
        assert "seeds 0, 1, 2, 3" in text and "show seed 3." in text and "One seed:" not in text

    def test_one_seed_separates_nothing(self, made, compared):
        make_ladder(made, 1)
        text = render(compared(), "text")
        assert all("higher" not in line and "lower" not in line for line in text.splitlines())
        assert ablation(text)["without rounding"] == [
            "1",
            "+0.0900",
            "–",
            "–",
            "+0.0400",
            "not distinguishable from + wgrad",
        ]
        assert "One seed cannot tell what training adds from chance." in text

    def test_a_seed_without_bf16_has_no_gap_and_is_named(self, made, compared):
        for seed, loss in ((1, 5.5), (2, 5.25), (3, 9.0)):
            made("mxfp8", [loss], seed=seed)
        for seed in (1, 2):
            made("bf16", [5.0], seed=seed)
        made("mxfp4", [7.0], seed=3)
        rows = only(compared())
        assert [*rows["mxfp8"].gaps.values()] == [0.5, 0.25] and rows["mxfp8"].seeds == (1, 2, 3)
        assert not rows["mxfp4"].gaps
        text = render(compared(), "text")
        assert "No bf16 run with seed 3 finished an iteration, so runs with that seed have no gap." in text
        (block,) = [block for block in text.split("\n\n") if block.startswith("Mean gap to bf16 over seeds")]
        assert block.splitlines()[2].split("  ")[0] == "mxfp8" and "not distinguishable from bf16" in block
        assert "Ablation of" not in text

    def test_repeats_of_a_seed_are_no_further_seed(self, made, compared):
        made("bf16", [5.0], seed=1)
        for loss in (5.5, 5.25):
            made("mxfp8", [loss], seed=1)
        (_, row) = only(compared()).values()
        assert row.runs == 2 and [*row.gaps.values()] == [0.25]
        assert "2 runs; the longest is shown (ties go to the newest)" in " ".join(render(compared(), "text").split())

    def test_layers_kept_in_bf16_make_no_other_bf16(self, made, compared):
        for recipe, loss in (("bf16", 5.0), ("te_nvfp4", 5.5), ("te_nvfp4(without=tiles)", 5.25)):
            made(recipe, [loss], skip_layers="first")
        comparison = compared()
        assert [row.figures.get(MEAN) for row in only(comparison).values()] == [None, 0.5, 0.25]
        (found,) = comparison.sections[0].ladders
        assert [rung.title for rung in found.rungs] == ["bf16", "full recipe", "without tiles"]


class TestRows:
    def test_of_several_runs_the_longest_newest_is_shown(self, made, compared):
        made("bf16", [5.0, 4.0, 3.0])
        made("mxfp8", [5.0, 4.5, 3.5])
        newest = made("mxfp8", [5.0, 4.25, 3.25])
        made("mxfp8", [5.0, 4.125])  # newer yet, but shorter
        row = only(compared())["mxfp8"]
        assert (row.runs, row.run_id) == (3, newest.run_id)
        assert (row.figures["loss_nats"], row.figures["loss_spread_nats"]) == (3.25, 0.375)
        text = render(compared(), "text")
        longest = f"mxfp8: 3 runs; the longest is shown (ties go to the newest): {newest.run_id}."
        assert longest in " ".join(text.split())
        assert "losses differ by 0.38." in text

    def test_each_state_has_a_row_of_its_own(self, made, compared):
        made("bf16", [5.0, 4.0])
        for state in (DONE, FAILED, CRASHED, RUNNING):
            made("mxfp8", [5.0, 4.5], state)
        made("mxfp4", [], FAILED)
        rows = only(compared())
        expected = ["mxfp8", "mxfp8 (running)", "mxfp8 (failed)", "mxfp8 (crashed)"]
        assert list(rows) == ["bf16", "mxfp4 (failed)", *expected]
        assert all(rows[label].figures[LAST] == 0.5 for label in expected)
        nothing = rows["mxfp4 (failed)"]
        assert nothing.iterations == 0 and not nothing.figures
        text = render(compared(), "text")
        assert (
            "mxfp4 (failed): it broke." in text
            and [line.split()[:2] for line in text.splitlines()].count(["mxfp8", "running"]) == 1
        )

    @pytest.mark.parametrize("state", [FAILED, CRASHED, RUNNING, DONE])
    def test_tensors_of_an_unfinished_iteration_do_not_count(self, made, compared, state):
        quantized = {"format": "mxfp8"}
        made("mxfp8", [5.0], state, [(TENSOR, quantized | {"iteration": i}) for i in (0, 1, 1)])
        (row,) = only(compared()).values()
        assert row.figures["operands"] == (3 if state == DONE else 1)
        assert row.figures["linear_forward_operands"] == (2 if state == DONE else 1)  # of the last iteration

    def test_nothing_finished_has_no_error_and_no_size(self, made, compared):
        made("mxfp8", [], FAILED, [(TENSOR, {"format": "mxfp8"})])
        (row,) = only(compared()).values()
        assert not row.figures and row.iterations == 0

    def test_each_operand_is_counted_in_its_own_format(self, made, compared):
        made(
            "FA_mxfp4",
            [5.0],
            tensors=[
                (TENSOR, {"format": "mxfp4", "component": "FA"}),
                (TENSOR.float()[:32], {"format": "nvfp4", "component": "FA", "operation": "backward"}),
                (TENSOR[:16], {"tensor_name": "output", "phase": "post"}),  # a result, not an operand
            ],
        )
        (row,) = only(compared()).values()
        assert (row.figures["operands"], row.figures["operand_values"]) == (2, 6144)
        assert row.figures["operand_bytes"] == (4096 * 4.25 + 2048 * 4.5) / 8
        assert row.figures["operand_bytes_in_bf16"] == 2 * 6144
        rounded = {name: value for name, value in row.figures.items() if name.endswith("_operands")}
        assert rounded == {"fa_forward_operands": 1, "fa_gradients_operands": 1}

    def test_operands_not_quantized_keep_their_dtype(self, collect, tmp_path):
        """A real DeepSeek: its routers work in float32, and only QK^T's operands are rounded."""
        run = collect("--model", "deepseek2_lite", "--layers", "2", "--quantization", "FA_mxfp8", "--no-raw")
        rows = operands(run.directory)
        assert {r["dtype"] for r in rows} == {"bfloat16", "float32"}
        bits = sum(r["numel"] * (8.25 if r["format"] else {"bfloat16": 16, "float32": 32}[r["dtype"]]) for r in rows)
        (row,) = only(compare(tmp_path / "runs")).values()
        assert {r["format"] for r in rows} == {None, "mxfp8"} and row.figures["operand_bytes"] == bits / 8

    def test_recorded_and_unrecorded_iterations_are_timed_apart(self, made, compared):
        run = made("mxfp8", [])
        for iteration, (seconds, recorded) in enumerate([(9.0, True), (1.0, False), (3.0, True), (2.0, False)]):
            run.append_loss({"iteration": iteration, "loss": 5.0, "seconds": seconds, "recorded": recorded})
        run.append_loss({"iteration": 4, "loss": 5.0, "seconds": 1.25, "recorded": False})
        (row,) = only(compared()).values()
        for kind, expected in (("recorded", (6.0, 2)), ("unrecorded", (1.25, 3))):
            names = (f"{kind}_iteration_median_seconds", f"{kind}_iterations_timed")
            assert tuple(row.figures[name] for name in names) == expected

    def test_runs_that_were_not_timed_show_a_blank(self, made, compared):
        made("mxfp8", [5.0, 4.0])
        cells = shown_tables(render(compared(), "text"))[-1][1]
        assert cells == ["mxfp8", *["–"] * 9]
        assert "steps that were not timed" in " ".join(render(compared(), "text").split())

    def test_runs_by_other_means_have_a_row(self, tmp_path, compared):
        """A recorder in a training loop of one's own: no model, no recipe, no losses."""
        writer = RunWriter.create(tmp_path / "runs", "mine", {})
        add_segment(writer, assorted(1))
        writer.finish(DONE)
        (row,) = only(compared()).values()
        assert row.recipe == "unnamed" and not {"loss_nats", MEAN} & set(row.figures) and row.figures["operands"] == 3
        assert "unnamed model, unnamed data" in render(compared(), "text")


class TestSections:
    def test_two_models_are_two_sections(self, tmp_path, collect):
        for model in ("llama32-1b", "llama31-8b"):
            for recipe in ("bf16", "hifp8"):
                collect("--model", model, "--quantization", recipe, "--no-raw")
        comparison = compare(tmp_path / "runs")
        assert [section.settings.model for section in comparison.sections] == ["llama32-1b", "llama31-8b"]
        rows = read_csv(render(comparison, "csv"))
        assert [(row["model"], row["recipe"]) for row in rows] == [
            (model, recipe) for model in ("llama32-1b", "llama31-8b") for recipe in ("bf16", "hifp8")
        ]
        for bf16, hifp8 in (rows[:2], rows[2:]):
            expected = float(hifp8["loss_nats"]) - float(bf16["loss_nats"])
            assert float(hifp8["gap_mean_nats"]) == expected != 0
        assert len(shown_tables(render(comparison, "text"))) == len(markdown_tables(render(comparison, "markdown"))[0])
        assert len(shown_tables(render(comparison, "text"))) == 6

    @pytest.mark.parametrize(
        "other",
        [
            {"model": "llama31-8b"},
            {"size": "full"},
            {"dataset": "dolma"},
            {"corpus_sha256": "00"},
            {"layers": 1},
            {"micro_batches": 2},
            {"micro_batch_size": 1},
            {"sequence_length": 64},
            {"warmup_iterations": 3},
            {"learning_rate": 0.5},
            {"device": "NVIDIA H100"},
            {"tp": 2},
            {"model": "another"},
        ],
        ids=str,
    )
    def test_what_was_trained_otherwise_is_not_compared(self, made, compared, other):
        usual = {
            "seed": 1, "micro_batches": 1, "micro_batch_size": 2, "sequence_length": 256, "corpus_sha256": "ab",
            "warmup_iterations": 0, "learning_rate": 0.001, "device": "cpu, 2 threads",
        }  # fmt: skip
        made("bf16", [5.0], **usual)
        made("mxfp8", [5.0], **usual | other)
        first, second = compared().sections
        assert not [row for row in (*first.rows, *second.rows) if MEAN in row.figures]
        headings = [line for line in render(compared(), "markdown").splitlines() if line.startswith("### ")]
        assert len(set(headings)) == 2

    @pytest.mark.parametrize(
        "other",
        [
            {"layers": 2},  # what tiny has
            {"control_iter": 50},
            {"capture_every": 7},
            {"collect_micro_batches": 0},
            {"scores": ["mxfp4"]},
            {"backend": "torch"},
            {"device": "cpu, 2 threads"},
            {"tp": 1},
        ],
        ids=str,
    )
    def test_what_was_trained_alike_is_compared(self, made, compared, other):
        made("bf16", [5.0], device="cpu, 1 threads", layers=None)
        made("mxfp8", [5.5], **{"device": "cpu, 1 threads"} | other)
        assert only(compared())["mxfp8"].figures[LAST] == 0.5

    def test_times_of_several_machines_are_noted(self, made, compared):
        made("bf16", [5.0], backend="torch", device="cpu, 2 threads")
        made("mxfp8", [5.0], backend="torch", device="cpu, 2 threads")
        assert "set-up" not in render(compared(), "text")
        made("mxfp4", [5.0], backend="triton 3.9.0 (interpreted)", device="cpu, 1 threads")
        text = " ".join(render(compared(), "text").split())
        assert "bf16, mxfp8: torch, cpu, 2 threads; mxfp4: triton 3.9.0 (interpreted), cpu, 1 threads." in text

    def test_runs_that_recorded_other_operands_are_noted(self, made, compared):
        quantized = {"format": "mxfp8"}
        made("bf16", [5.0], tensors=[(TENSOR, quantized)])
        made("mxfp8", [5.0], tensors=[(TENSOR, quantized)])
        assert "different tensors" not in render(compared(), "text")
        made("mxfp4", [5.0], tensors=[(TENSOR, quantized), (TENSOR, quantized)])
        assert "different tensors" in render(compared(), "text")


def one_line(text: str) -> bool:
    return text.startswith("binade: ") and text.endswith("\n") and text[:-1].isprintable()


class TestCommand:
    @pytest.mark.parametrize(
        ("make", "said", "status"),
        [
            (lambda root: None, "does not exist: ", 1),
            (lambda root: root.mkdir(), "contains no runs that can be read: ", 1),
            (lambda root: root.write_text("mine"), "is a file: the root of the runs must be a directory", 2),
        ],
        ids=["missing", "empty", "file"],
    )
    def test_a_root_without_runs_is_one_line(self, command, capsys, tmp_path, make, said, status):
        root = tmp_path / "runs"
        make(root)
        before = sorted(tmp_path.rglob("*"))
        assert command("compare") == command("compare", str(root), "--format", "csv") == status
        out, err = capsys.readouterr()
        first, second = err.splitlines(keepends=True)
        assert out == "" and first == second and one_line(first) and f"{root} {said}" in first
        assert sorted(tmp_path.rglob("*")) == before  # no index either

    def test_bad_usage_is_exit_2(self, command, capsys, tmp_path):
        for arguments in (("--format", "html"), ("a", "b"), ("--output",)):
            assert command("compare", *arguments) == 2
            out, err = capsys.readouterr()
            assert out == "" and one_line(err) and "; see binade" in err

    @pytest.mark.parametrize(
        ("file", "content"),
        [("run.json", b"{"), ("run.json", b"[]"), ("status.json", b"\xff\xfe"), ("status.json", b'{"state": "odd"}')],
    )
    def test_a_damaged_run_is_told_and_the_others_shown(self, command, capsys, made, tmp_path, file, content):
        made("bf16", [5.0])
        broken = made("mxfp8", [5.0])
        (broken.directory / file).write_bytes(content)
        assert command("compare", str(tmp_path / "runs"), "--format", "csv") == 0
        out, err = capsys.readouterr()
        assert one_line(err) and err.startswith(f"binade: skipped: {broken.run_id} cannot be read: ")
        assert [row["recipe"] for row in read_csv(out)] == ["bf16"]

    def test_nothing_but_damaged_runs_is_exit_1(self, command, capsys, made):
        (made("bf16", [5.0]).directory / "run.json").write_text("{")
        (made("mxfp8", [5.0]).directory / "status.json").unlink()
        assert command("compare") == 1
        out, err = capsys.readouterr()
        *passed_over, last = err.splitlines()
        assert out == "" and len(passed_over) == 2 and "contains no runs that can be read" in last
        assert all(line.startswith("binade: skipped: ") for line in passed_over)

    @pytest.mark.parametrize(
        ("damage", "said", "left"),
        [
            (lambda path: path.write_bytes(path.read_bytes()[:-9]), "loss.jsonl ends at iteration 1 of 2", "4.0"),
            (
                lambda path: path.write_bytes(b'{"iteration": 0, "loss": 5.0}\n17\n'),
                "line 2 of its loss.jsonl is not a loss",
                "5.0",
            ),
            (lambda path: path.write_bytes(b'{"iteration": 0, "loss": NaN}\n'), "line 1 of its loss.jsonl", ""),
            (lambda path: path.write_bytes(b'{"iteration": "x", "loss": 1}\n'), "line 1 of its loss.jsonl", ""),
            (lambda path: (path.unlink(), path.mkdir()), "loss.jsonl cannot be read: ", ""),
        ],
        ids=["cut short", "a number", "NaN", "no iteration", "a directory"],
    )
    def test_damaged_losses_are_told_and_the_rest_shown(self, command, capsys, made, damage, said, left):
        run = made("mxfp8", [5.0, 4.0, 3.0], tensors=[(TENSOR, {"format": "mxfp8"})])
        damage(run.directory / "loss.jsonl")
        assert command("compare", "--format", "csv") == 0
        out, err = capsys.readouterr()
        (row,) = read_csv(out)
        (line,) = (line for line in err.splitlines(keepends=True) if said in line)
        assert one_line(line) and run.run_id in line
        assert (row["iterations"], row["operands"]) == ("3", "1")
        assert row["gap_mean_nats"] == "" and row["loss_nats"] == ""  # the last iteration's is lost
        made("bf16", [1.0])
        assert command("compare", "--format", "csv") == 0
        gap = read_csv(capsys.readouterr().out)[1]["loss_at_common_iteration_nats"]
        assert gap == ("5.0" if left else "")

    def test_gradients_that_cannot_be_compared_are_told(self, command, capsys, made, monkeypatch):
        gradient = [(TENSOR, {"tensor_name": "grad_weight", "operation": "backward", "phase": "post"})]
        made("bf16", [5.0], tensors=gradient)
        run = made("mxfp8", [5.0], tensors=gradient)
        (file,) = run.directory.glob("tensors/*.pt")
        file.write_bytes(b"x")
        assert command("compare", "--format", "csv") == 0
        out, err = capsys.readouterr()
        assert err == "binade: skipped: mxfp8: 1 of its gradients cannot be read\n"
        assert read_csv(out)[1]["gradient_cosine"] == ""
        monkeypatch.setattr("binade.collector.cli.compare.MAX_GRADIENT_VALUES", TENSOR.numel() - 1)
        assert command("compare", "--format", "csv") == 0
        assert "skipped: gradients: 4,096 values are too many to compare here" in capsys.readouterr().err

    def test_a_damaged_segment_is_told(self, command, capsys, made):
        run = made("mxfp8", [5.0], tensors=[(TENSOR, {"format": "mxfp8"})])
        add_segment(run, [(TENSOR, {"format": "mxfp8"})], first=50)
        next(run.directory.glob("segments/*2/tensor.parquet")).write_bytes(b"x" * 99)
        made("bf16", [5.0])
        assert command("compare", "--format", "csv") == 0
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and f"segment {run.run_id}/" in err
        assert [row["recipe"] for row in read_csv(out)] == ["bf16"]

    def test_an_unknown_format_is_told(self, command, capsys, made):
        run = made("mxfp8", [5.0], tensors=[(TENSOR, {"format": "mxfp8"})])
        (file,) = run.directory.glob("segments/*/tensor.parquet")
        table = pq.read_table(file)
        place = table.column_names.index("format")
        pq.write_table(table.set_column(place, table.schema.field("format"), [["fp3"]]), file)
        reseal(run.directory)
        assert command("compare", "--format", "csv") == 0
        out, err = capsys.readouterr()
        assert one_line(err) and f"{run.run_id}: unknown format 'fp3'" in err
        assert read_csv(out)[0]["operand_bytes"] == "" and read_csv(out)[0]["linear_forward_sqnr_db"] != ""

    @pytest.mark.parametrize("kind", ["text", "csv", "markdown"])
    def test_output_is_what_would_be_printed(self, command, capsys, made, tmp_path, kind):
        made("bf16", [5.0])
        made("mxfp8", [5.5])
        assert command("compare", "--format", kind) == 0
        printed = capsys.readouterr().out
        target = tmp_path / "out" / "table"
        target.parent.mkdir()
        target.write_text("old")
        link = tmp_path / "out" / "link"
        link.symlink_to(target)
        assert command("compare", "--format", kind, "--output", str(link)) == 0
        assert capsys.readouterr().out == f"2 rows written to {link}\n"
        assert target.read_bytes().decode() == printed and link.is_symlink()
        assert (kind == "csv") == (b"\r\n" in target.read_bytes()) and len(list(target.parent.iterdir())) == 2

    @pytest.mark.parametrize("place", ["nowhere/x", "taken", "/dev/null", "/proc/binade", "n" * 300])
    def test_an_output_that_cannot_be_written_is_exit_1(self, command, capsys, made, tmp_path, monkeypatch, place):
        made("bf16", [5.0])
        (tmp_path / "work" / "taken").mkdir(parents=True)
        monkeypatch.chdir(tmp_path / "work")
        assert command("compare", "--output", place) == 1
        out, err = capsys.readouterr()
        assert out == "" and one_line(err) and place[:200] in err and "--output" in err
        assert [path.name for path in (tmp_path / "work").rglob("*")] == ["taken"]
        assert Path(os.devnull).is_char_device()

    def test_a_reader_that_leaves_is_no_error(self, made, tmp_path):
        made("bf16", [5.0])
        read, write = os.pipe()
        os.close(read)
        done = run_collector("compare", root=tmp_path / "runs", stdout=write)
        os.close(write)
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_terminal_without_such_characters_gets_them_escaped(self, made, tmp_path):
        made("bf16", [5.0])
        done = run_collector("compare", root=tmp_path / "runs", env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0 and done.stdout.isascii() and "\\u2013" in done.stdout

    def test_names_of_control_characters_and_bars_are_shown_not_obeyed(self, command, capsys, made):
        made("bf16", [5.0], dataset="a\n| x |\x1b[31m", model="m|*_`<b>")
        made("mx|fp8\nx", [5.0], dataset="a\n| x |\x1b[31m", model="m|*_`<b>")
        for kind in ("text", "markdown"):
            assert command("compare", "--format", kind) == 0
            out = capsys.readouterr().out
            assert all(line.isprintable() for line in out.splitlines())
        assert "m|*_`<b> tiny, 2 layers" not in out and "x1b" in out
        (loss, *_), _ = markdown_tables(out)
        assert [row[0] for row in loss] == ["recipe", "bf16", "mx|fp8\\nx"] and {len(row) for row in loss} == {12}
        assert command("compare", "--format", "csv") == 0
        assert [row["recipe"] for row in read_csv(capsys.readouterr().out)] == ["bf16", "mx|fp8\nx"]
