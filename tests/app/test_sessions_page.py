"""Sessions in the app: started from a page, listed, read, changed, deleted; and where nothing may be."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from binade.app.report import sessions as report
from binade.app.sessions import pins, session, storage
from binade.app.sessions.log import Add, Note
from binade.app.sessions.pins import draw
from binade.app.sessions.session import Pin, RunReference
from binade.app.view.view import View
from binade.cli import main
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
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
    return storage.create(root, marked).session


def sessions_page(visit: Visit, root: Path):
    return visit(root, "notebook", view="sessions")


def turn_to(at, part: str):
    at.button_group(key="part").set_value(part)
    return rerun(at)


def press(at, label: str, nth: int = 0):
    [button for button in at.button if button.label == label][nth].click()
    return rerun(at)


def latest(root: Path) -> session.Session:
    (saved,), problems = storage.list_sessions(root)
    assert not problems
    return saved.session


def test_a_root_without_sessions_or_runs(visit: Visit, collected: Path, tmp_path: Path):
    for place in (collected, tmp_path / "nothing"):
        at = sessions_page(visit, place)
        assert "No saved sessions yet" in words(at)
        assert "No session is open" in words(turn_to(at, "open"))
    assert [field for field in visit(collected, "map").text_input if field.label == "Name"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("page", ["map", "tensor", "explore", "runs"])
def test_an_empty_root_has_parts_and_nothing_to_save_or_filter(visit: Visit, tmp_path: Path, page: str):
    at = visit(tmp_path / "nothing", page)
    assert "No runs yet" in words(at) and not [each for each in at.button if each.label == "Clear"]
    assert not [field for field in at.text_input if field.label == "Name"]
    assert (page in ("map", "explore")) != bool([each for each in at.get("button_group") if each.key == "page_part"])


def test_a_name_starts_a_session_at_the_page_and_renames_it(visit: Visit, root: Path):
    at = visit(root, "map", across="iteration", quant_type="mxfp8")
    name_of(at).set_value("Drift of mxfp8")
    at = rerun(at)
    one = latest(root)
    assert one.name == "Drift of mxfp8" and one.view.page == "map" and one.id.startswith("drift-of-mxfp8-")
    own = {"view": ["map"], "across": ["iteration"], "quant_type": ["mxfp8"]}
    scope = {
        "metric": ["sqnr_vs_normal"],
        "format": ["used"],
        "experts": ["none"],
    }  # the defaults that it was started with
    assert one.view.params == own | scope
    assert [run.run_id for run in one.runs] == [run.name for run in roots.runs_of(root) if "mxfp8" in run.name]
    name_of(at).set_value("Another name")
    at = rerun(at)
    assert latest(root) == replace(one, name="Another name", saved=latest(root).saved)
    name_of(at).set_value(" ")
    rerun(at)
    assert latest(root).name == "Another name"


def name_of(at):
    (field,) = (field for field in at.text_input if field.label == "Name")
    return field


@pytest.mark.thorough
def test_a_link_shows_the_view_and_says_what_differs(visit: Visit, root: Path):
    one = saved(root, pins=(Pin("map", VIEW.params, "map"),))
    at = visit(root, "notebook", **READ, session=one.id)
    assert at.title[0].value == "Notebook › Sessions" and not at.warning and charts(at) == 1  # its pins and notes
    at = press(at, "Open page")
    assert at.title[0].value == "Map › Map" and at.session_state["shown_view"] == VIEW
    assert [box.value for box in at.selectbox if box.label == "Color"] == ["saturated"] and chips(at) == [
        "Quant type: mxfp4"
    ]
    other = Pin("map", VIEW.params, "map", "of a run that is elsewhere")
    storage.append(root, one.id, Add(other, (RunReference("elsewhere", "0" * 64),)))
    config = next(path for path in root.glob("*mxfp4*/run.json"))
    roots.replace(config, config.read_bytes() + b"\n")
    text = words(visit(root, "runs", session=one.id))
    assert "Run elsewhere is missing" in text and "has changed since it was pinned" in text
    beside = visit(root, "explore", session=one.id, quant_type="mxfp8")  # the address's own view stays
    assert beside.title[0].value == "Explore › Explore" and chips(beside) == ["Quant type: mxfp8"]
    assert "A finding" in "".join(each.proto.body for each in beside.get("html"))


@pytest.mark.thorough
def test_a_run_that_came_later_is_said_and_not_in_its_pins(visit: Visit, root: Path, tmp_path: Path):
    late = next(run for run in roots.runs_of(root) if "mxfp4" in run.name)
    late.rename(tmp_path / late.name)
    with Catalog.open(root) as catalog:
        wanted = session.new("All of it", View("explore", EXPLORE), pins=(Pin("explore", EXPLORE, "histogram"),))
        one = storage.create(root, pins.refreshed(catalog, wanted)).session
        seen = draw(catalog, one.pins[0]).figures[0]
    (tmp_path / late.name).rename(late)
    at = visit(root, "notebook", **READ, session=one.id)
    assert at.title[0].value == "Notebook › Sessions"
    assert "1 run in this root does not belong to this session" in words(at)
    at = turn_to(press(sessions_page(visit, root), "Read"), "open")
    spec = json.loads(chart_data(at)[0]["spec"])
    assert spec["title"] == json.loads(seen.on_page.spec)["title"]
    at.text_area[0].set_value("a word")
    rerun(at)
    now = storage.load(root, one.id).session
    assert now.notes == "a word" and now.run_ids == one.run_ids  # a note brings no run in
    with Catalog.open(root) as catalog:
        written = storage.export_bundle(catalog, now, tmp_path / "b.zip")
        assert len(pins.refreshed(catalog, wanted).runs) == 4
        pinned = next(report.contributions(catalog, now, "")).figures[0]
    assert written.runs == 3 and pinned.caption == seen.caption
    at = visit(root, "tensor", session=one.id, view="pair")
    at.session_state["pin_first"] = True  # the key p
    assert "now includes 1 more run" in words(rerun(rerun(at)))
    assert len(storage.load(root, one.id).session.runs) == 4


@pytest.mark.sampled(1)
@pytest.mark.parametrize("asked", ["gone", "../../etc", "", "A" * 5000])
def test_a_link_to_nothing_shows_the_page(visit: Visit, root: Path, asked: str):
    at = visit(root, "map", session=asked)
    assert at.title[0].value == "Map › Map" and "session" not in at.query_params
    assert "This link cannot be opened" in words(at)


@pytest.mark.thorough
def test_each_change_is_kept_at_once(visit: Visit, root: Path):
    one = saved(root, notes="was", pins=(Pin("map", VIEW.params, "map", "cap"), Pin("runs", {}, "losses")))
    at = turn_to(press(sessions_page(visit, root), "Read"), "open")
    assert charts(at) == 2
    at.text_area[0].set_value("![x](http://a/b.png) *now*")
    at = rerun(at)
    assert "\\!\\[x" in "".join(str(m.value) for m in at.markdown) and latest(root).notes.endswith("*now*")
    at.button(key="down_0").click()
    at = rerun(at)
    assert [pin.chart for pin in latest(root).pins] == ["losses", "map"]
    at.button(key="up_0").click()
    at = rerun(at)
    assert latest(root).pins == one.pins
    caption_of(at, 1).set_value("new words")
    at = rerun(at)
    assert [pin.caption for pin in latest(root).pins] == ["cap", "new words"] and latest(root).id == one.id


def caption_of(at, index: int):
    return [field for field in at.text_input if field.label == "Caption"][index]


def test_a_deleted_pin_comes_back(visit: Visit, root: Path):
    one = saved(root, pins=(Pin("map", VIEW.params, "map", "first"), Pin("runs", {}, "losses", "second")))
    edited = {"view": "sessions", "part": "open", "session": one.id}
    at, other = visit(root, "notebook", **edited), visit(root, "notebook", **edited)
    at.button(key="unpin_0").click()
    at = rerun(at)
    assert charts(at) == 1 and "Deleted: first" in words(at) and latest(root).pins == one.pins[1:]
    caption_of(other, 0).set_value("written elsewhere")  # this tab still shows both
    other = rerun(other)
    assert charts(other) == 1 and "Deleted: written elsewhere" in words(other)
    other = press(other, "Undo")
    assert charts(other) == 2 and [pin.caption for pin in latest(root).pins] == ["written elsewhere", "second"]
    assert "Deleted:" not in words(other)
    assert charts(rerun(at)) == 2 and caption_of(at, 0).value == "written elsewhere"


def test_of_two_tabs_with_one_session_none_loses_anything(visit: Visit, root: Path):
    """Both have its address open, and each shows what the other has changed when it is drawn again."""
    one = saved(root, notes="before")
    opened = {"view": "sessions", "part": "open", "session": one.id}
    first, second = visit(root, "notebook", **opened), visit(root, "notebook", **opened)
    first.text_area[0].set_value("before, and by the first")
    rerun(first)
    second.text_area[0].set_value("before\nby the second")
    rerun(second)
    assert latest(root).notes == "before, and by the first\nby the second" == second.text_area[0].value
    assert rerun(first).text_area[0].value == latest(root).notes
    name_of(first).set_value("Renamed")
    rerun(first)
    assert name_of(rerun(second)).value == "Renamed" == latest(root).name
    press(second, "Close")
    assert "session" not in second.query_params and "No session is open" in words(second)
    storage.delete(root, one.id)
    assert "There is no session" in words(rerun(first)) and "No session is open" in words(first)
    assert "session" not in first.query_params


def test_a_note_that_cannot_be_kept_stays_in_its_field(visit: Visit, root: Path):
    one = saved(root, notes="before")
    at = visit(root, "notebook", view="sessions", part="open", session=one.id)
    path = storage.folder(root) / f"{one.id}.jsonl"
    content = path.read_bytes()
    path.unlink()
    path.symlink_to(root / "nowhere")
    at.text_area[0].set_value("typed for an hour")
    at = rerun(at)
    assert "a symbolic link, which is not followed" in words(at)
    path.unlink()
    path.write_bytes(content)
    at = visit(root, "notebook", view="sessions", part="open", session=one.id)
    at.text_area[0].set_value("y" * 49_990 + "\n")
    rerun(at)
    storage.append(root, one.id, Note("other\n" * 100, latest(root).notes))
    at.text_area[0].set_value("z" * 49_990)
    at = rerun(at)
    assert "notes is longer than 50000" in words(at)


def test_a_link_is_for_reading(visit: Visit, root: Path):
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


def test_deleting(visit: Visit, root: Path):
    one, other = saved(root), saved(root, "Another")
    at = turn_to(press(sessions_page(visit, root), "Read", 1), "saved")
    assert at.query_params["session"] == [one.id] or at.query_params["session"] == one.id
    for session_id in (other.id, one.id):
        assert at.button(key=f"delete_{session_id}").disabled
        at.checkbox(key=f"sure_{session_id}").check()
        at = rerun(at)
        at.button(key=f"delete_{session_id}").click()
        at = rerun(at)
        assert ("session" in at.query_params) == (session_id == other.id)
    assert "No saved sessions yet" in words(at) and not list(storage.folder(root).iterdir())
    assert roots.runs_of(root) and "A finding" not in "".join(each.proto.body for each in at.get("html"))


def test_read_only(visit: Visit, root: Path, monkeypatch: pytest.MonkeyPatch):
    one = saved(root)
    monkeypatch.setenv("BINADE_READ_ONLY", "1")
    at = visit(root, "map")
    assert [button.disabled for button in at.button if button.label == "Session"] == [True]
    components = {each.proto.component_name: json.loads(each.proto.json) for each in at.get("bidi_component")}
    assert components["binade_map"]["pin"] is False
    at = sessions_page(visit, root)
    assert not [button for button in at.button if button.label == "Delete"]
    at = press(at, "Read")
    at = turn_to(at, "open")
    assert not at.text_area and not [field for field in at.text_input if field.label == "Name"]
    assert "Nothing can be imported" in words(turn_to(at, "import"))
    assert latest(root) == one


@pytest.mark.thorough
def test_a_session_of_a_page_that_is_not_served(visit: Visit, root: Path, monkeypatch: pytest.MonkeyPatch):
    view, pin = View("notebook", {"view": ["sql"], "q": ["SELECT 1"]}), Pin("map", VIEW.params, "map")
    one = storage.create(root, session.new("By SQL", view, pins=(pin,))).session
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
    at = visit(root, "tensor", session=one.id, view="pair")
    at.session_state["pin_first"] = True  # the key p
    told = [toast.value for toast in rerun(at).toast]
    at = sessions_page(visit, root)
    at.checkbox(key=f"sure_{one.id}").check()
    at = rerun(at)
    at.button(key=f"delete_{one.id}").click()
    told += [toast.value for toast in rerun(at).toast]
    assert [word.split()[0] for word in told] == ["Pinned", "Deleted"]
    for word in told:
        kinds = {token.type for token in MarkdownIt("commonmark").parseInline(word)[0].children or []}
        assert kinds == {"text"} and one.name in MarkdownIt("commonmark").parseInline(word)[0].children[0].content


def test_a_damaged_session_is_named(visit: Visit, root: Path):
    one = saved(root)
    (storage.folder(root) / f"{one.id}.jsonl").write_bytes(b"{}\n")
    at = sessions_page(visit, root)
    assert f"{one.id}.jsonl cannot be read: line 1 is damaged" in words(at)


@pytest.mark.thorough
def test_a_report_says_which_runs_are_only_baselines(root: Path):
    one = saved(root, pins=(Pin("tensor", {"view": ["pair"], "recipe": ["mxfp4"]}, "magnitudes"),))
    with Catalog.open(root) as catalog:
        runs = report.runs_of(catalog, one).set_index("recipe")["shown"]
        (table, *_) = [t for s in report.contributions(catalog, one, "") for t in s.tables if t.name == "runs"]
    assert runs.to_dict() == {"mxfp4": "selected", "bf16": "baseline only"}
    assert table.frame.set_index("recipe")["shown"].to_dict() == runs.to_dict()


@pytest.mark.thorough
def test_a_session_goes_to_another_root_with_its_runs(root: Path, tmp_path: Path):
    one = saved(root, pins=(Pin("tensor", {"view": ["pair"], "recipe": ["mxfp4"]}, "magnitudes"),))
    with Catalog.open(root) as catalog:
        written = storage.export_bundle(catalog, one, tmp_path / "a.zip")
    assert (written.runs, written.with_values) == (2, 2)  # the tensor's run, and the bf16 run it is compared with
    taken, imported = storage.import_bundle(tmp_path / "other", tmp_path / "a.zip")
    assert len(taken.added) == 2 and imported and imported.session.id == one.id
    session_ = imported.session
    assert pins.missing_runs(tmp_path / "other", session_) == []
    assert storage.import_bundle(tmp_path / "other", tmp_path / "a.zip")[1] == imported  # again: nothing new
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
    assert f"session {one.id}: A finding" in capsys.readouterr().out
    for arguments in (["export", "no-such", "--output", str(out)], ["import", str(tmp_path / "absent.zip")]):
        assert main(["bundle", *arguments, *where]) == 2
        error = capsys.readouterr().err
        assert error.startswith("binade: ") and error.count("\n") == 1
    assert main(["bundle", "export", one.id]) == 2 and "'--output'" in capsys.readouterr().err
