"""What two sessions differ in, in words. No Streamlit here."""

from __future__ import annotations

from dataclasses import dataclass

from binade.app.params import TITLES
from binade.app.sessions.session import Pin, Session


@dataclass(frozen=True)
class Difference:
    """What two sessions differ in, in words."""

    what: str
    first: str
    second: str


def compare(first: Session, second: Session) -> list[Difference]:
    """What two sessions differ in: name, page, filter and parameters, notes, pins, runs. Empty if in nothing."""
    found = [Difference("Name", first.name, second.name), Difference("Page", first.view.page, second.view.page)]
    names = sorted(set(first.view.params) | set(second.view.params), key=lambda n: (n not in TITLES, n))
    for name in names:
        title = f"Filter: {TITLES[name].lower()}" if name in TITLES else f"Parameter: {name}"
        texts = [", ".join(session.view.params.get(name, [])) or "–" for session in (first, second)]
        found.append(Difference(title, *texts))
    found.append(Difference("Notes", first.notes or "–", second.notes or "–"))
    pins = [[pin_text(pin) for pin in session.pins] for session in (first, second)]
    for pin in dict.fromkeys(pins[0] + pins[1]):
        counts = [str(side.count(pin)) if side.count(pin) > 1 else "pinned" if pin in side else "–" for side in pins]
        found.append(Difference(f"Pin: {pin}", *counts))
    if sorted(pins[0]) == sorted(pins[1]) and pins[0] != pins[1]:
        found.append(Difference("Order of the pins", " · ".join(pins[0]), " · ".join(pins[1])))
    hashes = [{run.run_id: run.hash for run in session.runs} for session in (first, second)]
    for run_id in dict.fromkeys([*hashes[0], *hashes[1]]):
        shown = [side[run_id][:12] if run_id in side else "–" for side in hashes]
        found.append(Difference(f"Run: {run_id}", *shown))
    return [one for one in found if one.first != one.second]


def pin_text(pin: Pin) -> str:
    """A pin in a line: its page and chart, what it is of, and its caption."""
    words = ", ".join(f"{name} {'/'.join(texts)}" for name, texts in sorted(pin.params.items()))
    place = f"{pin.page} {pin.chart}".strip()
    return " · ".join(part for part in (place, words, pin.caption) if part)
