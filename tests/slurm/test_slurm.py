"""Jobs of a real cluster of two nodes, through the queue: submitted, followed, cancelled, and every way to end.

The jobs are submitted together where they can be, and waited for afterwards: one waits a minute for its time limit.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from binade.collector import jobs
from binade.collector.cli.jobs import add_line
from binade.collector.jobs import JobState, JobView
from binade.collector.jobs.queue import read_jobs
from binade.collector.training.targets import CONFIG
from binade.data.run.directory import list_runs
from tests.conftest import until
from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slow, pytest.mark.thorough]

SMALL = ("--layers", "1", "--micro-batch-size", "1", "--sequence-length", "32", "--backend", "torch", "--scores", "")
RUN = ("run", *SMALL, "--no-raw", "--target")
ENDLESS = ("--control-iter", "1000000", "--capture-every", "100000")
TARGETS = """
[targets.two]
launcher = "slurm"
partition = "all"
setup = ["export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo"]
[targets.few]
launcher = "slurm"
at_once = 1
setup = ["export OMP_NUM_THREADS=1"]
[targets.tight]
launcher = "slurm"
options = ["--mem=60M"]
[targets.broken]
launcher = "slurm"
setup = ["echo 'binade: the module cuda is missing' >&2; exit 3"]
"""


@pytest.fixture(scope="module")
def root(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A root on which a runner works, with the targets above."""
    place = tmp_path_factory.mktemp("shared") / "runs"
    with pytest.MonkeyPatch.context() as patch:
        (place.parent / "binade.toml").write_text(TARGETS)
        patch.setenv(CONFIG, str(place.parent / "binade.toml"))
        yield place
        for view in jobs.listing(place):
            if view.active and view.state is not JobState.CANCELLING:
                jobs.cancel(place, view.job.id)
        until(lambda: not jobs.has_runner(place), "the runner to leave")


def add(root: Path, *line: str) -> list[int]:
    made = add_line(root, line)
    jobs.start_runner(root)
    return [job.id for job in made]


def now(root: Path, number: int) -> JobView:
    return jobs.view_of(root, jobs.find(root, number))


def reaches(root: Path, number: int, condition: Callable[[JobView], bool], what: str) -> JobView:
    """Wait until a job that has not ended is so far."""

    def there() -> bool:
        view = now(root, number)
        assert view.active, (view.state, view.reason, jobs.log_tail(root, view.job))
        return condition(view)

    until(there, what)
    return now(root, number)


def trains(view: JobView) -> bool:
    return view.run is not None and view.run.status.iteration >= 0


def ended(root: Path, number: int) -> JobView:
    until(lambda: not now(root, number).active, f"job {number} to end")
    return now(root, number)


def said(root: Path, view: JobView) -> tuple[object, ...]:
    return view.state, view.reason, view.cluster, jobs.log_tail(root, view.job)


@pytest.fixture(scope="module")
def limited(root: Path) -> int:
    """A job with a time limit of one minute, which passes while the others are tested."""
    (number,) = add(root, *RUN, "few", *ENDLESS, "--time", "1")
    return number


def test_two_ranks_on_two_nodes(root: Path, command, capsys):
    assert command("run", *SMALL, "--tp", "2", "--nodes", "2", "--target", "two", "--tensor-save-dir", str(root)) == 0
    out = capsys.readouterr().out
    (number,) = (view.job.id for view in jobs.listing(root) if "--tp" in view.job.arguments)
    view = ended(root, number)
    assert view.state == JobState.DONE, said(root, view)
    assert view.cluster and out.startswith(f"job {number} queued as Slurm job {view.cluster.id}: ")
    assert view.run and view.run.config["target"] == "two" and view.run.config["tp"] == 2
    assert {name[:6] for name in view.run.segments} == {"rank00", "rank01"}
    assert "iteration 0 (bf16): loss" in "\n".join(jobs.log_tail(root, view.job))


def test_a_batch_is_an_array_of_which_one_runs_at_once_and_a_failed_member_is_retried_alone(root: Path, limited: int):
    batch = ("batch", *SMALL, "--no-raw", "--quantization", "bf16,mxfp8", "--target", "few", "--partition", "all")
    one, two = add(root, *batch)
    clusters = [now(root, number).cluster for number in (one, two)]
    array = clusters[0].id.partition("_")[0]
    assert [cluster.id for cluster in clusters] == [f"{array}_0", f"{array}_1"]
    view = reaches(root, two, lambda view: bool(view.cluster and view.cluster.position), "a place in the queue")
    assert view.state == JobState.PENDING and view.cluster.place.endswith("in partition all")
    views = [ended(root, number) for number in (one, two)]
    assert [view.state for view in views] == [JobState.DONE] * 2, [said(root, view) for view in views]
    first, second = (view.run for view in views)
    assert [first.config["recipe"], second.config["recipe"]] == ["bf16", "mxfp8"]
    assert first.status.finished <= second.config["started"]
    again = jobs.retry(root, two)
    alone = now(root, again.id).cluster
    assert alone.id.endswith("_0") and alone.id.partition("_")[0] != array and again.repeats == second.run_id
    jobs.cancel(root, again.id)
    assert ended(root, again.id).state == JobState.CANCELLED


def test_a_job_that_is_cancelled_keeps_what_it_recorded(root: Path):
    (number,) = add(root, *RUN, "few", *ENDLESS)
    reaches(root, number, trains, "an iteration")
    jobs.cancel(root, number)
    view = ended(root, number)
    assert (view.state, view.reason) == (JobState.CANCELLED, None) and view.run.status.state == "cancelled"
    assert view.run.status.tensors > 0


def test_failures_say_why(root: Path):
    (short_of_memory,) = add(root, *RUN, "tight", *ENDLESS)
    (broken,) = add(root, *RUN, "broken")
    view = ended(root, broken)
    assert (view.state, view.reason) == (JobState.FAILED, "the module cuda is missing"), said(root, view)
    view = ended(root, short_of_memory)
    assert view.state == JobState.FAILED and "memory limit" in view.reason, said(root, view)
    assert view.advice.startswith("Use fewer layers")


def test_a_rank_that_is_killed_and_a_submission_that_is_refused(root: Path):
    (number,) = add(root, *RUN, "two", "--tp", "2", "--nodes", "2", *ENDLESS)
    reaches(root, number, trains, "an iteration")
    run_id = now(root, number).job.run_id
    victims = [
        process
        for process in psutil.process_iter(["cmdline", "environ"])
        if run_id in " ".join(process.info["cmdline"] or []).rpartition("/")[2]
        and (process.info["environ"] or {}).get("SLURM_PROCID") == "1"
        and "slurm-rank" in " ".join(process.info["cmdline"] or [])
    ]
    victims[0].send_signal(signal.SIGKILL)
    view = ended(root, number)
    assert view.state == JobState.FAILED and "task 1: Killed" in view.reason, said(root, view)
    assert view.run.status.state == "failed"
    before = read_jobs(root)
    with pytest.raises(jobs.SubmissionError, match="Invalid partition name"):
        add(root, *RUN, "few", "--partition", "nosuch")
    assert read_jobs(root) == before


def test_a_job_ends_before_its_time_limit(root: Path, limited: int):
    view = ended(root, limited)
    assert view.state == JobState.FAILED and "--time" in view.advice, said(root, view)
    assert view.run.status.state == "failed" and "time limit" in view.run.status.reason
    assert view.run.status.tensors > 0


def test_a_node_that_goes_away(root: Path, cluster: Cluster):
    (number,) = add(root, *RUN, "two", *ENDLESS)
    view = reaches(root, number, trains, "an iteration")
    name = cluster.ask("squeue", "-h", f"--jobs={view.cluster.id}", "--format=%N")
    node = psutil.Process(cluster.nodes[name].pid)
    steps = [p for p in psutil.process_iter(["name"]) if p.info["name"].startswith("slurmstepd")]
    lost = set()
    for each in (node, *steps):
        with suppress(psutil.NoSuchProcess):  # a step of an earlier job
            lost |= {each, *each.children(recursive=True)}
    for act in (psutil.Process.suspend, psutil.Process.kill):  # a node is gone at once: nothing of it sees the rest end
        for process in lost:
            with suppress(psutil.NoSuchProcess):
                act(process)
    view = ended(root, number)
    assert view.state == JobState.FAILED and "another node" in view.advice, said(root, view)
    assert view.run.status.state == "failed" and "node" in view.run.status.reason
    cluster.start_node(name)
    assert len([run for run in list_runs(root)[0] if run.config["started"] >= view.started]) == 1  # not started again
