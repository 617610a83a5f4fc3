"""The random generators of the user's iterator, separate from the generators of the training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.random import mtrand
from torch.utils.data import DataLoader, Sampler

from trainwright.checkpoint.codec import Tree
from trainwright.checkpoint.rng import (
    PythonState,
    RngBag,
    TwisterState,
    borrow,
    end_borrowing,
    preserved_rng,
    read_python,
    reseed,
    seed_of,
    write_python,
)

_read_torch, _write_torch = torch.default_generator.get_state, torch.default_generator.set_state


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators inside the context and restore them afterwards."""
    with preserved_rng():
        reseed(seed)
        yield


class UserGenerators:
    """The states of the global generators for one pass of the user's iterator.

    This is a context that is entered for each batch. Inside, the global generators continue from the last draw of the
    pass. Python's state is copied as memory, and NumPy's generator is exchanged, because tuples and arrays would take
    180 us per batch. The normal number that ``np.random.randn`` has cached is lost, at the same place in each run.
    """

    def __init__(self, seed: int) -> None:
        self._back = self._give_back  # one bound method, instead of a new one in each step
        self._numpy = np.random.MT19937()  # takes 150 us to create, 3 us to seed
        self.seed(seed)

    def seed(self, seed: int) -> None:
        """Restart, seeded as ``seed_all`` seeds the global generators."""
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
        except BaseException:  # of a signal handler
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
        """Copy the states outside the context (1 us).

        The result converts them to the format of a checkpoint (50 us).
        """
        python = self._python
        numpy = TwisterState.of(self._numpy)
        of_torch = self._torch
        return lambda: RngBag(python.as_tuple(), numpy.as_dict(), of_torch)

    def continue_here(self) -> None:
        """Continue from the current states of the global generators."""
        self.restore(RngBag.capture())

    def restore(self, bag: RngBag) -> None:
        """Continue from states that ``read`` returned."""
        self._python, self._torch = PythonState.of(bag.python), bag.torch_cpu
        self._numpy.state = bag.numpy  # type: ignore[assignment]  # in the format of RngBag


class EpochGenerators:
    """States of the global generators like UserGenerators, including the normal number that NumPy has cached.

    Entering and leaving takes 180 us, once per step.
    """

    def __init__(self, seed: int) -> None:
        with seeded(seed):
            self._state = RngBag.capture()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context in which the global generators have these states."""
        with preserved_rng():
            self._state.restore()
            yield
            self._state = RngBag.capture()


def prepare_epoch(source: object, seed: int, epoch: int) -> None:
    """Set the epoch of a loader or sampler and its inner samplers, and seed the generators that they hold."""
    set_epoch(source, epoch)
    for number, part in enumerate(_parts(source)):
        for name, value in _attributes(part).items():
            if isinstance(value, _SEEDED):
                _seed(value, seed_of(f"{seed}:{epoch}:{number}:{name}"))


def set_epoch(source: object, epoch: int) -> None:
    """Call ``set_epoch`` of a loader or sampler and its inner samplers, if they have it."""
    for part in _parts(source):
        if callable(set_own_epoch := getattr(part, "set_epoch", None)):
            set_own_epoch(epoch)


class HeldGenerators:
    """All generators among these objects, and in attributes of these objects and their inner samplers."""

    def __init__(self, sources: Sequence[object]) -> None:
        parts = [part for source in sources for part in _parts(source)]
        values = [*sources, *(value for part in parts for value in _attributes(part).values())]
        found = [value for value in values if isinstance(value, _SEEDED) and not isinstance(value, random.SystemRandom)]
        self._generators = list({id(each): each for each in found}.values())

    def read(self) -> tuple[Tree, ...]:
        """Return the states in the format of a checkpoint."""
        return tuple(_state_of(each) for each in self._generators)

    def restore(self, states: Sequence[Tree]) -> None:
        """Restore states that ``read`` returned. Ignores extra states or generators; the loader has then changed."""
        for each, state in zip(self._generators, states):
            _restore(each, state)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Context that restores the generators at its end."""
        states = self.read()
        try:
            yield
        finally:
            self.restore(states)


def _attributes(part: object) -> dict[str, object]:
    return vars(part) if hasattr(part, "__dict__") else {}


def _parts(source: object) -> list[object]:
    """Return the source, its dataset and its samplers, each once."""
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


def _seed(generator: object, seed: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    elif isinstance(generator, np.random.Generator):
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
    """Return a state of NumPy without arrays, which a checkpoint cannot store."""
    if isinstance(state, np.ndarray):
        return {"array": state.tolist(), "dtype": state.dtype.name}
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state.item() if isinstance(state, np.generic) else state


def _arrays(state: Tree) -> Tree:
    """Invert ``_plain``."""
    if isinstance(state, dict):
        if set(state) == {"array", "dtype"}:
            return np.array(state["array"], dtype=state["dtype"])
        return {key: _arrays(value) for key, value in state.items()}
    return state
