"""A question is added with one folder and one line: on its page, in a pin, in a report and in `plots`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app import roots
from tests.app.reports import tensors
from tests.conftest import run_python
from tests.data.builder import make_run

pytestmark = pytest.mark.slow

COMPUTE = """
def count(opened, where):
    return opened.tensors(where).groupby("tensor_name", dropna=False).size().rename("tensors").reset_index()
"""
CHARTS = """
from binade.app.draw import plot


def bars(table):
    y = plot.names("tensor_name", table["tensor_name"])
    tips = plot.tips(tensor_name="tensor", tensors=("tensors", ","))
    bars = plot.bars(table, y, plot.x("tensors", "tensors"), text="tensors", end="tensors", tips=tips)
    return plot.layers("Tensors by name", "of the filter", *bars)
"""
QUESTION = """
from binade.app.draw.figure import Drawn, Figure, Table, source
from binade.app.questions.question import Question
from binade.app.questions.FOLDER import charts, compute
from binade.app.questions.shared.selection import Of
from binade.data.compare.evidence import say


def draw(selection, values):
    table = compute.count(selection.opened, selection.where)
    figure = Figure("toy_bars", charts.bars(table), table, source(selection.where, "the index"))
    return Drawn((figure, Table("Names", table)), say("{count} names.", count=len(table)))


TOY = Question(
    text="How many are there on PAGE?", title="Toy PAGE", icon=":material/tag:", help="Tensors by name",
    page="PAGE", view="VIEW", draw=draw, of=Of.OF,
)
"""
CHECK = """
import sys
from pathlib import Path
from streamlit.testing.v1 import AppTest
from binade import plots
from binade.app.pages.registry import PAGES
from binade.app.questions.registry import describe
from binade.app.report import contents
from binade.app.sessions import pins
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter



def visit(name, **query):
    at = AppTest.from_string(f"from binade.app.main import navigate\\nnavigate({name!r})", default_timeout=120)
    at.query_params.update(query)
    at.run()
    assert not at.exception, at.exception[0].message
    return at


contents.QUESTIONS = [question for question in contents.QUESTIONS if question.title.startswith("Toy")]  # to save time
with Catalog.open(Path(sys.argv[1])) as catalog:
    reported = {}
    for one in contents.contributions(catalog, Filter(), "here"):
        reported.setdefault(one.title, one)  # of several views, the first is that of the page
for page, view, _ in PLACES:
    question, title = f"How many are there on {page}?", f"Toy {page}"
    assert question in describe() and PAGES[page].parts[view].kept
    at = visit(page, view=view)
    assert at.title[0].value == f"{PAGES[page].title} › {title}"
    assert any("names." in text.value for text in at.markdown), "the page has no verdict"
    assert title in next(one for one in at.get("button_group") if one.proto.id.endswith("page_part")).options
    with Catalog.open(Path(sys.argv[1])) as catalog:
        pin = pins.draw(catalog, pins.Pin(page, {"view": [view]}, "toy_bars"))
        assert getattr(plots, f"{page}_toy")(catalog).verdict == pin.verdict
    assert [figure.name for figure in pin.figures] == ["toy_bars"], pin.problems
    section = reported[title]
    assert section.figures and section.tables and section.verdict == pin.verdict
"""
PLACES = (("map", "toy", "SELECTION"), ("explore", "toy", "BOARD"), ("tensor", "toy", "TENSOR"))


@pytest.mark.thorough
def test_a_new_question_is_one_folder_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = roots.package_with_own_app(tmp_path)
    registry = package / "app" / "questions" / "registry.py"
    for page, view, of in PLACES:
        folder = package / "app" / "questions" / f"{page}_toy"
        folder.mkdir()
        for name, text in (("compute", COMPUTE), ("charts", CHARTS), ("question", QUESTION)):
            filled = text.replace("FOLDER", folder.name).replace("PAGE", page).replace("VIEW", view).replace("OF", of)
            (folder / f"{name}.py").write_text(filled)
        toy = f"    __import__('binade.app.questions.{folder.name}.question', fromlist=['TOY']).TOY,\n"
        registry.write_text(registry.read_text().replace("    CODES,\n", "    CODES,\n" + toy))
    root = tmp_path / "runs"
    make_run(root, tensors(1))
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(root))
    (tmp_path / "check.py").write_text(CHECK.replace("PLACES", repr(PLACES)))
    done = run_python("check.py", root, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
