"""Every file that several may write, written by two threads and by two processes at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.siege.writers import WRITERS, check_writers


@pytest.mark.parametrize("processes", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("name", WRITERS)
def test_two_writers_lose_and_damage_nothing(tmp_path: Path, name: str, processes: bool):
    (tmp_path / "place").mkdir()
    check_writers(name, tmp_path / "place", 12, processes)
