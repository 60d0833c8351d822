"""A report as a ZIP: each chart as PNG, SVG, CSV and its Vega-Lite specification, each table as CSV and JSON.

Entries carry no time of day, so that the same report makes the same bytes.
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from binade.app.report.painting import Painted
from binade.app.report.plates import Plate, Table
from binade.app.report.stats import strict_json

EPOCH = (1980, 1, 1, 0, 0, 0)


class Archive:
    """A ZIP that is being made: closed by the `with`, whole unless that was left by an error. Raises OSError."""

    def __init__(self, path: Path) -> None:
        self._zip = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def add(self, name: str, content: bytes | str) -> None:
        """One entry; pictures are stored as they are."""
        how = zipfile.ZIP_STORED if name.endswith(".png") else zipfile.ZIP_DEFLATED
        entry = zipfile.ZipInfo(name, EPOCH)
        entry.external_attr = 0o644 << 16
        self._zip.writestr(entry, content, how)

    def plate(self, plate: Plate, painted: Painted) -> None:
        self.add(f"{plate.path}.png", painted.png)
        self.add(f"{plate.path}.svg", painted.svg)
        self.add(f"{plate.path}.csv", plate.csv)
        whole = {"caption": plate.figure.caption, "vega_lite": plate.spec}
        self.add(f"{plate.path}.json", json.dumps(whole, ensure_ascii=False, allow_nan=False))

    def table(self, table: Table) -> None:
        self.add(f"tables/{table.name}.csv", table.frame.to_csv(index=False))
        self.add(f"tables/{table.name}.json", strict_json(table.frame.to_dict("records")))
