"""The app's entry: streamlit run app/main.py. Chooses the page; each page is a module in app/pages."""

from __future__ import annotations

import streamlit as st

from app.pages import explore, runs

st.set_page_config(page_title="Binade", page_icon=":material/stacked_bar_chart:", layout="wide")
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
        st.Page(explore.show, title="Explore", icon=":material/query_stats:", url_path="explore", default=True),
        st.Page(runs.show, title="Runs", icon=":material/science:", url_path="runs"),
    ],
    position="top",
)
page.run()
