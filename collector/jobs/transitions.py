"""The transitions of a job: a state and an event give the next state. Any pair that is not in the table is refused.

The end of a job's last process is an event too, named after the resulting state.

The state of an active job is not stored. It follows from files and processes (collector.jobs.state), evaluated in an
order that never shows a state that is revised later.
"""

from __future__ import annotations

from enum import Enum, StrEnum, auto


class State(StrEnum):
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


class Event(Enum):
    """An event in the life of a job."""

    SUBMIT = auto()  # a cluster has accepted it
    START = auto()  # the runner, or the cluster, starts its process
    LOSE = auto()  # a runner was killed before it started the process
    RECORD = auto()  # the process has made its run directory
    CANCEL = auto()  # the user cancels it
    DELETE = auto()  # the user deletes it


ACTIVE = (State.QUEUED, State.PENDING, State.STARTING, State.RUNNING, State.CANCELLING)
ENDED = tuple(state for state in State if state not in ACTIVE)

_ENDS: dict[Event | State, State | None] = {state: state for state in ENDED}

# None: the job is gone.
TRANSITIONS: dict[State, dict[Event | State, State | None]] = {
    State.QUEUED: {Event.SUBMIT: State.PENDING, Event.START: State.STARTING, Event.CANCEL: State.CANCELLED},
    State.PENDING: {Event.START: State.STARTING, Event.CANCEL: State.CANCELLING, **_ENDS},
    State.STARTING: {Event.LOSE: State.QUEUED, Event.RECORD: State.RUNNING, Event.CANCEL: State.CANCELLING, **_ENDS},
    State.RUNNING: {Event.CANCEL: State.CANCELLING, **_ENDS},
    State.CANCELLING: {
        Event.LOSE: State.CANCELLED,
        Event.RECORD: State.CANCELLING,
        Event.CANCEL: State.CANCELLING,
        **_ENDS,
    },
    **{state: {Event.DELETE: None} for state in ENDED},
}


class TransitionError(ValueError):
    """The event is not possible in this state."""


def after(state: State, *events: Event | State) -> State:
    """The state after these events. Raises TransitionError if one of them cannot happen."""
    for event in events:
        following = TRANSITIONS[state].get(event)
        if following is None:
            raise TransitionError(f"a job that is {state} has no transition for {event.name}")
        state = following
    return state


def allows(state: State, event: Event | State) -> bool:
    return event in TRANSITIONS[state]
