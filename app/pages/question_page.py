"""The page of a question that has its own page, in the default layout."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from binade.app.address import plain, write
from binade.app.pages.registry import Page
from binade.app.params import Params
from binade.app.questions.shared.selection import Selection
from binade.app.questions.view import show_question
from binade.app.state import view_page
from binade.data.catalog import Catalog
from binade.data.filter import FIELDS, Filter


def page_of(page: Page) -> Callable[[], None]:
    question = page.question
    assert question

    @view_page(page.name, question.title, question.params, question.of_fields)
    def shown(opened: Catalog, where: Filter, params: Params) -> None:
        write(where, params)
        st.caption(question.note or f"Shown: {plain(where.sentence())}.")
        ignored = set(FIELDS).difference(question.of_fields or FIELDS)
        selection = Selection(opened, where.without(*ignored))
        show_question(question, selection, {name: st.session_state[name] for name in params})
        write(where, params)

    return shown
