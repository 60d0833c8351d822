"""Everything that the app lists has its colour, its label and its help."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
from streamlit.material_icon_names import ALL_MATERIAL_ICONS

from binade.app.draw import style
from binade.app.jobs import summary
from binade.app.pages import registry
from binade.app.questions import registry as questions
from binade.app.questions.codes import charts, compute
from binade.app.questions.question import Question
from binade.app.questions.registry import QUESTIONS
from binade.app.questions.runs import page as runs_page
from binade.app.questions.shared.rounded import about_format
from binade.app.view.params import TITLES
from binade.app.view.view import View
from binade.collector.jobs.state import JobState
from binade.data.index.catalog import Catalog
from binade.data.run.directory import STATES
from binade.data.words.filter import FIELDS
from binade.quant.blocks import code_tiers
from binade.quant.formats import FORMATS
from binade.quant.specs import Spec

COLOR = re.compile(r"#[0-9a-f]{6}")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_a_color_and_a_line_about_it(name: str):
    assert COLOR.fullmatch(style.FORMAT_COLORS[name])
    assert FORMATS[name].title in about_format(Spec.of(name))


@pytest.mark.parametrize("name", FORMATS)
def test_every_tier_of_a_format_has_a_color_and_a_rank(name: str):
    for tier in set(code_tiers(FORMATS[name].element)):
        assert COLOR.fullmatch(charts.tier_color(tier))
        assert isinstance(compute.tier_rank(tier), int)


@pytest.mark.parametrize("bits", range(24))
def test_every_width_of_a_mantissa_has_a_color(bits: int):
    """Formats with four and five bits had none."""
    tier = f"{bits} mantissa bit{'s' * (bits != 1)}"
    assert COLOR.fullmatch(charts.tier_color(tier)) and compute.tier_rank(tier) == -bits


@pytest.mark.sampled(4)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.title)
def test_every_question_has_what_its_readers_need(question: Question, collected):
    assert question.text.endswith("?") and question.title and question.help
    assert question.icon.startswith(":material/")
    part = registry.PAGES[question.page].parts[question.view]
    assert part.question is question and part.kept
    with Catalog.open(collected) as catalog:
        view = View(question.page).changed(**question.address)
        reading = view.read(catalog)
        assert reading.question is question and not reading.problems and set(question.uses) <= set(reading.values)
        assert set(question.params(catalog)) <= set(view.params_in(catalog))
    assert f"| {question.text} |" in questions.describe() and question.help in questions.describe()


def test_no_two_questions_share_a_place():
    assert len({(question.page, question.view) for question in QUESTIONS}) == len(QUESTIONS)
    assert len({question.name for question in QUESTIONS}) == len(QUESTIONS)


@pytest.mark.parametrize("page", registry.PAGES.values(), ids=registry.PAGES)
def test_every_part_of_a_page_can_be_shown(page: registry.Page):
    assert page.title and page.icon.startswith(":material/") and not page.parts[page.first].writes
    for part in page.parts.values():
        assert part.title and part.icon.startswith(":material/") and callable(import_module(part.layout).show)


@pytest.mark.parametrize("state", JobState)
def test_every_state_of_a_job_has_a_badge(state: JobState):
    color, icon = summary.BADGES[state]
    assert icon.removeprefix(":material/").removesuffix(":") in ALL_MATERIAL_ICONS
    failed = state in (JobState.FAILED, JobState.CRASHED)
    assert color == "red" if failed else color in ("gray", "blue", "green", "orange")


def test_every_state_of_a_run_has_a_label():
    assert set(runs_page.STATES) == set(STATES)


def test_every_field_of_the_filter_has_a_title():
    assert set(FIELDS) <= set(TITLES)
