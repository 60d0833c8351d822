"""What a page, a link and a pin share: the view and its parameters. No Streamlit."""
