"""What each page shows, as figures: from the catalog and the view's parameters, without Streamlit.

A module for each page: `params` says which parameters it has, `drawn` draws all that a view of it shows. The page lays
the same figures out and adds what is not drawn: tables, controls, links.
"""
