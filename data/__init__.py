"""Runs on disk, the DuckDB index over them, and the small built-in corpora."""
