"""Runs ``tw.fit``, ``tw.watch`` and the demo as on macOS or Windows: ``python -m tests.other_system PLATFORM FOLDER``.

Only code of the package sees the simulated system: ``sys.platform``, missing modules, functions and constants, and on
Windows open files that cannot be renamed or deleted.
"""

from __future__ import annotations

import builtins
import importlib
import os
import signal
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAME = "trainwright"
EVERYWHERE_LACKING = {
    "os": ("sched_", "posix_fadvise", "posix_fallocate", "O_DIRECT", "memfd_", "eventfd", "pidfd_", "splice"),
    "signal": ("SIGPWR", "SIGSTKFLT", "SIGRT", "SIGPOLL"),
}
WINDOWS_LACKS = {
    "os": (
        "fork", "register_at_fork", "pread", "pwrite", "preadv", "pwritev", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK",
        "O_DIRECTORY", "O_SYNC", "O_DSYNC", "setsid", "setpgrp", "getpgrp", "setpgid", "getpgid", "killpg", "getuid",
        "geteuid", "getgid", "getegid", "getgroups", "sysconf", "statvfs", "fstatvfs", "uname", "getloadavg", "mkfifo",
        "nice", "wait", "wait3", "wait4", "WNOHANG", "chown", "fchmod", "fchown", "lchown", "ttyname", "ctermid",
        "getpriority", "posix_spawn", "spawnvp", "sync", "fdatasync", "openpty", "forkpty", "initgroups", "mknod",
    ),
    "signal": (
        "SIGKILL", "SIGHUP", "SIGQUIT", "SIGUSR", "SIGCHLD", "SIGALRM", "SIGBUS", "SIGPIPE", "SIGCONT", "SIGSTOP",
        "SIGTSTP", "SIGWINCH", "setitimer", "getitimer", "ITIMER_", "alarm", "pause", "pthread_", "sigwait",
        "sigpending", "siginterrupt", "set_wakeup_fd_",
    ),
}  # fmt: skip
IMPORTED_FIRST = (
    "asyncio", "concurrent.futures", "multiprocessing.connection", "numpy", "psutil", "pydantic", "rich.console",
    "safetensors.torch", "torch.utils.data", "typer", "uvicorn",
)  # fmt: skip
"""Imported before the simulation begins, because these packages choose their code by ``sys.platform``."""
STANDARD = {"pathlib", "io", "os", "shutil", "tempfile", "codecs", "tokenize", "linecache"}
MODULES = {"darwin": (), "win32": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix", "syslog")}


def _is_ours(depth: int = 2) -> bool:
    return str(sys._getframe(depth).f_globals.get("__name__", "")).partition(".")[0] == NAME


def _restrict(module: types.ModuleType, lacking: tuple[str, ...], **other: object) -> None:
    """Hides the names that begin with one of ``lacking`` from the package, and shows it the values in ``other``."""
    taken = [name for name in vars(module) if name in other or (lacking and name.startswith(lacking))]
    hidden = {name: vars(module).pop(name) for name in taken}

    def found(name: str) -> Any:  # called only for names that are not in the module, so others stay fast
        if name in hidden and not _is_ours():
            return hidden[name]
        if name in other:
            return other[name]
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r} on this system")

    vars(module)["__getattr__"] = found


def _refuse_imports(refused: tuple[str, ...]) -> None:
    imported = builtins.__import__

    def checked(name: str, namespace: Any = None, *rest: Any, **options: Any) -> Any:
        if name in refused and str((namespace or {}).get("__name__", "")).partition(".")[0] == NAME:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, namespace, *rest, **options)

    builtins.__import__ = checked  # type: ignore[assignment]


def _caller() -> str:
    """Returns the name of the module that opens a file, skipping modules of the standard library in between."""
    frame = sys._getframe(2)
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in (
            "pathlib",
            "io",
            "os",
            "shutil",
            "tempfile",
            "codecs",
            "tokenize",
            "linecache",
        ):
            return name
        frame = frame.f_back  # type: ignore[assignment]
    return ""  # type: ignore[unreachable]


def _open_files() -> set[str]:
    found = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(fd.readlink()))
        except OSError:
            continue
    return found


def _hook(platform: str) -> Callable[[str, tuple[Any, ...]], None]:
    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            path = os.fspath(args[0])
            if path.startswith(("/proc/", "/sys/")) and _caller().partition(".")[0] == NAME:
                raise FileNotFoundError(2, "No such file or directory", path)
            if platform == "win32" and args[1] is None and Path(path).is_dir():
                raise PermissionError(13, "Permission denied", path)
        elif platform == "win32" and event in ("os.rename", "os.remove"):
            moved = [str(Path(each).absolute()) for each in args[:2] if isinstance(each, str | os.PathLike)]
            for each in _open_files():
                if any(each == path or each.startswith(f"{path}/") for path in moved):
                    raise PermissionError(13, "The process cannot access the file: it is being used", each)

    return hook


class _Locks(types.ModuleType):
    """Simulates Windows' ``msvcrt`` with POSIX locks."""

    LK_NBLCK, LK_NBRLCK, LK_UNLCK = 2, 4, 0

    def __init__(self) -> None:
        super().__init__("msvcrt")
        import fcntl

        self._fcntl = fcntl

    def locking(self, fd: int, mode: int, nbytes: int) -> None:
        if os.lseek(fd, 0, os.SEEK_CUR) < 1 << 20:
            raise AssertionError("Windows refuses to read and write the bytes that are locked")
        how = self._fcntl.LOCK_UN if mode == self.LK_UNLCK else self._fcntl.LOCK_EX | self._fcntl.LOCK_NB
        try:
            self._fcntl.flock(fd, how)
        except BlockingIOError:
            raise PermissionError(13, "Permission denied") from None


def become(platform: str) -> None:
    """Simulates ``platform``, "darwin" or "win32", for the rest of this process."""
    for name in IMPORTED_FIRST:
        importlib.import_module(name)
    windows = WINDOWS_LACKS if platform == "win32" else {}
    for module in (os, signal):
        kill: dict[str, object] = {"kill": _no_signal_0} if platform == "win32" and module is os else {}
        _restrict(module, (*EVERYWHERE_LACKING[module.__name__], *windows.get(module.__name__, ())), **kill)
    _restrict(sys, (), platform=platform)
    if platform == "win32":
        sys.modules["msvcrt"] = _Locks()
    _refuse_imports(MODULES[platform])
    sys.addaudithook(_hook(platform))
    warnings.filterwarnings("error", category=EncodingWarning, module=NAME)


def _no_signal_0(pid: int, number: int) -> None:
    """Fails: on Windows, all signals but two end the process, and 0 is Ctrl-C."""
    raise AssertionError("os.kill on Windows ends the process")


def fit(folder: Path) -> None:
    """Trains, and resumes in the same folder, with the lock file and the checkpoint of the first run."""
    import torch

    import trainwright as tw

    data = [(torch.randn(4), torch.tensor(i % 2)) for i in range(64)]
    os.chdir(folder)
    model = torch.nn.Linear(4, 2)
    common: dict[str, Any] = {"val": data[:16], "device": "cpu", "name": "a"}
    first = tw.fit(model, data, "cross_entropy", until="3steps", **common)
    again = tw.fit(model, data, "cross_entropy", until="6steps", resume="runs/a", accept="until", **common)
    assert (first.step, again.step) == (3, 6), (first, again)


def watch(folder: Path) -> None:
    import torch

    import trainwright as tw

    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with tw.watch(model, optimizer, out=folder / "watched"):
        for _ in range(8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(2, (8,))).backward()
            optimizer.step()


def demo(folder: Path) -> None:
    from trainwright.cli import main

    os.chdir(folder)
    sys.argv = ["trainwright", "demo", "--budget", "2steps", "--set", "log.doctor=false"]
    main()


if __name__ == "__main__":
    become(sys.argv[1])
    for program in (fit, watch, demo):
        program(Path(sys.argv[2]))
