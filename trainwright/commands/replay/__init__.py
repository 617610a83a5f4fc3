"""``replay``: replays one step of a run or of a bundle in this process, compares it, and examines it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainwright.assembly.assemble import Parts
from trainwright.commands.replay.change import change_of
from trainwright.commands.replay.result import Rerun, Say
from trainwright.commands.replay.trained import Origin, read_records, rerun_trained
from trainwright.commands.replay.watched import rerun_watched
from trainwright.errors import UsageError
from trainwright.recipe import load
from trainwright.recipe.resolve import is_live
from trainwright.replay import bundle as bundles
from trainwright.replay.bundle import kind_of, read_bundle
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Record
from trainwright.training.subject import parts_of_run


def rerun(
    path: Path | str,
    step: int | None = None,
    *,
    model: str | None = None,
    settings: Sequence[str] = (),
    say: Say = lambda _text: None,
    parts: Parts | None = None,
    change: str | None = None,
) -> Rerun:
    """Replay ``step`` of a run folder or of a bundle, compare it with its record, and examine it.

    A run of the Trainwright engine is trained to that step from the newest checkpoint before it, in a separate folder.

    Args:
        path: A run folder, or a bundle.
        step: The step. A bundle of ``tw.watch`` has a default: the step at which it was written.
        model: ``file.py:function``, which builds the watched model, for a bundle of ``tw.watch``.
        settings: Overrides of the recipe.
        say: Receives lines on progress.
        parts: Newly built objects of a run of ``tw.fit``. None: they are built by its recorded function, or the step is
            in a bundle.
        change: Try this change on the step instead of examining it, such as ``lr=0.1`` (``change.CHANGES``).

    Raises:
        UsageError: The step does not exist or cannot be replayed.
    """
    path = Path(path)
    kind = kind_of(path)
    chosen = None if change is None else change_of(change, _records_of(path, is_bundle=kind is not None))
    if kind == bundles.CRASH_LOOP:
        origin = Origin.of_crash_loop(path)
        return rerun_trained(origin, origin.step if step is None else step, tuple(settings), say, change=chosen)
    if kind is None and not (path / bundles.NAME).exists():
        folder = RunFolder.open(path)
        if folder.recipe.exists() and (parts is not None or not _is_in_a_bundle(folder, step)):
            if step is None:
                raise UsageError("a run has many steps", remedy=f"name one: trainwright replay {path} --step N")
            origin = Origin.of_run(folder, step)
            if parts is None and _is_live(folder):
                parts = parts_of_run(folder, model)
            return rerun_trained(origin, step, tuple(settings), say, parts, chosen)
        path = _bundle_of(folder, step)
    if settings:
        raise UsageError("a watched step has no recipe to set", remedy="leave out --set")
    bundle = read_bundle(path)
    return rerun_watched(bundle, bundle.step if step is None else step, model, say, chosen)


def _records_of(path: Path, *, is_bundle: bool) -> Sequence[Record]:
    """Return the records of a run, or of the run around a bundle."""
    log = (path.parent.parent if is_bundle else path) / "log.jsonl"
    return read_records(log)


def _is_in_a_bundle(folder: RunFolder, step: int | None) -> bool:
    """Return True for a run of live objects whose step is in a bundle, so that no training is needed."""
    if not _is_live(folder):
        return False
    return any(kind_of(path) == bundles.KIND and step in (None, *bundles.steps_of(path)) for path in _bundles(folder))


def _bundles(folder: RunFolder) -> list[Path]:
    return sorted(folder.bundles.glob("step-*"))


def _is_live(folder: RunFolder) -> bool:
    return is_live(load(folder.recipe, environ={}).recipe.model.use)


def _bundle_of(folder: RunFolder, step: int | None) -> Path:
    """Return the bundle of a watched run that contains ``step``."""
    found = [path for path in _bundles(folder) if kind_of(path) == bundles.KIND]
    held = [(path, bundles.steps_of(path)) for path in found]
    fitting = [path for path, steps in held if step in steps or (step is None and len(found) == 1)]
    if fitting:
        return fitting[-1]
    kept = ", ".join(f"{steps[0]} to {steps[-1]}" for _, steps in held if steps) or "none"
    missing = "keeps several bundles" if step is None else f"has no bundle of step {step}"
    raise UsageError(
        f"{folder.path} {missing if found else 'keeps no bundle'}",
        remedy=f"name a step that it keeps: {kept}; a run that was only watched keeps those around an incident",
    )
