"""Programs that keep state in odd places train the same bits with and without the watch."""

from __future__ import annotations

import contextlib
import io
import random
import re
import types
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests.watching.attacks import ATTACKS, Attack

pytestmark = pytest.mark.slow
STEPS = 4
ABOUT_GRADIENTS = ("gradient.", "optim.", "loss.wrong_sign", "resources.not_reproducible", "resources.silent")


_NAMED_ONLY = (type, types.FunctionType, types.ModuleType, io.IOBase, Executor)


def content(value: Any, depth: int = 8) -> Any:
    """What a value holds, as plain values that can be compared."""
    if isinstance(value, Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.detach().contiguous().numpy().tobytes()
    if isinstance(value, np.ndarray):
        return "array", value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if depth == 0 or isinstance(value, _NAMED_ONLY):
        return type(value).__name__
    if isinstance(value, dict):
        return [(content(key, 2), content(item, depth - 1)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [content(item, depth - 1) for item in value]
    if isinstance(value, nn.Module):
        return content({**value.state_dict(), **_plain_attributes(value)}, depth - 1)
    if isinstance(value, int | float | str | bytes | bool | None):
        return value
    if type(value).__repr__ is object.__repr__:  # type: ignore[comparison-overlap]
        return content(getattr(value, "__dict__", None), depth - 1)  # type: ignore[unreachable]
    return re.sub("0x[0-9a-f]+", "", repr(value))


def _plain_attributes(model: nn.Module) -> dict[str, Any]:
    torchs_own = vars(nn.Module())
    named = {(path, name): value for path, m in model.named_modules() for name, value in vars(m).items()}
    return {f"{path}:{name}": value for (path, name), value in named.items() if name not in torchs_own}


def generators() -> Any:
    state = np.random.get_state(legacy=False)
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), repr(state)


def trained(make: Attack, folder: Path, *, is_watched: bool) -> list[Any]:
    """What the program is after each step, and after the watch."""
    folder.mkdir()
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    done = make(folder)
    after: list[Any] = []

    def note() -> None:
        state = content(done.state())
        grads = [content(p.grad) for p in done.model.parameters()]
        after.append(
            {
                "model": content(done.model),
                "optimizer": content(done.optimizer.state_dict()),
                "gradients": grads,
                "generators": generators(),
                "state": state,
            }
        )

    watch = tw.watch(done.model, done.optimizer, out=None, quiet=True, **done.watch) if is_watched else None
    with watch or contextlib.nullcontext():
        for number in range(STEPS):
            done.step(number)
            note()
    note()
    done.close()
    if watch is not None:
        assert watch.session.failures == []
        told = [each.code for each in watch.findings() if each.severity != "info"]
        wrong = [code for code in told if code.startswith(ABOUT_GRADIENTS)]
        assert wrong == [], "the backward pass and the updates of these programs are right"
    return after


def files(folder: Path) -> dict[str, bytes]:
    return {str(each.relative_to(folder)): each.read_bytes() if each.is_file() else b"" for each in folder.rglob("*")}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_watched_program_is_the_same(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plain = trained(ATTACKS[name], tmp_path / "plain", is_watched=False)
    printed = capfd.readouterr()
    watched = trained(ATTACKS[name], tmp_path / "watched", is_watched=True)
    assert capfd.readouterr() == printed
    for number, (one, other) in enumerate(zip(plain, watched, strict=True), 1):
        assert {key: other[key] == one[key] for key in one} == dict.fromkeys(one, True), f"after step {number}"
    assert files(tmp_path / "watched") == files(tmp_path / "plain")
