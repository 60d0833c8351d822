"""A finding travels: built by clicking, opened by its link in another browser profile, the same numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page

from binade.app.sessions import session as sessions
from binade.app.sessions import storage
from binade.app.view.view import View
from binade.data.index.catalog import Catalog
from binade.data.run.directory import fingerprint
from tests.app import roots
from tests.browser.driver import choose, press, serving, settle, turn_to
from tests.browser.test_explore import marks

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]


@pytest.fixture(scope="module")
def own_root(collected: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The collected runs under a root that may be written to."""
    return roots.copy(collected, tmp_path_factory.mktemp("sessions") / "root")


@pytest.fixture(scope="module")
def served(own_root: Path):
    with serving(own_root) as address:
        yield address


def link_of(session_id: str) -> str:
    return f"/notebook?view=sessions&part=read&session={session_id}"


def drawn(page: Page, name: str) -> list[dict[str, str]]:
    """The marks of a chart, by its name on the page."""
    names = page.locator(".chart").evaluate_all(
        "charts => charts.map(chart => chart.closest('[class*=st-key-chart_], section').className)"
    )
    found = [index for index, names_of in enumerate(names) if {f"st-key-chart_{name}", name} & {*names_of.split()}]
    assert len(found) == 1, (name, names)
    return marks(page, found[0])


def pin(page: Page, name: str, pins: str) -> None:
    """Pin a chart, and wait until the header counts it: the message is shown for a moment only."""
    menu = page.locator(f".explore section.{name}, [class*=st-key-chart_{name}]").first
    menu.get_by_role("button", name="Save or pin").click()
    menu.locator(".pin").click()
    page.locator(".st-key-header .session").get_by_text(pins).wait_for()
    settle(page)


def write(page: Page, field: str, text: str) -> None:
    page.get_by_role("textbox", name=field).fill(text)
    page.keyboard.press("Tab")
    settle(page)


def test_built_by_clicking_and_opened_elsewhere(visit: Visit, served: str, own_root: Path):
    page = visit("/", base=served)
    turn_to(page, "Explore")
    choose(page, "Quant type", "mxfp4")
    page.locator(".explore select[name=by]").select_option(label="Layer")
    page.wait_for_function("() => location.search.includes('by=layer_index')")
    settle(page)
    seen = {name: drawn(page, name) for name in ("histogram", "formats")}
    assert all(seen.values())
    pin(page, "histogram", "1 pin")
    turn_to(page, "Map")
    cells = page.locator(".map .cell[data-id]").count()
    page.get_by_role("button", name="Pin", exact=True).click()
    page.locator(".st-key-header .session").get_by_text("2 pins").wait_for()
    settle(page)
    page.get_by_role("button", name="Session", exact=True).click()
    write(page, "Name", "Where mxfp4 flushes")
    page.locator(".st-key-header .session").get_by_text("Where mxfp4 flushes").wait_for()
    link = page.locator("[data-testid=stCode]").get_by_text("session=").inner_text().strip()

    (saved,), problems = storage.list_sessions(own_root)
    assert not problems and link == served + link_of(saved.session.id)
    assert saved.session.name == "Where mxfp4 flushes" and [one.chart for one in saved.session.pins] == [
        "histogram",
        "map",
    ]
    assert saved.session.view.params["quant_type"] == ["mxfp4"] and len(saved.session.runs) == 1

    other = visit(link.removeprefix(served), base=served, own=True)
    assert other.locator("h1").inner_text() == "Notebook › Sessions"
    pinned, shown = (
        {mark.get("group") for mark in each} for each in (drawn(other, "pin0_histogram"), seen["histogram"])
    )
    assert pinned == shown
    assert len([mark for mark in drawn(other, "pin1_map") if "operand" in mark]) == cells
    other.get_by_role("button", name="Open page", exact=True).click()
    settle(other)
    assert other.locator("h1").inner_text() == "Explore › Explore"
    assert "quant_type=mxfp4" in other.url and f"session={saved.session.id}" in other.url
    for name in seen:
        assert drawn(other, name) == seen[name], name
    assert not page.complaints and not other.complaints
    assert all(url.startswith((served, "data:", "blob:", "ws")) for url in page.requests + other.requests)


def test_of_two_tabs_of_a_browser_none_loses_anything(visit: Visit, served: str, own_root: Path):
    """Both edit one session. Each shows what the other has changed, and both survive a reload."""
    pins = (sessions.Pin("runs", {}, "losses", "first"), sessions.Pin("runs", {}, "losses", "second"))
    one = storage.create(own_root, sessions.new("Shared", sessions.View("runs"), notes="before", pins=pins)).session
    tabs = [visit(f"/notebook?view=sessions&part=open&session={one.id}", base=served) for _ in range(2)]
    write(tabs[0], "Notes", "before\nby the first")
    write(tabs[1], "Notes", "before\nby the second")
    both = "before\nby the first\nby the second"
    assert tabs[1].get_by_role("textbox", name="Notes").input_value() == both
    tabs[0].locator(".st-key-pin_0").get_by_role("button", name="Delete").click()
    tabs[0].get_by_text("Deleted: first").wait_for()
    settle(tabs[0])
    assert tabs[0].get_by_role("textbox", name="Notes").input_value() == both
    write(tabs[1], "Name", "Shared by two")
    tabs[1].get_by_role("button", name="Undo").click()
    tabs[1].get_by_text("Deleted: first").wait_for(state="hidden")
    for page in tabs:
        page.reload()
        settle(page)
        assert page.get_by_role("textbox", name="Notes").input_value() == both
        assert page.get_by_role("textbox", name="Name").input_value() == "Shared by two"
        assert [field.input_value() for field in page.get_by_role("textbox", name="Caption").all()] == [
            "first",
            "second",
        ]
        assert not page.complaints
    storage.delete(own_root, one.id)


@pytest.mark.thorough
def test_a_link_to_what_is_absent_says_so(visit: Visit, served: str, own_root: Path, catalog: Catalog):
    view = sessions.View("map", {"run_id": ["gone"], "metric": ["sqnr_db"]})
    run = sessions.RunReference("gone", "0" * 64)
    one = storage.create(own_root, sessions.new("Half of it", view, runs=(run,))).session
    page = visit(link_of(one.id), base=served)
    assert page.locator("h1").inner_text() == "Notebook › Sessions"
    assert "Run gone is missing" in page.locator("[data-testid=stApp]").inner_text()
    page.get_by_role("button", name="Open page", exact=True).click()
    settle(page)
    assert page.locator("h1").inner_text() == "Map › Map"
    assert "run 'gone', which is not in this root" in page.locator("[data-testid=stApp]").inner_text()
    assert page.locator(".map").count() == 0  # nothing is shown in its place
    page.get_by_role("button", name="Open the page without it").click()
    page.wait_for_url(lambda url: "gone" not in url)
    settle(page)
    cells = page.locator(".map .cell[data-id]").count()
    assert cells and cells == View("map").draw(catalog).scope.counts[0][0]
    page = visit("/?session=never-was", base=served)
    assert page.locator(".map .cell[data-id]").count() == cells
    assert "There is no session 'never-was'" in page.locator("[data-testid=stApp]").inner_text()


HOSTILE = (
    "**bold** <img src='http://203.0.113.1/a.png' onerror='document.title=\"taken\"'> "
    "![p](http://203.0.113.1/b.png) ![r][x] [click](javascript:document.title='taken') [bank](https://203.0.113.1/d) "
    "<data:text/html,x> [e](data:text/html,x) [r][x] $\\href{https://203.0.113.1/f}{bank}$ [own](/?session=x)"
    "\n\n[x]: http://203.0.113.1/c.png"
)


VEGA = (
    '{"$schema": "https://203.0.113.1/v5.json", "data": {"url": "http://203.0.113.1/d.csv"}, "mark": {"type": "image", '
    '"url": "http://203.0.113.1/e.png"}, "params": [{"name": "p", "expr": "window.taken = 1"}], "usermeta": '
    '{"embedOptions": {"patch": "http://203.0.113.1/p.json"}}}'
)
PINS = (
    sessions.Pin("explore", {}, "histogram", f"{VEGA} {HOSTILE}"),
    sessions.Pin("map", {name: [VEGA, HOSTILE] for name in ("metric", "format", "module")}, "ranking", VEGA),
)


@pytest.mark.thorough
def test_a_name_that_is_a_picture_loads_nothing(visit: Visit, served: str, own_root: Path):
    """In the header, in the list and in passing when it is deleted."""
    name = "![p](http://203.0.113.7/n.png)"
    one = storage.create(own_root, sessions.new(name, sessions.View("runs"))).session
    page = visit(link_of(one.id), base=served)
    page.get_by_role("button", name="Open page", exact=True).click()
    settle(page)
    pin(page, "losses", "1 pin")
    turn_to(page, "Notebook")
    press(page, "Saved")
    page.locator("[data-testid=stLayoutWrapper]", has_text=one.id).get_by_role("button", name="Delete").last.click()
    page.get_by_text("Yes, delete it").last.click()
    settle(page)
    page.get_by_role("button", name="Delete", exact=True).last.click()
    page.get_by_text(one.id).wait_for(state="hidden")
    settle(page)
    assert page.locator("img[src*='203.0.113.7']").count() == 0
    assert not [url for url in page.requests if "203.0.113.7" in url]


@pytest.mark.thorough
def test_notes_that_would_stop_the_browser_are_shown_as_text(visit: Visit, served: str, own_root: Path):
    one = storage.create(own_root, sessions.new("Deep", sessions.View("runs"), notes=">" * 50_000)).session
    page = visit(link_of(one.id), base=served)
    turn_to(page, "Notebook")
    press(page, "Edit")
    page.get_by_text("nested too deeply").first.wait_for()
    settle(page)
    assert "RangeError" not in page.locator("[data-testid=stApp]").inner_text() and not page.complaints


def test_someone_elses_session_is_shown_and_loads_nothing(visit: Visit, served: str, own_root: Path, tmp_path: Path):
    page = visit("/notebook", base=served)
    press(page, "Import")
    whole = json.loads(
        sessions.to_json(sessions.new("<b>theirs</b>", sessions.View("explore"), notes=HOSTILE, pins=PINS))
    )
    (tmp_path / "bad.json").write_text(json.dumps(whole | {"binade_session": 9}))
    (tmp_path / "good.json").write_text(json.dumps(whole))
    for name, words in (("bad.json", "version is 9"), ("good.json", "was imported.")):
        page.locator("input[type=file]").set_input_files(tmp_path / name)
        page.get_by_text(name).first.wait_for()
        page.get_by_text("version is 9").wait_for(state="hidden")  # the page has taken notice of the file
        settle(page)
        page.get_by_role("button", name="Import", exact=True).last.click()
        page.get_by_text(words).first.wait_for()
        settle(page)
    page.goto(served + link_of(whole["id"]))
    settle(page)
    page.locator("strong", has_text="bold").first.wait_for()
    settle(page)
    assert drawn(page, "pin0_histogram")
    assert page.locator("[data-testid=stMarkdown] img").count() == 0 and page.title() != "taken"
    assert page.evaluate("window.taken") is None
    assert all(url.startswith((served, "data:", "blob:", "ws")) for url in page.requests)
    assert not [url for url in page.requests if "203.0.113.1" in url]
    links = page.locator("[data-testid=stMarkdown] a").evaluate_all("all => all.map(a => [a.href, a.text, a.rel])")
    assert ["https://203.0.113.1/d", "https://203.0.113.1/d", "noopener noreferrer"] in links
    assert all(href == text and set(rel.split()) >= {"noopener", "noreferrer"} for href, text, rel in links)


def test_a_bundle_is_saved_from_the_disk(visit: Visit, served: str, own_root: Path, tmp_path: Path):
    """Another root takes it as it comes."""
    run_id = min(path.parent.name for path in own_root.glob("*/run.json"))
    reference = sessions.RunReference(run_id, fingerprint(own_root / run_id))
    saved = storage.create(own_root, sessions.new("Packed", sessions.View("runs"), runs=(reference,)))
    page = visit("/", base=served)
    turn_to(page, "Notebook")
    page.get_by_role("button", name="Share").first.click()
    page.get_by_role("button", name="Create bundle").click()
    link = page.get_by_role("link", name="Save the bundle")
    link.wait_for(timeout=120_000)
    with page.expect_download() as download:
        link.click()
    assert download.value.suggested_filename == f"{saved.session.id}.zip"
    imported, brought = storage.import_bundle(tmp_path / "other", download.value.path())
    assert imported.added == (run_id,) and brought and brought.session == saved.session
    assert not page.complaints
