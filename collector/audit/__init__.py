"""Audits of quantized checkpoints: what each weight is stored in, by which rule, and its error against the original."""
