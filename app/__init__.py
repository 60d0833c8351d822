"""The Streamlit app. Pages only lay out: each question's `compute` and `charts` do the work, without Streamlit."""
