"""Functions for the `alert` option of a Recorder: a webhook, and scalars in another logger."""

from __future__ import annotations

import json
import urllib.request
import warnings
from collections.abc import Callable
from dataclasses import asdict
from http.client import HTTPException
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from binade.collector.errors import ConfigError
from binade.data.events import Event
from binade.data.text import describe

TIMEOUT = 5.0  # seconds


def webhook(url: str) -> Callable[[Event], None]:
    """Return a function that posts each event to the URL as JSON: its fields, and as `text` one sentence about all of
    them, which Slack and similar services show.

    Each request runs in its own thread for at most 5 seconds, and the process waits for it at exit. A failure is
    reported as a warning. Raises ConfigError for anything but an http or https URL.
    """
    try:
        valid = urlsplit(url).scheme in ("http", "https")
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"webhook {url!r} is not an HTTP URL: expected http:// or https://")

    def post(event: Event) -> None:
        content = json.dumps(asdict(event) | {"text": f"binade: {event}"}).encode()
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=TIMEOUT).close()
        except (OSError, ValueError, HTTPException) as error:  # URLError and HTTPError are OSErrors
            text = f"the webhook did not receive the event of iteration {event.iteration}: {describe(error)}"
            warnings.warn(text, stacklevel=2)

    def alert(event: Event) -> None:
        Thread(target=post, args=(event,), name="webhook").start()

    return alert


def scalars(writer: Any) -> Callable[[Event], None]:
    """Return a function that logs the scalar binade/<kind of event> with the value 1 at the event's iteration.

    writer: a SummaryWriter of TensorBoard or a run of Weights & Biases. Raises ConfigError for anything else.
    """
    if callable(getattr(writer, "add_scalar", None)):
        return lambda event: writer.add_scalar(f"binade/{event.kind}", 1, event.iteration)
    if callable(getattr(writer, "log", None)):
        return lambda event: writer.log({f"binade/{event.kind}": 1, "binade/iteration": event.iteration})
    raise ConfigError(f"{type(writer).__name__} cannot log scalars: expected a SummaryWriter or a wandb run")
