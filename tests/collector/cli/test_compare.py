"""`binade compare`: its figures against losses and raw tensors read here, its tables against those of the page."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
import scipy.stats
import torch
from markdown_it import MarkdownIt

from binade.app.view.view import View
from binade.cli import main
from binade.data.index.catalog import Catalog
from binade.data.run.directory import CRASHED, DONE, FAILED, RUNNING
from binade.data.run.rounding_alone import RoundingAlone
from binade.data.run.run_writer import RunWriter
from binade.quant import fake_quantize
from tests.compared import compared, gaps_of
from tests.compared import printed as text_of
from tests.conftest import RECIPES, run_collector
from tests.data.builder import add_segment, make_run

pytestmark = pytest.mark.slow
LOSS = View("runs", {"view": ["recipes"], "of": ["cost"]})


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


def named(table: list[list[str]]) -> dict[str, dict[str, str]]:
    """The cells of a table by the first one of their row and by title."""
    return {row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]}


class TestRealRuns:
    def test_gaps_are_those_of_the_files(self, printed, copy):
        rows = {row["label"]: row for row in read_csv(printed["csv"])}
        assert set(rows) == {*RECIPES} - {"bf16"}
        runs = {recipe: next(copy.glob(f"*_{recipe}_*")) for recipe in RECIPES}
        for recipe, row in rows.items():
            own, bf16 = (losses(runs[name]) for name in (recipe, "bf16"))
            assert [record["iteration"] for record in own] == [-2, -1, 0, 1]
            first, last = (own[i]["loss"] - bf16[i]["loss"] for i in (2, 3))
            assert row["run_id"] == runs[recipe].name and row["seeds"] == "1"
            figures = [float(row[name]) for name in ("gap", "added")]
            assert figures == pytest.approx([(first + last) / 2, last - first], rel=1e-9)
            assert float(row["alone"]) == pytest.approx(first, abs=1e-6)
            assert row["gap_low"] == row["gap_high"] == row["left"] == ""

    def test_gradient_errors_are_those_of_the_raw_tensors(self, copy):
        (section,) = compared(copy)
        assert section.gradients is not None and section.at == 0
        for row in section.gradients.to_dict("records"):
            own, bf16 = (gradients(next(copy.glob(f"*_{name}_*"))) for name in (row["label"], "bf16"))
            pairs = [(own[site], bf16[site]) for site in own]
            cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in pairs]
            squared = [((a - b) ** 2).sum() / (b @ b) for a, b in pairs]
            assert row["tensors"] == len(pairs) == 8
            expected = [np.median(cosines), np.median(squared)]
            assert [row["cosine"], row["relative_squared_error"]] == pytest.approx(expected, rel=1e-6)

    def test_operands_are_those_of_the_raw_tensors(self, copy):
        """SQNR and flushed share against numpy, bits per value against the formats' definitions."""
        (section,) = compared(copy)
        for row in section.operands.to_dict("records"):
            run = copy / row["run_id"]
            files = sorted((run / "segments").glob("*/tensor.parquet"))
            rows = [r for file in files for r in pq.read_table(file).to_pylist() if r["contracted_axis"] is not None]
            own = []
            for r in rows:
                if (r["component"], r["operation"], r["iteration"]) == ("linear", "forward", 1):
                    tensor = torch.load(run / r["path"], weights_only=True)["tensor"]
                    q = fake_quantize(tensor, r["format"], r["contracted_axis"]).double().numpy()
                    x = tensor.double().numpy()
                    sqnr = 10 * np.log10((x**2).sum() / ((q - x) ** 2).sum())
                    own.append((sqnr, ((x != 0) & (q == 0)).sum() / (x != 0).sum()))
            found = [row["linear_forward_sqnr_db"], row["linear_forward_flush_to_zero"]]
            assert len(own) == 16 and found == pytest.approx(np.median(own, 0), rel=1e-9)
            assert row["bits"] == pytest.approx({"mxfp8": 8.25, "mxfp4": 4.25, "hifp8": 8.0}[row["label"]])

    def test_csv_is_rfc_4180(self, printed):
        assert printed["csv"].count("\n") == len(RECIPES)  # a header, and no row for bf16
        (header, *rows) = csv.reader(io.StringIO(printed["csv"]), strict=True)
        assert len(set(header)) == len(header) and {len(row) for row in rows} == {len(header)}

    def test_markdown_and_text_say_the_same(self, printed):
        shown, alignments = markdown_tables(printed["markdown"])
        assert max(map(len, printed["text"].splitlines())) <= 120
        rows = {row["label"]: row for row in read_csv(printed["csv"])}
        for table, alignment in zip(shown, alignments, strict=True):
            assert alignment == ["left"] + ["right"] * (len(table[0]) - 1)
            for row in table:
                assert " ".join(row) in " ".join(printed["text"].split())
        for label, cells in named(shown[0]).items():
            assert float(cells["Mean gap"].replace("−", "-")) == pytest.approx(float(rows[label]["gap"]), abs=0.5001e-4)

    def test_the_page_has_the_same_tables_and_sentences(self, copy, printed):
        with Catalog.open(copy) as opened:
            drawn = LOSS.draw(opened)
        (section,) = compared(copy)
        assert section.compared
        table = section.compared.recipe_table  # to which the page adds what `binade measure` found
        pd.testing.assert_frame_equal(drawn.tables["recipes"][table.columns], table)
        said = " ".join(printed["text"].replace("\n* ", " ").split())
        assert str(section.compared.verdict) in drawn.verdict and str(section.compared.verdict) in said


Made = Callable[..., RunWriter]
TENSOR = torch.linspace(-3, 3, 64 * 64).reshape(64, 64).bfloat16()


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """Makes a run in tmp_path/"runs": made(recipe, [loss, ...], state=DONE, tensors=[(x, words)], **config)."""

    def make(recipe: str, loss: list[float], state: str = DONE, tensors=(), **config) -> RunWriter:
        operands = [] if recipe == "bf16" else [f"linear.input {recipe}"]
        parts = [tensors] if tensors else []
        writer = make_run(tmp_path / "runs", *parts, recipe=recipe, **{"operands": operands} | config)
        for iteration, value in enumerate(loss):
            writer.append_loss({"iteration": iteration, "loss": value, "time": 0.0})
        reason = "it broke" if state == FAILED else None
        writer.update(iteration=len(loss) - 1, state=RUNNING if state == CRASHED else state, reason=reason)
        if state == CRASHED:
            writer.update(pid_started=1.0)
        return writer

    return make


class TestSections:
    def test_models_are_compared_apart(self, made, tmp_path):
        for model, gap in (("llama32-1b", 0.5), ("llama31-8b", 0.25)):
            made("bf16", [5.0], model=model)
            made("mxfp8", [5.0 + gap], model=model)
        titles = [section.title for section in compared(tmp_path / "runs")]
        assert titles == ["llama32-1b tiny, wikipedia", "llama31-8b tiny, wikipedia"]
        rows = [section.compared.recipe_table for section in compared(tmp_path / "runs") if section.compared]
        assert [row["gap"].tolist() for row in rows] == [[0.5], [0.25]]

    def test_runs_of_one_recipe_are_named_by_what_differs(self, made, tmp_path):
        for seed, rate in ((0, 0.001), (1, 0.001), (1, 0.01)):
            made("bf16", [5.0], seed=seed, learning_rate=rate)
            made("mxfp8", [5.5], seed=seed, learning_rate=rate)
        assert set(gaps_of(tmp_path / "runs")) == {
            "mxfp8 · seed 0, learning rate 0.001",
            "mxfp8 · seed 1, learning rate 0.001",
            "mxfp8 · seed 1, learning rate 0.01",
        }

    def test_the_largest_gap_by_size_comes_first(self, made, tmp_path):
        made("bf16", [5.0])
        for recipe, gap in (("mxfp8", 0.1), ("mxfp4", -0.4), ("nvfp4", 0.2)):
            made(recipe, [5.0 + gap])
        assert list(gaps_of(tmp_path / "runs")) == ["mxfp4", "nvfp4", "mxfp8"]

    def test_means_and_intervals_over_seeds_are_scipys(self, made, tmp_path):
        gaps = np.random.default_rng(0).normal(0.1, 0.02, (4, 3))  # [seeds, iterations]
        for seed, own in enumerate(gaps):
            made("bf16", [5.0 + seed] * 3, seed=seed)
            alone = RoundingAlone(0, 5.0 + seed, own[0], 0.5, 8)
            made("mxfp4", (5.0 + seed + own).tolist(), seed=seed, **alone.fact())
        (section,) = compared(tmp_path / "runs")
        assert section.compared
        (row,) = section.compared.recipe_table.to_dict("records")
        parts = {"gap": gaps.mean(1), "alone": gaps[:, 0], "added": gaps[:, -1] - gaps[:, 0]}
        for name, values in parts.items():
            low, high = scipy.stats.t.interval(0.95, 3, values.mean(), scipy.stats.sem(values))
            figures = [row[name], row[f"{name}_low"], row[f"{name}_high"]]
            assert figures == pytest.approx([values.mean(), low, high], rel=1e-9)
        assert row["seeds"] == 4 and row["label"] == "mxfp4"

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize(("state", "count"), [(DONE, 1), (CRASHED, 1), (RUNNING, 1), (FAILED, 1)])
    def test_a_run_counts_as_far_as_it_came(self, made, tmp_path, state, count):
        made("bf16", [5.0, 4.0, 3.0])
        made("mxfp8", [5.5, 4.5], state)
        (section,) = compared(tmp_path / "runs")
        assert section.compared and section.compared.costs["iterations"].tolist() == [2] * count

    def test_runs_without_bf16_are_named(self, made, tmp_path):
        made("mxfp8", [5.0])
        assert "No bf16 run saw the same data as these runs" in text_of(tmp_path / "runs")
        made("bf16", [5.0])
        made("mxfp8", [5.0], seed=7)
        assert "Left out, because no bf16 run saw the same data: mxfp8 · seed 7." in text_of(tmp_path / "runs")


class TestBand:
    """When a gap leaves the band of two bf16 runs on the same data."""

    def test_the_iteration_is_numpys(self, made, tmp_path):
        steps = np.arange(12)
        noise = np.random.default_rng(1).normal(0, 0.001, 12)
        base = 5.0 - 0.1 * steps
        made("bf16", base.tolist())
        made("bf16", (base + noise).tolist())
        gap = 0.004 * steps**2
        made("mxfp4", (base + noise + gap).tolist())
        made("mxfp8", (base + noise + 1e-6).tolist())
        (section,) = compared(tmp_path / "runs")
        assert section.compared
        half = scipy.stats.t.ppf(1 - 0.025 / 2, 1) * np.abs(noise)  # of two recipes; a deviation is |noise| / sqrt(2)
        outside = gap > half  # gaps are to the newest bf16 run
        expected = int(np.max(np.nonzero(~outside)[0], initial=-1)) + 1
        left = dict(zip(section.compared.recipe_table["label"], section.compared.recipe_table["left"], strict=True))
        assert left == {"mxfp4": f"at iteration {expected}", "mxfp8": "no"} and 0 < expected < 10
        text = text_of(tmp_path / "runs")
        assert f"Leaves bf16: mxfp4 at iteration {expected} (one seed)." in text
        assert "Does not leave what differs from bf16 in bits alone: mxfp8." in text

    def test_without_two_bf16_runs_it_says_how_to_get_them(self, made, tmp_path):
        made("bf16", [5.0] * 4)
        made("mxfp4", [6.0] * 4)
        text = text_of(tmp_path / "runs")
        assert "Whether a recipe leaves bf16 is unknown: no two of your bf16 runs" in text
        assert "Leaves" not in text.split("Seeds:")[0]


def one_line(text: str) -> bool:
    return text.startswith("binade: ") and text.endswith("\n") and text[:-1].isprintable()


class TestCommand:
    @pytest.mark.parametrize(
        ("make", "said", "status"),
        [
            (lambda root: None, "does not exist: ", 2),
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
        made("mxfp4", [5.5])
        broken = made("mxfp8", [5.0])
        (broken.directory / file).write_bytes(content)
        assert command("compare", str(tmp_path / "runs"), "--format", "csv") == 0
        out, err = capsys.readouterr()
        assert one_line(err) and err.startswith(f"binade: skipped: {broken.run_id} cannot be read: ")
        assert [row["label"] for row in read_csv(out)] == ["mxfp4"]

    def test_nothing_but_damaged_runs_is_exit_1(self, command, capsys, made):
        (made("bf16", [5.0]).directory / "run.json").write_text("{")
        (made("mxfp8", [5.0]).directory / "status.json").unlink()
        assert command("compare") == 1
        out, err = capsys.readouterr()
        *passed_over, last = err.splitlines()
        assert out == "" and len(passed_over) == 2 and "contains no runs that can be read" in last
        assert all(line.startswith("binade: skipped: ") for line in passed_over)

    def test_a_damaged_segment_is_told(self, command, capsys, made):
        run = made("mxfp8", [5.0], tensors=[(TENSOR, {"format": "mxfp8"})])
        add_segment(run, [(TENSOR, {"format": "mxfp8"})], first=50)
        next(run.directory.glob("segments/*2/tensor.parquet")).write_bytes(b"x" * 99)
        made("bf16", [5.0])
        made("mxfp4", [5.5])
        assert command("compare", "--format", "csv") == 0
        out, err = capsys.readouterr()
        assert err.count("\n") == 1 and f"segment {run.run_id}/" in err
        assert [row["label"] for row in read_csv(out)] == ["mxfp4"]

    @pytest.mark.sampled(2)
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
        assert capsys.readouterr().out == f"1 rows written to {link}\n"
        assert target.read_bytes().decode() == printed and link.is_symlink()
        assert (kind == "csv") == (b"\r\n" in target.read_bytes()) and len(list(target.parent.iterdir())) == 2

    @pytest.mark.sampled(4)
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

    @pytest.mark.thorough
    def test_a_terminal_without_such_characters_gets_them_escaped(self, made, tmp_path):
        made("bf16", [5.0])
        done = run_collector("compare", root=tmp_path / "runs", env={"PYTHONIOENCODING": "ascii"})
        assert done.returncode == 0 and done.stdout.isascii() and "\\u2019" in done.stdout

    def test_names_of_control_characters_and_bars_are_shown_not_obeyed(self, command, capsys, made):
        made("bf16", [5.0], dataset="a\n| x |\x1b[31m", model="m|*_`<b>")
        made("mx|fp8\nx", [5.0], dataset="a\n| x |\x1b[31m", model="m|*_`<b>")
        for kind in ("text", "markdown"):
            assert command("compare", "--format", kind) == 0
            out = capsys.readouterr().out
            assert all(line.isprintable() for line in out.splitlines())
        assert "\x1b[31m" not in out
        (gaps, *_), _ = markdown_tables(out)
        assert [row[0] for row in gaps] == ["Recipe", "mx|fp8\\nx"] and len({len(row) for row in gaps}) == 1
        assert command("compare", "--format", "csv") == 0
        assert [row["label"] for row in read_csv(capsys.readouterr().out)] == ["mx|fp8\nx"]
