"""What identifies a place in a model: the columns by which questions about several tensors group them."""

from __future__ import annotations

PLACE = ("layer_index", "module", "operation", "tensor_name")
