"""Reports: what the app shows, as files. No Streamlit here.

headless   binade report: the folder of files
options    its command-line options
contents   the sections of a report of a filter's selection
sessions   the sections of a saved session's report
runs       the sections on runs, definitions and versions
plates     what sections are made of: charts and tables
stats      the numbers as JSON and text
frozen     the report as one HTML file that needs nothing else
archive    the report as a ZIP of pictures, drawings and numbers
painting   charts to PNG and SVG, by processes that run painter.py
"""
