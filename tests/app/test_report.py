"""Reports: numbers against NumPy on the tensors themselves, nothing that reaches outside, hostile words, failures."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd
import psutil
import pytest
import torch

from binade.app.draw.figure import Figure
from binade.app.draw.style import MEASURES
from binade.app.draw.theme import THEMES
from binade.app.questions.explore.question import EXPLORE
from binade.app.report import contents, overview, page, rendering, runs, writer
from binade.app.report.rendering import RenderError, Renderers
from binade.app.report.section import Section
from binade.app.report.tables import axis_of, shown
from binade.app.report.writer import ReportRequest
from binade.app.sessions import session as sessions
from binade.app.sessions import storage
from binade.app.sessions.pins import refreshed
from binade.app.sessions.session import Pin
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.store import process_start
from binade.data.words.filter import Filter
from tests.app import reports
from tests.app.reports import HOSTILE, tensors
from tests.conftest import PROJECT, MadeOnce, ended, start_binade, until
from tests.data.builder import make_run
from tests.numbers import read

pytestmark = pytest.mark.slow

BARS = alt.Chart(pd.DataFrame({"a": [1]})).mark_bar().encode(x="a:Q")
# What the Megatron fork's scripts look for, and pages of one tensor.
FOLDERS = ("distributions", "heatmaps", "comparisons", "attention_maps", "statistics", "why", "codes")


@pytest.fixture(scope="module")
def reported(made_once: MadeOnce) -> Path:
    return reports.reported(made_once)


@pytest.fixture(scope="module")
def root(reported: Path) -> Path:
    return reported / "root"


@pytest.fixture(scope="module")
def drawn(reported: Path) -> Path:
    """The folder as the command wrote it, in a process of its own."""
    return reported / "draw"


def everything(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


class Tags(html.parser.HTMLParser):
    """Every tag with its attributes, scripts by what they hold, and the tables that follow an id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._at, self._cell, self._id = "", None, ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._at = tag
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        if tag == "h3" and (dict(attrs).get("id") or "").startswith("table-"):
            self._id = dict(attrs)["id"] or ""
            self.tables[self._id] = []
        if tag == "figure":
            self._id = ""
        if tag == "tr" and self._id:
            self.tables[self._id].append([])
        self._cell = "" if tag in ("td", "th") else self._cell

    def handle_data(self, data: str) -> None:
        if self._at == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._id:
            self.tables[self._id][-1].append(self._cell or "")
        self._cell = None if tag in ("td", "th") else self._cell
        self._at = "" if tag == "script" else self._at


@pytest.fixture(scope="module")
def tags(drawn: Path) -> Tags:
    return Tags((drawn / "index.html").read_text())


# What is written


def test_the_folder_holds_what_was_asked_for(drawn):
    output = drawn
    files = everything(output)
    assert {"index.html", "quick_analysis.png", "tensor_stats.txt", "tensor_stats.json", "report.json"} <= files
    for folder in FOLDERS:
        assert any(name.startswith(f"{folder}/") and name.endswith(".svg") for name in files), folder
    assert set(json.loads((output / "report.json").read_text())["files"]) == files
    assert not [path for path in output.parent.iterdir() if path.name.endswith(".part")]
    for name in files:
        assert re.fullmatch(r"[A-Za-z0-9_./-]+", name), name
        if name.endswith(".svg"):
            assert name.removesuffix("svg") + "csv" in files
            tree = ElementTree.fromstring((output / name).read_bytes())
            found = {element.tag.rpartition("}")[2] for element in tree.iter()}
            assert "path" in found and not {"script", "img", "foreignObject"} & found, name


def test_quick_analysis_has_the_values_of_all_tensors_and_of_each_group(root):
    """The share of the values above 1 in each group, against the tensors' own values."""
    with Catalog.open(root) as opened:
        quick = overview.quick_analysis(opened, Filter())
    assert quick is not None
    assert set(quick.table["by"]) == {"all", "quant_type", "layer_type", "operation"}
    every = torch.cat([x.double().reshape(-1) for x, _ in tensors(1)])
    every = every[every.isfinite()]
    expected = {"all": every, "mxfp8 (4 tensors)": finite("mxfp8"), "mxfp4 (1 tensor)": finite("mxfp4")}
    for group, values in expected.items():
        bins = quick.table[(quick.table["group"] == group) & (quick.table["low"] >= 0)]
        shown = (bins["share"] * (bins["high"] - bins["low"])).sum()
        assert shown == pytest.approx(float((abs(np.asarray(values)) >= 1).mean()), rel=1e-9), group  # an edge of bins
    assert all("tensor" in group for group in quick.table.loc[quick.table["by"] != "all", "group"])


def test_a_root_of_losses_alone_has_a_report(command, tmp_path, started, monkeypatch):
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "root"))
    for recipe, gap in (("bf16", 0.0), ("mxfp8", 0.1)):
        file = tmp_path / f"{recipe}.csv"
        file.write_text("step,loss\n" + "".join(f"{step},{5 - step / 9 + gap}\n" for step in range(20)))
        assert command("import", str(file), "--recipe", recipe, "--model", "m", "--dataset", "d", "--seed", "1") == 0
    assert make(tmp_path / "root", tmp_path / "draw")
    files = everything(tmp_path / "draw")
    assert "quick_analysis.png" not in files and "tensor_stats.json" in files
    assert any(name.startswith("comparisons/") for name in files), files
    with pytest.raises(writer.ReportError, match="no tensor matches: layer 1"):
        make(tmp_path / "root", tmp_path / "other", layer_index=[1])


def finite(quant_type: str) -> np.ndarray:
    found = [x.double().reshape(-1) for x, words in tensors(1) if words.get("quant_type", "mxfp8") == quant_type]
    values = torch.cat(found).numpy()
    return values[np.isfinite(values)]


def test_statistics_are_those_of_the_tensors(drawn):
    stats = json.loads((drawn / "tensor_stats.json").read_text())
    assert stats["totals"]["tensors"] == 5 and stats["totals"]["values"] == sum(x.numel() for x, _ in tensors(1))
    rows = {row["group"]: row for row in stats["statistics_by"]["quant_type"]}
    for name in ("mxfp8", "mxfp4"):
        values = finite(name)
        for key, expected in (("mean", values.mean()), ("std", values.std()), ("min", values.min())):
            assert rows[name][key] == pytest.approx(expected, rel=1e-9), (name, key)
        assert rows[name]["max"] == values.max() and rows[name]["zeros"] == (values == 0).sum()
    assert (rows["mxfp8"]["nans"], rows["mxfp8"]["infs"]) == (1, 1)
    assert "mxfp4" in (drawn / "tensor_stats.txt").read_text()


def test_tables_of_the_html_hold_the_same_numbers(tags):
    head, *rows = tags.tables["table-distributions_quant_type_statistics"]
    column = {name: index for index, name in enumerate(head)}
    for row in rows:
        values = finite(row[0])
        for name, expected in (("Mean", values.mean()), ("Standard deviation", values.std()), ("Max", values.max())):
            assert float(read(row[column[name]])) == pytest.approx(expected, rel=2e-6), (row[0], name)
        assert row[column["Zeros"]] == f"{int((values == 0).sum()):,}"
    assert {row[0] for row in rows} == {"mxfp8", "mxfp4"}


@pytest.fixture(scope="module")
def sections(root: Path) -> list[Section]:
    with Catalog.open(root) as opened:
        return list(contents.contributions(opened, Filter(), "here"))


def test_shown_tables_lose_no_column(sections):
    for section in sections:
        for frame in [*(t.frame for t in section.tables), *(figure.table for figure in section.figures)]:
            assert len(shown(frame).columns) == len(frame.columns), list(frame.columns)


def test_shown_columns_have_names_and_units(sections):
    found = {f"{section.name}/{figure.name}": figure for section in sections for figure in section.figures}
    names = [(figure.name, name) for figure in found.values() for name in shown(figure.table).columns]
    raw = {(figure, name) for figure, name in names if re.fullmatch("[a-z0-9_ ]+", str(name))}
    assert {name for _, name in raw} <= {measure.axis for measure in MEASURES.values()}, raw
    named = {
        path: shown(figure.table, axis_of(figure.spec)).columns
        for path, figure in found.items()
        if path.startswith("distributions/histogram")
    }
    assert all(", |value|" in " ".join(names) for names in named.values()) and len(named) > 4
    histogram = shown(pd.DataFrame({"low": [-3.0], "high": [-2.5], "share": [0.25]}), "value")
    assert histogram.iloc[0].to_dict() == {"From, value": -3.0, "To, value": -2.5, "Share (%)": 25.0}


def test_large_tables_are_said_to_be_in_a_file():
    rows = page.CSV_CELLS // 100 + 1
    section = Section("x", figures=[Figure("y", BARS, pd.DataFrame(np.zeros((rows, 100))), "c")])
    assert "binade report writes them as a CSV file" in page.page((section,), {"x/y": ""}, "")


def test_long_and_wide_tables_are_cut_off_and_say_so():
    rows, columns = page.SHOWN_ROWS + 1, page.SHOWN_COLUMNS + 1
    section = Section("x", figures=[Figure("y", BARS, pd.DataFrame(np.zeros((rows, columns))), "c")])
    text = page.page((section,), {"x/y": ""}, "")
    assert f"The first {rows - 1} of {rows} rows and the first {columns - 1} of {columns} columns; all are" in text
    assert text.count("<td") == (rows - 1) * (columns - 1)


# Nothing reaches outside, nothing gets in


def test_the_html_refers_to_nothing_outside(tags):
    for tag, attributes in tags.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "form", "img", "audio", "video"), tag
        for name in ("src", "srcset", "action", "poster", "background", "data"):
            assert name not in attributes, (tag, name)
        assert attributes.get("href", "#").startswith("#"), attributes
    style = (PROJECT / "app" / "report" / "page.css").read_text()
    assert "url(" not in style and "@import" not in style
    policy = next(a["content"] for t, a in tags.tags if t == "meta" and a.get("http-equiv"))
    assert policy.startswith("default-src 'none'") and "unsafe-eval" not in policy and "http" not in policy


def test_the_policy_names_exactly_the_scripts_that_run(tags):
    policy = next(a["content"] for t, a in tags.tags if t == "meta" and a.get("http-equiv"))
    allowed = set(re.findall(r"'(sha256-[^']+)'", policy))
    run = [text for attributes, text in tags.scripts if attributes.get("type") != "application/json"]
    hashes = {"sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in run}
    assert len(run) == 2 and hashes == allowed


def test_hostile_words_are_words(drawn, tags):
    assert not [(tag, name) for tag, attributes in tags.tags for name in attributes if name.startswith("on")]
    cells = [cell for table in tags.tables.values() for row in table for cell in row]
    assert HOSTILE in cells
    for attributes, text in tags.scripts:
        if attributes.get("type") == "application/json":
            json.loads(text)
            assert "<" not in text


# The numbers


def test_a_histogram_in_the_folder_is_numpys(drawn):
    table = pd.read_csv(drawn / "distributions/histogram_quant_type.csv", comment="#")
    assert set(table["group"]) == {"mxfp4", "mxfp8"}
    for group, bins in table.groupby("group"):
        values = finite(group)
        log2 = np.log2(np.abs(values[values != 0]))
        for row in bins.iloc[:-1].itertuples():  # the last ends the line
            expected = (
                ((log2 >= row.low - 1e-12) & (log2 < row.high - 1e-12)).sum() / len(values) / (row.high - row.low)
            )
            assert row.share == pytest.approx(expected, rel=1e-9), row
        assert (bins["share"] * (bins["high"] - bins["low"])).sum() == pytest.approx(len(log2) / len(values))


def test_specifications_are_vega_lite(sections):
    spec = next(figure for section in sections for figure in section.figures).sized_spec(700)
    for theme in THEMES.values():
        kind = alt.LayerChart if "layer" in spec else alt.Chart
        kind.from_dict(spec | {"config": theme.config()})


# Words


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (
            {"command": "binade batch --quantization bf16,mxfp4 --tensor-save-dir /a", "recipe": "mxfp4"},
            "binade run --quantization mxfp4",
        ),
        ({"command": "binade batch", "recipe": "mxfp8"}, "binade run --quantization mxfp8"),
        (
            {"command": "binade run --dataset 'my corpus.jsonl' --tensor-save-dir=/x", "recipe": "bf16"},
            "binade run --dataset 'my corpus.jsonl'",
        ),
        ({"command": "binade quick mxfp8", "recipe": "mxfp8"}, "binade quick mxfp8"),
        ({"command": "unclosed 'quote"}, "unclosed 'quote"),
        ({}, "not recorded"),
    ],
    ids=["batch", "batch of all", "run", "quick", "damaged", "absent"],
)  # fmt: skip
def test_the_command_that_makes_a_run_again(config, expected):
    assert runs.again(config) == expected


def test_the_report_tells_how_it_was_made(drawn):
    text = (drawn / "index.html").read_text()
    assert "binade run --quantization mxfp8 --seed 7" in text
    assert "binade report --tensor-save-dir" in text and "10·log₁₀" in text


# A session


@pytest.mark.thorough
def test_a_sessions_report_tells_its_pins_and_notes(command, root, tmp_path, started):
    notes = f"# Found\n\n**fc1** is *worst* {HOSTILE} ![p](http://a.b/c.png) [go](javascript:alert(1)) <b>raw</b>"
    notes += " [bank](https://evil.example/d)"
    pins = (
        Pin("map", {"metric": ["absmax"]}, "map", "The worst\nof all"),
        Pin("map", {}, "no_such_chart", ""),
    )
    view = View("explore", {"quant_type": ["mxfp8"]})
    with Catalog.open(root) as opened:
        kept = refreshed(opened, sessions.new(f"Report {HOSTILE}", view, notes=notes, pins=pins))
        saved = storage.create(root, kept).session
    output = tmp_path / "draw"
    try:
        given = ("--tensor-save-dir", str(root), "--output", str(output), "--session", saved.id)
        assert command("report", *given) == 0
    finally:
        shutil.rmtree(storage.folder(root))
    files = everything(output)
    assert "pins/01_map.svg" in files and "view/histogram.svg" in files and "index.html" in files
    assert not any(name.startswith(FOLDERS) for name in files)
    text = (output / "index.html").read_text()
    tags = Tags(text)
    assert "<h1>Found</h1>" in text and "<strong>fc1</strong>" in text and "The worst of all" in text
    assert "Pin 2: The view no longer has the chart" in text and kept.runs[0].hash in text
    assert not [tag for tag, _ in tags.tags if tag in ("img", "b")]
    assert not [a for _, attributes in tags.tags for a in attributes if a.startswith("on")]
    links = [a for tag, a in tags.tags if tag == "a" and not a["href"].startswith("#")]
    assert links == [{"href": "https://evil.example/d", "rel": "noopener noreferrer"}]
    assert ">https://evil.example/d</a>" in text and "[go](javascript:alert(1))" in text
    assert json.loads((output / "tensor_stats.json").read_text())["filter"] == {"quant_type": ["mxfp8"]}


# What goes wrong


@pytest.mark.sampled(18)
@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--tensor-save-dir", "{tmp}/nowhere"], 2, "does not exist"),
        (["--tensor-save-dir", "{tmp}"], 1, "contains neither recorded tensors nor losses"),
        (["--tensor-save-dir", "{file}"], 2, "is a file"),
        (["--output", "{file}"], 2, "is a file: give --output a new folder"),
        (["--output", "/"], 2, "/ cannot be used for a report"),
        (["--quant-type", "hifp8"], 1, "no tensor matches: quant type hifp8"),
        (["--layer-index", "1,x"], 2, "'x' is not a number"),
        (["--quant-type", ","], 2, "names are expected"),
        (["--query", "layer_index=one"], 2, "which is not a number"),
        (["--query", "mxfp8"], 2, "'mxfp8' is not a query"),
        (["--query", "http://[::1"], 2, "'http://[::1' is not a query"),
        (["--jobs", "0"], 2, "'--jobs'"),
        (["--session", "absent"], 2, "There is no session 'absent'"),
        (["--session", "../x"], 2, "is not a session ID"),
        (["--session", "absent", "--rank", "0"], 2, "a session has its own filter"),
        (["--colour", "red"], 2, "'--colour'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_slip_is_one_line(command, root, tmp_path, capsys, arguments, status, words):
    file = tmp_path / "file"
    file.write_text("mine")
    given = [text.format(tmp=tmp_path, file=file) for text in arguments]
    usual = [] if "--tensor-save-dir" in given else ["--tensor-save-dir", str(root)]
    usual += [] if "--output" in given else ["--output", str(tmp_path / "draw")]
    assert command("report", *usual, *given) == status
    error = capsys.readouterr().err
    assert words in error and error.startswith("binade: ") and error.count("\n") == 1, error
    left = {path.name for path in tmp_path.iterdir()} - {"index.duckdb"}  # a root has its index
    assert left == {"file"} and file.read_text() == "mine"


@pytest.fixture(scope="module")
def renderers() -> Iterator[Renderers]:
    with Renderers(1) as opened:
        yield opened


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, renderers: Renderers) -> None:
    """A report is drawn by a process that has been started: to start one takes longer than to draw."""
    monkeypatch.setattr(writer, "Renderers", lambda jobs: nullcontext(renderers))


@pytest.fixture
def one_chart(monkeypatch: pytest.MonkeyPatch, started: None) -> None:
    """A report of one chart."""
    section = Section("codes", figures=[Figure("x", BARS, pd.DataFrame({"a": [1]}), "c")])
    monkeypatch.setattr(contents, "contributions", lambda *_: [section])


def make(root: Path, output: Path, **where: list) -> int:
    with Catalog.open(root) as opened:
        return writer.make(opened, ReportRequest(output, Filter(**where), jobs=1), lambda *_: None)


@pytest.mark.thorough
def test_a_second_report_replaces_the_first_and_nothing_else(root, tmp_path, one_chart):
    output = tmp_path / "draw"
    make(root, output)
    own = output / "heatmaps"
    own.mkdir()
    (own / "mine.png").write_text("mine")
    stale = json.loads((output / "report.json").read_text())
    (output / "old.png").write_text("of an earlier report")
    (output / "report.json").write_text(json.dumps(stale | {"files": [*stale["files"], "old.png", "../outside"]}))
    (tmp_path / "outside").write_text("kept")
    before = (output / "index.html").read_text()
    make(root, output, quant_type=["mxfp4"])
    assert (own / "mine.png").read_text() == "mine" and not (output / "old.png").exists()
    assert (tmp_path / "outside").read_text() == "kept"
    assert (output / "index.html").read_text() != before
    (output / "report.json").unlink()
    with pytest.raises(writer.UsageError, match=re.escape(f"{output}/")):
        make(root, output)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draw", "outside"]


def test_a_strangers_file_by_a_folders_name_is_told_before_the_work(command, root, tmp_path, capsys):
    name = "heatmaps"
    output = tmp_path / "draw"
    output.mkdir()
    (output / name).write_text("mine")
    assert command("report", "--tensor-save-dir", str(root), "--output", str(output)) == 2
    said = capsys.readouterr()
    assert f"{name} exists and was not written by a report" in said.err and "charts" not in said.err
    assert everything(output) == {name} and (output / name).read_text() == "mine"


@pytest.mark.parametrize("name", ["heatmaps", "of_an_earlier_report"])
def test_no_file_is_written_or_deleted_through_a_link(command, root, tmp_path, capsys, name):
    """A manifest that someone else wrote may name any file of a linked folder."""
    output, other = tmp_path / "draw", tmp_path / "other"
    for folder in (output, other):
        folder.mkdir()
    (other / "mine").write_text("mine")
    (output / name).symlink_to(other)
    (output / "report.json").write_text(json.dumps({"files": [f"{name}/mine"]}))
    assert command("report", "--tensor-save-dir", str(root), "--output", str(output)) == 2
    assert f"{name} exists and was not written by a report" in capsys.readouterr().err
    assert everything(other) == {"mine"} and everything(output) == {"report.json"} and (output / name).is_symlink()


def test_a_folder_that_nobody_foresaw_is_refused_before_anything_is_moved(tmp_path):
    output = tmp_path / "draw"
    output.mkdir()
    (output / "later").symlink_to("nowhere")
    made = report_of(tmp_path / "made", ["first.png", "later/one.png", "report.json"])
    with pytest.raises(writer.UsageError, match="draw/later "):
        writer.publish(made, output, set())
    assert [path.name for path in output.iterdir()] == ["later"]


def test_who_is_broken_off_while_moving_can_begin_again(tmp_path, monkeypatch):
    output = tmp_path / "draw"
    output.mkdir()
    report_of(output, ["old.png", "report.json"])
    new = ["a.png", "b/c.png", "index.html", "report.json"]

    def publish() -> None:
        made = report_of(tmp_path / "made", new)
        writer.publish(made, output, writer._written_before(output))

    move = os.replace
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda a, b: fail() if Path(b).name == "c.png" else move(a, b))
        with pytest.raises(OSError, match="broken"):
            publish()
    assert everything(output) == {"report.json", "old.png", "a.png"}
    publish()
    assert everything(output) == set(new) and json.loads((output / "report.json").read_text()) == {"files": new}


def report_of(folder: Path, names: list[str]) -> Path:
    """A folder with the files of a report."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps({"files": names}))
    return folder


def fail() -> None:
    raise OSError(5, "broken")


class Noon(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 1, 1, 12, tzinfo=tz)


def test_what_is_refused_at_the_end_leaves_no_folder(root, tmp_path, monkeypatch, one_chart):
    def refuse(*_: object) -> None:
        raise writer.UsageError("refused")

    monkeypatch.setattr(writer, "publish", refuse)
    with pytest.raises(writer.UsageError, match="refused"):
        make(root, tmp_path / "a" / "b" / "draw")
    assert list(tmp_path.iterdir()) == []


def test_a_run_deleted_meanwhile_is_said(root, tmp_path, monkeypatch, started):
    monkeypatch.setattr(contents, "QUESTIONS", [EXPLORE])  # whose sketches are deleted
    shutil.copytree(root, tmp_path / "runs")
    with Catalog.open(tmp_path / "runs") as opened, pytest.raises(writer.ReportError, match="changed while"):
        shutil.rmtree(next(path.parent for path in sorted(opened.root.glob("*/run.json"))))
        of_rank = ReportRequest(tmp_path / "draw", Filter(rank=[0]), jobs=1)  # no sums in the index have a rank
        writer.make(opened, of_rank, lambda *_: None)
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_who_is_interrupted_leaves_nothing(root, tmp_path, number):
    process = start_binade("report", "--output", tmp_path / "draw", "--tensor-save-dir", root, "--jobs", "1")
    assert "charts so far" in process.stderr.readline()
    renderers = [child.pid for child in psutil.Process(process.pid).children()]
    assert renderers
    process.send_signal(number)
    error = ended(process).stderr
    until(lambda: not any(map(process_start, renderers)), "the renderers to end")
    if number == signal.SIGKILL:
        assert process.returncode == -9 and not (tmp_path / "draw").exists()
    else:
        assert process.returncode == 130 and "cancelled" in error and "Traceback" not in error, error
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("output", [".", "/", "{tmp}"])
def test_a_bundle_is_no_folder(command, tmp_path, capsys, output):
    assert command("bundle", "export", "absent", "--output", output.format(tmp=tmp_path)) == 2
    error = capsys.readouterr().err
    assert "is a folder: pass a file name to --output" in error and error.count("\n") == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("verb", "number"), [("import", signal.SIGINT), ("export", signal.SIGTERM)], ids=["import", "export"]
)
def test_a_bundle_that_is_interrupted_leaves_nothing(tmp_path, verb, number):
    root, out = tmp_path / "root", tmp_path / "out"
    out.mkdir()
    made = tmp_path / "made"
    run = make_run(made, tensors(1))
    with Catalog.open(made) as opened:
        session = refreshed(opened, sessions.new("Long", View("explore", {"view": ["explore"]})))
        saved = storage.create(made, session).session
        if verb == "import":
            storage.export_bundle(opened, saved, tmp_path / "large.zip", values=True)
    if verb == "import":
        arguments, watched = [str(tmp_path / "large.zip")], root
        with zipfile.ZipFile(arguments[0], "a") as archive:
            with archive.open(f"runs/{run.run_id}/tensors/r00-000009.pt", "w") as large:  # takes a while to unpack
                for _ in range(1024):
                    large.write(bytes(1 << 20))
    else:
        arguments, watched, root = [saved.id, "--output", str(out / "x.zip")], out, made
        with open(run.directory / "log.txt", "ab") as log:
            log.truncate(4 << 30)  # takes a while to pack
    process = start_binade("bundle", verb, *arguments, "--tensor-save-dir", root)
    until(lambda: list(watched.glob(".*.part")) or process.poll() is not None, "the bundle to be begun")
    process.send_signal(number)
    error = ended(process).stderr
    assert (process.returncode, error) == (130, "binade: cancelled: no bundle was written or imported\n")
    assert not list(out.iterdir()) and not list(root.glob(".*.part")) and root.exists() == (verb == "export")


@pytest.mark.parametrize("small_disk", ["64k"], indirect=True)
def test_a_full_disk_is_said(command, capsys, root, small_disk, one_chart):
    assert command("report", "--tensor-save-dir", str(root), "--output", str(small_disk / "draw")) == 1
    assert list(small_disk.iterdir()) == []
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("binade: the disk is full")


def test_a_renderer_that_dies_is_an_error():
    figure = Figure("x", BARS, pd.DataFrame({"a": [1]}), "c")
    request = (figure.caption_svg, {"card": "#fff", "quiet": "#000", "font": "Arial"})
    with Renderers(1) as renderers:
        assert renderers.render(figure.spec, *request).result().svg.startswith(b"<svg")
        with pytest.raises(RenderError, match="cannot be drawn"):
            renderers.render({"mark": "nonsense"}, *request).result()
        renderers._processes[0].kill()
        with pytest.raises(RenderError, match="has ended"):
            renderers.render(figure.spec, *request).result()


def test_a_renderer_whose_parent_was_killed_says_nothing():
    command = [sys.executable, rendering.__file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        process.stdout.close()
        process.stdin.write(b"half a request\n")
        process.stdin.close()
        assert process.stderr.read() == b""


def test_small_digits_stand_in_letters_that_are_always_there():
    svg = '<svg xmlns="http://www.w3.org/2000/svg"><text x="1" aria-label="log₂">10·log₁₀(Σx²) ‖q‖</text></svg>'
    text = ElementTree.fromstring(rendering.supported(svg))[0]
    assert "".join(text.itertext()) == "10·log10(Σx2) ||q||" and text.get("aria-label") == "log₂"
    shifts = [float(span.get("dy", "0em")[:-2]) * (0.72 if span.get("font-size") else 1.0) for span in text]
    assert sum(shifts) == pytest.approx(0, abs=0.01)


def test_a_note_repeats_nothing_of_the_caption():
    figure = Figure("x", alt.Chart(), pd.DataFrame(), "SQNR: so.", "SQNR: so. Bright is bad.")
    assert page.note(figure) == "Bright is bad."


def test_a_caption_is_wrapped_beneath_the_chart():
    lines = ["Data: " + "a < b " * 60, "SQNR: so."]
    caption = Figure("x", alt.Chart(), pd.DataFrame(), "\n".join(lines)).caption_svg
    texts = ElementTree.fromstring(f"<g>{caption['svg']}</g>")
    assert " ".join(" ".join(text.text for text in texts).split()) == " ".join(" ".join(lines).split())
    assert len(texts) == 4 and caption["width"] <= 760 and max(len(text.text) for text in texts) * 5.7 <= 736
    assert [float(text.get("y")) for text in texts] == [8, 24, 40, 56] and caption["height"] > 56
    assert Figure("x", alt.Chart(), pd.DataFrame(), "").caption_svg["height"] == 0
