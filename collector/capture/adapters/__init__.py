"""Adapters find the matrix products of a model and replace them with ours, without changes to its source.

    layer.py          what an adapter returns for each layer: its site, its shards, how to attach and detach
    products.py       one product: as the model computes it with a tap, or quantized
    attention.py      functions of torch replaced while an attention core runs
    declared.py       products that the user declares by einsum equations
    own.py            collector's ParallelLinear and CoreAttention
    megatron.py       megatron.core's ColumnParallelLinear, RowParallelLinear, routers and DotProductAttention
    engine.py         Transformer Engine's modules, which are watched only
    hugging_face.py   transformers: the attention interface, Conv1D, the LM head
    torch_modules.py  nn.Linear, modules that call F.scaled_dot_product_attention, and those that hold weights
    weights.py        products that a module computes itself with a weight, such as those of experts
    boundary.py       linear layers with kernels of their own, watched from outside
    towers.py         the numbers of layers, and the towers that they belong to
    dtensor.py        linear layers and attention whose operands are DTensors
    first_pass.py     the first forward pass, watched for products that no adapter intercepts

`capture.survey` calls them all.
"""
