"""Comparisons of runs and their statistics."""
