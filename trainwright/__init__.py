"""Trainwright trains any PyTorch model so that a run never dies silently, is never lost, and explains itself."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainwright.version import __version__ as __version__

_HOME = {
    "ChainedOptimizer": "trainwright.checkpoint.chained_optimizer",
    "Cursor": "trainwright.checkpoint.cursor",
    "EarlyStopping": "trainwright.monitoring.early_stopping",
    "Ema": "trainwright.checkpoint.average",
    "Histogram": "trainwright.runs.media",
    "Image": "trainwright.runs.media",
    "Loading": "trainwright.data.loading",
    "Loss": "trainwright.engine.loss",
    "LossScaler": "trainwright.checkpoint.scaler",
    "MicroBatch": "trainwright.checkpoint.cursor",
    "Observer": "trainwright.engine.observer",
    "Outcome": "trainwright.engine.loop",
    "Precision": "trainwright.engine.precision",
    "Probe": "trainwright.engine.step",
    "Recipe": "trainwright.recipe",
    "ReplaySession": "trainwright.replay.session",
    "Result": "trainwright.training.result",
    "StepBatch": "trainwright.checkpoint.cursor",
    "StepBatches": "trainwright.data.loading",
    "StepResult": "trainwright.engine.step",
    "Stop": "trainwright.engine.observer",
    "TrainState": "trainwright.checkpoint.train_state",
    "TrainwrightError": "trainwright.errors",
    "bad_cases": "trainwright.commands.bad_cases.find",
    "check": "trainwright.commands.python_api",
    "compare_optimizers": "trainwright.commands.compare_optimizers",
    "evaluate": "trainwright.commands.evaluate",
    "files": "trainwright.data.read_files",
    "fit": "trainwright.training.fit",
    "for_seconds": "trainwright.engine.loop",
    "for_steps": "trainwright.engine.loop",
    "init": "trainwright.commands.init",
    "ladder": "trainwright.commands.ladder.climb",
    "load": "trainwright.recipe.load",
    "load_checkpoint": "trainwright.checkpoint.checkpoint",
    "log": "trainwright.engine.user_log",
    "lr_range": "trainwright.commands.python_api",
    "make_clip": "trainwright.optim.clip",
    "make_optimizer": "trainwright.optim.choose",
    "make_own_step": "trainwright.engine.manual_step",
    "make_schedule": "trainwright.optim.schedule",
    "make_step": "trainwright.engine.step",
    "mix": "trainwright.data.mixture",
    "mup_check": "trainwright.commands.python_api",
    "pad": "trainwright.data.padding",
    "plan": "trainwright.commands.python_api",
    "predict": "trainwright.commands.evaluate",
    "profile": "trainwright.commands.python_api",
    "replay": "trainwright.commands.python_api",
    "save_checkpoint": "trainwright.checkpoint.checkpoint",
    "steps": "trainwright.engine.loop",
    "sweep": "trainwright.commands.sweep.control",
    "table": "trainwright.data.table",
    "train": "trainwright.training.run",
    "verify_plain": "trainwright.commands.verify.plain",
    "verify_resume": "trainwright.commands.python_api",
    "watch": "trainwright.watching.watch",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604  keys of a dict are strings

if TYPE_CHECKING:
    from trainwright.checkpoint.average import Ema as Ema
    from trainwright.checkpoint.chained_optimizer import ChainedOptimizer as ChainedOptimizer
    from trainwright.checkpoint.checkpoint import load_checkpoint as load_checkpoint
    from trainwright.checkpoint.checkpoint import save_checkpoint as save_checkpoint
    from trainwright.checkpoint.cursor import Cursor as Cursor
    from trainwright.checkpoint.cursor import MicroBatch as MicroBatch
    from trainwright.checkpoint.cursor import StepBatch as StepBatch
    from trainwright.checkpoint.scaler import LossScaler as LossScaler
    from trainwright.checkpoint.train_state import TrainState as TrainState
    from trainwright.commands.bad_cases.find import bad_cases as bad_cases
    from trainwright.commands.compare_optimizers import compare_optimizers as compare_optimizers
    from trainwright.commands.evaluate import evaluate as evaluate
    from trainwright.commands.evaluate import predict as predict
    from trainwright.commands.init import init as init
    from trainwright.commands.ladder.climb import ladder as ladder
    from trainwright.commands.python_api import check as check
    from trainwright.commands.python_api import lr_range as lr_range
    from trainwright.commands.python_api import mup_check as mup_check
    from trainwright.commands.python_api import plan as plan
    from trainwright.commands.python_api import profile as profile
    from trainwright.commands.python_api import replay as replay
    from trainwright.commands.python_api import verify_resume as verify_resume
    from trainwright.commands.sweep.control import sweep as sweep
    from trainwright.commands.verify.plain import verify_plain as verify_plain
    from trainwright.data.loading import Loading as Loading
    from trainwright.data.loading import StepBatches as StepBatches
    from trainwright.data.mixture import mix as mix
    from trainwright.data.padding import pad as pad
    from trainwright.data.read_files import files as files
    from trainwright.data.table import table as table
    from trainwright.engine.loop import Outcome as Outcome
    from trainwright.engine.loop import for_seconds as for_seconds
    from trainwright.engine.loop import for_steps as for_steps
    from trainwright.engine.loop import steps as steps
    from trainwright.engine.loss import Loss as Loss
    from trainwright.engine.manual_step import make_own_step as make_own_step
    from trainwright.engine.observer import Observer as Observer
    from trainwright.engine.observer import Stop as Stop
    from trainwright.engine.precision import Precision as Precision
    from trainwright.engine.step import Probe as Probe
    from trainwright.engine.step import StepResult as StepResult
    from trainwright.engine.step import make_step as make_step
    from trainwright.engine.user_log import log as log
    from trainwright.errors import TrainwrightError as TrainwrightError
    from trainwright.monitoring.early_stopping import EarlyStopping as EarlyStopping
    from trainwright.optim.choose import make_optimizer as make_optimizer
    from trainwright.optim.clip import make_clip as make_clip
    from trainwright.optim.schedule import make_schedule as make_schedule
    from trainwright.recipe import Recipe as Recipe
    from trainwright.recipe.load import load as load
    from trainwright.replay.session import ReplaySession as ReplaySession
    from trainwright.runs.media import Histogram as Histogram
    from trainwright.runs.media import Image as Image
    from trainwright.training.fit import fit as fit
    from trainwright.training.result import Result as Result
    from trainwright.training.run import train as train
    from trainwright.watching.watch import watch as watch


class _CallablePackage(ModuleType):
    """A package with the name of a public function: ``tw.plan(...)`` calls the function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(importlib.import_module(_HOME[name]), name)(*args, **options)


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that importing this package does not import torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'trainwright' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


importlib.import_module("trainwright.plan").__class__ = _CallablePackage
importlib.import_module("trainwright.replay").__class__ = _CallablePackage
