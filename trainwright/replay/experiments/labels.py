"""What a step's targets are: the tokens of the input and how far shifted, never the end of a text, or wrong in part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainwright.recorder.program import mapped
from trainwright.replay.classified import Classified, classified
from trainwright.replay.experiments import experiment
from trainwright.replay.replayer import Intervention, NotReplayable
from trainwright.replay.session import ReplaySession
from trainwright.replay.tour import Tour

OFFSETS = (-1, 0, 1, 2, 3)


class _Asked(Tour):
    """Collects the cross-entropies of a step and what the models returned."""

    def __init__(self, bench: ReplaySession) -> None:
        super().__init__(bench)
        self.asked: list[Classified] = []

    def on_function(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        if (one := classified(name, args, kwargs)) is not None:
            self.asked.append(one)


@dataclass
class Placed:
    """Which place of ``ids`` (flat) each prediction is made at, and which one its targets were read from."""

    asked: Classified
    ids: Tensor
    at: Tensor

    def share(self, offset: int) -> float | None:
        """How many targets are the token ``offset`` places further on; None where there are too few to say."""
        length = self.ids.shape[1]
        column = self.at % length + offset
        use = (self.asked.target >= 0) & (column >= 0) & (column < length)
        if int(use.sum()) < 8:
            return None
        told = self.ids.flatten()[(self.at + offset)[use]]
        return float((told == self.asked.target[use]).double().mean())


def place(asked: Classified, ids: Tensor, outputs: list[Tensor]) -> Placed | None:
    """Finds the places: by the number of predictions, and where models return the scores, or what they are made of,
    by those.
    """
    marks = asked.marks
    batch, length = ids.shape
    grid = torch.arange(batch * length, device=ids.device).view(batch, length)
    layouts = [grid.flatten(), grid[:, :-1].flatten(), grid[:, 1:].flatten()]
    layouts = [each for each in layouts if len(each) == len(marks)]
    known = [o.reshape(batch * length, -1) for o in outputs if o.dim() == 3 and o.shape[:2] == ids.shape]
    known = [each for each in known if each.shape[1] == marks.shape[1]]
    for each in layouts:
        if not known or any(torch.equal(one[each].to(marks), marks) for one in known):
            return Placed(asked, ids, each)
    for one in known:
        if (found := _looked_up(one.to(marks), marks)) is not None:
            return Placed(asked, ids, found)
    return None


def _looked_up(known: Tensor, rows: Tensor) -> Tensor | None:
    """For rows that were picked by a mask: each among ``known``, if all are there."""
    mix = torch.cos(torch.arange(known.shape[1], device=known.device, dtype=torch.float64))
    marks, wanted = (known.double() * mix).sum(1), (rows.double() * mix).sum(1)
    order = marks.argsort()
    found = order[torch.searchsorted(marks[order], wanted).clamp(max=len(order) - 1)]
    return found if torch.equal(known[found], rows) else None


def token_inputs(bench: ReplaySession) -> list[Tensor]:
    found = {id(x): x for x in bench.inputs if not x.is_floating_point() and x.dtype != torch.bool}
    return [x for x in found.values() if x.dim() == 2 and x.shape[1] > 2 and int(x.max() - x.min()) > 1]


def _replayed(bench: ReplaySession, **edit: Any) -> tuple[list[Classified], list[Tensor]]:
    tour = _Asked(bench)
    with bench.live():
        played = tour.go("forward", **edit)
    outputs: list[Tensor] = []
    mapped(played.outputs, lambda leaf: outputs.append(leaf) if isinstance(leaf, Tensor) else None)
    return tour.asked, outputs


@experiment("tokens", when="asked")
def tokens(bench: ReplaySession) -> dict[str, Any]:
    """For each input of tokens, and each cross-entropy: which token of the input is asked for, and what gives it away.

    ``shares``: how many targets are the token so many places further on. ``sees``: how far scores change when only
    later tokens do, in eval mode, in deviations of the scores. ``ends``: ids that fill rows up, see _ends.
    """
    asked, outputs = _replayed(bench)
    found = []
    for number, ids in enumerate(token_inputs(bench)):
        for which, one in enumerate(asked):
            placed = place(one, ids, outputs)
            if placed is None:
                continue
            shares = {str(offset): placed.share(offset) for offset in OFFSETS}
            if max((s for s in shares.values() if s is not None), default=0.0) < 0.5:
                continue
            told = {"input": number, "loss": which, "shares": shares, "shape": list(ids.shape)}
            told |= _sees(bench, placed, which) | {"ends": _ends(bench, placed)}
            found.append(told)
    return {"found": found}


def _sees(bench: ReplaySession, placed: Placed, which: int) -> dict[str, Any]:
    """Other tokens from a place on, three quarters through the row: what is predicted before it, and counts."""
    ids, length = placed.ids, placed.ids.shape[1]
    column = placed.at % length
    counts = placed.asked.target >= 0
    starts = sorted(range(1, length), key=lambda t: abs(t - 3 * length // 4))
    start = next((t for t in starts if bool((counts & (column == t - 1)).any())), None)
    if start is None:
        return {"sees": None}
    edit = {"inputs": others_from(ids, start), "mode": "eval"}
    was, _ = _replayed(bench, mode="eval")
    now, _ = _replayed(bench, **edit)
    if len(now) <= which or len(was) <= which or now[which].marks.shape != was[which].marks.shape:
        return {"sees": None}
    before = (counts & (column < start)).nonzero().flatten()
    nearest = before[column[before].argsort(descending=True, stable=True)][: placed.asked.most]
    with bench.live():
        rows, changed = was[which].scores(nearest).double(), now[which].scores(nearest).double()
    spread = float(rows.std()) if rows.numel() > 1 else 0.0
    largest = float((changed - rows).abs().max())
    return {"sees": largest / spread if spread > 0 else None, "from": start}


def others_from(ids: Tensor, start: int) -> Callable[[int, Any, Any], tuple[Any, Any]]:
    """For ``Intervention.inputs``: the tokens from ``start`` on are others."""
    low, high = int(ids.min()), int(ids.max())
    other = ids.clone()
    other[:, start:] = low + (ids[:, start:] - low + 1 + (high - low) // 2) % (high - low + 1)

    def change(leaf: Any) -> Any:
        return other if leaf is ids else leaf

    return lambda call, args, kwargs: (mapped(args, change), mapped(kwargs, change))


def _ends(bench: ReplaySession, placed: Placed) -> dict[str, Any] | None:
    """The id that rows are filled up with, and where it is more than that: its place counts for something.

    ``within``: it comes after a token that is a target, and other tokens follow. ``attended``: it is the first of the
    filling, after a target, and a mask says that it is to be seen. ``targets``: how often it is a target itself.
    """
    ids, length = placed.ids, placed.ids.shape[1]
    target = torch.full((ids.numel(),), -1, device=ids.device)
    at = (placed.at + 1)[(placed.at % length) < length - 1]
    target[at] = placed.asked.target[(placed.at % length) < length - 1]
    wanted = target.view_as(ids)
    last = ids[:, -1]
    filler = last.mode().values
    run = (ids.flip(1) == filler).cumprod(1).sum(1)
    if int((run >= 2).sum()) < max(2, len(ids) // 5) or int(run.min()) == int(run.max()):
        return None
    is_it = ids == filler
    column = torch.arange(length, device=ids.device)
    trailing = column >= (length - run)[:, None]
    after_target = torch.cat([torch.zeros_like(is_it[:, :1]), wanted[:, :-1] >= 0], 1)
    within = is_it & ~trailing & after_target
    first = is_it & (column == (length - run)[:, None]) & after_target
    masks = [x for x in bench.inputs if x.shape == ids.shape and int(x.max()) == 1]
    attended = max((int((first & (mask != 0)).sum()) for mask in masks if int(mask.min()) == 0), default=0)
    used = is_it & (wanted >= 0)
    return {
        "id": int(filler), "within": int(within.sum()), "attended": attended, "first": int(first.sum()),
        "targets": int(used.sum()), "rows": len(ids),
    }  # fmt: skip


@experiment("sample_labels", when="asked")
def sample_labels(bench: ReplaySession) -> dict[str, Any]:
    """Each sample of the recorded steps when it was last fed: what the model believed of it, before that update.

    ``rank``: the place of its label among the classes; ``sure``: the probability of the class that the model names.
    """
    seen: list[tuple[list[Any], ...]] = []
    classes: list[int] = []
    sizes = {len(ids) for segment in bench.recorded for ids in segment.ids if ids is not None}

    def around(function: Any, args: Any, kwargs: Any) -> Any:
        if (one := classified(getattr(function, "__name__", ""), args, kwargs)) is not None:
            seen.append(_believed(one) if len(one.target) in sizes else ([],))
            classes.append(one.classes)
        return function(*args, **kwargs)

    steps = len(bench.train(32, Intervention(ops=around)))
    batches = [ids for segment in bench.recorded[-steps:] for ids in segment.ids]
    if len(seen) != len(batches) or any(ids is None or len(ids) != len(each[0]) for ids, each in zip(batches, seen)):
        raise NotReplayable("the ids of the samples are not known, or not each has one label")
    latest: dict[int, tuple[int, float, float]] = {}
    for ids, believed in zip(batches, seen):
        for i, target, rank, p, loss in zip(ids or (), *believed):
            latest.pop(i, None)  # so that they stay in the order in which they were last fed
            if target >= 0:
                latest[i] = (rank, p, loss)
    return {
        "classes": classes[0],
        "ids": list(latest),
        "rank": [each[0] for each in latest.values()],
        "sure": [round(each[1], 4) for each in latest.values()],
        "loss": [round(each[2], 4) for each in latest.values()],
    }


def _believed(one: Classified) -> tuple[list[Any], ...]:
    """Of each row: the label, its place among the classes, the probability of the class that is named, the loss."""
    told: list[list[Tensor]] = [[], [], []]
    for rows in one.pieces():
        scores = one.scores(rows).double().log_softmax(1)
        own = scores.gather(1, one.target[rows].clamp(min=0)[:, None])
        for each, values in zip(told, ((scores > own).sum(1), scores.max(1).values.exp(), -own[:, 0])):
            each.append(values)
    rank, sure, loss = (torch.cat(each).tolist() for each in told)
    return one.target.tolist(), rank, sure, loss
