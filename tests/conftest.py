"""One thread, here and in every process that a test starts: the models are tiny, and on a busy machine the threads of
OpenMP wait for each other by spinning.

torch is imported inside of fixtures, because the process that only distributes the tests does not need it.

Where tests marked ``process`` are left out (``make quick``), a test that starts one without the mark fails.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: fixtures of a module run before those of a test
os.environ["TRAINWRIGHT_LANG"] = "en"  # whatever the locale is
os.environ["TRAINWRIGHT_EXAMINE"] = "all"  # the loops are short and their models tiny; tests of the budget delete it
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test fetches a model; a test of the hub starts a server of its own
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # else a pool of processes, for kernels that take less than its start

import pytest

from tests import house

TESTS = Path(__file__).parent
EXAMINED = ("doctor", "finetune", "recorder", "replay", "watching")
DOCTOR_VARIABLE = "TRAINWRIGHT_DOCTOR"
MARKED_MODULE = re.compile(r"^pytestmark = (\[[^\]]*?)?pytest\.mark\.(slow|process)\b", re.MULTILINE)
STARTED: list[str] = []
gc.disable()  # until all tests are found: what is made till then is kept, and would be looked through many times


def _hear(event: str, args: tuple[object, ...]) -> None:
    """Notes commands that run a Python. Forks are cheap, and commands such as ``git`` end at once."""
    if event == "subprocess.Popen":
        command = [str(part) for part in args[1]] if isinstance(args[1], list | tuple) else str(args[1]).split()
        if any(Path(part).name.startswith(("python", "trainwright")) for part in command):
            STARTED.append(" ".join(command))


def pytest_configure(config: pytest.Config) -> None:
    if "not process" in config.getoption("markexpr"):
        sys.addaudithook(_hear)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of modules whose mark deselects all of their tests: they import the slowest libraries."""
    if "not slow and not process" not in config.getoption("markexpr") or collection_path.suffix != ".py":
        return None
    return True if MARKED_MODULE.search(collection_path.read_text()) else None


def _asks_the_house(module: object) -> bool:
    return any(each is house or getattr(each, "__module__", "") == house.__name__ for each in vars(module).values())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests that read all sources one after another, so that the sources are parsed once."""
    items.sort(key=lambda item: not _asks_the_house(getattr(item, "module", None)))


def pytest_collection_finish() -> None:
    """Exclude the objects of all test modules and their imports from garbage collection: the engine
    collects garbage whenever memory runs out, at a second each time over such a heap.

    From here on no bytecode is kept: a module that a test writes anew, as long and in the same second, would be taken
    for the one before.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)  # Python's own, 700, takes 3 % of the time of tests that record steps
    gc.enable()
    sys.dont_write_bytecode = True


@pytest.fixture(autouse=True, scope="module")
def no_memory_is_kept(request: pytest.FixtureRequest) -> Iterator[None]:
    """Return freed memory, up to a GiB, to the system. Parsed sources take 160 MiB and 4 s."""
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
    """Train without the doctor, which takes ten times as long as a short run, except where it is tested.

    It is tested in the folders `EXAMINED` and in tests marked ``examined``.
    """
    room = request.path.relative_to(TESTS).parts[0]
    with pytest.MonkeyPatch.context() as patch:
        if room not in EXAMINED and not _is_marked_examined(request.node):
            patch.setenv(DOCTOR_VARIABLE, "off")
        yield


@pytest.fixture(scope="module")
def forked_trials() -> Iterator[None]:
    """Fork the processes of trials from one that has imported torch, which takes longer than a small trial."""
    from tests import forked
    from trainwright.trials import trial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "subprocess", forked.FORKING)
        yield


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Begin each test with one thread, and with the doctor if it is marked; end what it leaves, and fail for a watch.

    One fixture, because each takes as long as the shortest tests. What a test imported is excluded from garbage
    collection, which would slow down all tests after it.
    """
    import torch

    from trainwright.recorder import hooks
    from trainwright.recorder.listener import listeners

    torch.set_num_threads(1)  # a run that was tested before may have set another number
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
