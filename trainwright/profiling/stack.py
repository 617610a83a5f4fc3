"""Determines the phase of a step that a stack of Python frames belongs to, and its line of user code."""

from __future__ import annotations

import site
import sysconfig
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

import trainwright

_PACKAGE = str(Path(trainwright.__file__).parent) + "/"
_TORCH = str(Path(torch.__file__).parent) + "/"
_LIBRARIES = tuple(
    {*site.getsitepackages(), site.getusersitepackages(), *map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))}
)

_LOOP = f"{_PACKAGE}engine/loop.py"
"""The file that calls ``observe`` of each observer."""
_FILES = {
    f"{_PACKAGE}engine/periodic.py:each_batch": "data",
    f"{_PACKAGE}optim/clip.py": "update",
    f"{_PACKAGE}engine/guard.py": "update",
    f"{_PACKAGE}engine/step.py:__call__": "update",
    f"{_PACKAGE}engine/rank_sums.py": "exchange",
    f"{_PACKAGE}engine/loss.py": "forward",
    f"{_PACKAGE}engine/step.py:_finish": "update",
    f"{_PACKAGE}engine/step.py:set_lr": "update",
    f"{_PACKAGE}engine/step.py:clear_grads": "update",
    f"{_PACKAGE}engine/evaluate.py": "evaluation",
    f"{_PACKAGE}monitoring/evaluation.py": "evaluation",
    f"{_PACKAGE}monitoring/saving.py": "saving",
    f"{_PACKAGE}recorder/": "looking",
    f"{_PACKAGE}watching/": "looking",
    f"{_PACKAGE}watching/experiments.py": "looks",
    f"{_PACKAGE}watching/findings.py": "looks",
    f"{_PACKAGE}replay/": "looks",
    f"{_PACKAGE}doctor/": "looks",
    f"{_PACKAGE}adapters/": "looking",
    f"{_TORCH}utils/data/dataloader.py:__next__": "data",
    f"{_TORCH}serialization.py:save": "saving",
    f"{_TORCH}distributed/": "exchange",
    f"{_TORCH}_tensor.py:backward": "backward",
    f"{_TORCH}autograd/": "backward",
    f"{_TORCH}optim/": "update",
    f"{_TORCH}amp/grad_scaler.py": "update",
    f"{_TORCH}nn/utils/clip_grad.py": "update",
    f"{_TORCH}nn/modules/module.py:_call_impl": "forward",
    f"{_TORCH}nn/functional.py": "forward",
}
"""The phase of code by its file, or by a function of a file; a folder ends in a slash."""
_INNERMOST = ("looks", "looking", "exchange")
"""Phases that apply even within another phase: hooks of the recorder run inside of the forward pass."""
_phases: dict[CodeType, str | None] = {}
_is_user: dict[CodeType, bool] = {}


class HostPlace(NamedTuple):
    """The position of a thread. ``label`` is the class of the running observer, or the function of user code.

    ``site`` is the innermost line of user code; "" if that only called Trainwright code that is running.
    """

    phase: str
    label: str
    site: str


def place_of(frame: FrameType | None) -> HostPlace:
    """Return the position of the thread whose innermost frame this is.

    The outermost phase applies: a dataset may use modules, and activation checkpointing runs them again in the backward
    pass. Exceptions are the forward pass, which may contain any other phase, and ``_INNERMOST``.
    """
    found = ""
    label = ""
    own = ""
    inner = ""
    is_ours = False
    while frame is not None:
        code = frame.f_code
        phase = _phase_of(code)
        is_ours = is_ours or code.co_filename.startswith(_PACKAGE)
        if not own and not is_ours and _is_user_code(code):
            own, label = f"{Path(code.co_filename).name}:{frame.f_lineno}", code.co_qualname
        if code.co_name == "observe" and frame.f_back is not None and frame.f_back.f_code.co_filename == _LOOP:
            owner = frame.f_locals.get(code.co_varnames[0])
            owner = getattr(owner, "function", owner)
            return HostPlace(inner or "looking", getattr(owner, "__name__", type(owner).__name__), own)
        if phase in _INNERMOST:
            inner = inner or phase
        if phase and (phase != "forward" or not found):
            found = phase
        frame = frame.f_back
    return HostPlace(found if found in ("data", "saving", "evaluation") else inner or found or "loop", label, own)


def _phase_of(code: CodeType) -> str | None:
    if code not in _phases:
        path = code.co_filename
        folders = (path[: index + 1] for index, letter in enumerate(path) if letter == "/")
        keys = (f"{path}:{code.co_name}", path, *folders)
        _phases[code] = next((_FILES[key] for key in keys if key in _FILES), None)
    return _phases[code]


def _is_user_code(code: CodeType) -> bool:
    if code not in _is_user:
        path = code.co_filename
        _is_user[code] = not path.startswith(("<frozen", _PACKAGE, _TORCH, *_LIBRARIES))
    return _is_user[code]
