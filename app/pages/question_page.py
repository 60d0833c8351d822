"""The page of a question that has a page of its own and no layout for it."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from binade.app.address import follow, plain, write
from binade.app.filters import sidebar
from binade.app.pages.registry import Page
from binade.app.questions.shared.selection import Selection
from binade.app.questions.view import show_question
from binade.app.state import catalog_page
from binade.data.catalog import Catalog


def page_of(page: Page) -> Callable[[], None]:
    question = page.question
    assert question

    @catalog_page(question.text)
    def shown(opened: Catalog) -> None:
        params = question.params(opened)
        follow(opened, page.name, params)
        where = sidebar(opened)
        write(where, params)
        st.caption(f"Shown: {plain(where.sentence())}.")
        show_question(question, Selection(opened, where), {name: st.session_state[name] for name in params})

    return shown
