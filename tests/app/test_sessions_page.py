"""Sessions in the app: saved from a page, listed, read, changed, compared, deleted; and where nothing may be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from binade.app.report import sessions as report
from binade.app.sessions import pins, session, storage
from binade.app.sessions.pins import draw
from binade.app.sessions.session import Pin, RunReference
from binade.app.view import View
from binade.cli import main
from binade.data.catalog import Catalog
from binade.data.filter import Filter
from tests.app import roots
from tests.app.test_pages import Visit, chart_data, charts, chips, rerun, words

pytestmark = pytest.mark.slow

VIEW = View("map", {"quant_type": ["mxfp4"], "metric": ["saturated"], "format": ["mxfp4"]})
EXPLORE = {"view": ["explore"]}
READ = {"view": "sessions", "part": "read"}  # what a session's link asks for


@pytest.fixture
def root(collected: Path, tmp_path: Path) -> Path:
    return roots.copy(collected, tmp_path / "root")


def saved(root: Path, name: str = "A finding", **more) -> session.Session:
    with Catalog.open(root) as catalog:
        marked = pins.refreshed(catalog, session.new(name, VIEW, **more))
    return storage.save(root, marked)[0]


def sessions_page(visit: Visit, root: Path):
    return visit(root, "notebook", view="sessions")


def turn_to(at, part: str):
    at.button_group(key="part").set_value(part)
    return rerun(at)


def press(at, label: str, nth: int = 0):
    [button for button in at.button if button.label == label][nth].click()
    return rerun(at)


def latest(root: Path) -> session.Session:
    (version,), problems = storage.list_sessions(root)
    assert not problems
    return version.session


def test_a_root_without_sessions_or_runs(visit: Visit, collected: Path, tmp_path: Path):
    for place in (collected, tmp_path / "nothing"):
        at = sessions_page(visit, place)
        assert "No saved sessions yet" in words(at)
        assert "No session is open" in words(turn_to(at, "open"))
        assert "nothing to compare" in words(turn_to(at, "compare"))
    assert [each.label for each in visit(collected, "map").button if each.label == "Save session"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", ["map", "tensor", "explore", "runs"])
def test_an_empty_root_has_parts_and_nothing_to_save_or_filter(visit: Visit, tmp_path: Path, page: str):
    at = visit(tmp_path / "nothing", page)
    assert "No runs yet" in words(at) and not [each for each in at.button if each.label in ("Save session", "Clear")]
    assert (page in ("map", "explore")) != bool([each for each in at.get("button_group") if each.key == "page_part"])


def test_saving_a_view_from_its_page(visit: Visit, root: Path):
    at = visit(root, "map", across="iteration", quant_type="mxfp8")
    (name,) = (field for field in at.text_input if field.key != "filter_name")
    name.set_value("Drift of mxfp8")
    at = press(rerun(at), "Save session")
    one = latest(root)
    assert one.name == "Drift of mxfp8" and one.view.page == "map" and one.id.startswith("drift-of-mxfp8-")
    own = {"view": ["map"], "across": ["iteration"], "quant_type": ["mxfp8"]}
    scope = {
        "metric": ["sqnr_vs_normal"],
        "format": ["used"],
        "experts": ["none"],
    }  # the defaults that it was saved with
    assert one.view.params == own | scope
    assert [run.run_id for run in one.runs] == [run.name for run in roots.runs_of(root) if "mxfp8" in run.name]
    at = press(at, "Save as new")
    assert len(storage.list_sessions(root)[0]) == 2


@pytest.mark.thorough
def test_a_link_shows_the_view_and_says_what_differs(visit: Visit, root: Path):
    one = saved(root, pins=(Pin("map", VIEW.params, "map"),))
    at = visit(root, "notebook", **READ, session=one.id)
    assert at.title[0].value == "Notebook › Sessions" and not at.warning and charts(at) == 1  # its pins and notes
    at = press(at, "Open page")
    assert at.title[0].value == "Map › Map" and at.session_state["shown_view"] == VIEW
    assert at.session_state["filter_metric"] == "saturated" and chips(at) == ["Quant type: mxfp4"]
    storage.save(root, replace(one, runs=(*one.runs, RunReference("elsewhere", "0" * 64))))
    config = next(path for path in root.glob("*mxfp4*/run.json"))
    roots.replace(config, config.read_bytes() + b"\n")
    text = words(visit(root, "runs", session=one.id))
    assert "Run elsewhere is missing" in text and "has changed since the session was saved" in text
    beside = visit(root, "explore", session=one.id, quant_type="mxfp8")  # the address's own view stays
    assert beside.title[0].value == "Explore › Explore" and chips(beside) == ["Quant type: mxfp8"]
    assert "A finding" in "".join(each.proto.body for each in beside.get("html"))


@pytest.mark.thorough
def test_a_run_that_came_later_is_said_and_not_in_its_pins(visit: Visit, root: Path, tmp_path: Path):
    late = next(run for run in roots.runs_of(root) if "mxfp4" in run.name)
    late.rename(tmp_path / late.name)
    with Catalog.open(root) as catalog:
        wanted = session.new("All of it", View("explore", EXPLORE), pins=(Pin("explore", EXPLORE, "histogram"),))
        one, _ = storage.save(root, pins.refreshed(catalog, wanted))
        seen = draw(catalog, one.pins[0]).figures[0]
    (tmp_path / late.name).rename(late)
    at = visit(root, "notebook", **READ, session=one.id)
    assert at.title[0].value == "Notebook › Sessions"
    assert "1 run in this root does not belong to this session" in words(at)
    at = turn_to(press(sessions_page(visit, root), "Read"), "open")
    spec = json.loads(chart_data(at)[0]["spec"])
    assert spec["title"] == json.loads(seen.on_page.spec)["title"]
    at.text_area[0].set_value("a word")
    press(rerun(at), "Save")
    now = storage.load(root, one.id).session
    assert now.notes == "a word" and now.run_ids == one.run_ids  # a note brings no run in
    with Catalog.open(root) as catalog:
        written = storage.export_bundle(catalog, now, tmp_path / "b.zip")
        assert len(pins.refreshed(catalog, wanted).runs) == 4
        pinned = next(report.contributions(catalog, now, "")).figures[0]
    assert written.runs == 3 and pinned.caption == seen.caption
    page = visit(root, "explore", session=one.id, by="operation")
    at = press(page, "Save session")  # the page as it is now, with the late run
    assert "now includes 1 more run" in words(at)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", ["gone", "../../etc", "", "A" * 5000])
def test_a_link_to_nothing_shows_the_page(visit: Visit, root: Path, asked: str):
    at = visit(root, "map", session=asked)
    assert at.title[0].value == "Map › Map" and "session" not in at.query_params
    assert "This link cannot be opened" in words(at)


@pytest.mark.thorough
def test_reading_changing_and_saving(visit: Visit, root: Path):
    one = saved(root, notes="was", pins=(Pin("map", VIEW.params, "map", "cap"), Pin("runs", {}, "losses")))
    at = turn_to(press(sessions_page(visit, root), "Read"), "open")
    assert charts(at) == 2 and "saved as version 1" in words(at).lower()
    at.text_area[0].set_value("![x](http://a/b.png) *now*")
    at = rerun(at)
    assert "\\!\\[x" in "".join(str(m.value) for m in at.markdown) and "changed since version 1" in words(at).lower()
    at.button(key="down_0").click()
    at = rerun(at)
    [field for field in at.text_input if field.label == "Caption"][1].set_value("new words")
    at = press(rerun(at), "Save")
    now = latest(root)
    assert now.notes.endswith("*now*") and [pin.chart for pin in now.pins] == ["losses", "map"]
    assert now.pins[1].caption == "new words" and now.id == one.id
    assert storage.load(root, one.id, 1).session == one
    at.button(key="unpin_0").click()
    assert charts(rerun(at)) == 1


def test_a_link_is_for_reading_and_a_copy_is_edited(visit: Visit, root: Path):
    with Catalog.open(root) as catalog:
        row = catalog.tensors(Filter(quant_type=["mxfp4"], tensor_name=["input"])).iloc[0]
        shown = Pin("tensor", {"view": ["why"], "tensor": [row["tensor_id"]], "format": ["mxfp4"]}, "codebook", "Why")
        drawn = draw(catalog, shown)
    one = saved(root, notes="*Read this*", pins=(shown,))
    at = visit(root, "notebook", **READ, session=one.id)
    assert at.header[0].value == one.name and at.subheader[0].value == "Why" and charts(at) == 1
    assert not at.text_area and not [field for field in at.text_input if field.label in ("Name", "Caption")]
    assert any(f"{row['module']} input" in caption.value for caption in at.caption)
    assert drawn.verdict.headline and drawn.verdict.headline in words(at)
    at = press(at, "Edit a copy")
    at.text_area[0].set_value("mine")
    rerun(at)
    copy = at.session_state["draft"].session
    assert copy.id != one.id and copy.notes == "mine" and copy.pins == one.pins
    assert storage.load(root, one.id).session.notes == "*Read this*"


@pytest.mark.thorough
def test_a_save_elsewhere_meanwhile_is_said_and_kept(visit: Visit, root: Path):
    one = saved(root)
    at = turn_to(press(sessions_page(visit, root), "Read"), "open")
    storage.save(root, replace(one, notes="theirs"))
    at.text_area[0].set_value("ours")
    at = press(rerun(at), "Save")
    assert "also saved elsewhere" in words(at)
    assert [version.session.notes for version in storage.history(root, one.id)[0]] == ["ours", "theirs", ""]


def test_of_two_tabs_with_one_session_none_loses_its_text(visit: Visit, root: Path):
    """Both have its address open. The second that writes gets a session of its own, which a new tab can open."""
    one = saved(root, notes="before")
    opened = {"view": "sessions", "part": "open", "session": one.id}
    first, second = visit(root, "notebook", **opened), visit(root, "notebook", **opened)
    first.text_area[0].set_value("written by the first")
    assert "changed in another tab" not in words(rerun(first))
    second.text_area[0].set_value("written by the second")
    rerun(second)
    assert "“A finding” was changed in another tab or by someone else. Your changes are now a session" in words(second)
    assert second.text_area[0].value == "written by the second"
    copy = second.session_state["draft"].session.id
    assert copy != one.id and copy in second.query_params["session"]
    for at, text in ((first, "more by the first"), (second, "more by the second"), (first, "and more by the first")):
        at.text_area[0].set_value(text)
        rerun(at)
        press(at, "Close") if at is second else None
    for session_id, text in ((one.id, "and more by the first"), (copy, "more by the second")):
        again = visit(root, "notebook", **opened | {"session": session_id})
        assert again.text_area[0].value == text
    assert storage.load(root, one.id).session.notes == "before" and len(storage.list_sessions(root)[0]) == 2


def test_saving_and_discarding_leave_the_draft_of_another_tab(visit: Visit, root: Path):
    one = saved(root)
    opened = {"view": "sessions", "part": "open", "session": one.id}
    first, second, third = (visit(root, "notebook", **opened) for _ in range(3))
    first.text_area[0].set_value("saved by the first")
    rerun(first)
    fourth = visit(root, "notebook", **opened)  # with the draft of the first
    fourth.text_area[0].set_value("saved by the first, and changed by the fourth")
    rerun(fourth)
    press(first, "Save")
    second.text_area[0].set_value("by the second")
    press(rerun(second), "Discard")
    draft = storage.draft_of(root, one.id)
    assert draft and draft.session.notes == "saved by the first, and changed by the fourth"
    assert storage.load(root, one.id).session.notes == "saved by the first"
    assert third.text_area[0].value == ""


def test_comparing_and_deleting(visit: Visit, root: Path):
    one = saved(root)
    storage.save(root, replace(one, notes="more"))
    at = turn_to(sessions_page(visit, root), "compare")
    assert at.dataframe[0].value.values.tolist() == [["Notes", "more", "–"]]
    at = turn_to(at, "saved")
    assert "2 versions" in words(at)
    delete = at.button(key=f"delete_{one.id}")
    assert delete.disabled
    at.checkbox(key=f"sure_{one.id}").check()
    at = rerun(at)
    at.button(key=f"delete_{one.id}").click()
    at = rerun(at)
    assert "No saved sessions yet" in words(at) and not list(storage.folder(root).iterdir())
    assert roots.runs_of(root)


def test_deleting_what_is_open(visit: Visit, root: Path):
    """A saved session stays open as a draft, which the address may name; a draft is closed."""
    one = saved(root)
    at = turn_to(press(sessions_page(visit, root), "Read"), "saved")
    for there in (True, False):
        at.checkbox(key=f"sure_{one.id}").check()
        at = rerun(at)
        at.button(key=f"delete_{one.id}").click()
        at = rerun(at)
        assert (storage.folder(root) / one.id / "draft.json").exists() == there
        assert ("session" in at.query_params) == (at.session_state["draft"] is not None) == there
    assert "A finding" not in "".join(each.proto.body for each in at.get("html"))


def test_read_only(visit: Visit, root: Path, monkeypatch: pytest.MonkeyPatch):
    one = saved(root)
    monkeypatch.setenv("BINADE_READ_ONLY", "1")
    at = visit(root, "map")
    assert [button.disabled for button in at.button if button.label == "Save"] == [True]
    components = {each.proto.component_name: json.loads(each.proto.json) for each in at.get("bidi_component")}
    assert components["binade_map"]["pin"] is False
    at = sessions_page(visit, root)
    assert not [button for button in at.button if button.label == "Delete"]
    at = press(at, "Read")
    assert [button.disabled for button in at.button if button.label == "Edit a copy"] == [True]
    at = turn_to(at, "open")
    assert [button.disabled for button in at.button if button.label == "Save"] == [True]
    assert "Nothing can be imported" in words(turn_to(at, "import"))
    assert storage.load(root, one.id).number == 1


@pytest.mark.thorough
def test_a_session_of_a_page_that_is_not_served(visit: Visit, root: Path, monkeypatch: pytest.MonkeyPatch):
    view, pin = View("notebook", {"view": ["sql"], "q": ["SELECT 1"]}), Pin("map", VIEW.params, "map")
    one, _ = storage.save(root, session.new("By SQL", view, pins=(pin,)))
    assert press(visit(root, "notebook", **READ, session=one.id), "Open page").title[0].value == "Notebook › SQL"
    monkeypatch.setenv("BINADE_READ_ONLY", "1")
    at = press(visit(root, "notebook", **READ, session=one.id), "Open page")
    assert at.title[0].value == "Notebook › Sessions" and charts(at) == 1
    assert "Viewers cannot open the session's page, SQL." in words(at)
    at = press(at, "Open page")
    assert (
        at.title[0].value == "Notebook › Sessions"
        and words(at).count("Viewers cannot open the session's page, SQL.") == 1
    )


def test_a_name_is_text_wherever_it_is_told(visit: Visit, root: Path):
    one = saved(root, "![p](http://203.0.113.7/n.png) <b>*x*</b> [a](b)")
    at = turn_to(press(sessions_page(visit, root), "Read"), "open")
    at.text_area[0].set_value("changed")
    at = press(rerun(at), "Save")
    told = [toast.value for toast in at.toast]
    at = turn_to(at, "saved")
    at.checkbox(key=f"sure_{one.id}").check()
    at = rerun(at)
    at.button(key=f"delete_{one.id}").click()
    told += [toast.value for toast in rerun(at).toast]
    assert [word.split()[0] for word in told] == ["Saved", "Deleted"]
    for word in told:
        kinds = {token.type for token in MarkdownIt("commonmark").parseInline(word)[0].children or []}
        assert kinds == {"text"} and one.name in MarkdownIt("commonmark").parseInline(word)[0].children[0].content


def test_a_damaged_session_is_named(visit: Visit, root: Path):
    one = saved(root)
    (storage.folder(root) / one.id / "0001.json").write_bytes(b"{")
    at = sessions_page(visit, root)
    assert "Version 1" in words(at) and "not JSON" in words(at)


@pytest.mark.thorough
def test_a_report_says_which_runs_are_only_baselines(root: Path):
    one = saved(root, pins=(Pin("tensor", {"view": ["drift"], "recipe": ["mxfp4"]}, "three_way"),))
    with Catalog.open(root) as catalog:
        runs = report.runs_of(catalog, one).set_index("recipe")["shown"]
        (table, *_) = [t for s in report.contributions(catalog, one, "") for t in s.tables if t.name == "runs"]
    assert runs.to_dict() == {"mxfp4": "selected", "bf16": "baseline only"}
    assert table.frame.set_index("recipe")["shown"].to_dict() == runs.to_dict()


@pytest.mark.thorough
def test_a_session_goes_to_another_root_with_its_runs(root: Path, tmp_path: Path):
    one = saved(root, pins=(Pin("tensor", {"view": ["drift"], "recipe": ["mxfp4"]}, "three_way"),))
    with Catalog.open(root) as catalog:
        written = storage.export_bundle(catalog, one, tmp_path / "a.zip")
    assert (written.runs, written.with_values) == (2, 2)  # the tensor's run, and the bf16 run it is compared with
    taken, version = storage.import_bundle(tmp_path / "other", tmp_path / "a.zip")
    assert len(taken.added) == 2 and version and version.number == 1
    session_ = version.session
    assert pins.missing_runs(tmp_path / "other", session_) == []
    assert storage.import_bundle(tmp_path / "other", tmp_path / "a.zip")[1] == version  # again: nothing new
    with Catalog.open(root) as ours, Catalog.open(tmp_path / "other") as theirs:
        here, there = (draw(catalog, session_.pins[0]) for catalog in (ours, theirs))
    assert here.figures[0].table.equals(there.figures[0].table) and len(here.figures) == 1


def test_the_command_line(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    one = saved(root)
    where = ["--tensor-save-dir", str(root)]
    assert main(["bundle", "list", *where]) == 0 and one.id in capsys.readouterr().out
    out = tmp_path / "b.zip"
    assert main(["bundle", "export", one.id, "--output", str(out), "--values", "none", *where]) == 0
    assert "0 with their values" in capsys.readouterr().out
    assert main(["bundle", "import", str(out), "--tensor-save-dir", str(tmp_path / "other")]) == 0
    assert f"session {one.id}, version 1" in capsys.readouterr().out
    for arguments in (["export", "no-such", "--output", str(out)], ["import", str(tmp_path / "absent.zip")]):
        assert main(["bundle", *arguments, *where]) == 1
        error = capsys.readouterr().err
        assert error.startswith("binade: ") and error.count("\n") == 1
    assert main(["bundle", "export", one.id]) == 2 and "'--output'" in capsys.readouterr().err
