"""Restores the weights of the best checkpoint at the end of a run."""

from __future__ import annotations

from collections.abc import Callable

from trainwright.checkpoint.manifest import name_of
from trainwright.checkpoint.store import read_best
from trainwright.checkpoint.weights import load_plain_state_dict, read_weights
from trainwright.runs.folder import RunFolder
from trainwright.runs.identity import identity_of
from trainwright.training.job import Job


def restore_best(job: Job, folder: RunFolder, say: Callable[[str], None]) -> int | None:
    """Load the weights of the best checkpoint into the model, if the recipe requests it, and return its step."""
    if not job.recipe.checkpoint.restore_best:
        return None
    best = read_best(folder.checkpoints, identity_of(folder))
    if best is None:
        say("no best weights to restore: no evaluation gave a finite value")
        return None
    load_plain_state_dict(job.state.model, read_weights(folder.checkpoints / name_of(best.step)))
    say(f"the model has the weights of step {best.step:,}, the best: {best.metric} {best.value:.6g}")
    return best.step
