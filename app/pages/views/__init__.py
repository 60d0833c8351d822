"""The views of one tensor: each answers a question, and draws itself from a `Look`."""
