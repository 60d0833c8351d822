"""Where uploaded files are saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from binade.app.jobs.import_view import LONGEST_NAME, harmless, uploaded


def places(*names: str) -> list[str]:
    return [*uploaded([(name, str(number).encode()) for number, name in enumerate(names)]).contents]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("a.csv", "a.csv", "a.csv"), ["a.csv", "2/a.csv", "3/a.csv"]),
        (("2", "a", "a"), ["2", "a", "3/a"]),  # a file has the name of the folder
        (("my losses.csv", "my?losses.csv"), ["my_losses.csv", "2/my_losses.csv"]),
        (("run/a/x.pt", "run/b/x.pt"), ["run/a/x.pt", "run/b/x.pt"]),
        (("events.out.tfevents.1.host.2",), ["events.out.tfevents.1.host.2"]),
        (("tfevents.1", "tfevents.2", "x.csv"), ["tfevents.1/tfevents.1", "tfevents.2/tfevents.2", "x.csv"]),
        (("tfevents.1", "tfevents.1"), ["tfevents.1/tfevents.1", "2/tfevents.1/tfevents.1"]),
        (("run/tfevents.1", "run/tfevents.2"), ["run/tfevents.1", "run/tfevents.2"]),  # one restarted training
    ],
)
def test_no_file_overwrites_another(names: tuple[str, ...], expected: list[str]):
    assert places(*names) == expected


@pytest.mark.parametrize("names", [("run/x.csv", "run/x.csv"), ("run/x", "run/x/y")])
def test_two_directories_of_one_name_are_not_mixed(names: tuple[str, ...]):
    with pytest.raises(ValueError, match=r"run/x\S* is uploaded twice"):
        places(*names)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "..", "", "/", "a\0b", "a\nb", "~", "-rf", ".ssh/config", "C:\\x\\y", "é" * 300,
     "/".join("abcdefghijklmnopqrstuvwxyz"), "a/./b/../c", "$(x)", "\udcff"],
)  # fmt: skip
def test_a_name_stays_in_its_folder(tmp_path: Path, name: str):
    path = harmless(name)
    assert (tmp_path / path).resolve().is_relative_to(tmp_path.resolve()) and path.isascii() and path.isprintable()
    assert all(0 < len(part) <= LONGEST_NAME and not part.startswith(".") for part in path.split("/"))


def test_the_same_upload_has_the_same_digest():
    files = [("a.csv", b"1"), ("b.csv", b"2")]
    assert uploaded(files).digest == uploaded(files[::-1]).digest
    assert uploaded(files).digest != uploaded([("a.csv", b"2"), ("b.csv", b"1")]).digest
    assert uploaded(files[:1]).digest == uploaded([("other.csv", b"1")]).digest
