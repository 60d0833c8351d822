"""All measures, in the order of the list of colors."""

from __future__ import annotations

from binade.app.measures.blocks import OF_BLOCKS
from binade.app.measures.channels import HOT_RATIO, OUTLIER_PERSISTENCE
from binade.app.measures.effect import EFFECT, PARITY
from binade.app.measures.gradients import GRADIENT_TO_NOISE
from binade.app.measures.map_measure import MapMeasure
from binade.app.measures.results import RESULT, RESULT_GAIN
from binade.app.measures.twin_step import OF_TWIN_STEPS
from binade.app.measures.values import OF_ERRORS, OF_STATISTICS, OF_TENSOR_SCALE
from binade.app.measures.weights import EDGE_EXCESS, OSCILLATING
from binade.data.index.catalog import Catalog
from binade.data.words.fields import MEASURES

_ALL = (
    *OF_ERRORS, EFFECT, PARITY, RESULT, RESULT_GAIN, *OF_BLOCKS, OUTLIER_PERSISTENCE, HOT_RATIO,
    OSCILLATING, EDGE_EXCESS, GRADIENT_TO_NOISE, *OF_TWIN_STEPS, OF_TENSOR_SCALE, *OF_STATISTICS,
)  # fmt: skip
MAP_MEASURES: dict[str, MapMeasure] = {one.measure.key: one for one in _ALL}
DEFINED = MEASURES | {name: one.measure for name, one in MAP_MEASURES.items()}
"""All that has a definition, by name."""


def recorded_measures(opened: Catalog) -> list[str]:
    """The names of the measures that a root has data for."""
    return opened.kept(
        "recorded measures", lambda: [name for name, one in MAP_MEASURES.items() if one.recorded(opened)]
    )
