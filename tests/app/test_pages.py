"""Each page over each kind of root a user may have: no exception, and the words that help."""

from __future__ import annotations

import gc
import json
import re
import shutil
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd
import pytest
import torch
from streamlit.runtime.scriptrunner import RerunException, StopException
from streamlit.runtime.scriptrunner_utils.script_requests import RerunData
from streamlit.testing.v1 import AppTest
from streamlit.testing.v1.element_tree import ButtonGroup

from binade.app.draw.formatting import plain
from binade.app.frame import state, uploads
from binade.app.frame.address import RESOLVED
from binade.app.questions.runs import page as runs_page
from binade.app.questions.shared.labels import group_name
from binade.app.sessions import open_session
from binade.app.view.params import texts_of
from binade.collector import Recorder
from binade.data.index.catalog import Catalog, DamagedIndexError
from binade.data.run.directory import RunNotes
from binade.data.run.events import Event, EventKind, append_event
from binade.data.run.run_notes import read_notes
from binade.data.words.filter import Filter
from tests.app import roots
from tests.app.conftest import close_pages

pytestmark = pytest.mark.slow

RECIPES = {"bf16", "hifp8", "mxfp8", "mxfp4"}
Visit = Callable[..., AppTest]


def words(at: AppTest) -> str:
    """All prose of a page, without Markdown's escapes and bold."""
    texts = []
    for kind in ("title", "caption", "markdown", "info", "warning", "error", "text", "code", "expander"):
        for element in at.get(kind):
            texts.append(str(getattr(element, "label" if kind == "expander" else "value", "")))
    plain = re.sub(r"(?<!\\)\*\*", "", "\n".join(texts))
    return re.sub(r"\\([^A-Za-z0-9\s])", r"\1", plain)


def metrics(at: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in at.metric}


def address(at: AppTest) -> dict[str, list[str]]:
    """The parameters of the address without those that the view leaves open."""
    query = {name: texts_of(at.query_params[name]) for name in at.query_params}
    left_open = query.pop(RESOLVED, [""])[0].split(",")
    return {name: texts for name, texts in query.items() if name not in left_open}


def components(at: AppTest, name: str) -> list[dict[str, Any]]:
    """What the page's components of a kind get."""
    return [json.loads(each.proto.json) for each in at.get("bidi_component") if each.proto.component_name == name]


def chart_data(at: AppTest) -> list[dict[str, Any]]:
    """What the charts of a page get, see app/draw/chart.js."""
    return components(at, "binade_chart")


def charts(at: AppTest) -> int:
    return len(chart_data(at))


def chips(at: AppTest) -> list[str]:
    """The fields that restrict the filter, with their values."""
    texts = [button.label for button in at.button if str(button.key).startswith("chip_of_")]
    return [re.sub(r"\\(.)", r"\1", text).removesuffix(" ▾") for text in texts if ":" in text]


def values_of(at: AppTest, name: str) -> ButtonGroup[str]:
    """The values of a field below the bar, whose chip is opened."""
    if not any(group.key == f"filter_{name}" for group in at.get("button_group")):
        at.button(key=f"chip_of_{name}").click()
        rerun(at)
    (group,) = [group for group in at.get("button_group") if group.key == f"filter_{name}"]
    return group


def narrow(at: AppTest, name: str, *values: object) -> AppTest:
    """Choose values of a field in the bar."""
    values_of(at, name).set_value(list(values))
    return rerun(at)


def scope(at: AppTest) -> str:
    """What the answer is of, below the bar."""
    of = next(text.value for text in at.caption if re.match(r"[\d,]+ tensors? ·", text.value))
    return re.sub(r"\\(.)", r"\1", of)


def rerun(at: AppTest) -> AppTest:
    at.run()
    assert not at.exception, at.exception[0].message
    return at


def first(catalog_root: Path, **where) -> str:
    with Catalog.open(catalog_root) as catalog:
        return catalog.tensors(Filter(**where)).iloc[0]["tensor_id"]


def explore(at: AppTest) -> dict[str, Any]:
    """What the component of Explore gets, see explore.js."""
    (data,) = components(at, "binade_explore")
    return data


def listed(at: AppTest) -> dict[str, dict[str, Any]]:
    """The cells of each run that the component of Runs gets, by run_id, see table.js."""
    (data,) = components(at, "binade_runs")
    groups = [group for workload in data["workloads"] for group in workload["groups"]]
    return {run["id"]: run["cells"] | {"origin": run["origin"]} for group in groups for run in group["runs"]}


def recipes_listed(at: AppTest, root: Path) -> set[str]:
    with Catalog.open(root) as catalog:
        recipes = catalog.runs().set_index("run_id")["recipe"]
    return {recipes[run_id] for run_id in listed(at)}


def drawn_groups(at: AppTest) -> list[str]:
    return [group["name"] for group in explore(at)["drawn"]["groups"] if group["x"] and group["shares"]]


def statistics(at: AppTest) -> pd.DataFrame:
    """The table of statistics, unfolded."""
    at.session_state["explore_statistics"] = True
    return rerun(at).dataframe[0].value


class TestExplore:
    def test_shows_the_newest_run_and_says_so(self, visit: Visit, collected: Path):
        at = visit(collected)
        with Catalog.open(collected) as catalog:
            run = catalog.runs()["run_id"].iloc[0]
            last = int(catalog.distinct(("iteration",), Filter(run_id=[run]))["iteration"].max())
            totals = catalog.totals(Filter(run_id=[run], iteration=[last]))
        assert scope(at) == f"{totals.tensors} tensors · 1 of 4 runs · iteration {last} · all with values"
        data = explore(at)
        assert len(data["rows"]["id"]) == totals.tensors
        assert drawn_groups(at) == [data["rows"]["name"][index] for index in range(3)]
        assert data["formats"]["tables"]["d2"]["length"] > totals.tensors and len(data["curves"]) == 24

    def test_filter_narrows_everything_and_the_address_follows(self, visit: Visit, collected: Path):
        at = narrow(visit(collected), "quant_type", "mxfp8")
        narrow(at, "layer_index", 1)
        with Catalog.open(collected) as catalog:
            last = int(catalog.distinct(("iteration",), Filter(quant_type=["mxfp8"]))["iteration"].max())
            rows = catalog.tensors(Filter(quant_type=["mxfp8"], layer_index=[1], iteration=[last]))
        assert scope(at).startswith(f"{len(rows)} tensors · 1 run · iteration {last}")
        names = explore(at)["rows"]["name"]
        assert len(names) == len(rows) and all(name.startswith("L1 ") for name in names)
        assert address(at) == {"quant_type": ["mxfp8"], "layer_index": ["1"]}
        assert chips(at) == ["Layer: 1", "Quant type: mxfp8"]

    def test_what_can_be_chosen_never_ends_in_nothing(self, visit: Visit, collected: Path):
        names = values_of(visit(collected, operation="backward"), "tensor_name").options
        assert names and all(plain("grad_") in name for name in names)

    def test_filter_from_the_address(self, visit: Visit, collected: Path):
        at = visit(collected, quant_type=["mxfp8", "mxfp4"], layer_index="2", axis="linear", by="module")
        assert chips(at) == ["Layer: 2", "Quant type: mxfp8, mxfp4"]
        data = explore(at)
        assert data["shown"] == {"values": "sigma", "axis": "linear", "by": "module", "rounded": "no"}
        assert all(name.startswith("L2 ") for name in data["rows"]["name"])
        assert set(drawn_groups(at)) == {"qkv", "core", "proj", "fc1", "fc2"}
        assert not at.warning

    def test_clear(self, visit: Visit, collected: Path):
        at = visit(collected, quant_type="mxfp8", layer_index="7")
        assert at.error and not components(at, "binade_explore")  # not the tensors of other layers
        at.button(key="clear_filter").click()
        rerun(at)
        assert scope(at) == scope(visit(collected))
        assert not at.error and not address(at)

    def test_a_field_is_cleared_by_its_cross(self, visit: Visit, collected: Path):
        at = visit(collected, quant_type="mxfp8", layer_index="1")
        at.button(key="clear_layer_index").click()
        assert chips(rerun(at)) == ["Quant type: mxfp8"] and "layer_index" not in at.query_params

    def test_unknown_values_in_the_address_are_named(self, visit: Visit, collected: Path):
        at = visit(
            collected,
            **{
                "quant_type": ["mxfp8", "mxfp9"],
                "layer_index": "one",
                "by": "loss",
                "axis": "log",
                "tensor": "no/such",
                "law": "cauchy",
                "delta": "low..high",
            },
            nonsense="1",
            iteration="99999999999999",
        )
        problems = words(at)
        for requested in (
            "mxfp9",
            "one",
            "loss",
            "log",
            "no/such",
            "cauchy",
            "low..high",
            "99999999999999",
            "nonsense",
        ):
            assert f"'{requested}'" in problems, requested
        assert chips(at) == ["Quant type: mxfp8"]
        assert len(at.error) == 1 and not components(at, "binade_explore")
        assert "nonsense" not in at.query_params
        at.button(key="without_what_is_gone").click()
        assert drawn_groups(rerun(at)) and not at.error and not address(at)

    def test_what_exists_is_drawn_beside_a_warning_about_the_rest(self, visit: Visit, collected: Path):
        at = visit(collected, quant_type=["mxfp8", "mxfp9"])
        assert "'mxfp9', which is not in this root" in words(at) and len(at.warning) == 1 and not at.error
        assert scope(at) == scope(visit(collected, quant_type="mxfp8")) and drawn_groups(at)

    @pytest.mark.sampled(3)
    @pytest.mark.parametrize("text", ["<script>alert(1)</script>", "**bold**", "$x$", "x" * 3000, "", "a\nb", "'\"%00"])
    def test_nothing_in_the_address_is_taken_for_more_than_text(self, visit: Visit, collected: Path, text: str):
        for query in ({"model": text, "layer_index": text, "tensor": text, "by": text}, {"view": text}):
            at = visit(collected, "explore", **query)
            assert len(at.error) == 1 and len(words(at)) < 3000
            assert "**bold**" not in at.error[0].value and "$x$" not in at.error[0].value
        at = visit(collected, "sessions", part=text)
        assert len(at.warning) == 1 and "**bold**" not in at.warning[0].value

    def test_a_filter_that_matches_nothing(self, visit: Visit, collected: Path):
        at = visit(collected, quant_type="mxfp8", operation="forward", tensor_name="grad_input")
        assert not components(at, "binade_explore")
        assert "No tensor matches: quant type mxfp8, operation forward, tensor grad_input" in words(at)
        at.button(key="clear_operation").click()
        assert drawn_groups(rerun(at))

    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("by", ["recipe", "layer_index", "module", "operation", "tensor_name", "iteration"])
    def test_compare_by(self, visit: Visit, collected: Path, by: str):
        at = visit(collected, by=by)
        with Catalog.open(collected) as catalog:
            groups = set(catalog.tensors()[by].map(group_name))
        assert set(drawn_groups(at)) <= groups and len(drawn_groups(at)) == min(len(groups), 10)
        assert ("groups: the 10 with the most values are drawn" in words(at)) == (len(groups) > 10)

    def test_a_ticked_tensor_is_drawn_from_its_values(self, visit: Visit, collected: Path):
        tensor_id = first(collected, quant_type=["mxfp8"], tensor_name=["weight"])
        at = visit(collected, tensor=tensor_id)
        assert drawn_groups(at) == ["L1 qkv weight"] and explore(at)["ticked"] == [tensor_id]
        assert at.query_params["tensor"] in (tensor_id, [tensor_id])
        assert statistics(at)["group"].tolist() == ["L1 qkv weight"]

    def test_more_than_ten_in_the_address(self, visit: Visit, collected: Path):
        with Catalog.open(collected) as catalog:
            ids = catalog.tensors()["tensor_id"].tolist()
        at = visit(collected, tensor=ids[::40])
        assert len(drawn_groups(at)) == 10

    def test_results_of_a_gemm_are_not_scored_and_it_is_said(self, visit: Visit, collected: Path):
        at = visit(collected, phase="post", layer_type="linear")
        assert "only the operands of a GEMM are scored" in explore(at)["without"]


class TestRuns:
    def test_lists_every_run_with_its_losses(self, visit: Visit, collected: Path):
        at = visit(collected, "runs")
        assert recipes_listed(at, collected) == RECIPES
        for cells in listed(at).values():
            losses = cells["course"][0]
            assert cells["state"][0] == "✓ done" and losses[-1] < losses[0]
            assert cells["loss"][1] == pytest.approx(losses[-1], abs=1e-4)
        assert charts(at) == 1
        assert "4 runs (4 done)" in components(at, "binade_runs")[0]["said"]

    def test_weights_on_a_grid_are_said_to_be(self, visit: Visit, tmp_path: Path):
        config = {"model": "smol@01234567", "weights": {"quantized": ["Q4_1", "Q8_0"]}, "recipe": "bf16"}
        with Recorder(tmp_path, config=config) as recorder:
            for name in ("input", "weight"):
                recorder.record(name, torch.randn(8, 32), layer=1, module="fc1", operation="forward", phase="pre")
        said = "dequantized from Q4_1 and Q8_0 and lie on a quantization grid"
        assert f"smol@01234567: The weights were {said}" in words(visit(tmp_path, "runs"))
        for name, there in (("weight", True), ("input", False)):
            assert (said in words(visit(tmp_path, "tensor", tensor_name=name))) == there

    def test_a_run_whose_process_is_gone(self, visit: Visit, collected: Path, tmp_path: Path):
        root = roots.copy(collected, tmp_path / "runs")
        roots.change_status(roots.runs_of(root)[0], state="running", pid=2**22 + 1, finished=None)
        at = visit(root, "runs")
        assert sorted(cells["state"][0] for cells in listed(at).values()) == ["✓ done"] * 3 + ["✕ crashed"]
        (crashed,) = (cells for cells in listed(at).values() if cells["state"][0] == "✕ crashed")
        assert "process ended" in crashed["event"][0]

    def test_the_latest_events_of_all_runs_are_shown(
        self, visit: Visit, collected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        root = roots.copy(collected, tmp_path / "runs")
        for number, run in enumerate(roots.runs_of(root)[:3]):
            (run / "events.jsonl").unlink(missing_ok=True)  # it may be a link to that of `collected`
            for minute in (number, 10 + number):
                append_event(run, Event(EventKind.TRIGGER, 0, "x", f"2026-01-01T00:{minute:02}:00+00:00"))
        monkeypatch.setattr(runs_page, "MOST_EVENTS", 4)
        at = visit(root, "runs")
        assert [time[14:16] for time in at.dataframe[0].value["time"]] == ["12", "11", "10", "02"]
        assert "The latest 4 of 6 events" in words(at)

    @pytest.mark.thorough
    def test_a_name_and_a_colour_are_used_everywhere(self, visit: Visit, collected: Path, tmp_path: Path):
        root = roots.copy(collected, tmp_path / "runs")
        run = next(run for run in roots.runs_of(root) if "mxfp8" in run.name)
        at = visit(root, "runs")
        at.selectbox("named_run").select(run.name)
        rerun(at).text_input(f"name_{run.name}").input(" floor **scales** ")
        at.checkbox(f"own_{run.name}").check()
        at.color_picker(f"color_{run.name}").set_value("#AA3377")
        at.text_area(f"note_{run.name}").input("first\ntry")
        next(button for button in at.button if button.label == "Save").click()
        table = rerun(at).dataframe[0].value.set_index("run_id")
        assert table.loc[run.name, ["name", "note"]].tolist() == ["floor **scales**", "first\ntry"]
        scale = json.loads(chart_data(at)[0]["spec"])
        assert '"#aa3377"' in json.dumps(scale) and "floor **scales**" in json.dumps(scale)
        assert "floor **scales**" in visit(root, "recipes").dataframe[0].value["label"].tolist()
        chosen = visit(root, "explore", run_id=run.name).selectbox(key="filter_scope_run_id")
        assert chosen.value == run.name and any("floor **scales**" in option for option in chosen.options)
        at = visit(root, "explore", run_id=[run.name, *(other.name for other in roots.runs_of(root) if other != run)])
        assert any("floor **scales**" in text for text in chips(at))

    def test_of_two_users_that_name_a_run_none_loses_a_text(self, visit: Visit, collected: Path, tmp_path: Path):
        root = roots.copy(collected, tmp_path / "runs")
        run = roots.runs_of(root)[0]

        def save(at: AppTest, **texts: str) -> AppTest:
            for field, text in texts.items():
                (at.text_input if field == "name" else at.text_area)(f"{field}_{run.name}").input(text)
            next(button for button in at.button if button.label == "Save").click()
            return rerun(at)

        first, second = visit(root, "runs"), visit(root, "runs")
        for at in (first, second):
            at.selectbox("named_run").select(run.name)
            rerun(at)
        save(first, note="from the first")
        save(second, name="from the second")  # whose form still has the empty note
        assert read_notes(run) == RunNotes("from the second", "", "from the first")
        second = save(second, note="also from the second")
        assert "someone else has changed the note in the meantime; it is now: from the first" in words(second)
        assert read_notes(run).note == "from the first"
        assert second.text_area(f"note_{run.name}").value == "also from the second"
        assert not save(second).error and read_notes(run).note == "also from the second"

    def test_a_name_that_is_another_recipes_is_refused(self, visit: Visit, collected: Path, tmp_path: Path):
        root = roots.copy(collected, tmp_path / "runs")
        run = next(run for run in roots.runs_of(root) if "mxfp8" in run.name)
        at = visit(root, "runs")
        at.selectbox("named_run").select(run.name)
        for name, refused in (("bf16", True), ("mxfp4", True), ("linear_nvfp4", True), ("mxfp8", False)):
            rerun(at).text_input(f"name_{run.name}").input(name)
            next(button for button in at.button if button.label == "Save").click()
            rerun(at)
            assert ["is the name of a recipe" in each.value for each in at.error] == [True] * refused
            assert (run / "notes.json").exists() == (not refused)

    def test_notes_that_are_damaged_do_not_hide_the_run(self, visit: Visit, collected: Path, tmp_path: Path):
        root = roots.copy(collected, tmp_path / "runs")
        for run, content in zip(roots.runs_of(root), ('{"name": 3}', "[]", "{", '{"color": "red"}'), strict=True):
            (run / "notes.json").write_text(content)
        at = visit(root, "runs")
        assert len(listed(at)) == 4
        assert all(f"the name and note of {run.name} are not shown" in words(at) for run in roots.runs_of(root))

    def test_a_failed_run_says_why(self, visit: Visit, tmp_path: Path):
        with pytest.raises(MemoryError):
            roots.record(tmp_path, [FailingTensor()])
        at = visit(tmp_path, "runs")
        (cells,) = listed(at).values()
        assert cells["state"][0] == "✕ failed" and cells["event"][0].endswith("out of memory")

    def test_loss_file_cut_short(self, visit: Visit, collected: Path, tmp_path: Path):
        root = roots.copy(collected, tmp_path / "runs")
        contents = (b"", b'{"iteration": 0, "loss": 5.0}\n{"iter', b"\xff", b"[1]\n")
        for run, content in zip(roots.runs_of(root), contents, strict=True):
            roots.replace(run / "loss.jsonl", content)
        assert charts(visit(root, "runs")) == 1


class FailingTensor(torch.Tensor):
    """Runs out of memory as soon as it is looked at."""

    @classmethod
    def __torch_function__(cls, *_: object) -> None:
        raise MemoryError


@pytest.mark.parametrize("page", ["map", "explore", "tensor", "recipes", "runs", "sql"])
class TestNoRuns:
    @pytest.mark.sampled(4)
    @pytest.mark.parametrize("there", [True, False], ids=["empty", "missing"])
    def test_root_without_runs(self, visit: Visit, tmp_path: Path, page: str, there: bool):
        root = tmp_path / "runs"
        if there:
            root.mkdir()
        at = visit(root, page)
        assert f"No runs yet in {root}" in words(at).replace("`", "")
        assert [code.value for code in at.code][1:] == [
            "binade import LOGS\nbinade bundle import FILE.zip",
            "make demo",
        ]
        assert root.exists() == there

    @pytest.mark.sampled(1)
    def test_root_is_a_file(self, visit: Visit, tmp_path: Path, page: str):
        root = tmp_path / "runs"
        root.write_text("")
        at = visit(root, page)
        assert "is a file" in at.error[0].value and "binade serve DIRECTORY" in words(at)


def test_a_root_that_a_file_replaces_while_the_app_runs(visit: Visit, tmp_path: Path):
    root = tmp_path / "runs"
    root.mkdir()
    assert "No runs yet" in words(visit(root, "runs"))
    shutil.rmtree(root)
    root.write_text("")
    at = visit(root, "runs")
    assert "is a file" in at.error[0].value and "No runs yet" not in words(at)


def test_chips_show_names_as_they_are_and_not_too_many(visit: Visit, tmp_path: Path):
    model = "![x](http://example.org/x.png)"
    with Recorder(tmp_path, config={"model": model}) as recorder:
        for number in range(24):
            recorder.record("input", torch.ones(4), layer=0, module=f"fc{number}", operation="forward", phase="pre")
    at = visit(tmp_path, "explore", model=model, module=[f"fc{number}" for number in range(24)])
    assert chips(at) == ["Module: fc0, fc1 +22", f"Model: {model}"]
    assert model not in "".join(button.label for button in at.button)
    at.button(key="clear_model").click()
    assert "model" not in rerun(at).query_params


def test_an_index_that_stays_damaged_is_named_on_every_way_to_a_page(
    visit: Visit, collected: Path, monkeypatch: pytest.MonkeyPatch
):
    def damaged(*_: object) -> NoReturn:
        raise DamagedIndexError("the index cannot be read")

    monkeypatch.setattr(open_session, "follow_link", damaged)
    assert [error.value for error in visit(collected, "jobs").error] == ["the index cannot be read."]


def test_a_page_that_stops_ends_its_uploads(monkeypatch: pytest.MonkeyPatch):
    closed: list[str] = []
    monkeypatch.setattr(uploads, "close", closed.append)
    for raised, ends in ((StopException, 1), (RerunException(RerunData()), 0), (ValueError, 1)):
        closed.clear()
        with pytest.raises(BaseException), uploads.page():  # noqa: B017, PT011
            raise raised
        assert len(closed) == ends


@pytest.mark.thorough
def test_a_damaged_index_is_made_anew_and_a_toast_says_so(visit: Visit, collected: Path, tmp_path: Path):
    root = roots.copy(collected, tmp_path / "runs")
    before = words(visit(root))
    state.catalog().close()
    state._open.clear()
    state.catalog()
    index = root / "index.duckdb"
    with open(index, "r+b") as file:
        file.seek(12288)  # after the headers
        file.write(bytes(index.stat().st_size - 12288))
    at = visit(root)
    (toast,) = at.toast
    assert "was damaged and has been rebuilt" in re.sub(r"\\([^A-Za-z0-9\s])", r"\1", toast.value)
    assert words(at) == before and not at.error


@pytest.mark.parametrize("page", ["explore", "runs"])
class TestEveryPage:
    @pytest.mark.sampled(1)
    def test_damaged_segment(self, visit: Visit, collected: Path, tmp_path: Path, page: str):
        root = roots.copy(collected, tmp_path / "runs")
        run = roots.runs_of(root)[1]
        segment = min((run / "segments").iterdir())
        roots.replace(segment / "sketch.parquet", b"PAR1 and no more")
        at = visit(root, page)
        assert "A run is damaged or cannot be read: the numbers on this page do not include it" in words(at)
        assert f"{run.name}/{segment.name}" in words(at)
        assert len(explore(at)["rows"]["id"] if page == "explore" else listed(at)) > 0
        if page == "runs":
            assert listed(at)[run.name]["state"][0] == "✕ damaged"
            assert "sketch.parquet has 16 bytes, expected" in words(at)
            assert "(3 done, 1 damaged)" in components(at, "binade_runs")[0]["said"]

    @pytest.mark.sampled(1)
    def test_damaged_run(self, visit: Visit, collected: Path, tmp_path: Path, page: str):
        root = roots.copy(collected, tmp_path / "runs")
        damaged = roots.runs_of(root)[:2]
        roots.replace(damaged[0] / "status.json", b"{")
        roots.replace(damaged[1] / "run.json", b"[]")
        at = visit(root, page)
        assert "2 runs are damaged or cannot be read" in words(at)
        assert all(run.name in words(at) for run in damaged)

    @pytest.mark.thorough
    def test_many_runs(self, visit: Visit, collected: Path, tmp_path: Path, page: str):
        root = tmp_path / "runs"
        root.mkdir()
        sources = roots.runs_of(collected)
        for index in range(40):
            roots.copy_run(sources[index % len(sources)], root / f"20260101_000000_copy_{index:06x}")
        if page == "runs":
            at = visit(root, page)
            assert len(listed(at)) == 40
            return
        with Catalog.open(root) as catalog:
            rows = catalog.tensors()
        at = visit(root, page, format="mxfp4", by="run_id", rows="iteration")  # else one iteration of the newest run
        data = explore(at)
        assert data["note"] == f"1 to 5,000 of {len(rows):,} tensors" and data["pages"] == [None, 5000]
        data = explore(visit(root, page, format="mxfp4", by="run_id", rows="iteration", after="5000"))
        assert data["note"] == f"5,001 to {min(10_000, len(rows)):,} of {len(rows):,} tensors" and data["pages"][0] == 0
        assert len(data["rows"]["id"]) == min(5000, len(rows) - 5000)

    @pytest.mark.sampled(1)
    def test_runs_that_come_and_go_while_the_page_is_open(
        self, visit: Visit, collected: Path, tmp_path: Path, page: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr("binade.app.frame.state.SYNC_SECONDS", 0.0)
        root = roots.copy(collected, tmp_path / "runs")
        (gone,) = [run for run in roots.runs_of(root) if "mxfp4" in run.name]
        at = visit(root, page, **({"quant_type": "mxfp4"} if page == "explore" else {}))
        shutil.move(gone, tmp_path / gone.name)
        rerun(at)
        if page == "explore":
            assert not components(at, "binade_explore")
        else:
            assert recipes_listed(at, root) == RECIPES - {"mxfp4"}
        shutil.move(tmp_path / gone.name, gone)
        rerun(at)
        if page == "explore":
            assert drawn_groups(at)
        else:
            assert recipes_listed(at, root) == RECIPES


@pytest.mark.parametrize(("name", "value"), [("range", "-4..-1"), ("channel", "0")])
def test_a_chart_says_what_is_marked_in_it_as_data(visit: Visit, collected: Path, name: str, value: str):
    at = visit(collected, "tensor", view="why", format="hifp8", **{name: value})
    assert any(data["marked"] is not None for data in chart_data(at))


class TestFilesThatCannotBeRead:
    @pytest.fixture
    def root(self, collected: Path, tmp_path: Path) -> Path:
        return roots.copy(collected, tmp_path / "runs")

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("kept", [0, 1, 3000])
    def test_cut_short(self, visit: Visit, root: Path, kept: int):
        tensor_id = first(root, quant_type=["mxfp8"], tensor_name=["key"])
        with Catalog.open(root) as catalog:
            path = catalog.path(tensor_id)
        roots.replace(path, path.read_bytes()[:kept])
        at = visit(root, tensor=tensor_id)
        assert at.error[0].value == plain("A tensor file cannot be read: drawn from the sketch instead.")
        assert path.name in words(at) and "\x1b" not in words(at)
        assert drawn_groups(at)

    @pytest.mark.thorough
    def test_deleted(self, visit: Visit, root: Path):
        ids = [first(root, quant_type=[name], tensor_name=["key"]) for name in ("mxfp8", "mxfp4")]
        with Catalog.open(root) as catalog:
            for tensor_id in ids:
                catalog.path(tensor_id).unlink()
        at = visit(root, tensor=[*ids, first(root, quant_type=["bf16"], tensor_name=["key"])])
        assert "2 tensor files cannot be read" in at.error[0].value
        assert "is missing: it was moved or deleted" in words(at)
        assert len(drawn_groups(at)) == 3

    def test_not_kept(self, visit: Visit, tmp_path: Path):
        odd = roots.odd_tensors()
        ids = roots.record(tmp_path, [odd["huge"], odd["constant"]], max_bytes=0)
        at = visit(tmp_path, tensor=ids)
        assert scope(at).endswith("· 0 with values")
        assert words(at).count("were not kept: drawn from its sketch") == 2
        assert not at.error


class TestOddTensors:
    @pytest.mark.sampled(2)
    @pytest.mark.parametrize("axis", ["log2", "linear"])
    @pytest.mark.parametrize("number", range(len(roots.odd_tensors())), ids=list(roots.odd_tensors()))
    def test_one(self, visit: Visit, odd_root: Path, number: int, axis: str):
        at = visit(odd_root, tensor=first(odd_root, layer_index=[number + 1]), axis=axis)
        name = list(roots.odd_tensors())[number]
        if name in ("all NaN", "all infinite", "empty"):
            assert "Nothing to draw: there are no finite values." in words(at)
        if name in ("constant", "zeros", "single"):
            assert "all values are equal" in words(at)
        if name == "zeros" and axis == "log2":
            assert "all finite values are zero" in words(at)
        if name == "some NaN":
            assert re.search(r"Not drawn: \d+ NaN", words(at))

    def test_all_together(self, visit: Visit, odd_root: Path):
        at = visit(odd_root)
        assert "2,048 infinite" in words(at)
        at = visit(odd_root, by="layer_index", axis="linear")
        assert len(statistics(at)) == len(roots.odd_tensors())

    def test_numbers_too_large_for_a_number_column_are_text(self, visit: Visit, odd_root: Path):
        at = visit(odd_root, tensor=first(odd_root, layer_index=[list(roots.odd_tensors()).index("huge") + 1]))
        assert re.fullmatch(r"[23]\.\d·10³⁸", statistics(at)["max"].iloc[0])


def test_times_are_in_utc(visit: Visit, collected: Path):
    for cells in listed(visit(collected, "runs")).values():
        text, seconds = cells["started"]
        assert datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S") == text
        assert 0 <= time.time() - seconds < 86_400


def test_drawing_pages_exempts_nothing_more_from_garbage_collection(collected: Path, monkeypatch):
    """Streamlit runs main.py anew for every drawing. Garbage in cycles that `gc.freeze` exempts is never freed."""
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(collected))
    at = AppTest.from_file(Path(state.__file__).parents[1] / "main.py", default_timeout=120)
    try:
        rerun(at)
        frozen = gc.get_freeze_count()
        rerun(rerun(at))
        assert gc.get_freeze_count() <= frozen
    finally:
        close_pages([str(collected)])
