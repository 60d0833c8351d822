"""The Streamlit app. Pages are thin: `analysis` computes, `charts` draws, neither knows Streamlit."""
