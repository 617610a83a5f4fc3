"""One of the public programs learns, is deterministic, and is the same under the watch.

All of them: ``python -m benchmarks.public --null``, and without ``--null`` under the watch.
"""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trainwright.errors import UsageError
from zoo.public import HELD_OUT, KINDS, OPEN, compare


@pytest.fixture(autouse=True)
def random_states_are_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])


def test_half_of_each_kind_is_open() -> None:
    for names in KINDS.values():
        kind = set(names.split())
        assert len(kind & set(OPEN)) == len(kind & set(HELD_OUT)) == len(kind) / 2
    assert not set(OPEN) & set(HELD_OUT)


def test_each_program_is_in_a_kind() -> None:
    names = {name for kind in KINDS.values() for name in kind.split()}
    files = {path.stem for path in Path(compare.__file__).parent.glob("*.py")}
    assert files - names == {"__init__", "compare", "data", "gym"} and not names - files


@pytest.mark.slow
def test_a_program_learns_and_is_the_same_under_the_watch(tmp_path: Path) -> None:
    plain = compare.run("gin", 1, tmp_path / "run", watched=False)
    assert plain.learned, plain.result
    assert plain.findings == []
    (tmp_path / "run").rename(tmp_path / "plain")
    watched = compare.run("gin", 1, tmp_path / "run", watched=True)
    assert compare.differences(plain, watched) == []
    assert compare.alarms(watched) == []


def record(*, losses: float = 0.5, step: int = 0, line: str = "loss 0.5", hook: bool = False) -> compare.Run:
    """A run as ``compare.run`` returns it, of a model that was not trained."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(1.0), model.bias.fill_(step)
    if hook:
        model.register_forward_hook(print)
    parts = dict(compare._leaves({"model": model, "losses": [losses]}, "objects"))
    return compare.Run(parts, [compare.TIMES.sub("<time>", line)], "", True, 1, 1.0, 1.0, [], "")


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (record(), []),
        (record(losses=0.5 + 1e-15), ["objects/losses: 1 differ, first objects/losses/0"]),
        (record(step=1), ["objects/model: 1 differ, first objects/model/bias"]),
        (record(hook=True), ["objects/model: 1 differ, first objects/model/#"]),
        (record(line="loss 0.6"), ["printed: 'loss 0.5' is 'loss 0.6' under the watch"]),
    ],
    ids=["the same", "a loss", "a bias", "a hook", "a line"],
)
def test_a_difference_is_found(other: compare.Run, found: list[str]) -> None:
    assert compare.differences(record(), other) == found


@pytest.mark.parametrize(
    "line",
    [
        "iter 10: loss 1.23, time 12.30ms, mfu 0.01%",
        "Epoch: [0][ 1/23]\tTime  0.240 ( 0.240)\tData  0.010 ( 0.010)\tLoss 2.4",
        "Test:   [0/6]  eta: 0:00:01  loss: 0.5 (0.5)  time: 0.0022  data: 0.0005  img/s: 2388.4",
        "SPS: 1200",
        "The time elapse of epoch 003 is: 00: 00: 02",
        "0m 1s (- 0m 7s) (2 25%) 2.5",
        "{'train_runtime': '1.23', 'train_samples_per_second': '45.6', 'train_loss': '0.2'}",
    ],
)
def test_times_are_left_out_of_lines(line: str) -> None:
    slower = line
    for a, b in (("12.30", "99.10"), ("0.240", "0.777"), ("0.010", "0.9"), ("0:00:01", "0:01:07"), ("0.0022", "1.5")):
        slower = slower.replace(a, b)
    for a, b in (("2388.4", "9.9"), ("1200", "7"), (": 02", ": 59"), ("1s", "9s"), ("7s", "66s"), ("1.23'", "8'")):
        slower = slower.replace(a, b)
    slower = slower.replace("mfu 0.01", "mfu -1.00").replace("45.6", "1.0").replace("0.0005", "0.2")
    assert slower != line
    assert compare.TIMES.sub("<time>", slower) == compare.TIMES.sub("<time>", line)


def test_a_pickle_that_needs_trainwright_is_not_loaded() -> None:
    assert compare._PICKLE.load(io.BytesIO(pickle.dumps(Path))) is Path
    with pytest.raises(pickle.UnpicklingError, match=r"needs trainwright\.errors\.UsageError"):
        compare._PICKLE.load(io.BytesIO(pickle.dumps(UsageError)))
