"""An S3 server of this process on loopback, and folders that are uploaded to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer
from pyarrow.fs import FileSelector, S3FileSystem

BUCKET = "bucket"


class Store:
    """The bucket of a running server, as another program than Binade sees it."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.files = S3FileSystem(endpoint_override=endpoint, allow_bucket_creation=True)
        self.files.create_dir(BUCKET)

    def upload(self, folder: Path, place: str) -> None:
        """Copy what a folder holds, but for files whose names begin with a dot."""
        for path in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
            self.write(f"{place}/{path.relative_to(folder).as_posix()}", path.read_bytes())

    def write(self, key: str, content: bytes) -> None:
        with self.files.open_output_stream(f"{BUCKET}/{key}") as file:
            file.write(content)

    def delete(self, key: str) -> None:
        self.files.delete_file(f"{BUCKET}/{key}")

    def delete_folder(self, key: str) -> None:
        self.files.delete_dir(f"{BUCKET}/{key}")

    def empty(self) -> None:
        self.files.delete_dir_contents(BUCKET)

    @contextmanager
    def checking_credentials(self) -> Iterator[None]:
        """The server knows no user, and takes no request without one."""
        self._check("0")
        try:
            yield
        finally:
            self._check("inf")

    def _check(self, after: str) -> None:
        address = f"{self.endpoint}/moto-api/reset-auth"
        urlopen(Request(address, after.encode(), {"Content-Type": "text/plain"}, method="POST")).close()

    def content(self) -> dict[str, bytes]:
        """Every object by its key."""
        found = self.files.get_file_info(FileSelector(BUCKET, recursive=True))
        return {info.path: self.files.open_input_file(info.path).readall() for info in found if info.is_file}


@contextmanager
def serving(patch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server with an empty bucket. The environment names it, with credentials that it takes."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in {
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        }.items():
            patch.setenv(name, value)
        yield Store(os.environ["AWS_ENDPOINT_URL"])
    finally:
        server.stop()
