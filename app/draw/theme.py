"""How charts look outside the app, where Streamlit's theme does not apply: Vega-Lite configurations, light and dark.

The colors of the page (text, background) are defined here too, so that pictures and reports agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from binade.app.draw.style import GREY, PALETTE, RAMP

MONO = "'JetBrains Mono', 'SF Mono', Menlo, Consolas, monospace"
# The first installed font is used: pictures are drawn with the fonts of the drawing library.
FONT = "Inter, 'Liberation Sans', 'Segoe UI', system-ui, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True)
class Theme:
    """Colors of a page: background, cards, text, secondary text, lines and links."""

    name: str
    ground: str
    card: str
    text: str
    quiet: str
    line: str
    link: str

    def config(self) -> dict[str, Any]:
        """The Vega-Lite configuration of a chart on a card."""
        axis = {
            "labelColor": self.quiet,
            "titleColor": self.quiet,
            "labelFontSize": 12,
            "titleFontSize": 12,
            "titleFontWeight": 500,
            "titlePadding": 10,
            "gridColor": self.line,
            "domainColor": self.line,
            "tickColor": self.line,
            "labelPadding": 6,
        }
        return {
            "background": self.card,
            "font": FONT,
            "padding": {"left": 12, "right": 14, "top": 12, "bottom": 10},
            "view": {"stroke": None, "continuousWidth": 560, "continuousHeight": 300},
            "scale": {"bandPaddingInner": 0.2},
            "axis": axis,
            "axisX": {"grid": False},
            "legend": {
                "labelColor": self.quiet,
                "titleColor": self.quiet,
                "labelFontSize": 12,
                "titleFontSize": 12,
                "titleFontWeight": 500,
            },
            "title": {"color": self.text, "fontSize": 16, "fontWeight": 600, "subtitleColor": GREY},
            "text": {"color": self.text},
            "range": {"category": PALETTE, "ramp": RAMP, "heatmap": RAMP},
        }


LIGHT = Theme("light", "#f4f5f9", "#ffffff", "#1c2030", "#596076", "#e1e4ec", "#4f46e5")
DARK = Theme("dark", "#0f1219", "#181c27", "#e4e7ef", "#a3abbd", "#2a3040", "#a5abfc")
PAPER = Theme("paper", "#ffffff", "#ffffff", "#000000", "#000000", "#c9ccd4", "#000000")
THEMES = {theme.name: theme for theme in (LIGHT, DARK)}
