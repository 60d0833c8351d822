"""The filter in the bar above each page: counts, ranges, and what it hides."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import altair as alt
import pandas as pd
import pytest
from streamlit.testing.v1 import AppTest

from binade.app.draw import show, style
from binade.app.draw.figure import Figure
from binade.app.frame.address import RESOLVED
from binade.app.view.params import texts_of
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.app import roots
from tests.app.test_pages import chips, narrow, rerun, words

Visit = Callable[..., AppTest]
WHERE = Filter(module=["fc1"], layer_index=[1, 2])


def test_what_is_filtered_out_is_not_taken_for_missing(visit: Visit, collected: Path):
    at = visit(collected, quant_type="mxfp8", operation="forward", tensor_name="grad_input")
    at.button(key="offer_to_clear").click()
    assert "No tensor matches" not in words(rerun(at))
    assert set(at.query_params) == {RESOLVED, *texts_of(at.query_params[RESOLVED])[0].split(",")}


def test_recipes_does_not_apply_the_fields_of_tensors(visit: Visit, collected: Path):
    every, filtered = visit(collected, "recipes"), visit(collected, "recipes", layer_index="2", tensor_name="query")
    hidden = visit(collected, "recipes", operation="forward", tensor_name="grad_input")
    answers = [
        next(text.value for text in at.markdown if "which one seed" in text.value) for at in (every, filtered, hidden)
    ]
    assert "which one seed cannot tell from chance" in answers[0] and len(set(answers)) == 1


@pytest.mark.thorough
@pytest.mark.slow
def test_more_layers_than_are_listed_are_chosen_as_a_range(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, list(roots.odd_tensors().values()) * 5)
    with Catalog.open(tmp_path) as catalog:
        layers = catalog.facets()["layer_index"]
    at = visit(tmp_path)
    at.button(key="chip_of_layer_index").click()
    rerun(at).select_slider[0].set_range(layers[2], layers[-2])
    rerun(at)
    assert at.query_params["layer_index"] == [str(layer) for layer in layers[2:-1]]
    assert len(at.dataframe[0].value) == len(layers) - 3
    assert chips(at) == [f"Layer: {layers[2]} to {layers[-2]}"]
    at.select_slider[0].set_range(layers[0], layers[-1])
    assert "layer_index" not in rerun(at).query_params


def test_fields_without_a_chip_are_behind_the_plus(visit: Visit, collected: Path):
    at = visit(collected)
    at.button(key="filter_more").click()
    fields = {button.key for button in rerun(at).button if str(button.key).startswith("field_")}
    assert {"field_iteration", "field_recipe", "field_run_id", "field_layer_type"} <= fields
    assert not fields & {"field_layer_index", "field_phase", "field_model"}  # chips; of one value
    at.button(key="field_recipe").click()
    rerun(at)
    assert chips(narrow(at, "recipe", "mxfp8")) == ["Recipe: mxfp8"]


def test_a_run_without_a_start_is_listed(visit: Visit, tmp_path: Path):
    roots.record(tmp_path, list(roots.odd_tensors().values()))
    (file,) = tmp_path.glob("*/run.json")
    config = json.loads(file.read_text())
    config.pop("crc32")
    file.write_text(json.dumps(config | {"started": None}))
    at = visit(tmp_path)
    assert at.selectbox(key="filter_scope_run_id").options == ["bf16"]


def test_a_click_after_one_with_shift_opens_the_mark(monkeypatch: pytest.MonkeyPatch):
    table = pd.DataFrame({"tensor_id": ["a"], "layer_index": [1]})
    chart = alt.Chart(table).mark_bar().add_params(style.choice("tensor_id"), style.only("layer_index"))
    figure = Figure("depth", chart, table, "", choose="tensor_id")
    state: dict[str, Any] = {}
    drawn, narrowed, opened = [], [], []

    def draw_chart(key: str, on_selected_change: Callable[[], None], **_: Any) -> Any:
        drawn.append((key, on_selected_change))
        return SimpleNamespace(selected=None)

    monkeypatch.setattr(show.st, "session_state", state)
    monkeypatch.setattr(show, "_charts", lambda: draw_chart)
    monkeypatch.setattr(show, "catalog", lambda: None)
    monkeypatch.setattr(show, "only", lambda _, values: narrowed.append(values))
    for name, mark in (("only", {"layer_index": 1}), ("chosen", {"tensor_id": "a"})):
        show.draw(figure, opened.append)
        key, on_select = drawn[-1]
        state[key] = SimpleNamespace(selected={"name": name, "selected": [mark]})
        on_select()
    assert narrowed == [{"layer_index": 1}] and opened == ["a"]
