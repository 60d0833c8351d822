"""What a recording watches by itself, each in one file with one class, listed in `registry.py`."""
