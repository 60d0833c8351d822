"""The terms that the app, its reports and the docs use, each defined once. Fields and metrics: `data.words.fields`."""

from __future__ import annotations

from binade.data.words.fields import IDENTITIES

_TERMS = {
    "absmax": "Largest magnitude of a tensor or block; elsewhere also called amax.",
    "axis": "The axis along which blocks lie: the one that the operand's GEMM contracts, which differs among the "
    "forward, dgrad and wgrad GEMMs.",
    "binade": "The floats that share an exponent: from one power of two up to the next.",
    "block": "Values that share a scale: 32 neighbors in MX formats, 16 in NVFP4, or a rectangle such as 128x128.",
    "cell": "A square of the Map: an operand of a GEMM in a layer or iteration. A tensor that two GEMMs take is an "
    "operand of each and has a cell in each; a result of a GEMM has none. If 108 of 210 tensors are operands of two "
    "GEMMs each, the Map has 216 cells.",
    "codebook": "All values that a format can represent, before the scale.",
    "dgrad": "The GEMM of the backward pass that computes the gradient of a layer's input, from the gradient of its "
    "output and its weight.",
    "fake quantization": "Rounding values to a format and keeping them in bf16 or fp32, so that an ordinary GEMM "
    "multiplies them. It shows the error of the format, not its speed.",
    "flushed": "A nonzero value that becomes 0: underflow.",
    "GEMM": "A matrix product. Training a linear layer takes three: forward, dgrad and wgrad.",
    "Hadamard rotation": "An orthogonal transform of neighboring values that spreads outliers over the block. If both "
    "operands of a GEMM are rotated along the axis that it contracts, the product stays the same.",
    "operand": "One of the two matrices that a GEMM multiplies.",
    "place": "Where a tensor belongs in the model: layer, module, operation and tensor.",
    "Q–Q plot": "Quantiles of the values against those of a distribution. If all points lie on the line, the values "
    "follow it; heavy tails bend away from the line at the ends.",
    "saturated": "A value beyond the largest of the format. It is clipped to that value or, in fp16 and bf16, becomes "
    "Inf.",
    "scale": "The number that a tensor's or block's values are divided by before they are rounded.",
    "sketch": "Counts of a tensor's values in bins of an eighth of a binade. Sketches can be added, so charts of many "
    "tensors need not read their values.",
    "spec": "A format with options, such as mxfp8(scale=rceil).",
    "stochastic rounding": "Rounding up or down at random, so that the expected result is the value itself.",
    "wgrad": "The GEMM of the backward pass that computes the gradient of a layer's weight, from the gradient of its "
    "output and its input.",
}
TERMS = dict(
    sorted(
        (_TERMS | {field.inline: field.definition for field in IDENTITIES.values()}).items(),
        key=lambda term: term[0].lower(),
    )
)
