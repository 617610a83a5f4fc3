"""Examines targets: their range, the offset of the input token that they equal, and end-of-text ids among them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trainwright.doctor.facts.data import TargetsFacts, TextEnds, TokenLoss, TokensFacts
from trainwright.doctor.facts.layers import Deviation
from trainwright.doctor.measure.function import EvalPasses, at_rows
from trainwright.doctor.measure.tensors import padding_of
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Operation, RecordedStep, constants_of, tensors_of
from trainwright.recorder.user_types import Args, Kwargs
from trainwright.replay.classified import CLASSIFYING, Classified, classified
from trainwright.replay.experiments import replay
from trainwright.replay.functions import InputHandler, change_leaves
from trainwright.replay.inspector import StepInspector
from trainwright.replay.replayer import Intervention
from trainwright.replay.session import ReplaySession

OFFSETS = (-1, 0, 1, 2, 3)
MIN_DEPENDENCE = 1e-6  # Change of a score, in standard deviations of the scores, that shows a dependence
MIN_EQUAL_FRACTION = 0.95  # Minimum fraction of targets that must equal the input token at an offset


class Losses(StepInspector):
    """Collects the cross-entropies of a step."""

    def __init__(self, session: ReplaySession) -> None:
        super().__init__(session)
        self.losses: list[Classified] = []

    def on_function(self, name: str, args: Args, kwargs: Kwargs, result: object) -> None:
        if (loss := classified(name, args, kwargs)) is not None:
            self.losses.append(loss)


@dataclass
class Placed:
    """A loss over the tokens ``ids`` (B, T). ``at`` (N,) is the flat position in ``ids`` of each prediction."""

    loss: Classified
    ids: Tensor
    at: Tensor

    def fraction(self, offset: int) -> float | None:
        """Returns the fraction of targets that are the token ``offset`` positions later; None if there are too few."""
        length = self.ids.shape[1]
        column = self.at % length + offset
        use = (self.loss.target >= 0) & (column >= 0) & (column < length)
        if int(use.sum()) < 8:
            return None
        tokens_there = self.ids.flatten()[(self.at + offset)[use]]
        return float((tokens_there == self.loss.target[use]).double().mean())

    def offset(self) -> tuple[int | None, float]:
        """Returns the only offset at which nearly all targets equal input tokens, or None; and the largest fraction."""
        fractions = {offset: self.fraction(offset) or 0.0 for offset in OFFSETS}
        same = [offset for offset in OFFSETS if fractions[offset] >= MIN_EQUAL_FRACTION]
        return same[0] if len(same) == 1 else None, max(fractions.values())


def place(loss: Classified, ids: Tensor, outputs: list[Tensor]) -> Placed | None:
    """Returns the position of each prediction; None if the positions cannot be found.

    Positions are found by the number of predictions, or by comparing the outputs of the models with the scores, or with
    the hidden states that the scores are computed from.
    """
    marks = loss.marks
    batch, length = ids.shape
    grid = torch.arange(batch * length, device=ids.device).view(batch, length)
    layouts = [grid.flatten(), grid[:, :-1].flatten(), grid[:, 1:].flatten()]
    layouts = [each for each in layouts if len(each) == len(marks)]
    known = [o.reshape(batch * length, -1) for o in outputs if o.dim() == 3 and o.shape[:2] == ids.shape]
    known = [each for each in known if each.shape[1] == marks.shape[1]]
    for each in layouts:
        if not known or any(torch.equal(one[each].to(marks), marks) for one in known):
            return Placed(loss, ids, each)
    for one in known:
        if (found := _find_rows(one.to(marks), marks)) is not None:
            return Placed(loss, ids, found)
    return None


def _find_rows(known: Tensor, rows: Tensor) -> Tensor | None:
    """Returns the index in ``known`` of each of ``rows``, which a mask has selected; None unless all are found."""
    mix = torch.cos(torch.arange(known.shape[1], device=known.device, dtype=torch.float64))
    marks, wanted = (known.double() * mix).sum(1), (rows.double() * mix).sum(1)
    order = marks.argsort()
    found = order[torch.searchsorted(marks[order], wanted).clamp(max=len(order) - 1)]
    return found if torch.equal(known[found], rows) else None


def token_inputs(session: ReplaySession) -> list[Tensor]:
    """Returns the inputs that look like token ids: integers (B, T), T > 2, without the negative values of labels."""
    found = {id(x): x for x in session.inputs if not x.is_floating_point() and x.dtype != torch.bool}
    tables = (x for x in found.values() if x.dim() == 2 and x.shape[1] > 2)
    return [x for x in tables if int(x.min()) >= 0 and int(x.max() - x.min()) > 1]


def _losses_in_eval(session: ReplaySession, inputs: InputHandler | None = None) -> list[Classified]:
    inspector = Losses(session)
    with session.live():
        inspector.run("forward", mode="eval", inputs=inputs)
    return inspector.losses


@replay(TokensFacts, when="requested", memory=3.0)
def tokens(session: ReplaySession) -> TokensFacts:
    """Finds, for each token input and cross-entropy, the offset from input to target, and leaks of the target."""
    inspector = Losses(session)
    with session.live():
        outputs = tensors_of(inspector.run("forward").outputs)
    found = []
    for ids in token_inputs(session):
        for which, loss in enumerate(inspector.losses):
            placed = place(loss, ids, outputs)
            if placed is None:
                continue
            offset, fraction = placed.offset()
            if fraction < 0.5:
                continue
            sees, given, start = _sees(session, placed, which)
            leak = _leak(session, ids, start) if offset == 1 and sees else None
            found.append(
                TokenLoss(
                    offset=offset,
                    fraction=fraction,
                    sees=sees,
                    given=given,
                    start=start,
                    module=leak.module if leak is not None else None,
                    line=leak.line if leak is not None else None,
                    ends=_ends(session, placed),
                )
            )
    return TokensFacts(losses=tuple(found))


def _sees(session: ReplaySession, placed: Placed, which: int) -> tuple[float | None, float | None, int]:
    """Changes the tokens from ``start`` on. Returns ``sees``, ``given`` and ``start`` of TokenLoss."""
    ids, length = placed.ids, placed.ids.shape[1]
    column = placed.at % length
    counts = placed.loss.target >= 0
    starts = sorted(range(1, length), key=lambda t: abs(t - 3 * length // 4))
    known = [t for t in starts if bool((counts & (column == t - 1)).any())]
    start = next((t for t in known if bool((counts & (column == t)).any())), next(iter(known), None))
    if start is None:
        return None, None, 0
    was, now = _losses_in_eval(session), _losses_in_eval(session, _changed(ids, slice(start, None)))
    if len(now) <= which or len(was) <= which or now[which].marks.shape != was[which].marks.shape:
        return None, None, start
    before, at = ((counts & places).nonzero().flatten() for places in (column < start, column == start))
    nearest = before[column[before].argsort(descending=True, stable=True)][: placed.loss.max_rows]
    own = at[: placed.loss.max_rows]
    with session.live():
        sees, given = (_change(was[which], now[which], rows) for rows in (nearest, own))
    if placed.offset()[0] == 1 or _depends_on_earlier(session, placed, which, start, was[which], own):
        return sees, given, start
    return None, given, start  # the second dimension may be the batch


def _depends_on_earlier(
    session: ReplaySession, placed: Placed, which: int, start: int, was: Classified, own: Tensor
) -> bool:
    """Returns True if predictions at ``start`` change with the tokens before it."""
    now = _losses_in_eval(session, _changed(placed.ids, slice(None, start)))
    if len(now) <= which or now[which].marks.shape != was.marks.shape:
        return False
    with session.live():
        return (_change(was, now[which], own) or 0.0) > MIN_DEPENDENCE


def _leak(session: ReplaySession, ids: Tensor, start: int) -> Deviation:
    """Returns where values at positions before ``start`` first depend on later tokens."""
    passes, change = EvalPasses(session), Intervention(inputs=_changed(ids, slice(start, None)))
    early = at_rows(lambda size: torch.arange(size) < start, ids.shape[1], dim=1)
    return passes.located(passes.deviation(passes.run(change), early), change, early)


def _change(was: Classified, now: Classified, rows: Tensor) -> float | None:
    """Returns the change of the scores of these rows, in standard deviations; None without rows."""
    if not len(rows):
        return None
    scores, changed = was.scores(rows).double(), now.scores(rows).double()
    spread = float(scores.std()) if scores.numel() > 1 else 0.0
    return float((changed - scores).abs().max()) / spread if spread > 0 else None


def _changed(ids: Tensor, columns: slice) -> InputHandler:
    """Returns a handler that replaces the tokens in these columns."""
    low, high = int(ids.min()), int(ids.max())
    other = ids.clone()
    other[:, columns] = low + (ids[:, columns] - low + 1 + (high - low) // 2) % (high - low + 1)

    return change_leaves(lambda leaf: other if leaf is ids else leaf)


def _ends(session: ReplaySession, placed: Placed) -> TextEnds | None:
    """Returns the uses of the padding id, which may also end texts; None without padding at the end of rows."""
    ids, length = placed.ids, placed.ids.shape[1]
    target = torch.full((ids.numel(),), -1, device=ids.device)
    at = (placed.at + 1)[(placed.at % length) < length - 1]
    target[at] = placed.loss.target[(placed.at % length) < length - 1]
    wanted = target.view_as(ids)
    filler, trailing = padding_of(ids) or (0, torch.zeros_like(ids, dtype=torch.bool))
    if not bool(trailing[:, -1].any()) or int((trailing.sum(1) >= 2).sum()) < len(ids) // 5:
        return None
    is_it = ids == filler
    after_target = torch.cat([torch.zeros_like(is_it[:, :1]), wanted[:, :-1] >= 0], 1)
    within = is_it & ~trailing & after_target
    first = trailing & (trailing.cumsum(1) == 1) & after_target
    masks = [x for x in session.inputs if x.shape == ids.shape and int(x.max()) == 1]
    attended = max((int((first & (mask != 0)).sum()) for mask in masks if int(mask.min()) == 0), default=0)
    used = is_it & (wanted >= 0)
    return TextEnds(
        id=filler,
        within=int(within.sum()),
        attended=attended,
        targets=int(used.sum()),
        rows=len(ids),
        is_end=int(filler) in _ends_of_text(session),
        begins=2 * int(is_it[:, 0].sum()) > len(ids),
    )


def _ends_of_text(session: ReplaySession) -> set[int]:
    """Returns the end-of-text ids in the configurations of the models."""
    configs = (getattr(root, "config", None) for root in session.replayer.subject.roots)
    named = [getattr(config, "eos_token_id", None) for config in configs]
    return {n for each in named for n in (each if isinstance(each, list) else [each]) if isinstance(n, int)}


EVERY_STEP_UNTIL = 64  # All steps until this one are read, then every INTERVAL_STEPS-th
INTERVAL_STEPS = 16
MIN_LABELS = 4  # Fewer labels of a rare class are in ascending order by chance
NAMES_OF_ENDS = ("eos_token_id", "eos_id", "eos_idx", "eos_index")
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


class Targets(Probe):
    """Records the range of the targets in 0-d tensors, which are read at examinations."""

    name = TargetsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._watched = watched
        self._targets = 0
        self._largest: Tensor | None = None
        self._ranges: list[Tensor] = []  # the lowest and the highest class of each step
        self._binary: Tensor | None = None  # minus the lowest target of a binary loss, and the highest target

    def on_closed(self, step: RecordedStep) -> None:
        if step.step <= EVERY_STEP_UNTIL or step.step % INTERVAL_STEPS == 0:
            with torch.no_grad():
                self._observe(step)

    def _observe(self, step: RecordedStep) -> None:
        for loss in step.program:
            if not isinstance(loss, Operation) or loss.name not in CLASSIFYING | BINARY:
                continue
            given = constants_of((loss.args[1:2] or loss.args, loss.kwargs.get("target")))
            for target in (c.tensor.detach() for c in given if c.is_unchanged and c.tensor.numel()):
                if (
                    len(self._ranges) < EVERY_STEP_UNTIL
                    and target.numel() >= MIN_LABELS
                    and target.numel() == len(target)
                ):
                    self._ranges.append(torch.stack([target.min(), target.max()]).double())
                if loss.name in BINARY:
                    ends = torch.stack([-target.min(), target.max()]).double()
                    self._binary = ends if self._binary is None else torch.maximum(self._binary, ends)
                elif not target.is_floating_point():
                    largest = target.max()
                    self._targets += target.numel()
                    self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
                return

    def facts(self) -> TargetsFacts | None:
        if self._largest is None and self._binary is None:
            return None
        lowest, highest = (0.0, 1.0) if self._binary is None else self._binary.tolist()
        return TargetsFacts(
            targets=self._targets,
            largest=-1 if self._largest is None else int(self._largest),
            lowest=-lowest + 0.0,
            highest=highest,
            ascending=_longest_ascent(torch.stack(self._ranges).tolist()) if self._ranges else 0,
            ends=_ends_named_by(self._watched),
        )


def _longest_ascent(ranges: list[list[float]]) -> int:
    """Returns the most steps in a row without a label below one of the step before. The last three have higher ones."""
    longest = start = 0
    for n, (lowest, _) in enumerate(ranges):
        start = n if n and lowest < ranges[n - 1][1] else start
        if n - start >= 3 and ranges[n - 2][1] > ranges[start][0]:
            longest = max(longest, n + 1 - start)
    return longest


def _ends_named_by(watched: WatchedObjects) -> tuple[int, ...]:
    """Returns the end-of-text ids of objects such as a tokenizer, among variables of the loop and parts of loaders."""
    held = [part for each in watched.loaders for part in (getattr(each, "collate_fn", 0), getattr(each, "dataset", 0))]
    owners = [*watched.values(), *held]
    inner = [value for each in owners for value in (getattr(each, "__dict__", None) or {}).values()]
    found = set()
    for each in (*owners, *inner):
        for name in NAMES_OF_ENDS:
            if name in (getattr(each, "__dict__", None) or ()) or hasattr(type(each), name):
                value = getattr(each, name, None)
                found |= {value} if type(value) is int else set()
    return tuple(sorted(found))
