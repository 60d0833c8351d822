"""All questions, in the order in which the parts of a page are shown."""

from __future__ import annotations

from binade.app.questions.attention.question import ATTENTION
from binade.app.questions.blocks.question import BLOCKS
from binade.app.questions.codes.question import CODES
from binade.app.questions.cost.question import COST
from binade.app.questions.difference.question import DIFFERENCE
from binade.app.questions.explore.question import EXPLORE
from binade.app.questions.map.question import MAP
from binade.app.questions.normality.question import NORMALITY
from binade.app.questions.pair.question import PAIR
from binade.app.questions.provenance.question import PROVENANCE
from binade.app.questions.question import Question
from binade.app.questions.recipes.question import RECIPES
from binade.app.questions.runs.question import RUNS
from binade.app.questions.what_if.question import WHAT_IF
from binade.app.questions.why.question import WHY
from binade.data.words.text import markdown_table

QUESTIONS: tuple[Question, ...] = (
    MAP,
    EXPLORE,
    WHY,
    WHAT_IF,
    NORMALITY,
    PAIR,
    BLOCKS,
    ATTENTION,
    CODES,
    RUNS,
    RECIPES,
    COST,
    DIFFERENCE,
    PROVENANCE,
)


def describe() -> str:
    """The questions as a Markdown table, for the docs."""
    rows = [(question.text, question.place, f"`{question.name}`", question.help) for question in QUESTIONS]
    return markdown_table(("Question", "Page › part", "Function of `binade.plots`", "What it shows"), rows)
