"""Fields, names, filters and texts: each word once."""
