"""Summarizes in a few lines what the doctor examined in a run, what it did not examine, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainwright.doctor.check import CheckState
from trainwright.plan.amounts import human_seconds
from trainwright.runs.files import UnreadableFile, read_text
from trainwright.runs.json_values import JsonValue
from trainwright.runs.records import Examined, Record, Unexamined, Watched
from trainwright.runs.shapes import ProvenanceFile, read_as

_STEP_EXPERIMENTS = {
    "again", "batch", "first_loss_rescaled", "formats", "function", "in_eval_mode", "integrity", "padded", "structure",
    "symmetry", "update",
}  # fmt: skip
"""Experiments that replay a step unasked, and whose facts come from nothing else."""
MAX_REASON_CHARS, MAX_NAMES = 200, 4


@dataclass(frozen=True)
class Examination:
    """The extent of an examination.

    Args:
        steps: Number of steps with a record. In a long run not every step has one.
        taken: Number of steps that ran while the doctor was active. All were checked for NaN and infinity.
        replayed: Steps that were replayed and examined closely.
        blind: Pairs (reason why steps could not be replayed, number of such steps), the most frequent first.
        not_run: Experiments that were due and have not run.
        unexamined: Experiments for which no time was left at the end of the run; None if the run has not ended, or if
            all experiments ran.
    """

    steps: int
    replayed: tuple[int, ...]
    checks: tuple[CheckState, ...] = ()
    blind: tuple[tuple[str, int], ...] = ()
    not_run: tuple[str, ...] = ()
    unexamined: Unexamined | None = None
    taken: int = 0

    @classmethod
    def of(
        cls, records: Iterable[Record], checks: Sequence[CheckState] = (), not_run: Sequence[str] = ()
    ) -> Examination:
        every = tuple(records)
        examined = [each for each in every if isinstance(each, Examined) and each.experiment in _STEP_EXPERIMENTS]
        replayed = [each.step for each in examined if "blind" not in each.values]
        watched = [each for each in every if isinstance(each, Watched)]
        blind = Counter(str(each.values["blind"]) for each in watched if each.values.get("blind"))
        last_unexamined = [each for each in every if isinstance(each, Unexamined)][-1:]
        numbers = {each.step for each in watched}
        if not (replayed or blind):  # several experiments on a step failed alike: that is not a matter of one of them
            failed = Counter((each.step, str(each.values["blind"])) for each in examined)
            blind = Counter({why: len(numbers) for (_, why), count in failed.items() if count > 1})
        return cls(
            steps=len(numbers),
            replayed=tuple(dict.fromkeys(replayed)),
            checks=tuple(checks),
            blind=tuple(blind.most_common()),
            not_run=tuple(not_run),
            unexamined=last_unexamined[0] if last_unexamined and last_unexamined[0].experiments else None,
            taken=max(numbers) - min(numbers) + 1 if numbers else 0,
        )

    @property
    def counts(self) -> dict[str, int]:
        return dict(Counter(each.state for each in self.checks))

    def lines(self, run: Path | None = None) -> Iterator[str]:
        """Yield what was examined, then what was not, and why. ``run`` is the run folder."""
        recorded = f"{self.steps:,} recorded step{'' if self.steps == 1 else 's'}"
        if self.steps < self.taken:
            sampled = f"fewer of the later ones; all {self.taken:,} were checked for NaN and infinity"
            recorded = f"{self.steps:,} of {self.taken:,} steps ({sampled})"
        replayed = f"{len(self.replayed) or 'none'} of them replayed"
        yield "; ".join([f"examined  {recorded}, {replayed}", *self._checks()])
        if self.blind:
            reason, count = self.blind[0]
            shown = " ".join(reason.split())[:MAX_REASON_CHARS]
            yield f"not replayed  {count:,} of {self.steps:,} recorded steps: {shown}"
        if self.unexamined is not None:
            yield f"not examined  {line_of_unexamined(self.unexamined, run)}"
        elif self.not_run:
            names = ", ".join(self.not_run[:MAX_NAMES]) + (", ..." if len(self.not_run) > MAX_NAMES else "")
            have = "experiments have" if len(self.not_run) > 1 else "experiment has"
            yield f"not examined  {len(self.not_run)} {have} not run: {names}"

    def _checks(self) -> Iterator[str]:
        if not self.checks:
            return
        passed = Counter(each.code.partition(".")[0] for each in self.checks if each.state == "passed")
        kinds = ", ".join(f"{family} {count}" for family, count in passed.items())
        others = {"found": "did not", "not applicable": "do not apply", "not examined": "had nothing to examine"}
        counted = [f"{self.counts[state]} {words}" for state, words in others.items() if state in self.counts]
        yield ", ".join([f"{sum(passed.values())} checks passed{f' ({kinds})' if kinds else ''}", *counted])

    def to_json(self) -> dict[str, JsonValue]:
        return {
            "steps": self.steps,
            "replayed": list(self.replayed),
            "checks": self.counts,
            "not_replayed": dict(self.blind),
            "not_run": list(self.not_run),
        }


def line_of_unexamined(unexamined: Unexamined, run: Path | None) -> str | None:
    """Return a line on experiments for which no time was left and how to run them; None if all ran.

    ``run`` is None if the run has no folder.
    """
    count, took_s = len(unexamined.experiments), unexamined.examined_s
    if not count:
        return None
    return (
        f"no time for {count} experiment{'' if count == 1 else 's'}: others took {human_seconds(took_s)} of "
        f"{human_seconds(took_s + unexamined.trained_s)} in the training thread; {_later(unexamined, run)}"
    )


def _later(unexamined: Unexamined, run: Path | None) -> str:
    """Return how to run the remaining experiments: by replaying the run or its last steps, or during training."""
    if run is not None and can_be_trained_again(run):
        return f"later: trainwright diagnose {run} --deep"
    if run is not None and unexamined.bundle is not None:
        return f"later: trainwright diagnose {run} --deep --model FILE.py:FUNCTION, which returns the model"
    return f"{while_it_trains(run)} takes the time"


def while_it_trains(run: Path | None) -> str:
    """Return the setting that runs all experiments during training. A run without a folder is a watched loop."""
    try:
        recipe = None if run is None or not (run / "recipe.yaml").is_file() else read_text(run / "recipe.yaml")
    except UnreadableFile:
        recipe = ""
    if recipe is None:
        return 'tw.watch(..., examine="all")'
    return 'tw.fit(..., settings={"log.examine": "all"})' if "use: live:" in recipe else "--set log.examine=all"


def can_be_trained_again(run: Path) -> bool:
    """Return True if all steps of a run can be replayed from its folder.

    This needs a recipe, and for objects that were passed in Python (``use: live:Net``) a recorded function that creates
    them. False for a watched loop.
    """
    try:
        if not (run / "recipe.yaml").is_file():
            return False
        if "use: live:" not in read_text(run / "recipe.yaml"):
            return True
        objects = read_as(run / "provenance.json", ProvenanceFile).objects
    except UnreadableFile:
        return False
    return objects is not None and objects.function is not None
