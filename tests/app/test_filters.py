"""The filter in the bar above each page: counts, ranges, saved filters, and what it hides."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import Multiselect

from binade.app import saved_filters, show, style
from binade.app.figure import Figure
from binade.app.params import texts_of
from binade.app.saved_filters import SavedFiltersError
from binade.data.access import SETTING, ReadOnlyError
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from tests.app import roots
from tests.app.test_pages import chips, rerun, words

Visit = Callable[..., AppTest]
WHERE = Filter(module=["fc1"], layer_index=[1, 2])


def test_each_value_has_the_number_of_its_tensors(visit: Visit, collected: Path):
    at = visit(collected, operation="backward")
    with Catalog.open(collected) as catalog:
        tensors = catalog.tensors(Filter(operation=["backward"]))
        total = catalog.totals().tensors
    counts = tensors["module"].value_counts()
    assert set(at.multiselect(key="filter_module").options) == {f"{name} ({n:,})" for name, n in counts.items()}
    assert f"The filter hides {total - len(tensors):,} of {total:,} tensors" in words(at)


def test_a_browser_that_still_shows_earlier_counts(visit: Visit, collected: Path, monkeypatch: pytest.MonkeyPatch):
    """It sends the labels that it shows, also when a fragment runs on its own."""
    at = visit(collected, quant_type="mxfp8", layer_index="1")
    values = Multiselect.values.fget
    before = {box.key: values(box) for box in at.multiselect if box.key in ("filter_quant_type", "filter_layer_index")}
    at.multiselect(key="filter_operation").set_value(["forward"])
    rerun(at)
    assert all(values(at.multiselect(key=key)) != labels for key, labels in before.items())
    monkeypatch.setattr(Multiselect, "values", property(lambda box: before.get(box.key) or values(box)))
    rerun(at)
    assert [texts_of(at.query_params[name]) for name in ("quant_type", "layer_index")] == [["mxfp8"], ["1"]]
    assert len(chips(at).options) == 3


def test_what_is_filtered_out_is_not_taken_for_missing(visit: Visit, collected: Path):
    at = visit(collected, quant_type="mxfp8", operation="forward", tensor_name="grad_input")
    at.button(key="offer_to_clear").click()
    assert "No tensor matches" not in words(rerun(at)) and not at.query_params


def test_recipes_does_not_apply_the_fields_of_tensors(visit: Visit, collected: Path):
    every, filtered = visit(collected, "recipes"), visit(collected, "recipes", layer_index="2", tensor_name="query")
    hidden = visit(collected, "recipes", operation="forward", tensor_name="grad_input")
    answers = [
        next(text.value for text in at.markdown if "which one seed" in text.value) for at in (every, filtered, hidden)
    ]
    assert "which one seed cannot tell from chance" in answers[0] and len(set(answers)) == 1


@pytest.mark.slow
def test_many_layers_are_chosen_as_a_range(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, list(roots.odd_tensors().values()) * 3)
    with Catalog.open(tmp_path) as catalog:
        layers = catalog.facets()["layer_index"]
    at = visit(tmp_path)
    at.select_slider[0].set_range(layers[2], layers[-2])
    rerun(at)
    assert at.query_params["layer_index"] == [str(layer) for layer in layers[2:-1]]
    assert len(at.dataframe[0].value) == len(layers) - 3
    assert chips(at).options == [f"Layer\\: {layers[2]} to {layers[-2]} ✕"]
    at.select_slider[0].set_range(layers[0], layers[-1])
    assert "layer_index" not in rerun(at).query_params


@pytest.mark.slow
def test_a_saved_filter_comes_back(visit: Visit, collected: Path, tmp_path: Path):
    root = roots.copy(collected, tmp_path / "runs")
    at = visit(root, module="fc1", layer_index="1")
    at.text_input(key="filter_name").set_value("first **layer**")
    rerun(at)
    next(button for button in at.button if button.label == "Save this filter").click()
    rerun(at)
    assert saved_filters.load(root) == {"first **layer**": Filter(module=["fc1"], layer_index=[1])}
    again = visit(root, quant_type="mxfp8")
    again.button(key="load_filter_0").click()
    rerun(again)
    assert again.session_state["filter_module"] == ["fc1"] and not again.session_state["filter_quant_type"]
    again.button(key="delete_filter_0").click()
    rerun(again)
    assert not saved_filters.load(root)


def test_a_saved_filter_may_name_iterations_that_are_gone(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, list(roots.odd_tensors().values()) * 3)
    saved_filters.save(tmp_path, "gone", Filter(layer_index=[999]))
    at = visit(tmp_path)
    at.button(key="load_filter_0").click()
    assert "asks for layer '999', which is not in this root" in words(rerun(at)) and not at.metric


def test_a_run_without_a_start_is_listed(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, list(roots.odd_tensors().values()))
    (file,) = tmp_path.glob("*/run.json")
    config = json.loads(file.read_text())
    config.pop("crc32")
    file.write_text(json.dumps(config | {"started": None}))
    at = visit(tmp_path)
    (option,) = at.multiselect(key="filter_run_id").options
    assert option.startswith("bf16 (")
    assert at.selectbox(key="filter_scope_run_id").options == ["bf16"]


def test_a_click_after_one_with_shift_opens_the_mark(monkeypatch: pytest.MonkeyPatch):
    table = pd.DataFrame({"tensor_id": ["a"], "layer_index": [1]})
    chart = alt.Chart(table).mark_bar().add_params(style.choice("tensor_id"), style.only("layer_index"))
    figure = Figure("depth", chart, table, "", choose="tensor_id")
    state: dict[str, Any] = {}
    drawn, narrowed, opened = [], [], []

    def draw_chart(key: str, on_select: Callable[[], None], **_: Any) -> Any:
        drawn.append((key, on_select))
        return state.setdefault(key, {"selection": {}})

    monkeypatch.setattr(show.st, "session_state", state)
    monkeypatch.setattr(show.st, "vega_lite_chart", draw_chart)
    monkeypatch.setattr(show, "_exporter", lambda: lambda **_: None)
    monkeypatch.setattr(show, "catalog", lambda: None)
    monkeypatch.setattr(show, "only", lambda _, values: narrowed.append(values))
    for selection in ({"only": [{"layer_index": 1}]}, {"chosen": [{"tensor_id": "a"}]}):
        show.draw(figure, opened.append)
        key, on_select = drawn[-1]
        state[key]["selection"] |= selection  # as the browser does: it keeps the other selections
        on_select()
    assert narrowed == [{"layer_index": 1}] and opened == ["a"]


def test_saved_filters_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    saved_filters.save(tmp_path, "a", WHERE)
    saved_filters.save(tmp_path, "b", Filter())
    saved_filters.save(tmp_path, "b", None)
    assert saved_filters.load(tmp_path) == {"a": WHERE}
    monkeypatch.setenv(SETTING, "1")
    with pytest.raises(ReadOnlyError, match="Saving a filter"):
        saved_filters.save(tmp_path, "c", WHERE)


def test_filters_that_are_saved_at_once_are_all_kept(tmp_path: Path):
    names = [f"filter {number}" for number in range(8)]
    with ThreadPoolExecutor(len(names)) as pool:
        for done in [pool.submit(saved_filters.save, tmp_path, name, WHERE) for name in names for _ in range(3)]:
            done.result()
    assert saved_filters.load(tmp_path) == dict.fromkeys(names, WHERE)


@pytest.mark.parametrize(
    "content", ["[]", '{"filters": {"a": {"layer_index": ["x"]}}}', '{"filters": {"a": {"no": []}}}']
)
def test_a_damaged_file_is_named(tmp_path: Path, content: str):
    (tmp_path / saved_filters.FILE).write_text(content)
    with pytest.raises(SavedFiltersError, match=saved_filters.FILE):
        saved_filters.load(tmp_path)
