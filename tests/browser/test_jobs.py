"""Launching, watching and cancelling in a real browser, and in two at once."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Page, expect

from binade.collector import jobs
from binade.collector.cli.options import parse
from binade.collector.jobs import processes
from binade.collector.recipes.parse import parse_recipe
from binade.data.run.losses import read_losses
from tests.browser.driver import press, serving, settle
from tests.collector.test_jobs import ENDLESS, end_all, launch
from tests.conftest import until

pytestmark = [pytest.mark.browser, pytest.mark.slow]
Visit = Callable[..., Page]
PATIENCE = 90_000  # milliseconds
PARTS = {"Jobs": "jobs", "New collection": "collect"}
CALM = (*ENDLESS, "--capture-every", "100")  # records little of its iterations


@pytest.fixture(scope="module")
def own_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture(scope="module")
def app(own_root: Path) -> Iterator[str]:
    """One for all tests: to start it takes as long as a test. The first finds no jobs yet."""
    with serving(own_root) as address:
        yield address


@pytest.fixture
def root(own_root: Path) -> Iterator[Path]:
    yield own_root
    end_all(own_root)


def enter(visit: Visit, app: str, part: str, **profile: bool) -> Page:
    """A part of the page Runs."""
    return visit(f"/runs?view={PARTS[part]}", base=app, **profile)


def badge(page: Page, state: str):
    """The state beside the title of the job that is shown."""
    return page.locator(".st-key-jobtitle .stMarkdownBadge").filter(has_text=state)


def cancel(page: Page, root: Path, job: jobs.Job) -> None:
    """By clicking, as a user would: once more if nothing came of it, which the page shows by staying as it is."""
    confirm = page.get_by_role("button", name="Cancel the job")
    for _ in range(3):
        if not confirm.is_visible():
            page.get_by_role("button", name="Cancel", exact=False).first.click()
        confirm.click()
        settle(page)
        if jobs.view_of(root, job).state != "running":
            return
    raise AssertionError("three clicks did not cancel the job")


@pytest.mark.thorough
def test_a_run_launched_by_clicking_is_watched_and_opened(visit: Visit, app: str, root: Path):
    page, other = enter(visit, app, "New collection"), enter(visit, app, "Jobs")
    expect(other.get_by_text("No jobs yet.")).to_be_visible()
    page.get_by_role("button", name="Quick").click()
    settle(page)
    for label, option, number in (("Layers", "--layers", "1"), ("Sequence length", "--sequence-length", "32")):
        field = page.get_by_label(label, exact=True)
        field.fill(number)
        field.press("Enter")
        expect(page.get_by_test_id("stCode").filter(has_text=f"{option} {number}")).to_be_visible()
    page.get_by_role("button", name="Launch").click()
    expect(page.get_by_role("heading", name="Runs › Jobs")).to_be_visible()
    expect(badge(page, "done")).to_be_visible(timeout=PATIENCE)
    (view,) = jobs.listing(root)
    assert view.state == "done"
    assert [view.job.config] == parse(["quick", "mxfp8", "--layers", "1", "--sequence-length", "32"]).runs
    expect(badge(other, "done")).to_be_visible(timeout=PATIENCE)
    page.get_by_role("link", name="Open its tensors").click()
    expect(page.get_by_role("heading", name="Explore › Explore")).to_be_visible()
    settle(page)
    shown = page.get_by_text(re.compile(r"^[\d,]+ tensors? · ")).first
    assert shown.inner_text().startswith(f"{view.run.status.tensors:,} tensors")
    assert page.complaints == [] and other.complaints == []


def test_a_number_that_is_typed_stays(visit: Visit, app: str, root: Path):
    """In the field and in the command, although the browser sends a whole number as an integer."""
    page = enter(visit, app, "New collection")
    for label, option, number in (("Recorded iterations", "--control-iter", "5"), ("Layers", "--layers", "1")):
        field = page.get_by_label(label, exact=True)
        field.fill(number)
        field.press("Enter")
        expect(page.get_by_test_id("stCode").filter(has_text=f"{option} {number}")).to_be_visible()
        settle(page)
        expect(field).to_have_value(number)
    assert page.complaints == []


def test_a_form_is_in_its_address(visit: Visit, app: str, root: Path):
    """A reload keeps it, Back undoes each change, and Forward repeats it."""
    page = enter(visit, app, "New collection")
    command = page.get_by_test_id("stCode").filter(has_text="binade")
    settle(page)
    seen = [(page.url, command.inner_text())]
    for name in ("All ten recipes", "Ablation"):
        page.get_by_role("button", name=name).click()
        settle(page)
        seen.append((page.url, command.inner_text()))
    assert "form=" not in seen[0][0] and len({text for _, text in seen}) == 3
    page.reload()
    settle(page)
    assert (page.url, command.inner_text()) == seen[2]
    for step, back in ((1, True), (0, True), (1, False), (2, False)):
        page.go_back() if back else page.go_forward()
        settle(page)
        assert (page.url, command.inner_text()) == seen[step]
    assert page.complaints == []


@pytest.mark.thorough
def test_a_baseline_is_added_and_both_losses_are_read_at_one_iteration(visit: Visit, app: str, root: Path):
    page = enter(visit, app, "New collection")
    page.get_by_role("button", name="Quick").click()
    settle(page)
    page.get_by_role("button", name="Add the bf16 baseline").click()
    settle(page)
    recipes = page.get_by_test_id("stMultiSelect").filter(has=page.get_by_text("Recipes", exact=True))
    for recipe in ("bf16", "mxfp8"):
        expect(recipes.get_by_text(recipe, exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Add the bf16 baseline")).to_have_count(0)
    layers = page.get_by_label("Layers", exact=True)
    layers.fill("1")
    layers.press("Enter")
    settle(page)
    page.get_by_role("button", name="Launch 2 jobs").click()
    compare = page.get_by_role("link", name="Compare losses of 2 runs")
    expect(compare).to_be_visible(timeout=PATIENCE)
    runs = [view.run for view in sorted(jobs.listing(root), key=lambda view: view.job.id)[-2:]]
    press(page, "Runs")
    press(page, "shown")
    press(page, "shown")  # a second click keeps it
    assert "warmup=show" in page.url
    chart = page.locator(".st-key-chart_losses")
    chart.scroll_into_view_if_needed()
    box = chart.locator("canvas, svg.marks").first.bounding_box()
    assert box
    tooltip = page.locator("#vg-tooltip-element.visible")
    for place in (0.5, 0.51):
        page.mouse.move(box["x"] + place * box["width"], box["y"] + 0.5 * box["height"])
    expect(tooltip).to_be_visible()
    rows = [row.inner_text().split("\t") for row in tooltip.get_by_role("row").all()]
    (title, at), *shown = [(name.strip(), value.strip()) for name, value in rows]
    assert title == "loss at iteration" and at == "−1"
    losses = [step["loss"] for run in runs for step in read_losses(run.directory) if step["iteration"] == -1]
    assert {value for _, value in shown} >= {f"{loss:.4f}" for loss in losses}
    press(page, "Jobs")
    compare.click()
    expect(page.get_by_role("heading", name="Runs › Recipes")).to_be_visible()
    assert [run.run_id in page.url for run in runs] == [True, True]
    assert page.complaints == []


@pytest.mark.thorough
def test_two_browsers_on_a_job_that_another_process_started(visit: Visit, app: str, root: Path):
    """It moves without a click, is killed, resumed by clicking in one, and cancelled there."""
    job = launch(root, (*CALM, "--checkpoint-every", "5"))
    until(lambda: [*root.glob("*/checkpoints/*/rank00.json")], "a checkpoint")
    for process in processes.marked(root / job.run_id):
        psutil.Process(process.pid).nice(10)  # the browsers need the processor more
    run = jobs.view_of(root, job).run
    one, two = enter(visit, app, "Jobs"), enter(visit, app, "Jobs", own=True)
    for page in (one, two):
        expect(badge(page, "running")).to_be_visible(timeout=PATIENCE)
    done = one.get_by_test_id("stMetric").filter(has_text="Iterations")
    first = done.inner_text()
    expect(done).not_to_have_text(first, timeout=PATIENCE)
    for process in processes.marked(root / job.run_id):
        process.send(signal.SIGKILL)
    for page in (one, two):
        expect(badge(page, "crashed")).to_be_visible(timeout=PATIENCE)
    one.get_by_role("button", name="Resume").click()
    expect(one.get_by_text("continues its run")).to_be_visible()
    expect(badge(one, "running")).to_be_visible(timeout=PATIENCE)
    again = jobs.find(root, job.id)
    until(lambda: any("resumed after" in line for line in jobs.log_tail(root, again)), "the run to go on")
    assert jobs.view_of(root, again).run.run_id == run.run_id
    cancel(one, root, again)
    expect(badge(one, "cancelled")).to_be_visible(timeout=PATIENCE)
    until(lambda: not jobs.view_of(root, again).active, "the job to end")
    assert jobs.view_of(root, again).run.status.state == "cancelled" and processes.marked(root / job.run_id) == set()
    assert one.complaints == [] and two.complaints == []


@pytest.mark.thorough
def test_a_recipe_is_edited_and_saved(visit: Visit, app: str, root: Path):
    page = enter(visit, app, "New collection")
    page.get_by_text("Edit a recipe").click()
    start = page.get_by_role("combobox", name="Start from")
    start.fill("te_block")
    start.press("Enter")
    toml = page.get_by_label("Recipe as TOML")
    expect(toml).to_have_value(re.compile('title = "Transformer Engine Float8BlockScaling, edited"'))
    text = toml.input_value()
    operand = 'forward.input = "fp8_e4m3(block=1x128, scale=pow2)"'
    line = text.splitlines().index(operand) + 1
    toml.fill(text.replace('forward.input = "fp8_e4m3', 'forward.input = "mxfp9'))  # and no key that applies it
    expect(page.get_by_text(f"line {line}: linear.forward.input: unknown format 'mxfp9")).to_be_visible()
    expect(page.get_by_role("button", name="Save")).to_be_disabled()
    changed = text.replace(
        'forward.input = "fp8_e4m3(block=1x128, scale=pow2)"', 'forward.input = "mxfp8(scale=rceil)"'
    )
    toml.fill(changed)
    expect(page.get_by_text("unknown format")).to_have_count(0)
    page.get_by_role("button", name="Operands").click()
    expect(page.get_by_test_id("stCode").filter(has_text="linear.forward.input")).to_contain_text("mxfp8(scale=rceil)")
    page.keyboard.press("Escape")
    name = page.get_by_label("Name", exact=True)
    name.fill("mine")
    name.press("Enter")
    settle(page)
    press(page, "Jobs")  # what was edited survives a look at another part
    press(page, "New collection")
    expect(page.get_by_label("Recipe as TOML")).to_have_value(changed)
    page.get_by_role("button", name="Save").click()
    path = root / ".recipes" / "mine.toml"
    expect(page.get_by_test_id("stCode").filter(has_text=f"mxfp8,{path}")).to_be_visible()
    assert parse_recipe(str(path)).linear.rounded_to("forward_a") == "mxfp8(scale=rceil)"
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete recipe").click()
    settle(page)
    assert not path.exists()
    assert page.complaints == []
