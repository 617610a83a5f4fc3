"""Samples that are read in a forked process: what comes back, how it may end, and that nothing is left of it."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import torch

from trainwright.data import fork
from trainwright.data.fork import Begin, TooSlowError, read_in_fork, try_in_fork
from trainwright.errors import DataError

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = set(psutil.Process().children())
    files = psutil.Process().num_fds()
    yield
    assert set(psutil.Process().children()) <= before
    assert psutil.Process().num_fds() == files


def numbers(befalls: Callable[[], object] = lambda: None, at: int = 3) -> Callable[[Begin], Iterator[int]]:
    def read(begin: Begin) -> Iterator[int]:
        for position in range(6):
            begin(position)
            if position == at:
                befalls()
            yield position

    return read


def test_what_is_yielded_there_comes_back() -> None:
    assert list(read_in_fork(numbers(), limit_s=60)) == [0, 1, 2, 3, 4, 5]
    assert next(read_in_fork(numbers(lambda: time.sleep(300)), limit_s=60)) == 0

    def tensors(begin: Begin) -> Iterator[torch.Tensor]:
        yield torch.arange(10**6)

    (tensor,) = read_in_fork(tensors, limit_s=60)
    assert torch.equal(tensor, torch.arange(10**6))


def test_tensors_come_back_as_they_were_and_without_the_rest_of_their_storage() -> None:
    whole = torch.arange(10**6, dtype=torch.float32)
    sent = [
        whole[3:9].view(2, 3).t(),
        torch.tensor(3),
        torch.ones(2, dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.zeros(0, 4),
        torch.nn.Parameter(torch.ones(2)),
    ]
    ((came, same),) = read_in_fork(lambda begin: iter([(sent, sent[0])]), limit_s=60)
    for one, other in zip(came, sent, strict=True):
        assert type(one) is type(other) and one.dtype == other.dtype and one.requires_grad == other.requires_grad
        assert torch.equal(one, other)
    assert same is came[0] and same.untyped_storage().nbytes() == 24
    same.add_(1)  # it is no view of what was received
    assert not torch.equal(same, sent[0])


def segfault() -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def test_it_leaves_no_trace_here() -> None:
    state, done = torch.get_rng_state(), list[int]()
    list(read_in_fork(numbers(lambda: done.append(len(torch.randn(3)))), limit_s=60))
    assert torch.equal(torch.get_rng_state(), state) and done == []


@pytest.mark.parametrize(
    ("befalls", "how"),
    [
        (lambda: os._exit(3), "ended with exit code 3"),
        (lambda: os._exit(0), "ended with exit code 0"),
        (segfault, "was killed by SIGSEGV"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "was killed by SIGKILL"),
    ],
)
def test_a_sample_that_ends_the_process_is_named(befalls: Callable[[], object], how: str) -> None:
    with pytest.raises(DataError) as caught:
        list(read_in_fork(numbers(befalls), limit_s=60))
    assert caught.value.message == f"a process that reads the data {how} while it read sample 3"
    assert caught.value.sample_ids == (3,)


def test_an_end_before_any_sample() -> None:
    def read(begin: Begin) -> Iterator[int]:
        yield from (os._exit(3) for _ in range(1))

    with pytest.raises(DataError, match="exit code 3\n") as caught:
        list(read_in_fork(read, limit_s=60))
    assert caught.value.sample_ids == ()


def test_what_is_raised_there_is_raised_here() -> None:
    def fail() -> None:
        raise OSError("no such mount")

    with pytest.raises(DataError, match="OSError: no such mount"):
        list(read_in_fork(numbers(fail), limit_s=60))


LIMITS_S = (0.3, 3.0, 30.0)
"""A busy machine may take longer than the first of them until the samples before the one that hangs are read."""


def test_a_sample_that_hangs_is_not_waited_for() -> None:
    def position(limit_s: float) -> int:
        with pytest.raises(TooSlowError) as caught:
            list(read_in_fork(numbers(lambda: time.sleep(300)), limit_s=limit_s))
        return caught.value.position

    assert 3 in map(position, LIMITS_S)


def test_samples_are_tried_whatever_they_raise() -> None:
    class Some:
        def __getitem__(self, position: int) -> int:
            if position == 1:
                raise SystemExit(2)
            if position == 2:
                time.sleep(300)
            return 10 // position

    assert try_in_fork(Some(), [0, 1], limit_s=60) == 2
    assert 2 in (try_in_fork(Some(), [0, 1, 2], limit_s=limit_s) for limit_s in LIMITS_S)


def test_a_daemonic_process_reads_the_samples_itself() -> None:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=lambda: there.send(list(read_in_fork(numbers(), limit_s=60))), daemon=True)
    process.start()
    assert here.poll(60) and here.recv() == [0, 1, 2, 3, 4, 5]
    process.join()
    process.close()
    here.close()
    there.close()


def test_without_fork_samples_are_read_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork, "CAN_FORK", False)

    def read(begin: Begin) -> Iterator[int]:
        for position in range(3):
            begin(position)
            yield os.getpid()

    def broken(begin: Begin) -> Iterator[int]:
        begin(0)
        yield int("no such file")

    assert list(read_in_fork(read, limit_s=60.0)) == [os.getpid()] * 3
    with pytest.raises(TooSlowError) as caught:
        list(read_in_fork(read, limit_s=-1.0))
    assert caught.value.position == 0
    with pytest.raises(DataError, match="no such file"):
        list(read_in_fork(broken, limit_s=60.0))
