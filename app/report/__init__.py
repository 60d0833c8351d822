"""Reports: what the app shows, as files. No Streamlit here.

writer     binade report: the folder of files
options    its command-line options
contents   the sections of a report of a filter's selection: a list of views
sessions   the sections of a saved session's report
runs       the sections on runs, definitions and versions
section    the parts of a section
tables     names, units and numbers of tables
stats      the numbers as JSON and text
page       the report as one HTML file that needs nothing else: page.html, page.css, page.js
rendering  charts to SVG and PDF, in separate processes
"""
