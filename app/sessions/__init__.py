"""Sessions: views, pinned charts and notes that a user keeps, shares and opens again.

session      what a session is, and its JSON file
storage      the saved versions on disk
pins         pinned charts, drawn again from their page and parameters
references   which runs a session shows, and whether they changed since
comparison   what two sessions differ in
notes        Markdown that is safe to show
bundles      a session with its runs as one .zip
draft        the session that is open in a browser tab
page         the Sessions page
"""
