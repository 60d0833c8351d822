"""What is measured of a tensor: the statistics of its values, and the error of rounding it.

Apart from the arrays of the sketch, each field is a number that data/run/columns.py makes a column of; `meaning` in a
field's metadata describes it, and METRICS the errors. This file imports no torch.
"""

import math
from dataclasses import dataclass, field

import numpy as np

from binade.quant.sketch import Sketch


@dataclass(frozen=True)
class Summary:
    """The statistics of a tensor.

    Moments are over the finite elements, summed in float64; std is the population's. absmin is the smallest nonzero
    magnitude. kurtosis is E(x-mean)^4 / std^4 (3 for a normal), not the excess. A value is NaN where it is undefined
    (no finite element, no spread). `bins` and `counts` are the sketch's nonempty bins, finite
    elements only.
    """

    numel: int
    min: float = field(metadata={"meaning": "moments are over the finite elements"})
    max: float
    mean: float
    std: float = field(metadata={"meaning": "population standard deviation: divided by n, not n − 1"})
    rms: float = field(metadata={"meaning": "square root of the mean square of the finite values"})
    absmax: float = field(metadata={"meaning": "largest magnitude"})
    absmin: float = field(metadata={"meaning": "smallest nonzero magnitude"})
    skewness: float
    kurtosis: float = field(metadata={"meaning": "E(x-mean)^4 / std^4: 3 for a normal distribution"})
    zeros: int
    nans: int
    infs: int
    bins: np.ndarray
    counts: np.ndarray

    @property
    def sketch(self) -> Sketch:
        """The binade sketch, for quantiles, Q-Q points and distances: see `quant.sketch`."""
        return Sketch(self.bins, self.counts)

    @property
    def crest_factor(self) -> float:
        """absmax / rms."""
        return self.absmax / self.rms if self.rms else math.nan

    @property
    def dynamic_range(self) -> float:
        """log2(absmax / absmin), in binades."""
        return math.log2(self.absmax / self.absmin) if self.absmax > 0 else math.nan


@dataclass(frozen=True)
class Errors:
    """Error of q against x, over the finite elements of x. Sums in float64. METRICS has the definitions.

    sqnr_db is +inf if q equals x everywhere, -inf if a finite x became infinite, and NaN if x is all zero (as are
    relative_error, cosine and projection); flush_to_zero is NaN where x has no nonzero element. saturated and
    saturated_error_share are NaN without a format.

    flushed_error_share and saturated_error_share are shares of Σ(q-x)², NaN where that is 0. The rest, up to 1, is
    rounding within the format's grid. A value that is beyond the largest and becomes 0, because its scale does, is
    flushed.
    """

    sqnr_db: float
    mse: float
    relative_error: float
    cosine: float
    projection: float
    max_abs_error: float
    flush_to_zero: float
    underflow_of_all: float
    saturated: float
    flushed_error_share: float
    saturated_error_share: float
