"""What is exported, read by the tools that it is for, and compared with the values that were recorded."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from csv import reader
from dataclasses import replace
from pathlib import Path

import duckdb
import numpy as np
import pandas as pd
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import binade
from binade.collector.cli import export_command
from binade.data.exchange import export
from binade.data.exchange.export import Choice, Histogram, Sink
from binade.data.index.catalog import Catalog
from binade.data.run.columns import Origin
from binade.data.run.directory import DONE, read_run
from binade.data.words.filter import Filter
from tests.data.builder import assorted, make_run, row

pytestmark = pytest.mark.slow
LAYER2 = Filter(layer_index=(2,))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root with a run of assorted tensors and losses, and one of losses alone."""
    root = tmp_path_factory.mktemp("runs")
    for label, tensors in (("made", [assorted(0), assorted(1, iteration=7)]), ("losses", [])):
        run = make_run(root, *tensors, label=label)
        for iteration, loss in ((-1, 5.5), (0, 5.25), (7, 4.0)):
            run.append_loss({"iteration": iteration, "loss": loss})
    return root


@pytest.fixture(scope="module")
def catalog(root):
    with Catalog.open(root) as opened:
        yield opened


@pytest.fixture(scope="module")
def made(root) -> str:
    return next(path.name for path in root.glob("*_made_*"))


def read(directory: Path) -> EventAccumulator:
    """A run as TensorBoard reads it, every point and histogram."""
    return EventAccumulator(str(directory), size_guidance={"scalars": 0, "histograms": 0}).Reload()


def scalars(events: EventAccumulator) -> dict[tuple[str, int], float]:
    return {(tag, each.step): each.value for tag in events.Tags()["scalars"] for each in events.Scalars(tag)}


def test_tensorboard_shows_the_values_recorded(catalog, made, tmp_path):
    done = export.export(catalog, "tensorboard", tmp_path / "logs", Choice(where=LAYER2))
    assert (done.runs, done.histograms) == (2, 2)
    events = read(tmp_path / "logs" / made)
    found = scalars(events)
    assert {step: value for (tag, step), value in found.items() if tag == "loss"} == {-1: 5.5, 0: 5.25, 7: 4.0}
    tensors = catalog.tensors(LAYER2)
    assert set(tensors["iteration"]) == {0, 7}
    for _, tensor in tensors.iterrows():
        x = catalog.load(tensor["tensor_id"]).double()
        finite = x[x.isfinite()].numpy()
        assert found["layer2/fc1/output/absmax", tensor["iteration"]] == np.float32(np.abs(finite).max())
        (histogram,) = [
            each.histogram_value
            for each in events.Histograms("layer2/fc1/output/histogram")
            if each.step == tensor["iteration"]
        ]
        assert (histogram.min, histogram.max) == (finite.min(), finite.max())
        assert histogram.num == len(finite)
        assert (histogram.sum, histogram.sum_squares) == pytest.approx((finite.sum(), (finite**2).sum()))
        magnitudes = np.abs(finite)  # a bin of negative values does not hold its lower edge, numpy's do
        limits, counts = np.array(histogram.bucket_limit), np.array(histogram.bucket)
        for chosen, sign in ((limits > 0, 1), (limits <= 0, -1)):
            assert counts[chosen].sum() == (np.sign(finite) == sign).sum() + (sign == 1) * (finite == 0).sum()
        upper = limits[limits > 0]
        expected = [((finite >= 0) & (magnitudes < limit)).sum() for limit in upper]
        assert counts[limits > 0].cumsum().tolist() == expected


def test_tables_are_read_by_pandas(catalog, made, tmp_path):
    frames = {}
    for kind, read_table in (("csv", pd.read_csv), ("parquet", pd.read_parquet)):
        export.export(catalog, kind, tmp_path / kind, Choice())
        frames[kind] = [read_table(tmp_path / kind / made / f"{stem}.{kind}") for stem in ("values", "histograms")]
    for csv, parquet in zip(frames["csv"], frames["parquet"], strict=True):
        pd.testing.assert_frame_equal(csv, parquet, check_dtype=False)
    values, bins = frames["parquet"]
    tensors, scores = catalog.tensors(), catalog.scores()
    for metric in ("absmax", "kurtosis"):
        assert sorted(values.query("metric == @metric")["value"]) == sorted(tensors[metric].dropna())
    errors = values.query("metric == 'sqnr_db'").groupby("format")["value"].agg(sorted)
    expected = scores.dropna(subset="sqnr_db").groupby("format")["sqnr_db"].agg(sorted)
    assert errors.to_dict() == expected.to_dict() and set(errors.index) == {"hifp8", "mxfp4"}
    assert values.query("metric == 'loss'")[["iteration", "value"]].to_numpy().tolist() == [
        [-1, 5.5],
        [0, 5.25],
        [7, 4],
    ]
    finite = tensors["numel"] - tensors["nans"] - tensors["infs"]
    assert bins["count"].sum() == finite.sum() and (bins["low"] < bins["high"]).all()
    assert not values["value"].isna().any()
    alone = next((tmp_path / "csv").glob("*_losses_*"))
    assert len(pd.read_csv(alone / "values.csv")) == 3 and pd.read_csv(alone / "histograms.csv").empty


def test_csv_has_no_formulas(tmp_path):
    """Names of a run that a spreadsheet would run become text, and are kept as they are for other programs."""
    formulas = ["=1+1", "+cmd|' /C calc'!A0", "@SUM(A1)", "\t=1", "-2+3", "\r=1"]
    named = [(assorted(0)[0][0], {"module": formula}) for formula in formulas]
    make_run(tmp_path / "runs", named)
    with Catalog.open(tmp_path / "runs") as catalog:
        for kind in ("csv", "parquet"):
            export.export(catalog, kind, tmp_path / kind, Choice())
    for stem in ("values", "histograms"):
        ((csv,), (parquet,)) = ([*tmp_path.glob(f"{kind}/*/{stem}.{kind}")] for kind in ("csv", "parquet"))
        with open(csv, newline="") as file:
            written = pd.DataFrame(reader(file))
        written = written[1:].set_axis(written.iloc[0], axis=1)
        inside = {"\t=1": "'\t'=1", "\r=1": "'\r'=1"}  # a reader may divide cells there
        assert set(written["module"]) == {inside.get(formula, f"'{formula}") for formula in formulas}
        assert set(pd.read_parquet(parquet)["module"]) == set(formulas)


def test_points_of_the_index_are_those_of_the_rows(catalog, made):
    """They are computed from the index here, and while a run is written there."""

    def listed(points):
        return sorted((p.tag, p.step, p.value.counts.tolist() if p.metric == "histogram" else p.value) for p in points)

    metrics = tuple(name for name in export.METRICS if name != "loss")
    for choice in (Choice(metrics), Choice(("histogram", "sqnr_db"), ("mxfp4",), Filter(quant_type=("mxfp8",)))):
        rows = [
            row(made, number, x, None, **{key: value for key, value in words.items() if key != "raw"})
            for number, (x, words) in enumerate([*assorted(0), *assorted(1, iteration=7)])
        ]
        runs = catalog.runs().query("run_id == @made").to_dict("records")
        found = listed(export.points(catalog, runs[0], choice))
        assert found == listed(export.points_of_rows(rows, choice)) and found
    assert {tag.rpartition("sqnr_db")[2] for tag, *_ in found if "sqnr_db" in tag} == {"/mxfp4"}


def test_series_of_different_tensors_differ():
    places = [
        {},
        {"operation": "evaluation"},
        {"micro_batch": 1},
        {"rank": 1},
        {"expert": 0},
        {"tensor_name": "mine"},
        {"tensor_name": "mine", "phase": "post"},
        {"layer_index": 2},
        {"module": "fc2"},
    ]
    x = torch.ones(4)
    rows = [row("run", number, x, None, **words) for number, words in enumerate(places)]
    logged = [row("log", 0, x, None, quant_type=name) for name in ("mxfp8", "hifp8")]
    rows += [
        replace(each, origin=Origin(original_quant_type="as logged", stage=stage)) for each in logged for stage in "ab"
    ]
    tags = [point.tag for point in export.points_of_rows(rows, Choice(("absmax",)))]
    assert len(set(tags)) == len(rows)
    assert tags[:5] == [
        "layer1/fc1/input/absmax",
        "layer1/fc1/input/evaluation/absmax",
        "layer1/fc1/input/micro_batch1/absmax",
        "layer1/fc1/input/rank1/absmax",
        "layer1/fc1/expert0/input/absmax",
    ]


def test_joined_bins_keep_counts():
    generator = np.random.default_rng(0)
    edges, counts = np.sort(generator.normal(size=1412)), generator.integers(0, 9, 1411)
    joined, wider = Histogram(edges, counts, 0, 0, 0, 0).coarse(512)
    assert len(joined) == len(wider) - 1 <= 512 and (wider[0], wider[-1]) == (edges[0], edges[-1])
    below = [counts[: np.searchsorted(edges, edge)].sum() for edge in wider]
    assert np.diff(below).tolist() == joined.tolist()


def record(root: Path, sink: Sink) -> Path:
    """Two iterations of a small model, recorded with a sink; the run's directory."""
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
    with binade.Recorder(root, scores=("mxfp4", "nvfp4(block=16x16)"), watch=binade.Watch(sink=sink)) as recorder:
        with binade.instrument(model, "mxfp8", recorder):
            for _ in range(2):
                model(torch.randn(8, 64)).square().mean().backward()
                recorder.step()
    return recorder.writer.directory


def test_a_sink_gets_what_is_recorded_and_serves_the_next_run(tmp_path):
    sink = Sink("tensorboard", tmp_path / "live")
    runs = [record(tmp_path / "runs", sink) for _ in range(2)]
    with Catalog.open(tmp_path / "runs") as catalog:
        export.export(catalog, "tensorboard", tmp_path / "later", Choice())
        assert {f"{run.name}" for run in runs} == {each.name for each in (tmp_path / "live").iterdir()}
    for run in runs:
        live, later = read(tmp_path / "live" / run.name), read(tmp_path / "later" / run.name)
        assert scalars(live) == scalars(later) and {step for _, step in scalars(live)} == {0, 1}
        assert any("/sqnr_db/nvfp4_block_16x16" in tag for tag, _ in scalars(live))
        assert live.Tags()["histograms"] == later.Tags()["histograms"] != []


def test_a_sink_that_fails_does_not_lose_the_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="sink failed.*not a directory.*binade export") as warned:
        run = record(tmp_path / "runs", Sink("csv", tmp_path / "file"))
    assert len(warned) == 1
    status = read_run(run).status
    assert status.state == DONE
    with Catalog.open(tmp_path / "runs") as catalog:
        tensors = catalog.tensors()
        assert len(tensors) == status.tensors > 0 and set(tensors["iteration"]) == {0, 1}


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline run of W&B: a LevelDB log, blocks of 32 KiB, after a header of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := -at % 32768) and left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            yield record
            record = b""


@pytest.mark.thorough
def test_an_offline_run_of_weights_and_biases_holds_the_values(catalog, made, tmp_path, monkeypatch):
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    monkeypatch.setenv("WANDB_MODE", "offline")
    export.export(catalog, "wandb", tmp_path / "out", Choice(where=Filter(layer_index=(2,), run_id=(made,))))
    wandb.teardown()  # waits for W&B's own process, which writes the file
    (file,) = (tmp_path / "out" / made).glob("wandb/offline-run-*/run-*.wandb")
    written = [Record.FromString(each) for each in log_records(file.read_bytes())]
    assert written[-1].HasField("exit")
    history: dict[int, dict[str, str]] = {}  # by W&B's own step, which it may write in several records
    for each in (each.history for each in written if each.HasField("history")):
        found = {"/".join(item.nested_key) or item.key: item.value_json for item in each.item}
        history.setdefault(int(found.get("_step", each.step.num)), {}).update(found)
    (run,) = (each.run for each in written if each.HasField("run"))
    config = {item.key: item.value_json for item in run.config.update}
    assert config["recipe"] == '"mxfp8"'
    losses = {int(each["iteration"]): float(each["loss"]) for each in history.values() if "loss" in each}
    assert losses == {-1: 5.5, 0: 5.25, 7: 4.0}
    series = "layer2/fc1/output"
    of = [each for each in history.values() if f"{series}/absmax" in each]
    absmax = {int(each["iteration"]): float(each[f"{series}/absmax"]) for each in of}
    assert absmax == catalog.tensors(LAYER2).set_index("iteration")["absmax"].to_dict()
    histograms = [json.loads(each[f"{series}/histogram/values"]) for each in of]
    assert list(map(sum, histograms)) == [7 * 33 - 2] * 2  # but for a NaN and an infinity


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--to", "csv", "--output", "full"], 2, "full exists and is not an empty directory"),
        (
            ["--to", "csv", "--output", "new", "--metrics", "sqnr"],
            2,
            "unknown metric 'sqnr': expected one of loss, ",
        ),
        (["--to", "csv", "--output", "new", "--formats", "mxfp9"], 2, "mxfp9"),
        (["--to", "csv", "--output", "new", "--model", "mine"], 1, "has no values that match model mine"),
        (["--to", "tensorboard", "--output", "new"], 2, "pip install 'binade[tensorboard]'"),
    ],
)
def test_the_command_says_in_one_line_what_is_wrong(
    arguments, status, message, command, root, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(root))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    monkeypatch.setattr(export, "find_spec", lambda name: None)
    assert command("export", *arguments) == status
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


def test_the_command_exports_what_is_chosen(command, root, made, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(root))
    (tmp_path / "new").mkdir()
    chosen = ["--metrics", "sqnr_db", "--formats", "hifp8", "--iteration", "7"]
    assert command("export", "--to", "parquet", "--output", str(tmp_path / "new"), *chosen) == 0
    values = pd.read_parquet(tmp_path / "new" / made / "values.parquet")
    assert set(values["format"]) == {"hifp8"} and set(values["iteration"]) == {7}
    assert f"1 run, {len(values)} values and 0 histograms" in capsys.readouterr().out


def test_tables_are_those_of_the_segments(catalog, root, tmp_path):
    """Read by DuckDB and by pandas, against the Parquet files of the run's segments."""
    done = export.export(catalog, "tables", tmp_path / "all", Choice())
    with duckdb.connect() as raw:
        for name in ("tensor", "sketch", "score"):
            recorded = f"'{root}/*/segments/*/{name}.parquet'"
            columns = [column for column, *_ in raw.execute(f"DESCRIBE FROM {recorded}").fetchall()]
            values = ", ".join(column for column in columns if column not in ("tensor_id", "run_id"))
            sums = f"SELECT count(*), sum(hash({values})), count(DISTINCT tensor_id)"
            expected = raw.execute(f"{sums} FROM {recorded}").fetchall()
            assert raw.execute(f"{sums} FROM '{tmp_path}/all/{name}/*/*.parquet'").fetchall() == expected
            assert len(pd.read_parquet(tmp_path / "all" / name)) == expected[0][0] > 0
        scores, tensors = (f"'{tmp_path}/all/{name}/*/*.parquet'" for name in ("score", "tensor"))
        joined = raw.execute(f"SELECT count(*) FROM {scores} JOIN {tensors} USING (run_id, tensor_id)").fetchall()
        assert joined == [expected[0][:1]]
    tensors = pd.read_parquet(tmp_path / "all" / "tensor")
    assert (done.runs, done.values) == (tensors["run_id"].nunique(), len(tensors))
    where = Filter(layer_index=[1])
    export.export(catalog, "tables", tmp_path / "some", Choice(where=where))
    assert len(pd.read_parquet(tmp_path / "some" / "tensor")) == catalog.totals(where).tensors
    with pytest.raises(export.ExportError, match="--formats"):
        export.export(catalog, "tables", tmp_path / "none", Choice(formats=("mxfp4",)))


def test_what_cannot_be_written_is_not_taken_for_a_damaged_index(catalog, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "run").write_text("in the way")
    for directory in (tmp_path / "full", tmp_path / "missing"):
        with pytest.raises(OSError, match=directory.name):
            catalog.write_tables(directory)
    assert not catalog.notices and not catalog.in_memory
    with pytest.raises(export.ExportError, match="contains a backslash"):
        export.export(catalog, "tables", tmp_path / "a\\b", Choice())
    assert {path.name for path in tmp_path.iterdir()} == {"full"}


def test_the_help_names_every_target_and_metric():
    assert (*export.TARGETS, export.TABLES) == export_command.TARGETS
    assert set(export.METRICS) <= set(export_command.METRICS.replace(",", "").replace(";", "").split())
    assert tuple(export_command.DEFAULT.split(", ")) == export.DEFAULT_METRICS
