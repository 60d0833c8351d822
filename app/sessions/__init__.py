"""Sessions: pinned charts, notes and a view that a user keeps, shares and opens again.

session       what a session is, and the JSON in which it travels
log           a session as a log of operations
storage       the logs on disk, and sessions with their runs as one .zip
pins          pinned charts, drawn again from their page and parameters, and the runs that they show
notes         Markdown that is safe to show
open_session  the session that is open in a browser tab
page          the Sessions page
"""
