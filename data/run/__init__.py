"""Runs on disk: directories, segments, rows, tensor files, and what a run says of itself."""
