"""How many clicks the tasks of a researcher take in a real browser, and how long.

    python -m tests.bench.bench_tasks ROOT

Each task starts on the Map in a new tab. A drag counts as a click; typing and keys (Ctrl K, Enter) do not, but are
counted beside. The seconds include the app's answers, until the page is at rest, but no thinking. Each task ends by
requiring that what it is for can be read on the page. ROOT is copied first, since tasks save sessions and filters and
launch runs. Exit status 1 if a task takes more clicks than it may.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from playwright.sync_api import Error as PlaywrightError
from playwright.sync_api import Locator, Page, expect, sync_playwright

from tests.bench.bench_pages import launch
from tests.browser.driver import new_page, serving, settle

FORMAT = "mxfp4"
LONG = 600_000  # milliseconds that launched runs may take


@dataclass
class User:
    """Uses the app on a page, and counts."""

    page: Page
    clicks: int = 0
    keys: int = 0

    def click(self, target: Locator) -> None:
        target.click()
        self.clicks += 1
        settle(self.page)

    def key(self, *names: str) -> None:
        for name in names:
            self.page.keyboard.press(name)
            self.keys += 1
        settle(self.page)

    def type(self, text: str) -> None:
        self.page.keyboard.type(text)
        self.keys += 1

    def button(self, name: str) -> None:
        self.click(self.page.get_by_role("button", name=name, exact=True).first)

    def link(self, name: str) -> None:
        self.click(self.page.get_by_role("link", name=name, exact=True).first)

    def part(self, name: str) -> None:
        self.click(self.page.get_by_role("radio", name=name, exact=True))

    def pick(self, title: str, value: str | re.Pattern[str]) -> None:
        """Choose from a list: one click opens it, one chooses."""
        box = self.page.get_by_test_id("stSelectbox").filter(has=self.page.get_by_text(title, exact=True))
        self.click(box.locator("input"))
        self.click(self.page.get_by_role("option", name=value, exact=isinstance(value, str)).first)

    def find(self, text: str) -> None:
        """Search with the palette, and open what it finds first."""
        self.key("Control+k")
        self.type(text)
        self.page.locator(".palette .search li").first.wait_for()
        self.page.wait_for_timeout(400)  # of the pause in typing, after which it searches
        self.key("Enter")

    def sees(self, words: str | re.Pattern[str]) -> None:
        expect(self.page.get_by_text(words).first).to_be_visible(timeout=LONG)

    def drag_over(self, chart: str) -> None:
        """Over the middle of a chart."""
        box = self.page.locator(f".st-key-chart_{chart} svg.marks").bounding_box()
        assert box
        x, y = box["x"] + box["width"] * 0.2, box["y"] + box["height"] / 2
        self.page.mouse.move(x, y)
        self.page.mouse.down()
        self.page.mouse.move(x + box["width"] * 0.1, y, steps=8)
        self.page.mouse.up()
        self.clicks += 1
        settle(self.page)

    def tick(self, row: int) -> None:
        """A row of the table of Explore."""
        self.page.locator(f".explore tbody tr[data-index='{row}']").click()
        self.clicks += 1
        self.page.wait_for_function("() => location.search.includes('tensor=')")
        self.page.wait_for_timeout(1000)  # until Python has heard of it
        settle(self.page)

    def drawn(self, chart: str) -> None:
        of_explore = f".explore section.{chart} svg.marks"
        expect(self.page.locator(f"[class*=st-key-chart_{chart}] svg.marks, {of_explore}").first).to_be_visible()


def worst_operand(user: User) -> None:
    user.pick("Format", FORMAT)
    user.sees(re.compile("exceptions · worst first"))
    user.sees(re.compile(f"{FORMAT} does what it does to normal values"))


def two_block_sizes(user: User) -> None:
    user.click(user.page.get_by_role("button", name=re.compile("^Open L")).first)
    user.part("What if")
    user.click(user.page.get_by_role("button", name=re.compile(r"^block 16: \+")).first)
    expect(user.page.locator(".st-key-chart_trials_0")).to_contain_text(f"{FORMAT}(block=1x16)")


def one_tensor_in_all_formats(user: User) -> None:
    user.link("Explore")
    user.tick(0)
    for chart in ("histogram", "qq", "formats"):
        user.drawn(chart)


def two_directions(user: User) -> None:
    user.link("Explore")
    user.page.locator(".explore select[name=by]").select_option(label="Operation")
    user.clicks += 2  # the list, and the choice
    settle(user.page)
    user.drawn("qq")
    expect(user.page.locator(".explore .legend")).to_contain_text("backward")


def filtered(*fields: tuple[str, int]) -> Callable[[User], None]:
    """Explore, filtered by the value of this number of each field."""

    def task(user: User) -> None:
        user.page.goto(user.page.url.split("?")[0].rstrip("/") + "/explore")
        settle(user.page)
        for title, nth in fields:
            listed = user.page.locator(".st-key-chip_values")
            if not listed.get_by_text(title, exact=True).count():
                user.button(f"{title} ▾")
            name = {"Layer": "layer_index", "Quant type": "quant_type"}.get(title, title.lower())
            user.click(listed.locator(f".st-key-filter_{name} button").nth(nth))
            assert f"{name}=" in user.page.url, user.page.url
        user.drawn("histogram")

    return task


def in_all_runs(user: User) -> None:
    user.link("Explore")
    user.tick(0)
    user.button("In all runs")
    assert "by=run_id" in user.page.url


def launch_with_baseline(user: User) -> None:
    user.find("new collection")
    user.click(user.page.get_by_test_id("stMultiSelect").filter(has_text="Recipes").locator("input"))
    user.type("mxfp4")
    user.key("Enter")
    user.key("Escape")
    user.button("Add the bf16 baseline")
    user.click(user.page.get_by_role("button", name=re.compile("^Launch")))
    link = user.page.get_by_role("link", name=re.compile("^Compare losses of"))
    link.wait_for(timeout=LONG)
    user.click(link)
    user.sees("bf16")


def pin_share_report(user: User) -> None:
    user.button("Pin")
    user.find("why do they lose precision")
    user.key("p")
    user.find("how are the values distributed")
    user.key("p")
    user.page.reload()
    settle(user.page)
    user.sees("3 pins")
    user.button("Session")
    user.page.get_by_role("textbox", name="Name").fill("Three findings")
    user.keys += 1
    user.key("Tab")
    user.button("Create report")
    user.sees("Save the report (HTML)")
    expect(user.page.locator("[data-testid=stCode]").get_by_text("session=")).to_be_visible()


def which_run_diverged(user: User) -> None:
    user.link("Runs")
    user.sees("Runs › Runs")
    expect(user.page.get_by_test_id("stDataFrame").first).to_be_visible()


def brushed_range(user: User) -> None:
    user.find("why do they lose precision")
    user.drag_over("codebook")
    user.sees(re.compile(r"[\d,]+ values, .* of all, in .* channels"))


def compare_two_runs(user: User) -> None:
    user.pick("Compared with", re.compile(r"^mxfp8 \(run\)"))
    user.sees(re.compile("difference to"))
    assert "versus=" in user.page.url


def what_to_use(user: User) -> None:
    user.button("What should I use?")
    user.sees(re.compile("^The measured |^Nothing was measured"))


TASKS: dict[str, tuple[Callable[[User], None], int]] = {
    "worst operand of a format, and why": (worst_operand, 2),
    "two block sizes of that tensor": (two_block_sizes, 3),
    "distribution and Q–Q of one tensor, and all formats": (one_tensor_in_all_formats, 2),
    "distributions forward and backward": (two_directions, 3),
    "the same tensor in all runs": (in_all_runs, 3),
    "filter by layer": (filtered(("Layer", 0)), 2),
    "filter by phase": (filtered(("Phase", 0)), 2),
    "filter by operation": (filtered(("Operation", 0)), 2),
    "filter by quant type": (filtered(("Quant type", 0)), 2),
    "filter by all four": (filtered(("Layer", 0), ("Phase", 0), ("Operation", 0), ("Quant type", 0)), 7),
    "launch two formats with their baseline, open them together": (launch_with_baseline, 4),
    "three pins, reload, share, report": (pin_share_report, 6),
    "which run diverged, and when": (which_run_diverged, 1),
    "a range of magnitudes with counts": (brushed_range, 1),
    "compare two runs": (compare_two_runs, 3),
    "what should I use?": (what_to_use, 2),
}


def copied(root: Path, target: Path) -> Path:
    """A root like it, with the tensor files as hard links."""

    def copy(source: str, end: str) -> None:
        (os.link if source.endswith(".pt") else shutil.copy2)(source, end)

    shutil.copytree(root, target, copy_function=copy, ignore=shutil.ignore_patterns(".sessions", ".jobs"))
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", type=Path)
    parser.add_argument("--only", help="part of a task's name")
    args = parser.parse_args()
    failed = 0
    print("| task | clicks | at most | keys | s |\n| --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(dir=args.root.parent) as folder, sync_playwright() as playwright:
        browser = launch(playwright)
        with serving(copied(args.root, Path(folder) / "root")) as address:
            for name, (task, most) in TASKS.items():
                if args.only and args.only not in name:
                    continue
                context = browser.new_context(viewport={"width": 1280, "height": 900})
                user = User(new_page(context))
                user.page.goto(address)
                settle(user.page)
                start = time.perf_counter()
                try:
                    task(user)
                    seconds = f"{time.perf_counter() - start:.1f}"
                except (AssertionError, PlaywrightError) as error:
                    seconds, failed = f"failed: {str(error).splitlines()[0]}", failed + 1
                failed += user.clicks > most
                print(f"| {name} | {user.clicks} | {most} | {user.keys} | {seconds} |", flush=True)
                context.close()
        browser.close()
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
