"""Copies checkpoints to an S3-compatible server whose connections are cut: the newest complete copy always loads.

    pip install s3fs "moto[server]"
    python -m benchmarks.remote_checkpoints [--quick] [--faults 200]

A relay between the run and the server cuts a connection with some probability, after a random number of bytes, also
in the middle of multipart uploads. After each checkpoint the run is fetched without faults. The fetched run must have
the newest checkpoint that was reported as copied, or a newer one, with the right sizes and hashes.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import socket
import tempfile
import threading
import time
from contextlib import suppress
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
MIN_PART_BYTES = 5 * 2**20
"""The smallest part of a multipart upload that S3 accepts."""
CUT_PROBABILITY = 0.4
MAX_CUT_BYTES = 5e6


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
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


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

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    port = server.get_host_and_port()[1]
    relay = Relay(port, seed=0)
    os.environ |= {"AWS_ACCESS_KEY_ID": "benchmark", "AWS_SECRET_ACCESS_KEY": "benchmark", "AWS_MAX_ATTEMPTS": "1"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{relay.port}"}
    S3FileSystem._put_file = partialmethod(S3FileSystem._put_file, chunksize=MIN_PART_BYTES)
    S3FileSystem.retries = 1
    remote.RETRY_AFTER_S = (0.1,)  # type: ignore[assignment]
    boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}").create_bucket(Bucket="runs")
    about("remote_checkpoints")
    copied, failed, lost, seconds, step = 0, 0, 0, [], 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = RunFolder(Path(scratch) / "gpt")
        folder.path.mkdir()
        write_identity(folder, RUN)
        while relay.cuts < options.faults:
            step += 1
            relay.faulty = True
            copies = CheckpointCopies(folder, "s3://runs/team", run=RUN, retention=Retention(2))
            begin_s, path = time.perf_counter(), _save(folder, step)
            copies.take(path)
            messages = copies.close()
            seconds.append(time.perf_counter() - begin_s)
            relay.faulty = False
            if any(message.startswith(f"copied step {step} ") for message in messages):
                copied = step
            else:
                failed += 1
            prune(folder.checkpoints, path, Retention(2), RUN)
            if copied:
                other = Path(scratch) / "other"
                found, _ = newest_valid(RunFolder(fetch_run(copies.place.url, other, lambda _line: None)).checkpoints)
                lost += found is None or int(found.name[5:]) < copied
                shutil.rmtree(other)
        names = StoredFolder.open("s3://runs/team/gpt-01234567/checkpoints").steps()
    server.stop()
    figure("remote_checkpoints", "faults", [relay.cuts], unit="connections cut", against=f"{step} checkpoints of 12 MB")
    figure("remote_checkpoints", "failed_copies", [failed], unit="checkpoints", against="all attempts failed; reported")
    figure("remote_checkpoints", "lost", [lost], unit="checkpoints", against="reported as copied, but not fetched")
    figure("remote_checkpoints", "kept", [len(names)], unit="complete copies", against="2 requested")
    figure("remote_checkpoints", "copy", seconds, unit="s", against="with a second attempt")


if __name__ == "__main__":
    main()
