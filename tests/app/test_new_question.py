"""A question is added with one folder and one line: on the overview, in the navigation, in a pin and in a report."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
COMPUTE = """
def count(opened, where):
    return opened.tensors(where).groupby("tensor_name", dropna=False).size().rename("tensors").reset_index()
"""
CHARTS = """
import altair as alt
from binade.app import style


def bars(table):
    chart = alt.Chart(table).mark_bar().encode(x="tensors:Q", y="tensor_name:N")
    return chart.properties(title=style.title("Tensors by name", "of the filter"))
"""
QUESTION = """
from binade.app.figure import Drawn, Figure, Table, source
from binade.app.questions.question import Question
from binade.app.questions.toy import charts, compute


def draw(selection, values):
    table = compute.count(selection.opened, selection.where)
    figure = Figure("toy_bars", charts.bars(table), table, source(selection.where, "the index"))
    return Drawn((figure, Table("Names", table)), f"{len(table)} names.")


TOY = Question(
    text="How many are there?", title="Toy", icon=":material/tag:", help="Tensors by name",
    page=PAGE, view=VIEW, draw=draw,
)
"""
CHECK = """
import sys
from pathlib import Path
from streamlit.testing.v1 import AppTest
from binade.app.pages.registry import PAGES
from binade.app.questions.registry import describe
from binade.app.report.contents import contributions
from binade.app.sessions import pins, session
from binade.data.catalog import Catalog
from binade.data.filter import Filter

page, view, root = sys.argv[1:]
address = {"view": view} if view else {}


def visit(name, **query):
    at = AppTest.from_string(f"from binade.app.main import navigate\\nnavigate({name!r})", default_timeout=120)
    at.query_params.update(query)
    at.run()
    assert not at.exception, at.exception[0].message
    return at


overview = visit("overview")
assert "How many are there?" in [link.proto.label for link in overview.main.get("page_link")]
assert page in overview.session_state["pages"] and page in session.pages()
assert "How many are there?" in describe()
at = visit(page, **address)
assert any("names." in text.value for text in at.markdown), "the page has no verdict"
if view:
    assert "Toy" in next(one for one in at.get("button_group") if one.proto.id.endswith("view")).options
else:
    assert PAGES[page].title == "Toy"
with Catalog.open(Path(root)) as catalog:
    pin = pins.draw(catalog, pins.Pin(page, {name: [text] for name, text in address.items()}, "toy_bars"))
    assert [figure.name for figure in pin.figures] == ["toy_bars"], pin.problems
    section = next(one for one in contributions(catalog, Filter(), "here") if one.name == "toy")
    assert section.figures and section.tables and section.verdict == pin.verdict
"""


@pytest.mark.parametrize(("page", "view"), [("toy", ""), ("worst", "toy"), ("tensor", "toy")])
def test_a_new_question_is_one_folder_and_one_line(
    collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: str, view: str
):
    package = tmp_path / "binade"
    package.mkdir()
    for path in (PROJECT / "binade").glob("*.py"):
        shutil.copy2(path, package)
    for name in ("quant", "data", "collector"):
        (package / name).symlink_to(PROJECT / name)
    shutil.copytree(PROJECT / "app", package / "app", ignore=shutil.ignore_patterns("__pycache__"))
    folder = package / "app" / "questions" / "toy"
    folder.mkdir()
    (folder / "compute.py").write_text(COMPUTE)
    (folder / "charts.py").write_text(CHARTS)
    (folder / "question.py").write_text(QUESTION.replace("PAGE", repr(page)).replace("VIEW", repr(view)))
    registry = package / "app" / "questions" / "registry.py"
    line = "    CODES,\n"
    toy = "    __import__('binade.app.questions.toy.question', fromlist=['TOY']).TOY,\n"
    registry.write_text(registry.read_text().replace(line, line + toy))
    root = shutil.copytree(collected, tmp_path / "runs", ignore=shutil.ignore_patterns("index.duckdb*"))
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(root))
    (tmp_path / "check.py").write_text(CHECK)
    done = subprocess.run(
        [sys.executable, "check.py", page, view, str(root)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
