"""Charts and tables: drawn from data, shown on a page, exported."""
