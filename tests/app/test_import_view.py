"""Importing files on Runs › Import: what is recognized is shown first, and `binade import` does the rest."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest
import torch
from streamlit.testing.v1 import AppTest

from binade.app.jobs.import_view import DIRECTORY, FOLDER, PATH, _run
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, list_runs
from tests.app.test_pages import Visit, rerun, words

pytestmark = pytest.mark.slow  # a process for each command
STATE = {"log_history": [{"step": step, "loss": 3.0 - step / 10} for step in (1, 2, 3)]}


@pytest.fixture
def at(visit: Visit, tmp_path: Path) -> AppTest:
    found = visit(tmp_path / "runs", "runs", view="import")
    found.session_state["root"] = tmp_path / "runs"
    return found


def runs(tmp_path: Path) -> list:
    return list_runs(tmp_path / "runs")[0]


def upload(at: AppTest, name: str, content: bytes) -> str:
    return upload_all(at, {name: content})


def upload_all(at: AppTest, *files: dict[str, bytes]) -> str:
    at.file_uploader[0].set_value([(name, content, "") for each in files for name, content in each.items()])
    return words(rerun(at))


def shown(at: AppTest) -> list[str]:
    """The lines of the importer."""
    return "\n".join(code.value for code in at.code).splitlines()


def losses(tmp_path: Path) -> dict[str, float | None]:
    """The last loss of each run, by where its log is in the upload."""
    kept = tmp_path / "runs" / FOLDER
    places = {run.run_id: "/".join(Path(run.config["source"]).relative_to(kept).parts[1:]) for run in runs(tmp_path)}
    return {places[run.run_id]: run.status.loss_last for run in runs(tmp_path)}


def name_path(at: AppTest, path: Path) -> str:
    at.radio(key="import_way").set_value(PATH)
    rerun(at).text_input(key="import_path").set_value(str(path))
    return words(rerun(at))


def import_now(at: AppTest) -> str:
    at.button(key="import_files").click()
    return words(rerun(at))


def test_an_upload_is_recognized_and_then_imported(at: AppTest, tmp_path: Path):
    at.text_input(key="import_recipe").set_value("mxfp8")
    shown = upload(at, "../my state.json", json.dumps(STATE).encode())
    assert "trainer_state.json of Hugging Face: 3 losses (loss), step 1 to 3" in shown
    assert not runs(tmp_path)
    assert "3 losses (loss), step 1 to 3" in import_now(at)
    (run,) = runs(tmp_path)
    assert (run.config["recipe"], run.status.loss_last) == ("mxfp8", STATE["log_history"][-1]["loss"])
    upload(at, "my state.json", json.dumps(STATE).encode())
    import_now(at)
    assert len(runs(tmp_path)) == 1


def test_what_the_importer_prints_while_the_page_is_drawn_is_shown(tmp_path: Path):
    root, log = tmp_path / "runs", tmp_path / "trainer_state.json"
    log.write_text(json.dumps(STATE))

    def draw(line: str) -> None:
        while not (root.exists() and [run for run in list_runs(root)[0] if run.status.state == DONE]):
            time.sleep(0.05)
        time.sleep(1)  # the process prints what it has imported, and ends

    status, lines = _run(root, log, [], draw)
    assert status == 0 and "3 losses (loss), step 1 to 3" in "".join(lines)


@pytest.mark.thorough
def test_an_uploaded_tensor_stays_where_the_index_points_to(at: AppTest, tmp_path: Path):
    torch.save({"model.layers.0.mlp.down_proj.weight": torch.ones(4, 32)}, content := io.BytesIO())
    assert "1 tensor file in the upload" in upload(at, "x.pt", content.getvalue())
    import_now(at)
    with Catalog.open(tmp_path / "runs") as catalog:
        (tensor,) = catalog.tensors()["tensor_id"]
        assert torch.equal(catalog.load(tensor), torch.ones(4, 32))


@pytest.mark.thorough
def test_a_path_of_the_server(at: AppTest, tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "trainer_state.json").write_text(json.dumps(STATE))
    assert "trainer_state.json of Hugging Face: 3 losses" in name_path(at, tmp_path / "logs")
    import_now(at)
    assert len(runs(tmp_path)) == 1 and not (tmp_path / "runs" / FOLDER).exists()


REFUSED = {
    "cut": ("x.json", b'{"log_history": [{"st', "x.json is not JSON"),
    "other": ("x", b"\0" * 100, "x is not recognized as a loss log"),
    "empty": ("x.csv", b"", "x.csv is empty"),
    "no tensors": ("x.pt", b"", "has no tensor file and no loss log"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("name", "content", "message"), REFUSED.values(), ids=REFUSED)
def test_a_refused_upload_is_one_line_and_leaves_nothing(at: AppTest, tmp_path: Path, name, content, message):
    upload(at, name, content)
    assert len(at.error) == 1 and message in at.error[0].value and "\n" not in at.error[0].value
    assert not at.get("button") or "import_files" not in {button.key for button in at.button}
    assert not (tmp_path / "runs" / FOLDER).exists() and not runs(tmp_path)


def log(last: float) -> bytes:
    return f"step,loss\n1,5.5\n2,{last}\n".encode()


def test_several_files_are_imported_and_each_refused_one_is_one_line(at: AppTest, tmp_path: Path):
    """Two have the same name."""
    files = {"losses.csv": log(3.5), "state.json": json.dumps(STATE).encode(), "notes.txt": b"Dear reader,\n",
             "bad.csv": b"step,loss\n1,two\n", "x.pkl": b"x"}  # fmt: skip
    upload_all(at, files, {"losses.csv": log(2.5)})
    lines = shown(at)
    assert not runs(tmp_path) and not (tmp_path / "runs" / FOLDER).exists()
    for name in ("notes.txt", "x.pkl", "bad.csv"):
        assert sum(name in line for line in lines) == 1, name
    import_now(at)
    assert losses(tmp_path) == {"losses.csv": 3.5, "2/losses.csv": 2.5, "state.json": STATE["log_history"][-1]["loss"]}
    (kept,) = (tmp_path / "runs" / FOLDER).iterdir()
    assert (kept / "losses.csv").read_bytes() == log(3.5) and (kept / "2" / "losses.csv").read_bytes() == log(2.5)
    upload_all(at, files, {"losses.csv": log(2.5)})
    import_now(at)
    assert len(runs(tmp_path)) == 3 and [*(tmp_path / "runs" / FOLDER).iterdir()] == [kept]


def test_a_directory_keeps_its_folders(at: AppTest, tmp_path: Path):
    """Losses and tensors together. A damaged log does not keep the tensors out."""
    at.radio(key="import_way").set_value(DIRECTORY)
    rerun(at)
    assert at.file_uploader[0].accept_directory
    torch.save({"model.layers.0.mlp.down_proj.weight": torch.ones(4, 32)}, content := io.BytesIO())
    at.text_input(key="import_recipe").set_value("")
    upload_all(at, {"out/a/losses.csv": b"step,loss\n1,two\n", "out/checkpoint-7/x.pt": content.getvalue()})
    assert "1 tensor file in the upload" in shown(at)
    import_now(at)
    assert any("out/a/losses.csv, line 2: the loss is 'two'" in line for line in shown(at))
    with Catalog.open(tmp_path / "runs") as catalog:
        table = catalog.tensors()
        assert table["iteration"].tolist() == [7]  # of the name of its folder
        assert torch.equal(catalog.load(table["tensor_id"][0]), torch.ones(4, 32))


def test_of_a_refused_import_an_earlier_one_stays(at: AppTest, tmp_path: Path):
    upload(at, "losses.csv", log(3.5))
    import_now(at)
    at.text_input(key="import_recipe").set_value("x\0y")
    upload(at, "losses.csv", log(3.5))
    assert len(at.error) == 1 and len(runs(tmp_path)) == 1
    assert len([*(tmp_path / "runs" / FOLDER).glob("*/losses.csv")]) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize("path", ["/none", "--help", "-x", "a\0b"], ids=["missing", "option", "flag", "NUL"])
def test_a_path_that_cannot_be_read_is_one_line(at: AppTest, path: str):
    name_path(at, Path(path))
    assert len(at.error) == 1 and "\n" not in at.error[0].value


def test_a_viewer_sees_no_importer(visit: Visit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BINADE_READ_ONLY", "1")
    at = visit(tmp_path / "runs", "runs", view="import")
    assert not at.get("file_uploader") and not at.expander
