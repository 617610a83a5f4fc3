"""Observes the class targets of losses, and the ids that reach an embedding with a padding_idx."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from trainwright.doctor.facts.data import TargetsFacts
from trainwright.recorder.probes import Probe, WatchedObjects
from trainwright.recorder.program import Operation, RecordedStep, constants_of
from trainwright.replay.classified import CLASSIFYING
from trainwright.runlog.json_values import Facts, strict

ALL, PERIOD = 64, 16
"""Every step is read until the first number, then every so many-th."""
PADDED = 8
"""Steps in which padding is counted."""
IGNORE = -100
BINARY = frozenset({"binary_cross_entropy", "binary_cross_entropy_with_logits"})


class Targets(Probe):
    """Keeps 0-d tensors, which are read when a step is examined."""

    name = TargetsFacts.experiment

    def __init__(self, watched: WatchedObjects) -> None:
        self._embedding = _with_padding(watched.subject.roots)
        self._targets = 0
        self._largest: Tensor | None = None
        self._binary: Tensor | None = None  # minus the lowest target of a binary loss, and the highest
        self._padded: list[tuple[Tensor, Tensor]] = []  # inside of the rows of ids, and among the targets

    @torch.no_grad()
    def on_closed(self, step: RecordedStep) -> None:
        if step.step > ALL and step.step % PERIOD:
            return
        for loss in step.program:
            if not isinstance(loss, Operation) or loss.name not in CLASSIFYING | BINARY:
                continue
            for target in _tensors(loss.args[1:2] or loss.args, loss.kwargs.get("target")):
                if loss.name in BINARY:
                    ends = torch.stack([-target.min(), target.max()]).double()
                    self._binary = ends if self._binary is None else torch.maximum(self._binary, ends)
                elif not target.is_floating_point():
                    self._add(step, target, loss)
                return

    def _add(self, step: RecordedStep, target: Tensor, loss: Operation) -> None:
        self._targets += target.numel()
        largest = target.max()
        self._largest = largest if self._largest is None else torch.maximum(self._largest, largest)
        if self._embedding is None or len(self._padded) >= PADDED or not step.calls:
            return
        padding = self._embedding[1]
        given = _tensors(step.calls[0].args, step.calls[0].kwargs)
        ids = [each for each in given if each.dim() == 2 and not each.is_floating_point()]
        if ids and 2 * target.numel() >= ids[0].numel():
            ignored = loss.kwargs.get("ignore_index", loss.args[4] if len(loss.args) > 4 else IGNORE)
            counted = (target == padding).double().mean() * (ignored != padding)
            self._padded.append((_inside(ids[0] == padding), counted))

    def values(self) -> Facts | None:
        if self._largest is None and self._binary is None:
            return None
        inside, counted = 0.0, 0.0
        if self._padded:
            inside, counted = (float(torch.stack(each).mean()) for each in zip(*self._padded))
        lowest, highest = (0.0, 1.0) if self._binary is None else self._binary.tolist()
        path, padding = self._embedding or (None, -1)
        facts = TargetsFacts(
            targets=self._targets,
            largest=-1 if self._largest is None else int(self._largest),
            lowest=-lowest + 0.0,
            highest=highest,
            embedding=path,
            padding=padding,
            inside=inside,
            padding_targets=counted,
        )
        return dict(strict(vars(facts)))


def _with_padding(roots: Sequence[nn.Module]) -> tuple[str, int] | None:
    """Path and padding_idx of the largest embedding that has one."""
    modules = [(path, each) for root in roots for path, each in root.named_modules() if isinstance(each, nn.Embedding)]
    padded = [(each.num_embeddings, path, each.padding_idx) for path, each in modules if each.padding_idx is not None]
    return max(padded)[1:] if padded else None


def _tensors(*values: object) -> Iterator[Tensor]:
    """The tensors from outside of the program."""
    for each in constants_of(values):
        if each.is_unchanged and each.tensor.numel():
            yield each.tensor.detach()


def _inside(is_padding: Tensor) -> Tensor:
    """The fraction of ids that are padding and have others before and behind them in their row."""
    others = (~is_padding).long()
    before, behind = others.cumsum(1) > 0, others.flip(1).cumsum(1).flip(1) > 0
    return (is_padding & before & behind).double().mean()
