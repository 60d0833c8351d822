"""Sessions: views, pinned charts and notes that a user keeps, shares and opens again.

session   what a session is, its JSON file, and what two sessions differ in
storage   the saved versions on disk, and sessions with their runs as one .zip
pins      pinned charts, drawn again from their page and parameters, and the runs that they show
notes     Markdown that is safe to show
draft     the session that is open in a browser tab
page      the Sessions page
"""
