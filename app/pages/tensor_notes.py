"""Notes on a tensor: where an imported one comes from, and what was corrected in its log.

Names, paths and words come from untrusted files, so everything is shown as text, never as Markdown.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import streamlit as st

from binade.app.view.params import TITLES
from binade.data.run.columns import Identity
from binade.data.run.notes import notes
from binade.data.words.filter import INTEGER_FIELDS
from binade.data.words.text import one_line

LONGEST = 1000
NOT_LOGGED = ("model", "size", "dataset", "recipe")


def show_notes(row: pd.Series, config: str) -> None:
    """A button that shows the notes on a tensor, if there are any. config: run.json, as text."""
    sentences = notes({str(name): value for name, value in row.items()}, config)
    if not sentences:
        return
    imported = pd.notna(row["path"]) and str(row["path"]).startswith("/")
    with st.popover("About this tensor", icon=":material/description:", width="content"):
        if imported:
            _words(row)
        st.text("\n".join(one_line(sentence, LONGEST) for sentence in sentences))
        if imported:
            st.caption("Its file:")
            key = "" if pd.isna(row["file_key"]) else f" [{row['file_key']}]"
            st.text(one_line(f"{row['path']}{key}", LONGEST))


def _words(row: pd.Series) -> None:
    """The fields that users filter by, blank where the log does not give them."""
    names = [name for name in (*Identity.__annotations__, "stage") if name not in NOT_LOGGED]
    cells: dict[str, Any] = {TITLES[name]: [row[name]] for name in names}
    cells["Logged as"] = [row["original_quant_type"]]
    cells["Logged at"] = [row["captured"]]
    st.dataframe(
        pd.DataFrame(cells).astype({TITLES[name]: "Int64" for name in INTEGER_FIELDS}),
        hide_index=True,
        placeholder="",
        column_config={"Logged at": st.column_config.DatetimeColumn(format="YYYY-MM-DD HH:mm:ss")},
    )
