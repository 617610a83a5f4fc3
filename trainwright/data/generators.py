"""The random generators that the user's own iterator draws from: apart from those that training draws from."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import singledispatch

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, Sampler

from trainwright.checkpoint.codec import Tree
from trainwright.checkpoint.numpy_generator import TwisterState
from trainwright.checkpoint.python_generator import PythonState, read_python, write_python
from trainwright.checkpoint.rng import RngBag, borrow, end_borrowing, preserved_rng, reseed, seed_of

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

    def continue_here(self) -> None:
        """Goes on from the present states of the global generators."""
        self.restore(RngBag.capture())

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
    set_epoch(source, epoch)
    for number, part in enumerate(_parts(source)):
        for name, value in _attributes(part).items():
            if isinstance(value, _SEEDED):
                _seed(value, seed_of(f"{seed}:{epoch}:{number}:{name}"))


def set_epoch(source: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader or sampler, and of the samplers inside it, where they have it."""
    for part in _parts(source):
        if callable(tell := getattr(part, "set_epoch", None)):
            tell(epoch)


class HeldGenerators:
    """The generators among these objects, and those that they and the samplers inside them hold as attributes."""

    def __init__(self, sources: Sequence[object]) -> None:
        parts = [part for source in sources for part in _parts(source)]
        values = [*sources, *(value for part in parts for value in _attributes(part).values())]
        found = [value for value in values if isinstance(value, _SEEDED) and not isinstance(value, random.SystemRandom)]
        self._generators = list({id(each): each for each in found}.values())

    def read(self) -> tuple[Tree, ...]:
        """Return their states, as a checkpoint keeps them."""
        return tuple(_state_of(each) for each in self._generators)

    def restore(self, states: Sequence[Tree]) -> None:
        """Put back what ``read`` returned. Extra states or generators are left alone: the loader is another one."""
        for each, state in zip(self._generators, states):
            _restore(each, state)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """What happens inside leaves no trace in them."""
        states = self.read()
        try:
            yield
        finally:
            self.restore(states)


def _attributes(part: object) -> dict[str, object]:
    return vars(part) if hasattr(part, "__dict__") else {}


def _parts(source: object) -> list[object]:
    """The source, and inside it dataset and samplers, each once."""
    found: list[object] = []
    waiting = [source]
    while waiting:
        part = waiting.pop(0)
        if any(part is each for each in found):
            continue
        found.append(part)
        waiting += [value for value in _attributes(part).values() if isinstance(value, Sampler)]
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


def _state_of(generator: object) -> Tree:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return _plain(generator.get_state(legacy=False))
    assert isinstance(generator, np.random.Generator)
    return _plain(generator.bit_generator.state)


def _restore(generator: object, state: Tree) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(_arrays(state))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _arrays(state)


def _plain(state: Tree) -> Tree:
    """A state of NumPy without arrays, which a checkpoint does not keep."""
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.name}
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Tree) -> Tree:
    """The inverse of ``_plain``."""
    if isinstance(state, dict):
        if set(state) == {"array", "dtype"}:
            return np.array(state["array"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
