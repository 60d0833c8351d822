"""Quantized checkpoints of other tools: how each stores a weight, what it stands for, and which rule of its
configuration says which module is quantized."""
