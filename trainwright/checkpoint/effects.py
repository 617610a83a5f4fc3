"""Keeps replayed code from acting outside of the process: on files, connections, processes, the terminal.

Inside of ``no_effects``, functions that write files, start processes or send data raise instead, and printed and logged
lines are dropped. This applies to one thread; others are not affected.

An audit hook of Python would catch more. But it cannot be removed, and it makes each ``id()`` of the process take seven
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
    """Code that must have no effects acts on something that cannot be restored; the message names it."""


@contextmanager
def no_effects() -> Iterator[list[str]]:
    """Prevent effects of this thread outside of the process. Yields a list, to which prevented effects are added.

    An effect raises NotIsolated. The code may catch that, so the caller must check the list. Garbage collection is
    disabled within the context, because finalizers of the user's objects may have effects: the finalizer of a
    DataLoader's iterator ends its workers.
    """
    thread = threading.get_ident()
    if thread in _prevented:
        yield _prevented[thread]
        return
    prevented: list[str] = []
    collects = gc.isenabled()
    gc.disable()
    _prevented[thread] = prevented
    with _changing:
        _patches.enter()
    try:
        yield prevented
    finally:
        with _changing:
            _patches.exit()
        del _prevented[thread]
        if collects:
            gc.enable()


_prevented: dict[int, list[str]] = {}
"""Prevented effects, by the threads that must have none."""
_changing = threading.Lock()


def _prevented_here() -> list[str] | None:
    """Return the list of prevented effects of this thread; None if it may have effects."""
    thread = threading.get_ident()
    found = _prevented.get(thread)
    if found is None and _prevented and thread not in threading._active:  # type: ignore[attr-defined]
        return next(iter(_prevented.values()), None)  # a thread of autograd, which works for the thread in _prevented
    return found


@functools.cache
def _preventing(original: Callable[..., Any], name: str, is_effect: Callable[..., bool]) -> Callable[..., Any]:
    what = "it opens a file to write" if name.endswith("open") else f"it calls {name}"

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        prevented = _prevented_here()
        if prevented is not None and is_effect(*args, **kwargs):
            prevented.append(what)
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
"""Functions that have effects: module or class, its name in messages, the functions, and when a call has an effect."""
_OS_FUNCTIONS = {vars(os)[name] for owner, _, names, _ in _EFFECTS if owner is os for name in names if name in vars(os)}


def acts_outside(function: object) -> bool:
    """Return True for a prevented function of ``os``. If code imported the function by name, it cannot be replaced."""
    return isinstance(function, Hashable) and function in _OS_FUNCTIONS


class _Silent:
    """A stream that drops the output of threads that must have no effects."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if _prevented_here() is not None else int(self.stream.write(text) or 0)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        if _prevented_here() is None:
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class _Patches:
    """Replaces the functions while any thread must have no effects."""

    def __init__(self) -> None:
        self._depth = 0
        self._undo: list[tuple[Any, str, Any, Any]] = []  # owner, name, value before (None: inherited), value now

    def enter(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for owner, prefix, names, is_effect in _EFFECTS:
            for name in names:
                original = getattr(owner, name, None)
                if original is not None:  # else this system does not have it
                    full_name = prefix if name.startswith("_") else prefix + name
                    self._replace(owner, name, original, _preventing(original, full_name, is_effect))
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
                if vars(owner).get(name) is not ours:  # replaced by other code meanwhile
                    continue
                if original is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, original)


_patches = _Patches()


@functools.cache
def _handle_of(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def handle(self: logging.Logger, record: logging.LogRecord) -> None:
        if _prevented_here() is None:
            original(self, record)

    return handle
