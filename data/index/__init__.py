"""The DuckDB index over a root, and its queries."""
