"""Copies checkpoints to an S3-compatible server whose connections are cut. The newest complete copy must always load.

    pip install s3fs "moto[server]"
    python -m benchmarks.remote_checkpoints [--quick] [--faults 200]

A relay between the run and the server cuts connections at random, after a random number of bytes, also within multipart
uploads. After each checkpoint, the run is fetched without faults. The fetched run must have the newest checkpoint that
was reported as copied, or a newer one, with the right sizes and hashes.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partialmethod
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.figures import about, arguments, figure
from trainwright.checkpoint import remote
from trainwright.checkpoint.manifest import name_of, write_manifest
from trainwright.checkpoint.remote import CheckpointCopies, StoredFolder, fetch_run
from trainwright.checkpoint.store import Retention, newest_valid, prune
from trainwright.runs.folder import RunFolder, write_identity

RUN = "0123456789abcdef"
URL = "s3://runs/team"
KEPT = Retention(2)
MIN_PART_BYTES = 5 * 2**20
"""The smallest part of a multipart upload that S3 accepts."""
CUT_PROBABILITY = 0.4
MAX_CUT_BYTES = 5e6
LOG_BYTES = 12_000_000
"""Size of the log, which is copied with each checkpoint in three parts."""


class Relay:
    """Forwards TCP connections to a port, and cuts some of them while ``faulty``."""

    def __init__(self, port: int, seed: int) -> None:
        self._target, self._random = port, random.Random(seed)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.faulty, self.cuts = False, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._server.accept()
            try:
                server = socket.create_connection(("127.0.0.1", self._target))
            except OSError:
                client.close()
                continue
            for pair in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=pair, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        left = self._random.uniform(0, MAX_CUT_BYTES) if self._random.random() < CUT_PROBABILITY else None
        with suppress(OSError):
            while data := source.recv(65536):
                if left is not None and self.faulty:
                    left -= len(data)
                    if left < 0:
                        self.cuts += 1
                        break
                target.sendall(data)
        for each in (source, target):  # closed, too: after a shutdown alone, a client that sends would wait forever
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


def _save(folder: RunFolder, step: int) -> Path:
    path = folder.checkpoints / name_of(step)
    path.mkdir(parents=True)
    save_file({"w": torch.full((3_000_000,), float(step))}, path / "model.safetensors")  # 12 MB: three parts
    save_file({"m": torch.full((50_000,), float(step))}, path / "rest.safetensors")
    (path / "state.json").write_text("{}")
    write_manifest(path, step, None, RUN)
    return path


def main() -> None:
    options = arguments(__doc__, faults=(200, 10))
    import boto3
    from moto.server import ThreadedMotoServer
    from s3fs import S3FileSystem

    logging.getLogger("werkzeug").setLevel(logging.CRITICAL)  # moto raises for parts of an aborted upload
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    relay = Relay(port, seed=0)
    os.environ |= {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_MAX_ATTEMPTS": "1"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
    S3FileSystem._put_file = partialmethod(S3FileSystem._put_file, chunksize=MIN_PART_BYTES)
    S3FileSystem.retries = 1
    remote.RETRY_AFTER_S = (0.1,)  # type: ignore[assignment]
    # one client for all copies: creating a client takes more CPU time than a copy
    remote.StoredFolder.open = functools.cache(StoredFolder.open)  # type: ignore[method-assign]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the figures so far are printed
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="runs")
    about("remote_checkpoints")
    found = Found()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            _copy_and_fetch(Path(scratch), relay, options.faults, found)
    finally:
        _show(found, relay.cuts)
    server.stop()


@dataclass
class Found:
    """Counts of checkpoints, and the seconds of each copy. ``copied`` is the last step that was reported as copied."""

    step: int = 0
    copied: int = 0
    failed: int = 0
    lost: int = 0
    seconds: list[float] = field(default_factory=list)


def _copy_and_fetch(scratch: Path, relay: Relay, faults: int, seen: Found) -> None:
    """Copy checkpoints while connections are cut, and fetch the run after each, until there were enough cuts."""
    folder = RunFolder(scratch / "gpt")
    folder.path.mkdir()
    write_identity(folder, RUN)
    folder.log.write_bytes(b"x" * LOG_BYTES)
    while relay.cuts < faults:
        seen.step += 1
        relay.faulty = True
        copies = CheckpointCopies(folder, URL, run=RUN, retention=KEPT)
        begin_s, path = time.perf_counter(), _save(folder, seen.step)
        copies.take(path)
        messages = copies.close()
        seen.seconds.append(time.perf_counter() - begin_s)
        relay.faulty = False
        if any(message.startswith(f"copied step {seen.step} ") for message in messages):
            seen.copied = seen.step
        else:
            seen.failed += 1
        prune(folder.checkpoints, path, KEPT, RUN)
        if seen.copied:
            other = scratch / "other"
            newest, _ = newest_valid(RunFolder(fetch_run(copies.place.url, other, lambda _line: None)).checkpoints)
            seen.lost += newest is None or int(newest.name[5:]) < seen.copied
            shutil.rmtree(other)


def _show(seen: Found, cuts: int) -> None:
    names = StoredFolder.open(f"{URL}/gpt-{RUN[:8]}/checkpoints").steps()
    size = "12 MB, each with a log of 12 MB"
    figure("remote_checkpoints", "faults", [cuts], unit="connections cut", against=f"{seen.step} checkpoints of {size}")
    figure(
        "remote_checkpoints", "failed_copies", [seen.failed], unit="checkpoints", against="attempts failed; reported"
    )
    figure("remote_checkpoints", "lost", [seen.lost], unit="checkpoints", against="reported as copied, but not fetched")
    figure("remote_checkpoints", "kept", [len(names)], unit="complete copies", against=f"{KEPT.newest} requested")
    figure("remote_checkpoints", "copy", seen.seconds, unit="s", against="with a second attempt")


if __name__ == "__main__":
    main()
