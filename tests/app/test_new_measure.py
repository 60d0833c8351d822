"""A measure is added with one file and one line: a color of the Map, in the bar, a pin, a report and `plots`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.app import roots
from tests.app.reports import tensors
from tests.conftest import run_python
from tests.data.builder import make_run

pytestmark = pytest.mark.slow

MEASURE = """
from binade.app.draw.figure import Text
from binade.app.measures.cells import by_cell, places
from binade.app.measures.map_measure import MapMeasure, if_any
from binade.data.compare.evidence import Measure


def cells(query):
    each = places(query)[["tensor_id"]].drop_duplicates()
    return by_cell(query, each.assign(value=each["tensor_id"].str.len().astype(float)))


TOY = MapMeasure(
    measure=Measure("toy", "Length of the name", "letters", "letters of a tensor_id", ".1f"), cells=cells,
    nothing=lambda opened, where, fmt: "No tensor is named.", neutral=3.0, recorded=if_any("tensor"),
    extra=lambda query, cell: Text("Toy text" if cell is None else f"Toy of {cell['tensor']}"),
)
"""
CHECK = """
import sys
from pathlib import Path
from streamlit.testing.v1 import AppTest
from binade import plots
from binade.app.report import contents
from binade.app.report.runs import definitions
from binade.app.sessions import pins
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter

at = AppTest.from_string("from binade.app.main import navigate\\nnavigate('map')", default_timeout=120)
at.query_params.update(metric="toy")
at.run()
assert not at.exception, at.exception[0].message
assert "Length of the name" in at.selectbox(key="filter_metric").options
assert any("Toy text" in text.value for text in at.caption)
with Catalog.open(Path(sys.argv[1])) as catalog:
    pin = pins.draw(catalog, pins.Pin("map", {"metric": ["toy"]}, "map"))
    cells = pin.get("map").table
    assert (cells["value"] == cells["tensor_id"].str.len()).all() and (cells["shade"] if "shade" in cells else True)
    assert plots.map(catalog, metric="toy").verdict == pin.verdict and "Length of the name" in pin.verdict
    cell = f"{cells['row'][0]}/{cells['layer_index'][0]}"
    assert plots.map(catalog, metric="toy", cell=cell).items[1].text == f"Toy of {cells['tensor'][0]}"
    contents.QUESTIONS = [question for question in contents.QUESTIONS if question.name == "map"]  # to save time
    contents.OF_FORMAT = contents.OF_VALUES = ()
    sections = contents.contributions(catalog, Filter(), "here")
    assert any(figure.name == "map_toy" for section in sections for figure in section.figures)
    assert "Length of the name" in definitions().tables[0].frame["Metric"].tolist()
"""


@pytest.mark.thorough
def test_a_new_measure_is_one_file_and_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = roots.package_with_own_app(tmp_path)
    (package / "app" / "measures" / "toy.py").write_text(MEASURE)
    registry = package / "app" / "measures" / "registry.py"
    toy = "    __import__('binade.app.measures.toy', fromlist=['TOY']).TOY,\n"
    registry.write_text(registry.read_text().replace("_ALL = (\n", "_ALL = (\n" + toy))
    root = tmp_path / "runs"
    make_run(root, tensors(1))
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(root))
    (tmp_path / "check.py").write_text(CHECK)
    done = run_python("check.py", root, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
