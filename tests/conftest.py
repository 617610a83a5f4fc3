"""Settings and fixtures of all tests.

Tests and the processes that they start use one thread: the models are tiny, and the threads of OpenMP wait for each
other by spinning, which is slow on a busy machine. torch is imported inside of fixtures, because the process that only
distributes the tests does not need it. If tests marked ``process`` are left out (``make quick``), a test without the
mark that starts a Python process fails.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # must be set before torch is loaded
os.environ["TRAINWRIGHT_LANG"] = "en"  # independent of the locale
os.environ["TRAINWRIGHT_EXAMINE"] = "all"  # no time budget for examinations; tests of the budget delete this
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test downloads a model; a test of the hub starts a local server
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # starting a pool of processes takes longer than compiling here

import pytest

from tests import house

TESTS = Path(__file__).parent
EXAMINED = ("doctor", "finetune", "recorder", "replay", "watching")
DOCTOR_VARIABLE = "TRAINWRIGHT_DOCTOR"
MARKED_MODULE = re.compile(r"^pytestmark = (\[[^\]]*?)?pytest\.mark\.(slow|process)\b", re.MULTILINE)
STARTED: list[str] = []
gc.disable()  # until the tests are collected: the objects created until then stay, and would be traversed many times


def _hear(event: str, args: tuple[object, ...]) -> None:
    """Audit hook that records commands that run Python. Forks and commands such as ``git`` are fast: not recorded."""
    if event == "subprocess.Popen":
        command = [str(part) for part in args[1]] if isinstance(args[1], list | tuple) else str(args[1]).split()
        if any(Path(part).name.startswith(("python", "trainwright")) for part in command):
            STARTED.append(" ".join(command))


def pytest_configure(config: pytest.Config) -> None:
    if "not process" in config.getoption("markexpr"):
        sys.addaudithook(_hear)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip modules whose ``pytestmark`` deselects all of their tests. Their imports are the slowest."""
    if "not slow and not process" not in config.getoption("markexpr") or collection_path.suffix != ".py":
        return None
    return True if MARKED_MODULE.search(collection_path.read_text()) else None


def _asks_the_house(module: object) -> bool:
    return any(each is house or getattr(each, "__module__", "") == house.__name__ for each in vars(module).values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that read all sources one after another, so that the sources are parsed once."""
    items.sort(key=lambda item: not _asks_the_house(getattr(item, "module", None)))


def pytest_collection_finish() -> None:
    """Exclude the objects of all test modules and their imports from garbage collection.

    The engine collects garbage whenever memory runs out, which would take a second each time. From here on no bytecode
    is written: Python would use it for a module that a test writes again with the same size in the same second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # the default of 700 takes 3 % of the time of tests that record steps
    gc.enable()
    sys.dont_write_bytecode = True


@pytest.fixture(autouse=True, scope="module")
def no_memory_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return freed memory, up to a GiB, to the system, and drop the parsed sources (160 MiB, 4 s to parse again)."""
    asks = _asks_the_house(request.module)
    if not asks:
        house.forget()
    yield
    if not asks:
        import torch

        from trainwright.distributed.memory import give_back

        give_back(torch.device("cpu"))


def _is_marked_examined(node: pytest.Item | pytest.Collector) -> bool:
    return node.get_closest_marker("examined") is not None


@pytest.fixture(autouse=True, scope="module")
def doctor_of_module(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turn the doctor off, except in the folders ``EXAMINED`` and in tests marked ``examined``.

    It takes ten times as long as a short run.
    """
    room = request.path.relative_to(TESTS).parts[0]
    with pytest.MonkeyPatch.context() as patch:
        if room not in EXAMINED and not _is_marked_examined(request.node):
            patch.setenv(DOCTOR_VARIABLE, "off")
        yield


@pytest.fixture(scope="module")
def forked_trials() -> Iterator[None]:
    """Fork the processes of trials from one that has imported torch. The import takes longer than a small trial."""
    from tests import forked
    from trainwright.trials import trial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "subprocess", forked.FORKING)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin each test with one thread, and with the doctor if it is marked. End its processes; fail for an open watch.

    This is one fixture because each fixture takes as long as the shortest tests. Modules that a test imported are
    excluded from garbage collection, because they would slow down all later tests.
    """
    import torch

    from trainwright.recorder import hooks
    from trainwright.recorder.listener import listeners

    torch.set_num_threads(1)  # a run in an earlier test may have set another number
    modules, started = len(sys.modules), len(STARTED)
    with pytest.MonkeyPatch.context() as patch:
        if _is_marked_examined(request.node):
            patch.delenv(DOCTOR_VARIABLE, raising=False)
        yield
    if forked := sys.modules.get("tests.forked"):
        forked.end_all()
    left = [type(each).__name__ for each, _ in listeners]
    if left:
        hooks.stop_all()
    if len(sys.modules) != modules:
        gc.collect()
        gc.freeze()
    assert left == [], "end the watch, or the session of the engine: it would hear what all tests after it do"
    assert STARTED[started:] == [], "mark this test with pytest.mark.process"
