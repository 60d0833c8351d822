"""The order of events when a running job is cancelled: its run says so, its processes end, then its end is noted."""

from __future__ import annotations

from pathlib import Path

import pytest

from binade.collector import jobs
from binade.collector.jobs import directory, processes
from binade.data.run.directory import rank_statuses, read_status
from tests.collector.test_failures import check_rows
from tests.collector.test_jobs import ENDLESS, TWO_RANKS, after_iteration, ended, launch
from tests.siege.queue import queue, runners

pytestmark = [pytest.mark.slow, pytest.mark.thorough]


@pytest.mark.parametrize(("line", "started"), [(ENDLESS, 1), (TWO_RANKS, 3)], ids=["one rank", "two ranks"])
def test_events_of_a_cancelled_job(tmp_path: Path, line: tuple[str, ...], started: int):
    """What is read later has happened earlier, so that each look proves an order."""
    with queue(tmp_path / "runs") as root:
        job = launch(root, line)
        after_iteration(root, job, 0)
        place = root / job.run_id
        carriers = processes.marked(place)
        assert len(carriers) == started  # of two ranks, also the process that starts them
        jobs.cancel(root, job.id)
        shown = []
        while "cancelled" not in shown:
            view = jobs.view_of(root, job)
            noted = directory.read_launch(root, job)
            left = {process for process in carriers if process.alive}
            status = read_status(place)
            assert noted and noted.cancelled
            assert noted.ended or view.active
            assert not (noted.ended and left)
            assert left or status.state == "cancelled"
            if view.state not in shown:
                shown.append(view.state)
        assert shown in (["cancelling", "cancelled"], ["cancelled"])
        assert processes.marked(place) == set()
        assert not any(processes.Process(rank.pid, rank.pid_started).alive for rank in rank_statuses(place))
        # Each rank has ended by itself: it was not killed.
        assert (place / "log.txt").read_text().count("ended early: ") == max(1, started - 1)
        assert jobs.log_tail(root, job)[-1] == "binade: cancelled; what was recorded is kept"
        view = ended(root, job)
        assert view.run and check_rows(root) == view.run.status.tensors > 0
    assert not runners(root)
