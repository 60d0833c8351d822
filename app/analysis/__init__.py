"""Catalog rows and tensors to the small tables that charts are drawn from. No Streamlit here.

distribution  how values lie: histograms and boxes
laws          Q-Q against fitted laws and between samples
labels        what tensors are called
formats       what each format would do to a selection, from the index
whatif        the same, with any options, on the values
boards        any metric by place, depth, iteration, direction
anatomy       one tensor against a codebook, by channel, token, block and code
attention     probabilities and scores by head
recipes       runs against the bf16 run of the same data
"""

from binade.app.analysis.distribution import (
    MAX_EXACT_FLOAT32,
    SKETCH_SMALLEST,
    Distribution,
    boxes,
    distribution_of,
    distributions,
    each_by,
    linear_histogram,
    log2_histogram,
    magnitudes,
    quantiles,
)
from binade.app.analysis.formats import format_comparison
from binade.app.analysis.labels import group_name, tensor_label, unique_labels
from binade.app.analysis.laws import qq_normal

__all__ = [
    "MAX_EXACT_FLOAT32",
    "SKETCH_SMALLEST",
    "Distribution",
    "boxes",
    "distribution_of",
    "distributions",
    "each_by",
    "format_comparison",
    "group_name",
    "linear_histogram",
    "log2_histogram",
    "magnitudes",
    "qq_normal",
    "quantiles",
    "tensor_label",
    "unique_labels",
]
