"""Predicts the training set by cross-validation: each part by a model that was trained on the others."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Subset

from trainwright.assembly.assemble import Parts, build_dataset, build_loss, build_model
from trainwright.checkpoint.cursor import MicroBatch
from trainwright.commands.bad_cases.scores import CollectedScores, Scores
from trainwright.commands.bad_cases.slices import Groups
from trainwright.data.loading import EvaluationBatches, Loading
from trainwright.data.unwrap import length_of
from trainwright.errors import StoppedError, UsageError
from trainwright.recipe import Loaded, load
from trainwright.recipe.resolve import LIVE, is_live
from trainwright.recipe.schema import DEFAULT_BATCH_SIZE
from trainwright.runs.folder import RunFolder
from trainwright.training.run import train

FOLD_SETTINGS = (
    *("data.val=null", "data.more_val=[]", "observers=[]", "metrics=[]"),
    *("log.sinks=[]", "log.doctor=false", "alerts=null"),
    *("checkpoint.every=null", "checkpoint.best=null", "checkpoint.restore_best=false"),
)
"""Settings that reduce the run of a fold to its training."""


class FoldedTraining:
    """Trains the recipe of a run once for each of ``folds`` parts of its training set, without that part.

    ``batches`` are the full training set in its order. Raises UsageError for a run of live objects, and for data that
    cannot be read by position.
    """

    def __init__(self, folder: RunFolder, folds: int, batch: int | None, say: Callable[[str], None]) -> None:
        self._folder = folder
        self._folds = folds
        self._say = say
        loaded = load(folder.recipe, environ={})
        live = [part.use for part in (loaded.recipe.model, loaded.recipe.data.train, loaded.recipe.loss)]
        if named := [use for use in live if is_live(use)]:
            raise UsageError(
                f"{named[0].removeprefix(f'{LIVE}:')} of {folder.path} was passed in Python, so no recipe can train "
                "it again",
                remedy="leave --folds out, or train in folds yourself and give tw.bad_cases each model and its part",
            )
        self._train = build_dataset(loaded, "train")
        size = length_of(self._train.dataset)
        if size is None or self._train.own_batches is not None or self._train.order is not None or size < 2 * folds:
            raise UsageError(
                f"the training set of {folder.path} cannot be divided into {folds} folds",
                remedy="leave --folds out; it takes a dataset with a length whose samples are read by position",
            )
        self._size, rows = size, batch or DEFAULT_BATCH_SIZE
        self._how = Loading(rows, rows, collate=self._train.collate)
        self.batches = EvaluationBatches(self._train.dataset, self._how)

    def scores(self, groups: Groups) -> Scores:
        """Return the scores of each sample by the model that was not trained on it."""
        part = np.random.default_rng(0).permutation(self._size) % self._folds
        found = CollectedScores()
        for number in range(self._folds):
            self._fold(number, part, found)
        for _ in groups.watching(self.batches):
            """The values of the groupings, in the order of the data."""
        return found.scores(by_id=True)

    def _fold(self, number: int, part: NDArray[np.int64], found: CollectedScores) -> None:
        self._say(f"fold {number + 1} of {self._folds}: training on {int((part != number).sum()):,} samples")
        mine, others = np.flatnonzero(part == number), np.flatnonzero(part != number)
        with tempfile.TemporaryDirectory(prefix="trainwright-fold-") as folder:
            loaded = self._loaded(folder)
            rest = replace(self._train, dataset=Subset(self._train.dataset, others.tolist()))
            model, _ = build_model(loaded, self._train)
            result = train(loaded, parts=Parts(model, rest, {}, build_loss(loaded)), quiet=True)
        if result.state is None or result.ending == "stopped":
            raise StoppedError(f"fold {number + 1} was stopped: {result.reason}", remedy="run it again")
        how = replace(self._how, device=next(result.state.model.parameters()).device)
        left_out = EvaluationBatches(Subset(self._train.dataset, mine.tolist()), how)
        found.collect(
            result.state.model, build_loss(loaded), (MicroBatch(micro.data, mine[micro.ids]) for micro in left_out)
        )

    def _loaded(self, folder: str) -> Loaded:
        return load(self._folder.recipe, overrides=[*FOLD_SETTINGS, f"folder={Path(folder).as_posix()}"], environ={})
