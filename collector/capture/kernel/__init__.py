"""Sees the products of a model where torch computes them, below autograd, in place of `capture.adapters`.

    overrides.py   torch's kernels of mm, addmm, bmm, ..., replaced while a model is instrumented
    weights.py     which weight an operand is: by its memory, by what autograd knows of it, or by its module
    operands.py    a product as its kernel gets it, as the product of a linear layer: x · weightᵀ
    gemms.py       one product that is rounded or recorded
    callers.py     what runs a kernel: an autograd function, a transform of torch.func
    layers.py      which layers of a model are seen in kernels
    products.py    the products of a model: in the forward pass, and in the backward pass

An operand of a forward GEMM is rounded in the kernel of that GEMM, and so are those of dgrad and wgrad in theirs. So
autograd saves the operands before any rounding, and no autograd function is needed. A kernel of a backward GEMM finds
its forward call by autograd's sequence number, which both share.
"""
