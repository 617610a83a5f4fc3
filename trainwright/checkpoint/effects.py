"""Keeps code that runs once more from acting outside of the process: on files, connections, processes, the terminal.

Inside of ``no_effects``, functions that write files, start processes or send data raise before they do so, and printed
and logged lines are dropped. This holds for one thread: others are not affected.

An audit hook of Python would see more. It cannot be removed again, and it makes each ``id()`` of the process take seven
times as long.
"""

from __future__ import annotations

import builtins
import functools
import gc
import io
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class NotIsolated(Exception):
    """Code that must leave no trace acts on something that cannot be put back; the message says on what."""


@contextmanager
def no_effects() -> Iterator[list[str]]:
    """Inside, this thread has no effects outside of the process. Yields what was refused, which is filled meanwhile.

    An effect raises NotIsolated. The code may catch that, so the caller must look at what was refused. Garbage is not
    collected meanwhile: finalizers of the user's objects may have effects, as that of a DataLoader's iterator ends its
    workers.
    """
    thread = threading.get_ident()
    if thread in _refused:
        yield _refused[thread]
        return
    refused: list[str] = []
    collects = gc.isenabled()
    gc.disable()
    _refused[thread] = refused
    with _changing:
        _patches.enter()
    try:
        yield refused
    finally:
        with _changing:
            _patches.exit()
        del _refused[thread]
        if collects:
            gc.enable()


_refused: dict[int, list[str]] = {}
"""What was refused, by the threads that must have no effects."""
_changing = threading.Lock()


def _of_this_thread() -> list[str] | None:
    """What was refused in this thread; None where it may have effects."""
    thread = threading.get_ident()
    found = _refused.get(thread)
    if found is None and _refused and thread not in threading._active:  # type: ignore[attr-defined]
        return next(iter(_refused.values()), None)  # a thread of autograd, which works for the other
    return found


def _refusing(original: Callable[..., Any], name: str, is_effect: Callable[..., bool]) -> Callable[..., Any]:
    what = "it opens a file to write" if name.endswith("open") else f"it calls {name}"

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        refused = _of_this_thread()
        if refused is not None and is_effect(*args, **kwargs):
            refused.append(what)
            raise NotIsolated(what)
        return original(*args, **kwargs)

    return call


def _always(*args: Any, **kwargs: Any) -> bool:
    return True


def _opens_to_write(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> bool:
    if isinstance(mode, int):
        return bool(mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
    return not set(str(mode)).isdisjoint("wax+")


_EFFECTS: tuple[tuple[Any, str, tuple[str, ...], Callable[..., bool]], ...] = (
    (builtins, "", ("open",), _opens_to_write),
    (io, "io.", ("open",), _opens_to_write),
    (sys.modules["_io"], "io.", ("open",), _opens_to_write),
    (os, "os.", ("open",), lambda path, flags, *args, **kwargs: _opens_to_write(path, flags)),
    (
        os,
        "os.",
        (
            "write", "writev", "pwrite", "sendfile", "remove", "unlink", "rename", "renames", "replace", "mkdir",
            "makedirs", "rmdir", "link", "symlink", "truncate", "ftruncate", "mkfifo", "chmod", "chown", "utime",
            "putenv", "unsetenv", "chdir", "kill", "killpg", "system", "fork", "forkpty", "posix_spawn", "posix_spawnp",
        ),
        _always,
    ),
    (subprocess.Popen, "subprocess.Popen", ("__init__",), _always),
    (socket.socket, "socket.", ("connect", "bind", "send", "sendall", "sendto", "sendmsg"), _always),
    (threading.Thread, "threading.Thread.", ("start",), _always),
    (torch.serialization, "torch.save", ("_open_zipfile_writer", "_open_file_like"), lambda f, *mode: mode != ("rb",)),
)  # fmt: skip
"""The modules and classes with their functions that have effects, and when they do."""
_OF_THE_SYSTEM = {
    vars(os)[name] for owner, _, names, _ in _EFFECTS if owner is os for name in names if name in vars(os)
}


def acts_outside(function: object) -> bool:
    """Whether it is a function of ``os`` that is refused. One that was imported by name cannot be replaced."""
    return isinstance(function, Hashable) and function in _OF_THE_SYSTEM


class _Silent:
    """A stream that drops what a thread without effects writes."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if _of_this_thread() is not None else int(self.stream.write(text) or 0)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if _of_this_thread() is None:
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Patches:
    """Replaces the functions while any thread must have no effects."""

    def __init__(self) -> None:
        self._depth = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, what it was (None: inherited), what it is

    def enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for owner, prefix, names, is_effect in _EFFECTS:
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:  # else this system does not have it
                    said = prefix if name.startswith("_") else prefix + name
                    self._replace(owner, name, original, _cached(original, said, is_effect))
        self._replace(logging.Logger, "handle", logging.Logger.handle, _handle_of(logging.Logger.handle))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            self._replace(sys, name, stream, _Silent(stream))

    def _replace(self, owner: Any, name: str, original: Any, ours: Any) -> None:
        self._undo.append((owner, name, original if name in vars(owner) else None, ours))
        setattr(owner, name, ours)

    def exit(self) -> None:
        self._depth -= 1
        if self._depth == 0:
            undo, self._undo = self._undo, []
            for owner, name, original, ours in undo:
                if vars(owner).get(name) is not ours:  # somebody else has replaced it
                    continue
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


_patches = _Patches()


@functools.cache
def _cached(original: Callable[..., Any], name: str, is_effect: Callable[..., bool]) -> Callable[..., Any]:
    return _refusing(original, name, is_effect)


@functools.cache
def _handle_of(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        if _of_this_thread() is None:
            original(self, record)

    return handle
