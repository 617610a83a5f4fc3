"""The random generators that the user's own iterator draws from: apart from those that training draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import singledispatch

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, Sampler

from trainwright.state.numpy_generator import TwisterState
from trainwright.state.python_generator import PythonState, read_python, write_python
from trainwright.state.rng import RngBag, borrow, end_borrowing, preserved_rng, reseed, seed_of

_read_torch, _write_torch = torch.default_generator.get_state, torch.default_generator.set_state


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds all generators inside the context and restores them after it."""
    with preserved_rng():
        reseed(seed)
        yield


class OwnGenerators:
    """The global generators as one pass of the user's iterator sees them; it goes on where it last drew.

    A context, entered for each batch: inside, the global generators are these. Python's is copied as it lies in memory,
    and NumPy's exchanged: as tuples and arrays they take 180 us for each batch. What ``np.random.randn`` keeps of a
    pair of normals is lost by that, at the same place in each run.
    """

    def __init__(self, seed: int) -> None:
        self._back = self._give_back  # made once: between two steps each call costs ten times what it does in a row
        self._numpy = np.random.MT19937()  # takes 150 us, to seed it 3
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Begins anew, as ``seed_all`` seeds the global ones."""
        self._python = PythonState.of(random.Random(seed).getstate())
        self._torch = torch.Generator().manual_seed(seed).get_state()
        np.random.RandomState(self._numpy).seed(seed % 2**32)

    def __enter__(self) -> None:
        self._outside = read_python(), _read_torch(), mtrand.get_bit_generator()
        try:
            borrow(self._back)
            write_python(self._python)
            _write_torch(self._torch)
            mtrand.set_bit_generator(self._numpy)
        except BaseException:  # of the handler of a signal
            end_borrowing(self._back)
            raise

    def __exit__(self, *error: object) -> None:
        end_borrowing(self._back)

    def _give_back(self) -> None:
        self._python, self._torch = read_python(), _read_torch()
        python, of_torch, numpy = self._outside
        write_python(python)
        _write_torch(of_torch)
        mtrand.set_bit_generator(numpy)

    def read(self) -> Callable[[], RngBag]:
        """A copy of the states, outside the context: 1 us. Called, it gives them as a checkpoint has them: 50 us."""
        python, numpy, of_torch = self._python, TwisterState.of(self._numpy), self._torch
        return lambda: RngBag(python.as_tuple(), numpy.as_dict(), of_torch)

    def restore(self, bag: RngBag) -> None:
        """Goes on from states that ``read`` gave."""
        self._python, self._torch = PythonState.of(bag.python), bag.torch_cpu
        self._numpy.state = bag.numpy  # type: ignore[assignment]  # as RngBag has it


class EpochGenerators:
    """As OwnGenerators, in full: NumPy's spare normal too. To enter and leave takes 180 us, once for a step."""

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._state = RngBag.capture()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the global generators are these."""
        with preserved_rng():
            self._state.restore()
            yield
            self._state = RngBag.capture()


def prepare_epoch(source: object, seed: int, epoch: int) -> None:
    """Tells a loader or sampler, and the samplers inside it, the epoch, and seeds the generators that they hold."""
    for number, part in enumerate(_parts(source)):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)
        for name, value in (vars(part) if hasattr(part, "__dict__") else {}).items():
            if isinstance(value, _SEEDED):
                _seed(value, seed_of(f"{seed}:{epoch}:{number}:{name}"))


def _parts(source: object) -> list[object]:
    """The source, and inside it dataset and samplers, each once."""
    found: list[object] = []
    waiting = [source]
    while waiting:
        part = waiting.pop(0)
        if any(part is each for each in found):
            continue
        found.append(part)
        own = vars(part) if hasattr(part, "__dict__") else {}
        waiting += [value for value in own.values() if isinstance(value, Sampler)]
        if isinstance(part, DataLoader):
            waiting.append(part.dataset)
    return found


_SEEDED = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator)


@singledispatch
def _seed(generator: object, seed: int) -> None:
    """Seeds a generator of one of these classes."""
    raise TypeError(f"{type(generator).__name__} is not seeded")


@_seed.register
def _(generator: torch.Generator, seed: int) -> None:
    generator.manual_seed(seed)


@_seed.register
def _(generator: random.Random, seed: int) -> None:
    generator.seed(seed)


@_seed.register
def _(generator: np.random.RandomState, seed: int) -> None:
    generator.seed(seed % 2**32)


@_seed.register
def _(generator: np.random.Generator, seed: int) -> None:
    generator.bit_generator.state = type(generator.bit_generator)(seed).state
