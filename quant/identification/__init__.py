"""Which spec gave a kernel's values: see `search.identify`."""
