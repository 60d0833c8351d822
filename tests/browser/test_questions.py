"""The questions, asked in a real browser on the runs that `make run` collects: each within five clicks."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pandas as pd
import pytest
from playwright.sync_api import Browser, Locator, Page
from torch import Tensor

from binade import quant
from binade.app.pages.registry import PAGES
from binade.app.questions.pair.three_way import three_way
from binade.app.questions.shared import laws
from binade.app.questions.shared.distributions import distribution_of
from binade.app.questions.shared.operands import along
from binade.app.questions.shared.quantile_plots import against_law
from binade.app.questions.shared.scope import scoped
from binade.app.questions.shared.selection import worst as worst_of
from binade.app.questions.what_if import compute as what_if_compute
from binade.app.view.view import View
from binade.data.compare import loss_gaps
from binade.data.compare.gradients import gradient_errors
from binade.data.index.catalog import Catalog
from binade.data.index.run_table import runs_with_references
from binade.data.run.losses import read_losses
from binade.data.words.fields import FIELDS
from binade.data.words.filter import Filter
from binade.data.words.text import number_text
from binade.quant.normal import normal_sqnr
from tests.browser.driver import new_page, press, serving, settle, turn_to
from tests.browser.test_explore import number
from tests.conftest import PROJECT, run_collector

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.thorough]
MOST_CLICKS = 5
SMALLER = ("--sequence-length", "32", "--warmup-iterations", "12", "--train-iters", "2", "--capture-every", "1")


@pytest.fixture(scope="session")
def first_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root as `make run` fills it, read off make itself, but with fewer iterations and tokens."""
    root = tmp_path_factory.mktemp("first")
    made = subprocess.run(["make", "-n", "run"], cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"/binade ((?:batch|run) [^;&}]*)", made)
    assert len(commands) == 2
    for command in commands:
        done = run_collector(*shlex.split(command), *SMALLER, root=root)
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture(scope="module")
def catalog(first_runs: Path) -> Iterator[Catalog]:
    with Catalog.open(first_runs) as opened:
        yield opened


@pytest.fixture(scope="module")
def worst(catalog: Catalog) -> str:
    """The tensor that the page Tensor shows if none is chosen."""
    return str(worst_of(catalog, Filter(), "mxfp4")[0])


@pytest.fixture(scope="module")
def operand_shown(catalog: Catalog) -> tuple[Tensor, int]:
    """The values of that tensor and the axis along which they are rounded, in the GEMM in which it loses most."""
    tensor_id, gemm = worst_of(catalog, Filter(), "mxfp4")
    return along(catalog.load(tensor_id), catalog.rows_of([tensor_id]).iloc[0], gemm)


def shown(catalog: Catalog, *apart: str) -> Filter:
    """What a page shows without a filter: one run and iteration."""
    return scoped(catalog, Filter(), apart, scored=True)


def said(catalog: Catalog, page: str, part: str, **params: str) -> str:
    """The answer of a part, drawn without the app."""
    return str(View(page, {"view": [part]} | {name: [text] for name, text in params.items()}).draw(catalog).verdict)


def share(value: float) -> str:
    """As all shares are written."""
    return FIELDS["flush_to_zero"].quantity(value)


@pytest.fixture(scope="module")
def window(browser: Browser, first_runs: Path) -> Iterator[Page]:
    """One page in one browser for all questions: it shows the Map first."""
    with serving(first_runs) as address:
        context = browser.new_context(viewport={"width": 1280, "height": 1000}, base_url=address)
        page = new_page(context)
        page.complaints = []  # type: ignore[attr-defined]
        page.on("pageerror", lambda error: page.complaints.append(str(error)))  # type: ignore[attr-defined]
        page.goto("/")
        settle(page)
        yield page
        context.close()


class Visitor:
    """A newcomer who counts clicks. Every question starts from the Map."""

    def __init__(self, page: Page) -> None:
        self.page, self.clicks = page, 0
        self.section: Page | Locator = page

    def click(self, what: Locator) -> None:
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS
        what.click()

    def ask(self, page: str, part: str) -> None:
        """Open a part: its page is one click, its room another, and a part of a room a third, which
        `test_every_part_...` does."""
        room = PAGES[page].parts[part].room_name
        self.clicks += (page != "map") + (room != PAGES[page].first) + (part != room)
        self.page.goto(f"/{page}?view={part}" if page != "map" else f"/?view={part}")
        settle(self.page)
        section = self.page.locator(f".st-key-section_{part}")
        self.section = section if section.count() else self.page

    def choose(self, title: str, value: str) -> None:
        """A value of a list: one click opens it, one chooses."""
        box = self.page.locator("[data-testid=stSelectbox]").filter(has=self.page.get_by_text(title, exact=True))
        self.click(box.locator("input"))
        self.click(self.page.get_by_role("option", name=value, exact=True))

    def segment(self, name: str) -> None:
        self.click(
            self.page.get_by_role("radio", name=name, exact=True)
            .or_(self.page.get_by_role("button", name=name, exact=True))
            .first
        )

    def until(self, words: str) -> None:
        """Wait for a text, and for the page to come to rest."""
        self.page.get_by_text(re.compile(words)).first.wait_for()
        settle(self.page)

    @property
    def answer(self) -> str:
        return self.section.locator("[data-testid=stMarkdown]:not(.st-key-header *) p:has(> strong)").first.inner_text()

    def title(self, name: str) -> str:
        """All the words of a chart."""
        return self.chart(name).locator("svg.marks").evaluate("svg => svg.textContent")

    def chart(self, name: str) -> Locator:
        return self.page.locator(f".st-key-chart_{name}")

    def marks(self, name: str) -> list[dict[str, str]]:
        labels = self.chart(name).locator("path[aria-label]").evaluate_all(
            "paths => paths.map(path => path.getAttribute('aria-label'))"
        )  # fmt: skip
        return [dict(part.split(": ", 1) for part in label.split("; ") if ": " in part) for label in labels]


@pytest.fixture
def visitor(window: Page) -> Iterator[Visitor]:
    yield Visitor(window)
    assert window.complaints == []  # type: ignore[attr-defined]


def test_every_part_is_within_three_clicks(window: Page):
    """Its page, its room, and its part of the room: one of a control, or a section."""
    for page in PAGES.values():
        rooms = {part.room_name: part for part in page.parts.values()}
        titles = [page.parts[name].room_title for name in rooms]
        turn_to(window, page.title)
        assert window.locator("h1").inner_text() == f"{page.title} › {titles[0]}"
        for name, title in zip(rooms, titles, strict=True):
            if name != page.first:
                press(window, title)
                assert window.locator("h1").inner_text() == f"{page.title} › {title}"
            radios = window.locator(".st-key-page_part").get_by_role("radio").all_inner_texts()
            assert radios == ([] if len(rooms) < 2 else titles)
            room = page.parts[name].room
            if room and room[0].choice:
                assert window.locator(".st-key-room").get_by_role("radio").all_inner_texts() == [q.title for q in room]
            else:
                shown = window.locator("[class*=st-key-section_] summary strong").all_inner_texts()
                assert shown == [q.title for q in room[1:] if q.title in shown or not q.applies]


def test_what_does_the_format_break(visitor: Visitor, catalog: Catalog):
    """The worst operands are listed at first; why the worst is, is one click away."""
    visitor.ask("map", "map")
    assert visitor.page.locator(".map .said").inner_text() == said(catalog, "map", "map")
    condition, parameters = catalog.condition(shown(catalog))
    table = catalog.ask(
        f"""SELECT arg_min(tensor_id, score.sqnr_db) AS tensor_id, median(score.sqnr_db) AS sqnr_db
        FROM score JOIN tensor USING (key) WHERE {condition} AND score.format = 'mxfp4' AND layer_index IS NOT NULL
        GROUP BY score.gemm, module, tensor_name, layer_index ORDER BY sqnr_db""",
        parameters,
    )
    assert visitor.page.locator(".map .cell[data-id]").count() == len(table)
    sqnr = table["sqnr_db"].iloc[0]
    away = table["sqnr_db"] - normal_sqnr("mxfp4")
    assert f"({(away <= -2).sum()} at −2 dB or below)" in visitor.page.locator(".map .panel h4").inner_text()
    listed = visitor.page.locator(".map .exceptions")
    deltas = [number(text) for text in listed.locator(".delta").all_inner_texts()]
    assert deltas == pytest.approx(away[away <= -2].head(9).tolist(), abs=0.051)
    assert listed.locator("> span").nth(1).inner_text() == f"{sqnr:.1f} dB"
    visitor.click(visitor.page.locator(".map .panel").get_by_role("button", name=re.compile("^Open L")))
    visitor.page.wait_for_url(re.compile("/tensor"))
    visitor.page.get_by_role("heading", name="Tensor › In the format").wait_for()
    settle(visitor.page)
    assert visitor.answer.startswith(f"In mxfp4 (as recorded): SQNR {sqnr:.1f} dB. ")
    assert f"tensor={table['tensor_id'].iloc[0].replace('/', '%2F')}" in visitor.page.url


def test_which_gradients_flush_to_zero(visitor: Visitor, catalog: Catalog):
    visitor.ask("map", "map")
    visitor.choose("Color", "Flushed to zero")
    visitor.until("Flushed to zero as used")
    assert visitor.page.locator(".map .said").inner_text() == said(catalog, "map", "map", metric="flush_to_zero")
    places = View("map", {"metric": ["flush_to_zero"]}).draw(catalog).tables["places"]["place"]
    assert visitor.page.locator(".map .exceptions .link").all_inner_texts() == places.head(9).tolist()
    for gemm in ("forward", "dgrad", "wgrad"):
        assert visitor.page.locator(".map h4").get_by_text(f"{gemm} GEMM", exact=True).is_visible()


def test_why(visitor: Visitor, operand_shown: tuple[Tensor, int]):
    visitor.ask("tensor", "why")
    x, dim = operand_shown
    wanted = quant.score(x, "mxfp4", dim)
    flushed, saturated = share(wanted.flushed_error_share), share(wanted.saturated_error_share)
    shares = f"{flushed} is of values flushed to zero, {saturated} of saturated ones and "
    said_of_it = f"In mxfp4 (as recorded): SQNR {wanted.sqnr_db:.1f} dB. Of the squared error, {shares}"
    assert visitor.answer.startswith(said_of_it)
    assert f"flushed: {flushed} of the error" in visitor.title("codebook")
    assert f"saturated: {saturated} of the error" in visitor.title("codebook")
    assert "Largest magnitude by channel" in visitor.title("channels")
    assert visitor.chart("tokens").locator("image").count() == 1
    for name in ("Kurtosis, with zeros", "Crest factor", "Dynamic range"):
        assert visitor.page.get_by_test_id("stMetric").filter(has_text=name).is_visible()


def test_would_another_format_fix_it(visitor: Visitor, operand_shown: tuple[Tensor, int]):
    visitor.ask("tensor", "whatif")
    visitor.click(visitor.page.get_by_text("More options"))
    for knob in ("Scale", "Rounding", "Block", "Overflow"):
        assert visitor.page.get_by_text(knob, exact=True).first.is_visible()
    visitor.choose("Hadamard", "32")
    visitor.until("hadamard=32")
    trials = what_if_compute.with_defaults(
        [what_if_compute.trial(name, hadamard=32) for name in ("mxfp8", "mxfp4", "nvfp4", "hifp8")]
    )
    table = what_if_compute.try_formats([what_if_compute.TriedOperand(*operand_shown)], trials)[0]
    shown = {
        mark["trial"]: mark["SQNR (dB, higher is better)"] for mark in visitor.marks("trials_0") if "trial" in mark
    }
    assert shown == {row.label: number_text(row.sqnr_db) for row in table.itertuples()}


def test_is_it_normal(visitor: Visitor, catalog: Catalog, worst: str):
    visitor.ask("tensor", "law")
    d = laws.nonzero(distribution_of("x", catalog.load(worst)))
    closest = laws.laws_table(d).iloc[0]
    assert f"distance of {closest['ks']:.3f}" in visitor.answer
    assert "exact" in visitor.title("qq")
    visitor.segment("Student’s t")
    visitor.until("Fitted Student’s t")
    plot = against_law(d, "student_t")
    drawn = [mark for mark in visitor.marks("qq") if "expected" in mark]
    assert len(drawn) == len(plot.sample)
    assert number(drawn[10]["value"]) == pytest.approx(plot.sample[10], rel=1e-3, abs=1e-3)


def test_which_part_costs_the_most_loss(visitor: Visitor, catalog: Catalog):
    visitor.ask("runs", "recipes")
    table = runs_with_references(catalog.runs(), catalog.parts())
    gaps = loss_gaps.loss_gaps(table, {run_id: read_losses(catalog.root / run_id) for run_id in table["run_id"]})
    costs = loss_gaps.costs(gaps, loss_gaps.with_outcomes(table, {}))
    alone = costs[costs["only"].notna()]
    assert set(alone["only"]) == {"QK", "PV", "linear"}
    assert visitor.answer.startswith(
        "Change of the loss by rounding alone (the same sequences and weights, with and without): "
    )
    bars = {mark["recipe"]: mark for mark in visitor.marks("costs") if "seeds" in mark}
    for row in costs.itertuples():
        gap, unit, *_ = bars[row.label]["mean gap to bf16 per token"].split()
        assert number(gap) == pytest.approx(row.gap, abs=6e-5) and unit == "nats"
    visitor.segment("Gradients")
    visitor.until("osine with bf16’s")
    run = table[table["label"] == "mxfp4"].iloc[0]
    pairs = catalog.pairs(run["run_id"], run["references"][0], Filter(tensor_name=["grad_weight"], iteration=[0]))
    found = gradient_errors(catalog, pairs)[0].set_index(["layer_index", "module"])
    dots = {(m["run"], m["gradient"]): m for m in visitor.marks("cosine") if "gradient" in m}
    assert dots["mxfp4", "L1 fc1"]["Cosine to bf16’s gradient"] == number_text(found.loc[(1, "fc1"), "cosine"])


def test_rounding_or_drift(visitor: Visitor, catalog: Catalog, worst: str):
    visitor.ask("tensor", "pair")
    row = catalog.rows_of([worst]).iloc[0]
    twins = catalog.twins(row["tensor_id"]).set_index("run_id")
    table = runs_with_references(catalog.runs(), catalog.parts()).set_index("run_id")
    run = row["run_id"]
    assert table.loc[run, "quantized"]
    reference = twins.loc[table.loc[run, "references"][0]]
    fmt = twins.loc[run, "format"] if isinstance(twins.loc[run, "format"], str) else "mxfp4"
    pair = catalog.load(reference["tensor_id"]), catalog.load(twins.loc[run, "tensor_id"])
    assert visitor.answer.endswith(three_way(*pair, fmt).verdict)
    assert f"bf16 run, rounded to {fmt}" in visitor.title("magnitudes")


def test_which_blocks_fail(visitor: Visitor, operand_shown: tuple[Tensor, int]):
    visitor.ask("tensor", "blocks")
    x, dim = operand_shown
    seen = quant.look(x, "mxfp4", dim)
    finite = seen.sqnr_db[~seen.sqnr_db.isnan()]
    lowest_db = f"{float(finite.min()):.1f}".replace("-", "−")
    assert f"of {len(finite):,} blocks of 32" in visitor.answer and f"the worst {lowest_db} dB" in visitor.answer
    assert visitor.chart("block_map").locator("image").count() == 1
    assert "Block scales" in visitor.title("scales")
    table = visitor.section.get_by_test_id("stDataFrame").first
    table.scroll_into_view_if_needed()
    visitor.clicks += 1
    table.click(position={"x": 18, "y": 36 + 28 * 2 + 14})  # the third worst
    visitor.page.wait_for_function("() => location.search.includes('block=')")
    settle(visitor.page)
    block = int(re.search(r"[?&]block=(\d+)", visitor.page.url).group(1))
    values = [mark for mark in visitor.marks("block_values") if "rounded to" in mark]
    shown = {int(number(m["position in the block"])): m for m in values}
    assert len(shown) == 32
    for place, mark in shown.items():
        assert mark["value"] == number_text(float(seen.x[block, place]))
        assert mark["rounded to"] == number_text(float(seen.y[block, place]))
        assert int(mark["code"], 2) == int(seen.codes[block, place])


def test_which_gemm_loses_it(visitor: Visitor, catalog: Catalog):
    visitor.page.goto("/?metric=result_sqnr_db")
    visitor.page.get_by_text("Click a cell to compare accumulators").wait_for()
    visitor.page.locator(".map .cell").first.click()
    visitor.page.get_by_text("was not computed again").wait_for()  # the result is not of FP8 operands
    visitor.page.goto("/?metric=result_gain_db")
    products = View("map", {"metric": ["result_gain_db"]}).draw(catalog).get("results_against_operands").table
    assert len([mark for mark in visitor.marks("results_against_operands") if "GEMM" in mark]) == len(products)


def test_do_blocks_fail_over_time(visitor: Visitor, catalog: Catalog):
    visitor.page.goto("/?metric=block_sqnr_db&across=iteration")
    settle(visitor.page)
    view = View("map", {"metric": ["block_sqnr_db"], "across": ["iteration"]})
    drawn = view.draw(catalog).get("block_distribution").table
    marks = [mark for mark in visitor.marks("block_distribution") if "share of blocks" in mark]
    assert {int(mark["iteration"]) for mark in marks} == set(drawn["iteration"])


def test_are_outliers_the_same_channels(visitor: Visitor, catalog: Catalog):
    visitor.page.goto("/?metric=outlier_persistence")
    settle(visitor.page)
    history = View("map", {"metric": ["outlier_persistence"]}).draw(catalog).get("hot_channels").table
    assert len([mark for mark in visitor.marks("hot_channels") if "share over all iterations" in mark]) == len(history)


def test_are_steps_more_than_noise(visitor: Visitor, catalog: Catalog):
    visitor.page.goto("/?metric=gradient_to_noise")
    settle(visitor.page)
    cells = View("map", {"metric": ["gradient_to_noise"]}).draw(catalog).get("map").table
    assert visitor.page.locator(".map .cell[data-id]").count() == len(cells)


def test_what_happens_inside_attention(visitor: Visitor):
    visitor.ask("tensor", "attention")
    assert re.search(r"[Pp]robability mass (flushed )?to zero", visitor.answer) and "Lowest entropy" in visitor.answer
    assert "Range of the scores" in visitor.title("scores")
    assert "Flushed attention" in visitor.title("flushed")
    heads = visitor.chart("entropy").locator("path[aria-label*='mean entropy']")
    assert heads.count() >= 8
    visitor.click(heads.nth(2))
    visitor.until("Probabilities of head 3")
    assert "head=3" in visitor.page.url
    assert visitor.chart("head_map").locator("image").count() == 1


def test_what_is_the_format_really_using(visitor: Visitor, catalog: Catalog):
    visitor.ask("tensor", "codes")
    visitor.choose("Format", "hifp8")
    visitor.until("of 256 codes are used")
    (tensor_id,) = parse_qs(urlsplit(visitor.page.url).query)["tensor"]  # the one that was shown before stays
    used = quant.usage(catalog.load(tensor_id), "hifp8")
    assert visitor.answer.startswith(
        f"{used.codes_used} of 256 codes are used; their entropy is {used.code_entropy_bits:.2f} of 8 bits."
    )
    assert "denormal" in visitor.title("tiers") and "3 mantissa bits" in visitor.title("tiers")


def test_every_chart_can_be_saved_with_its_caption(visitor: Visitor, tmp_path: Path):
    visitor.ask("runs", "recipes")
    saved = {}
    ends = {"PNG": ".png", "SVG": ".svg", "CSV": ".csv", "Markdown": ".md", "84 mm wide as PDF": "-84mm.pdf"}
    for kind, end in ends.items():
        with visitor.page.expect_download() as download:
            visitor.section.get_by_role("button", name="Save or pin").first.click()
            name = f"Save as {kind}" if end.startswith(".") else kind
            visitor.page.get_by_role("button", name=name, exact=True).first.click()
        path = tmp_path / download.value.suggested_filename
        download.value.save_as(path)
        saved[kind] = path.read_bytes()
        assert path.name == f"binade-costs{end}"
    assert b"| :--" in saved["Markdown"] and saved["84 mm wide as PDF"].startswith(b"%PDF")
    assert saved["PNG"].startswith(b"\x89PNG") and len(saved["PNG"]) > 10_000
    svg, table = saved["SVG"].decode(), saved["CSV"].decode()
    for text in (svg, table):
        for words in ("their bf16 runs, from loss.jsonl", "Gap: the run’s loss minus that of bf16", "Data: "):
            assert words in text, words
    assert "<svg" in svg and "Mean gap to bf16" in svg
    rows = pd.read_csv(tmp_path / "binade-costs.csv", comment="#")
    assert rows["gap"].notna().all() and rows["label"].is_unique and {"run_id", "low", "high"} <= set(rows)
