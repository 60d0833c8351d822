"""The app's entry: streamlit run app/main.py. Chooses the page; each page is a module in app/pages."""

from __future__ import annotations

import streamlit as st

from binade.app import state
from binade.app.jobs import collect_page as collect
from binade.app.jobs import page as jobs
from binade.app.pages import overview_page as overview
from binade.app.pages import runs_page as runs
from binade.app.pages import sql_page as sql
from binade.app.pages import tensor_page as tensor
from binade.app.pages import worst_page as worst
from binade.app.questions.distribution import page as explore
from binade.app.questions.recipes import page as recipes
from binade.app.sessions import draft
from binade.app.sessions import page as sessions
from binade.data.access import read_only

# Drawn here: Streamlit's own icons would be fetched from another host.
ICON = (
    '<svg viewBox="0 0 16 16"><g fill="#6366f1"><rect x="1" y="10" width="3" height="5"/>'
    '<rect x="5" y="5" width="3" height="10"/><rect x="9" y="1" width="3" height="14"/>'
    '<rect x="13" y="7" width="2" height="8"/></g></svg>'
)
CSS = (
    "<style>"
    ".block-container{padding:3.4rem 2.2rem 3rem;max-width:1760px}"
    "h1{font-size:1.9rem!important;padding-bottom:.2rem!important}"
    "[data-testid=stMetric]{padding:.55rem .9rem}"
    "[data-testid=stMetricValue]{font-size:1.4rem}"
    "[data-testid=stSidebarHeader]{height:2.6rem}"
    ".st-key-notices{padding-top:1.1rem}"
    "</style>"
)


def navigate(default: str = "overview") -> None:
    """Declare the pages, so that they can link to each other, and run the one that the address names."""
    st.set_page_config(page_title="Binade", page_icon=ICON, layout="wide")
    st.html(CSS)
    pages = {
        "overview": (overview.page, "Overview", ":material/home:"),
        "explore": (explore.page, "Explore", ":material/query_stats:"),
        "worst": (worst.page, "Worst", ":material/trending_down:"),
        "tensor": (tensor.page, "Tensor", ":material/grid_on:"),
        "recipes": (recipes.page, "Recipes", ":material/balance:"),
        "runs": (runs.page, "Runs", ":material/science:"),
        "sessions": (sessions.page, "Sessions", ":material/bookmarks:"),
        "sql": (sql.page, "SQL", ":material/database:"),
        "collect": (collect.page, "Collect", ":material/play_circle:"),
        "jobs": (jobs.page, "Jobs", ":material/list_alt:"),
    }
    if read_only():
        pages = {name: page for name, page in pages.items() if name not in ("sql", "collect")}
    declared = {
        name: st.Page(page, title=title, icon=icon, url_path=None if name == default else name, default=name == default)
        for name, (page, title, icon) in pages.items()
    }
    st.session_state["pages"] = declared
    chosen = st.navigation(list(declared.values()), position="top")
    draft.follow_link()
    draft.notices()
    chosen.run()
    draft.panel(state.catalog)


if __name__ == "__main__":
    navigate()
