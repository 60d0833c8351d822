"""Reports: what the app shows, as files. No Streamlit here.

contents   what a report holds: sections of figures and tables, from the index where it can
painting   figures to PNG and SVG, by processes of their own (painter.py is one)
frozen     one HTML file that needs nothing else
archive    a ZIP of pictures, drawings and numbers
headless   binade report: a folder of all that
"""
