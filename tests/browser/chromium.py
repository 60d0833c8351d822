"""The Chromium that the browser tests drive: one that is here, else Debian's package.

python -m tests.browser.chromium prints its path, after installing it where that is possible. Exit status: 0 found,
1 not there, and a line on stderr says what to install.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ARGUMENTS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--in-process-gpu",  # frames are drawn without a process to hand them to
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--js-flags=--no-opt",  # a page of a test ends before what the last compiler makes pays
)


class ChromiumError(RuntimeError):
    """There is no browser to drive. The message says what to install."""


def find() -> str | None:
    """The path of a Chromium: $CHROMIUM if it is set, else the first of NAMES on PATH, else None."""
    given = os.environ.get("CHROMIUM")
    for name in [given] if given else NAMES:
        if path := shutil.which(name):
            return path
    return None


def install() -> str:
    """The path of a Chromium, Debian's package installed if there is none. Raises ChromiumError."""
    if path := find():
        return path
    if given := os.environ.get("CHROMIUM"):
        raise ChromiumError(f"CHROMIUM is {given!r}, which is no program: give a Chromium's path, or unset it")
    wanted = "install Chromium (Debian, Ubuntu: apt-get install chromium), or set CHROMIUM to the path of one"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise ChromiumError(f"there is no Chromium on PATH: {wanted}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for arguments in (["update"], ["install", "-y", "--no-install-recommends", "chromium"]):
        done = subprocess.run(["apt-get", *arguments], env=environment, stdout=sys.stderr, stdin=subprocess.DEVNULL)
        if done.returncode:
            raise ChromiumError(f"apt-get {arguments[0]} failed with exit status {done.returncode}: {wanted}")
    if path := find():
        return path
    raise ChromiumError(f"the package chromium brought no program of that name: {wanted}")


if __name__ == "__main__":
    try:
        print(install())
    except ChromiumError as missing:
        print(f"chromium: {missing}", file=sys.stderr)
        sys.exit(1)
