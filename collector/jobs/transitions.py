"""The transitions of a job: a state and an event give the next state. Any pair that is not in the table is refused.

The end of a job's last process is an event too, named after the resulting state.

The state of an active job is not stored. It follows from files and processes (collector.jobs.state), evaluated in an
order that never shows a state that is revised later.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class JobState(StrEnum):
    """The state of a job, as shown to users."""

    QUEUED = "queued"  # waits for its turn
    PENDING = "pending"  # waits in a cluster's queue
    STARTING = "starting"  # has a process, or will have one in a moment, but no run directory yet
    RUNNING = "running"
    CANCELLING = "cancelling"  # its processes are being ended
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"  # the collector said why
    CRASHED = "crashed"  # the collector did not say why
    KILLED = "killed"  # by SIGKILL
    NO_MEMORY = "out of memory"
    NO_DISK = "disk full"
    RESTARTED = "machine restarted"
    TIME_LIMIT = "time limit"  # of a cluster's job
    NODE_LOST = "node lost"  # of a cluster


class JobEvent(Enum):
    """An event in the life of a job."""

    SUBMIT = auto()  # a cluster has accepted it
    START = auto()  # the runner, or the cluster, starts its process
    LOSE = auto()  # a runner was killed before it started the process
    RECORD = auto()  # the process has made its run directory
    CANCEL = auto()  # the user cancels it
    DELETE = auto()  # the user deletes it


ACTIVE = (JobState.QUEUED, JobState.PENDING, JobState.STARTING, JobState.RUNNING, JobState.CANCELLING)
ENDED = tuple(state for state in JobState if state not in ACTIVE)

_ENDS: dict[JobEvent | JobState, JobState | None] = {state: state for state in ENDED}

# None: the job is gone.
TRANSITIONS: dict[JobState, dict[JobEvent | JobState, JobState | None]] = {
    JobState.QUEUED: {
        JobEvent.SUBMIT: JobState.PENDING,
        JobEvent.START: JobState.STARTING,
        JobEvent.CANCEL: JobState.CANCELLED,
    },
    JobState.PENDING: {JobEvent.START: JobState.STARTING, JobEvent.CANCEL: JobState.CANCELLING, **_ENDS},
    JobState.STARTING: {
        JobEvent.LOSE: JobState.QUEUED,
        JobEvent.RECORD: JobState.RUNNING,
        JobEvent.CANCEL: JobState.CANCELLING,
        **_ENDS,
    },
    JobState.RUNNING: {JobEvent.CANCEL: JobState.CANCELLING, **_ENDS},
    JobState.CANCELLING: {
        JobEvent.LOSE: JobState.CANCELLED,
        JobEvent.RECORD: JobState.CANCELLING,
        JobEvent.CANCEL: JobState.CANCELLING,
        **_ENDS,
    },
    **{state: {JobEvent.DELETE: None} for state in ENDED},
}


class TransitionError(ValueError):
    """The event is not possible in this state."""


def after(state: JobState, *events: JobEvent | JobState) -> JobState:
    """The state after these events. Raises TransitionError if one of them cannot happen."""
    for event in events:
        following = TRANSITIONS[state].get(event)
        if following is None:
            raise TransitionError(f"a job that is {state} has no transition for {event.name}")
        state = following
    return state


def allows(state: JobState, event: JobEvent | JobState) -> bool:
    return event in TRANSITIONS[state]
