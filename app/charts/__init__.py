"""Small tables to Altair charts, in the visual language of `app.style`. No Streamlit here.

Titles say what is plotted, subtitles from what; axes carry units. A module for each idea of `app.analysis`.
"""

from binade.app.charts.distribution import (
    LAW_TITLES,
    boxes,
    boxes_height,
    linear_histogram,
    log2_histogram,
    qq,
    qq_between,
    qq_normal,
)
from binade.app.charts.formats import ERROR_PANELS, format_height, format_panels, trial_panels
from binade.app.charts.runs import losses

__all__ = [
    "ERROR_PANELS",
    "LAW_TITLES",
    "boxes",
    "boxes_height",
    "format_height",
    "format_panels",
    "linear_histogram",
    "log2_histogram",
    "losses",
    "qq",
    "qq_between",
    "qq_normal",
    "trial_panels",
]
