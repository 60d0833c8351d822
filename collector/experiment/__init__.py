"""Evaluates the same batches on the same weights under several treatments, and keeps what each does to them."""
