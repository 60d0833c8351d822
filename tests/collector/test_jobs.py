"""Jobs with real processes: the queue, its runner, cancelling, and every way in which a job may end."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from binade.app.jobs import summary
from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.cli.options import parse
from binade.collector.errors import ConfigError
from binade.collector.jobs import directory, processes, queue, runner, state
from binade.collector.jobs.estimate import estimate, volume_of
from binade.collector.jobs.state import JobState
from binade.collector.training.config import RunConfig
from binade.collector.training.plan import plan
from binade.data.index.catalog import Catalog
from binade.data.run.access import ReadOnlyError
from binade.data.run.continued import continued_run
from binade.data.run.directory import RunState, list_runs, read_status
from binade.data.run.json_files import write_json
from binade.data.run.run_writer import RUN_VARIABLE, RunWriter, settle, write_queued
from binade.data.run.store import HOST
from tests.collector.forked import run_forked
from tests.collector.test_failures import check_rows
from tests.conftest import PROJECT, run_collector, start_python, until

pytestmark = pytest.mark.slow

SMALL = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "64", "--backend", "torch", "--scores", "")
SHORT = ("run", *SMALL, "--quantization", "mxfp8")
ENDLESS = (*SHORT, "--control-iter", "1000000")
TWO_RANKS = (*ENDLESS, "--dp", "2", "--micro-batch-size", "1", "--sequence-length", "32")
PATIENCE = 120  # seconds


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A root for jobs; whatever still runs at the end is ended, and nothing of it may be left."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    place = tmp_path / "runs"
    yield place
    end_all(place)


def end_all(place: Path) -> None:
    for view in jobs.listing(place):
        for process in processes.marked(place / view.job.run_id):
            process.send(signal.SIGKILL)
        if view.active and view.state != JobState.CANCELLING:
            with suppress(jobs.JobError):  # it has ended meanwhile
                jobs.cancel(place, view.job.id)
    until(lambda: not jobs.has_runner(place), "the runner to leave")


def launch(root: Path, line: tuple[str, ...]) -> jobs.Job:
    (job,) = add_line(root, line)
    jobs.start_runner(root)
    return job


def now(root: Path, job: jobs.Job) -> jobs.JobView:
    return jobs.view_of(root, jobs.find(root, job.id))


def after_iteration(root: Path, job: jobs.Job, number: int) -> jobs.JobView:
    """Wait until an iteration is recorded."""

    def there() -> bool:
        view = now(root, job)
        assert view.active, (view.state, view.reason, jobs.log_tail(root, job))
        return view.run is not None and view.run.status.iteration >= number

    until(there, f"iteration {number}")
    return now(root, job)


def ended(root: Path, job: jobs.Job) -> jobs.JobView:
    until(lambda: not now(root, job).active, f"job {job.id} to end")
    return now(root, job)


def runner_of(root: Path) -> processes.Process:
    """The process that works through the queue, by its command line."""
    wanted = ["jobs", "serve", "--tensor-save-dir", str(root)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                words = (entry / "cmdline").read_text().split("\0")[:-1]
            except OSError:
                continue
            if words[-4:] == wanted and (found := processes.Process.of(int(entry.name))):
                return found
    raise AssertionError("no runner lives")


def first_process(root: Path, job: jobs.Job) -> processes.Process:
    status = read_status(root / job.run_id)
    return processes.Process(status.pid, status.pid_started)


def set_process(root: Path, job: jobs.Job, process: processes.Process | None, **others: object) -> None:
    """What the runner notes when it starts a job, and the job's process when it has begun the run."""
    known = {"host": processes.host(), "boot": processes.boot(), "at": "2026-01-01", "oom_kills": 1 << 40}
    directory.write_launch(root, job, directory.Launch(**(known | others)))
    if process:
        where = {name: str((known | others)[name]) for name in ("host", "boot")}
        status = replace(read_status(root / job.run_id), state=RunState.RUNNING, **where)
        write_json(root / job.run_id / "status.json", replace(status, pid=process.pid, pid_started=process.pid_started))


class TestAsking:
    @pytest.mark.parametrize(
        "line",
        [
            "run",
            "quick mxfp8",
            "run --model deepseek2_lite --quantization linear_mxfp4 --router-quant bf16 --modules fc1,fc2 --tp 2",
            "run --collect-micro-batches 0 --micro-batches 3 --max-bytes 500M --scores= --seed 7",
            "run --no-raw",
            "run --no-save-tensors",
            "run --capture-layers first,^layer2[.]core$ --skip-layers last --operand-quant qk.forward.key=mxfp4",
            "run --tp 2 --sequence-parallel --dp 2 --ranks 0,3 --learning-rate 3e-05",
            "batch --training-config fast --warmup-iterations 2",
        ],
    )
    def test_arguments_are_the_configuration_again(self, line):
        runs = parse(line.split()).runs
        assert [parse(config.arguments()).runs for config in runs] == [[config] for config in runs]

    def test_a_budget_for_values_that_are_not_kept_is_left_out(self):
        assert parse(RunConfig(raw=False, max_bytes=1).arguments()).runs == [RunConfig(raw=False)]

    def test_a_shown_command_asks_for_the_same_runs(self):
        runs = parse(["batch", "--quantization", "bf16,FA_mxfp4", "--skip-layers", "^layer1[.](qkv|core)$"]).runs
        words = shlex.split(jobs.command_line(runs))
        assert words[:2] == ["binade", "batch"] and parse(words[1:]).runs == runs

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            ([], "a job is a command line of run"),
            (["list"], "a job is a command line of run"),
            (["run", "--dry-run"], "--dry-run runs nothing"),
            (["run", "--nodes", "2"], "--nodes needs --target or --launcher slurm"),
            (["run", "--layerz", "1"], "--layerz"),
            (["run", "--dataset", "wikipdia"], "wikipdia"),
            (["run", "--layers", "17"], "expected 1 to 16"),
        ],
    )
    def test_what_cannot_run_is_not_queued(self, tmp_path, line, expected):
        with pytest.raises(ConfigError, match=expected):
            add_line(tmp_path, line)
        assert list(tmp_path.iterdir()) == []


class TestEstimate:
    def test_disk_and_tensors_are_those_of_the_real_run(self, collected):
        """The disk's own count of the files that were written."""
        runs, _ = list_runs(collected)
        config = parse(
            ["run", "--training-config", "fast", "--warmup-iterations", "2", "--control-iter", "2"]
        ).runs[0]  # fmt: skip
        volume = volume_of(plan(config))
        for run in runs:
            written = sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file())
            assert volume.tensors == run.status.tensors
            assert volume.files == pytest.approx(run.status.bytes, rel=0.01)
            assert volume.disk == pytest.approx(written, rel=0.02)

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize(
        "line",
        [
            ["--model", "deepseek2_lite"],
            ["--tp", "2", "--ranks", "1", "--modules", "core,proj,fc2", "--tensors", "input,query,grad_value"],
            ["--train-iters", "5", "--watch", "every 2 steps", "--stats", "full"],
            ["--train-iters", "5", "--watch", "every 2 steps"],
        ],
        ids=lambda line: " ".join(line),
    )
    def test_disk_of_other_shapes(self, tmp_path, line):
        size = ("--micro-batch-size", "1", "--sequence-length", "64", "--backend", "torch", "--scores", "")
        assert run_forked(tmp_path / "runs", *size, *line, ranks=2 if "--tp" in line else 1) == 0
        (run,), _ = list_runs(tmp_path / "runs")
        volume = volume_of(plan(parse(["run", *size, *line]).runs[0]))
        assert volume.tensors == pytest.approx(run.status.tensors, rel=0.05)  # an expert may get no token
        assert volume.files == pytest.approx(run.status.bytes, rel=0.05)
        if "--watch" in line:
            written = sum(path.stat().st_size for path in run.directory.rglob("*") if path.is_file())
            assert volume.disk == pytest.approx(written, rel=0.1)

    def test_time_comes_from_former_runs(self, collected, tmp_path):
        length = ("--training-config", "fast", "--warmup-iterations", "2", "--control-iter", "2")
        line = ["run", "--backend", "torch", *length]
        config = parse([*line, "--quantization", "mxfp8"]).runs[0]
        unknown, known = estimate([plan(config)], tmp_path), estimate([plan(config)], collected)
        assert unknown.basis.startswith("No similar run yet")
        assert known.basis == "Estimated from 1 earlier run of this model and recipe."
        (run,) = [run for run in list_runs(collected)[0] if run.config["recipe"] == "mxfp8"]
        # The first of each kind does not count.
        _, warm_up, _, recorded = (record["seconds"] for record in jobs.state.losses_of(run))
        assert known.seconds - 8.0 == pytest.approx(2 * warm_up + 2 * recorded)
        longer = estimate([plan(replace(config, train_iters=10, control_iter=10))], collected)
        assert longer.seconds > known.seconds
        other = parse([*line, "--quantization", "linear_mxfp4"]).runs[0]
        assert estimate([plan(other)], collected).basis.startswith("No run of this recipe yet: estimated from ")

    def test_what_cannot_fit_is_refused(self, tmp_path):
        large = parse(["run", "--model", "llama31-8b", "--size", "full", "--max-bytes", "900T"]).runs[0]
        found = estimate([plan(replace(large, control_iter=100_000))], tmp_path)
        memory, disk = found.refusals
        assert "for weights, gradients and optimizer" in memory and disk.startswith("The runs would write")


class TestQueue:
    def test_two_writers_lose_nothing(self, root):
        code = (
            "import sys; from pathlib import Path; from binade.collector import jobs\n"
            "from binade.collector.cli.options import parse\n"
            "for i in range(20):\n"
            "    plans = parse(['run', '--seed', str(i)]).plans\n"
            "    jobs.add_runs(Path(sys.argv[1]), plans, titles=[sys.argv[2]])"
        )
        writers = [start_python("-c", code, root, name) for name in ("one", "two")]
        assert [writer.wait(PATIENCE) for writer in writers] == [0, 0]
        found = queue.read_jobs(root)
        assert [job.id for job in found] == list(range(1, 41)) and len({job.run_id for job in found}) == 40
        for name in ("one", "two"):
            seeds = [job.config.seed for job in found if job.title == name]
            assert seeds == list(range(20))
        for job in found:
            jobs.cancel(root, job.id)

    def test_one_at_a_time_in_order_after_the_app_is_gone(self, root):
        """Queued by a process that ends at once; nobody else touches the queue."""
        line = ("batch", "--quantization", "mxfp8,bf16", *SMALL, "--tensor-save-dir", str(root))  # the line's own wins
        added = run_collector("jobs", "add", "--", *line, root=root.with_name("another"))
        assert added.returncode == 0, added.stderr
        assert [line.split(":")[0] for line in added.stdout.splitlines()] == ["job 1 queued", "job 2 queued"]
        until(lambda: not any(view.active for view in jobs.listing(root)), "both to end")
        first, second = jobs.listing(root)
        assert first.state == second.state == "done"
        assert [view.run.config["recipe"] for view in (first, second)] == ["mxfp8", "bf16"]
        assert first.run.status.finished < second.run.config["started"]
        until(lambda: not jobs.has_runner(root), "the runner to leave an empty queue")
        followed = run_collector("jobs", "follow", "1", root=root)
        assert followed.returncode == 0 and "iteration 0 (mxfp8): loss" in followed.stdout
        assert followed.stdout.endswith("job 1 done\n")
        listed = run_collector("jobs", root=root).stdout
        assert [line.split()[:2] for line in listed.splitlines()[1:3]] == [["1", "done"], ["2", "done"]]

    def test_more_at_once_by_choice(self, root):
        jobs.set_at_once(root, 2)
        both = [launch(root, ENDLESS), launch(root, ENDLESS)]
        until(lambda: not any(now(root, job).state == JobState.QUEUED for job in both), "both to start")
        assert all(now(root, job).active for job in both)

    @pytest.mark.thorough
    def test_retry_and_delete(self, root):
        job = launch(root, SHORT)
        assert job.title == "mxfp8 · llama32-1b tiny"
        with pytest.raises(jobs.JobError, match="cancel it first"):
            jobs.delete(root, job.id, with_run=True)
        done = ended(root, job)
        again = jobs.retry(root, job.id)
        assert (again.arguments, again.title, again.repeats) == (job.arguments, job.title, job.run_id)
        jobs.cancel(root, again.id)
        with Catalog.open(root) as catalog:
            assert done.run.run_id in set(catalog.runs()["run_id"])
            jobs.delete(root, job.id, with_run=True)
            catalog.sync()
            assert done.run.run_id not in set(catalog.runs()["run_id"]) and not done.run.directory.exists()
        with pytest.raises(jobs.JobError, match="no job 1"):
            jobs.find(root, job.id)
        missing = run_collector("jobs", "delete", "2", "99", root=root)
        assert missing.returncode == 2 and "there is no job 99" in missing.stderr and jobs.find(root, 2)
        ended(root, again)
        assert add_line(root, SHORT)[0].id == 3  # numbers are not given twice
        jobs.cancel(root, 3)


class TestRun:
    """A job is a run."""

    def test_deleting_a_job_keeps_a_run_that_cannot_be_read(self, root, monkeypatch):
        (job,) = add_line(root, SHORT)
        jobs.cancel(root, job.id)
        monkeypatch.setenv(RUN_VARIABLE, str(root / job.run_id))
        write_queued(root / job.run_id)
        writer = RunWriter.create(root, "mine", {})
        writer.append_loss({"iteration": 0, "loss": 2.0})
        writer.finish(RunState.FAILED)
        (writer.directory / "run.json").write_text("{")
        jobs.delete(root, job.id)
        assert (writer.directory / "loss.jsonl").exists() and not (writer.directory / "job.json").exists()

    def test_a_queued_run_is_no_run_of_the_index_until_it_begins(self, root, monkeypatch):
        """Once, and only under its own root."""
        (job,) = add_line(root, SHORT)
        assert list_runs(root) == ([], []) and read_status(root / job.run_id).state == "queued"
        with Catalog.open(root) as catalog:
            assert catalog.runs(damaged=True).empty and not catalog.refused
        monkeypatch.setenv(RUN_VARIABLE, str(root / job.run_id))
        other = RunWriter.create(root.with_name("other"), "mine", {})
        writer, again = (RunWriter.create(root, "mine", {}) for _ in range(2))
        assert writer.run_id == job.run_id and job.run_id not in (other.run_id, again.run_id)
        assert {run.run_id for run in list_runs(root)[0]} == {writer.run_id, again.run_id}

    def test_a_copy_or_a_link_is_no_job(self, root):
        (job,) = add_line(root, SHORT)
        shutil.copytree(root / job.run_id, root / "copy")
        (root / "link").symlink_to(root / job.run_id)
        assert queue.read_jobs(root) == [job] and jobs.problems(root) == []

    def test_another_command_is_queued_and_makes_the_run_of_its_directory(self, root, tmp_path, command):
        steps = tmp_path / "state" / "trainer_state.json"
        steps.parent.mkdir()
        steps.write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2.25}]}))
        line = ("import", str(steps.parent))
        assert command("jobs", "add", *line) == 0
        (job,) = queue.read_jobs(root)
        view = ended(root, job)
        assert (view.state, view.reason) == ("done", None), jobs.log_tail(root, job)
        assert job.command == line and view.run.run_id == job.run_id and view.run.config["kind"] == "import"

    @pytest.mark.parametrize(
        ("line", "expected"),
        [
            (("measure", "--nosuch"), "no such option '--nosuch'"),
            (("import",), "missing argument"),
            (("import", "a", "--tensor-save-dir=x"), "comes before the command"),
            (("serve",), "a job is a command line of run, batch, quick, import"),
        ],
    )
    def test_another_command_that_is_wrong_is_one_line(self, root, command, capsys, line, expected):
        assert command("jobs", "add", *line) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and expected in error and not queue.read_jobs(root)

    def test_a_command_that_continues_another_run_names_it(self, root, tmp_path, command, capsys, monkeypatch):
        """While it runs, when it is cancelled and when it is done: it has begun, in the directory of that run."""
        steps = tmp_path / "state" / "trainer_state.json"
        steps.parent.mkdir()
        steps.write_text(json.dumps({"log_history": [{"step": 1, "loss": 2.5}]}))
        line = ("import", str(steps.parent))
        assert command("jobs", "add", *line) == 0 and command("jobs", "add", *line) == 0
        first, second = queue.read_jobs(root)
        made, view = ended(root, first).run, ended(root, second)
        assert (view.state, view.reason, view.run) == ("done", None, None), jobs.log_tail(root, second)
        assert view.continues.run_id == view.written.run_id == made.run_id and len(list_runs(root)[0]) == 1
        assert summary.line(view, jobs.progress(view)).startswith(f"continued run {made.run_id}")
        capsys.readouterr()
        assert command("jobs") == 0 and capsys.readouterr().out.count(made.run_id) == 2

        (third,) = jobs.add_runs(root, [line])
        set_process(root, third, None, host=processes.host(), runner=processes.Process.of(os.getpid()))
        assert now(root, third).state == "starting"
        monkeypatch.setenv(RUN_VARIABLE, str(root / third.run_id))
        same = {name: made.config[name] for name in ("kind",)}
        with pytest.raises(KeyboardInterrupt), continued_run(root, "import", same, list(same), "") as (writer, known):
            assert known and writer.run_id == made.run_id
            view = now(root, third)
            assert (view.state, view.continues.run_id) == ("running", made.run_id)
            assert summary.line(view, jobs.progress(view)) == f"continues run {made.run_id}"
            raise KeyboardInterrupt
        settle(root / third.run_id, RunState.CANCELLED, None)
        directory.change_launch(root, third, ended="2026-01-02")
        view = now(root, third)
        assert view.state == "cancelled" and summary.line(view, jobs.progress(view)).startswith("continued run ")

    @pytest.mark.thorough
    def test_resume_continues_the_run_of_the_job_under_its_number(self, root):
        job = launch(root, (*ENDLESS, "--checkpoint-every", "1"))
        after_iteration(root, job, 1)
        jobs.cancel(root, job.id)
        before = ended(root, job)
        assert jobs.resumable(before)
        again = jobs.resume(root, job.id)
        assert (again.id, again.run_id, again.resumes) == (job.id, job.run_id, True) and again.position > job.position
        after_iteration(root, again, before.run.status.iteration + 2)
        jobs.cancel(root, job.id)
        view = ended(root, again)
        assert view.state == "cancelled" and len(list_runs(root)[0]) == 1
        assert check_rows(root) == view.run.status.tensors


class TestProgress:
    def test_time_left_counts_each_kind_of_iteration(self):
        """Against a plain walk over the iterations that RunConfig says are recorded."""
        config = parse(["run", "--warmup-iterations", "4", "--control-iter", "3", "--capture-every", "5"]).runs[0]
        seconds = {"warm-up": 1.0, "recorded": 100.0, "plain": 10.0}

        def kind(iteration: int) -> str:
            return "warm-up" if iteration < 0 else "recorded" if config.records(iteration) else "plain"

        everything = range(-4, config.iterations)
        for done in range(6, len(everything) + 1):
            losses = [
                {"iteration": i, "seconds": seconds[kind(i)], "recorded": kind(i) == "recorded"}
                for i in everything[:done]
            ]
            wanted = sum(seconds[kind(i)] for i in everything[done:])
            assert state.seconds_left(config, losses) == wanted
        assert state.seconds_left(config, losses[:3]) is None

    def test_an_endless_run_is_told_at_once(self):
        config = parse(["run", "--control-iter", "1000000000", "--capture-every", "1000"]).runs[0]
        start = time.process_time()  # a walk over the iterations takes minutes
        assert state.seconds_left(config, [{"iteration": 0, "seconds": 1.0, "recorded": True}]) > 1e9
        assert time.process_time() - start < 60


class TestEnds:
    @pytest.mark.thorough
    def test_survives_its_runner_and_is_cancelled_by_the_next(self, root):
        job = launch(root, ENDLESS)
        view = after_iteration(root, job, 1)
        runner_of(root).send(signal.SIGKILL)
        until(lambda: not jobs.has_runner(root), "the runner to be gone")
        after_iteration(root, job, view.run.status.iteration + 1)
        run_collector("jobs", root=root)
        until(lambda: jobs.has_runner(root), "a look at the queue to have somebody work through it")
        runner_of(root).send(signal.SIGKILL)
        until(lambda: not jobs.has_runner(root), "the runner to be gone")
        for place in (queue.folder(root) / ".runner.json", root / job.run_id / ".launch.json"):  # of one killed
            place.with_name(f"{place.name}.{HOST}.1.part").touch()
        done = run_collector("jobs", "cancel", str(job.id), root=root)
        assert done.returncode == 0 and done.stdout == f"job {job.id} cancelled\n", done.stderr
        view = ended(root, job)
        assert view.state == "cancelled" and view.run.status.state == "cancelled" and view.reason is None
        assert processes.marked(root / job.run_id) == set() and not first_process(root, job).alive
        assert check_rows(root) == view.run.status.tensors >= 2 * 35

    @pytest.mark.thorough
    def test_a_job_that_does_not_listen_is_ended(self, root, monkeypatch):
        """All its processes are stopped, so that none can obey: they are ended by force, and the run is settled."""
        monkeypatch.setattr(runner, "ASK_ALL", 0.5)
        monkeypatch.setattr(runner, "END_ALL", 1.0)
        (job,) = add_line(root, ENDLESS)
        worker = runner.Runner(root)
        until(lambda: worker.turn() and (run := now(root, job).run) and run.status.iteration >= 0, "an iteration")
        first_process(root, job).send(signal.SIGSTOP)
        directory.change_launch(root, job, cancelled="2026-01-02")
        assert now(root, job).state == "cancelling"
        until(lambda: not worker.turn(), "it to be ended")
        view = now(root, job)
        assert view.state == "cancelled" and view.run.status.state == "cancelled"
        assert processes.marked(root / job.run_id) == set()

    def test_killed_in_warm_up_when_is_known(self, root):
        job = launch(root, (*ENDLESS, "--warmup-iterations", "1000000"))
        until(lambda: (view := now(root, job)).run and len(state.losses_of(view.run)) > 20, "some warm-up iterations")
        first_process(root, job).send(signal.SIGKILL)
        view = ended(root, job)
        last, end = (record["time"] for record in state.losses_of(view.run)[-2:])  # it follows each loss
        assert view.state == "crashed" and "SIGKILL" in view.reason and view.run.status.iteration == -1
        assert datetime.fromisoformat(view.run.status.heartbeat).timestamp() >= last - 0.001  # milliseconds are cut off
        assert datetime.fromisoformat(view.ended).timestamp() >= end - 0.001

    @pytest.mark.thorough
    def test_a_rank_is_killed(self, root):
        job = launch(root, TWO_RANKS)
        view = after_iteration(root, job, 0)
        rank = json.loads((view.run.directory / "ranks" / "rank01.json").read_text())
        processes.Process(rank["pid"], rank["pid_started"]).send(signal.SIGKILL)
        view = ended(root, job)
        assert view.state == "failed" and view.reason == "rank 1 was killed by SIGKILL"
        assert (view.run.status.state, view.run.status.reason) == ("failed", "rank 1 was killed by SIGKILL")
        assert jobs.log_tail(root, job)[-1] == "binade: the run failed: rank 1 was killed by SIGKILL"
        assert processes.marked(root / job.run_id) == set()
        assert check_rows(root, files_too=False) > 0 and not list(view.run.directory.glob("*/.*.part"))

    @pytest.mark.thorough
    @pytest.mark.parametrize("small_disk", ["6m"], indirect=True)
    def test_disk_full(self, small_disk, monkeypatch):
        monkeypatch.setenv("OMP_NUM_THREADS", "1")
        job = launch(small_disk, ENDLESS)
        view = ended(small_disk, job)
        assert view.state == "failed" and "no space left on device" in view.reason.lower()
        assert view.advice.startswith("Free space")
        end_all(small_disk)

    def test_failed_says_why(self, root, tmp_path):
        """Its data vanish while it waits in the queue."""
        data = tmp_path / "few.jsonl"
        data.write_text(json.dumps({"text": "a text of some words " * 40}) + "\n")
        (job,) = add_line(root, [*SHORT, "--dataset", str(data)])
        data.unlink()
        jobs.start_runner(root)
        view = ended(root, job)
        assert view.state == "failed" and view.run is None and "few.jsonl" in view.reason

    def test_machine_restarted(self, root):
        """What a job of another boot looks like: no process of this one is taken for it."""
        (job,) = add_line(root, SHORT)
        set_process(root, job, processes.Process.of(os.getpid()), boot="another")
        shown = now(root, job)
        assert shown.state == "crashed" and "machine was restarted" in shown.reason and shown.advice.endswith("Retry.")
        runner.Runner(root).turn()
        assert (now(root, job).state, now(root, job).reason) == (shown.state, shown.reason)

    def test_never_signals_a_process_that_only_has_the_number(self, root):
        with subprocess.Popen(["sleep", "600"]) as stranger:
            try:
                (job,) = add_line(root, SHORT)
                theirs = processes.Process.of(stranger.pid)
                set_process(root, job, processes.Process(theirs.pid, theirs.pid_started - 1))
                directory.change_launch(root, job, cancelled="2026-01-02")
                for _ in range(3):
                    runner.Runner(root).turn()
                assert stranger.poll() is None and now(root, job).state == "cancelled"
            finally:
                stranger.kill()


# The first thread ends and another goes on: the process lives, though the kernel calls it a zombie.
HALF_GONE = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
ctypes.CDLL(None).pthread_exit(None)
"""


class TestOrder:
    """No state is shown that is taken back."""

    @pytest.mark.parametrize("handles", [True, False])
    def test_a_runner_waits_for_a_child_and_signals_it_also_without_handles(self, tmp_path, monkeypatch, handles):
        """Linux before 5.3, and some containers, have no handles of processes."""
        if not handles:
            monkeypatch.setattr(os, "pidfd_open", lambda pid: os.open(tmp_path / "absent", os.O_RDONLY))
        child = subprocess.Popen(["sleep", "600"])
        waiting = runner.Runner(tmp_path, children={"run": child})
        waiting.rest()
        assert child.poll() is None
        process = processes.Process.of(child.pid)
        assert process
        process.send(signal.SIGTERM)
        until(lambda: waiting.rest() or child.poll() is not None, "the end of the child")
        assert child.returncode == -signal.SIGTERM
        process.send(signal.SIGTERM)  # it is gone
        waiting.rest()

    def test_a_process_of_which_one_thread_is_left_is_waited_for(self, root):
        """A killed process looks like this until the kernel has ended all of its threads; only then is its exit status
        known."""
        (job,) = add_line(root, SHORT)
        worker = runner.Runner(root)
        child = subprocess.Popen([sys.executable, "-c", HALF_GONE])
        try:
            set_process(root, job, processes.Process.of(child.pid), runner=worker.process)
            until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE, "the first thread to end")
            worker.children[job.run_id] = child
            for _ in range(3):
                assert worker.turn() and now(root, job).state == "running"
        finally:
            child.kill()
        until(lambda: not worker.turn(), "it to be ended")
        assert now(root, job).state == "crashed" and "SIGKILL" in now(root, job).reason

    @pytest.mark.thorough
    def test_the_word_of_the_runner_is_waited_for(self, root):
        job = launch(root, ENDLESS)
        after_iteration(root, job, 1)
        its_runner, process = runner_of(root), first_process(root, job)
        its_runner.send(signal.SIGSTOP)
        process.send(signal.SIGKILL)
        until(lambda: not process.alive, "the process to end")
        assert now(root, job).state == "running" and now(root, job).run.status.state == "crashed"
        its_runner.send(signal.SIGCONT)
        view = ended(root, job)
        assert view.state == "crashed" and "SIGKILL" in view.reason and "what kills processes" in view.advice
        assert view.run.status.state == "crashed" and view.run.status.iteration >= 1
        assert any(line.startswith("iteration ") for line in jobs.log_tail(root, job))

    @pytest.mark.thorough
    def test_what_was_shown_without_a_runner_is_what_the_next_one_notes(self, root):
        """Nobody can know the exit status any more."""
        job = launch(root, ENDLESS)
        after_iteration(root, job, 0)
        its_runner, process = runner_of(root), first_process(root, job)
        its_runner.send(signal.SIGSTOP)
        process.send(signal.SIGKILL)
        until(lambda: not process.alive, "the process to end")
        its_runner.send(signal.SIGKILL)
        until(lambda: not its_runner.alive, "the runner to end")
        shown = now(root, job)
        assert shown.state == "crashed"
        queue.write_runner(root, processes.Process.of(os.getpid()))  # another runner, which has not come to this job
        assert now(root, job) == shown
        runner.Runner(root).turn()
        noted = now(root, job)
        assert (noted.state, noted.reason) == (shown.state, shown.reason)
        (queue.folder(root) / "runner.json").unlink()

    def test_a_job_cancelled_while_a_dead_runner_started_it_is_not_queued_again(self, root):
        (job,) = add_line(root, SHORT)
        set_process(root, job, None, runner=processes.Process.of(os.getpid()))
        assert now(root, job).state == "starting"
        directory.change_launch(root, job, cancelled="2026-01-02")
        assert now(root, job).state == "cancelling"
        runner.Runner(root).turn()
        assert now(root, job).state == "cancelled"


class TestReadOnly:
    def test_nothing_can_be_done(self, root, monkeypatch):
        (job,) = add_line(root, SHORT)
        jobs.cancel(root, job.id)
        before = sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*"))
        monkeypatch.setenv("BINADE_READ_ONLY", "1")
        for act in (
            lambda: add_line(root, SHORT),
            lambda: jobs.cancel(root, job.id),
            lambda: jobs.retry(root, job.id),
            lambda: jobs.delete(root, job.id),
            lambda: jobs.set_at_once(root, 2),
            lambda: jobs.start_runner(root),
        ):
            with pytest.raises(ReadOnlyError, match="BINADE_READ_ONLY"):
                act()
        assert jobs.listing(root)[0].state == "cancelled"
        assert sorted((path, path.stat().st_mtime_ns) for path in root.rglob("*")) == before
        monkeypatch.delenv("BINADE_READ_ONLY")

    @pytest.mark.sampled(1)
    @pytest.mark.parametrize("line", [("jobs", "add", *SHORT), ("jobs", "serve"), SHORT, ("import", str(PROJECT))])
    def test_the_command_line_refuses_in_one_line(self, command, capsys, monkeypatch, tmp_path, line):
        monkeypatch.setenv("BINADE_READ_ONLY", "1")
        assert command(*line) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and "BINADE_READ_ONLY" in error and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["cancel", "9"], "there is no job 9"),
        (["add"], "jobs add needs a command line"),
        (["add", "run", "--layers", "17"], "expected 1 to 16"),
        (["at-once", "0"], "expected 1 to"),
        (["frobnicate"], "frobnicate"),
    ],
    ids=" ".join,
)
def test_bad_usage_is_one_line(command, capsys, arguments, expected):
    assert command("jobs", *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and expected in error


def test_jobs_are_listed_though_no_runner_can_be_started(command, capsys, tmp_path):
    add_line(tmp_path / "runs", SHORT)
    os.mkfifo(tmp_path / "runs" / ".jobs" / "runner.log")
    assert command("jobs") == 0
    out, err = capsys.readouterr()
    assert "1   queued" in out and err.count("\n") == 1 and "runner.log" in err


def test_every_field_of_a_run_can_be_asked_for():
    """A choice that the arguments dropped would be lost between the form and the run."""
    assert parse(RunConfig().arguments()).runs == [RunConfig()]
