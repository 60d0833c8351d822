"""The app's entry: streamlit run app/main.py. Chooses the page; each page is a module in app/pages."""

from __future__ import annotations

import streamlit as st

from app.pages import explore, runs

# Drawn here: Streamlit's own icons would be fetched from another host.
ICON = (
    '<svg viewBox="0 0 16 16"><g fill="#6366f1"><rect x="1" y="10" width="3" height="5"/>'
    '<rect x="5" y="5" width="3" height="10"/><rect x="9" y="1" width="3" height="14"/>'
    '<rect x="13" y="7" width="2" height="8"/></g></svg>'
)

st.set_page_config(page_title="Binade", page_icon=ICON, layout="wide")
st.html(
    "<style>"
    ".block-container{padding:3.4rem 2.2rem 3rem;max-width:1760px}"
    "h1{font-size:1.9rem!important;padding-bottom:.2rem!important}"
    "[data-testid=stMetric]{padding:.55rem .9rem}"
    "[data-testid=stMetricValue]{font-size:1.55rem}"
    "[data-testid=stSidebarHeader]{height:2.6rem}"
    "</style>"
)
page = st.navigation(
    [
        st.Page(explore.show, title="Explore", icon=":material/query_stats:", default=True),
        st.Page(runs.show, title="Runs", icon=":material/science:", url_path="runs"),
    ],
    position="top",
)
page.run()
