"""The weights of a model as FSDP gathers them: in units, each weight cut along its first dimension."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainwright.plan.call_trace import Kind, Moment, Trace
from trainwright.plan.scale import PASSES, Scaled

Zero = int  # the ZeRO stage: 1, 2 or 3


@dataclass(frozen=True)
class Weight:
    """A parameter: its first dimension, the product of the others, the bytes of an element."""

    rows: int
    columns: int
    item_bytes: int = 4
    trained: bool = True

    def whole_bytes(self, ranks: int) -> int:
        """Return the bytes of the weight with the padding that makes its rows divisible."""
        return -(-self.rows // ranks) * ranks * self.columns * self.item_bytes


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together; the model has ``times`` such units."""

    weights: tuple[Weight, ...]
    times: int = 1

    def whole_bytes(self, ranks: int = 1, *, trained: bool = False) -> int:
        """Return the bytes of one all-gather, or of one reduce-scatter of gradients (``trained``)."""
        return sum(each.whole_bytes(ranks) for each in self.weights if each.trained or not trained)

    @property
    def numel(self) -> int:
        """Number of parameters in one unit."""
        return sum(each.rows * each.columns for each in self.weights)


@dataclass(frozen=True)
class Weights:
    """All units of a model: its equal blocks, ``others`` that are gathered alone, and ``root`` with the rest."""

    root: Unit
    blocks: Unit = Unit((), 0)
    others: tuple[Unit, ...] = ()

    @property
    def units(self) -> tuple[Unit, ...]:
        """The units that are not empty."""
        return tuple(unit for unit in (self.root, self.blocks, *self.others) if unit.weights and unit.times)

    @property
    def numel(self) -> int:
        """Number of parameters."""
        return sum(unit.numel * unit.times for unit in self.units)

    def whole_bytes(self, ranks: int = 1, *, trained: bool = False) -> int:
        """Return the bytes of all units, with padding for ``ranks``."""
        return sum(unit.whole_bytes(ranks, trained=trained) * unit.times for unit in self.units)

    def with_blocks(self, count: int) -> Weights:
        """Return the same model with another number of blocks."""
        return replace(self, blocks=replace(self.blocks, times=count))


def shard_layout(scaled: Scaled, weights: Weights, ranks: int, zero: Zero) -> Scaled:
    """Apply ``shard_trace`` to both traces."""
    if ranks == 1:
        return scaled
    small, large = (shard_trace(each, weights, ranks, zero) for each in (scaled.small, scaled.large))
    return replace(scaled, small=small, large=large)


def shard_trace(trace: Trace, weights: Weights, ranks: int, zero: Zero) -> Trace:
    """Return the trace of a rank that holds one of ``ranks`` parts of weights, gradients and optimizer state (FSDP2).

    In forward and backward, the rank holds the full weights of the root and of two blocks at a time (with zero 1 and 2:
    of all blocks). In backward, it holds the full gradients of the root and of one block twice: as computed, and in the
    buffer that is sent.
    """
    # more than 1/ranks because of the padding
    part = weights.whole_bytes(ranks) / ranks / max(1, weights.whole_bytes())
    rest = [unit for unit in weights.units if unit is not weights.root]
    two = sorted((unit.whole_bytes(ranks) for unit in rest for _ in range(min(2, unit.times))), reverse=True)[:2]
    gathered = weights.root.whole_bytes(ranks) + sum(two) if zero == 3 else weights.whole_bytes(ranks)
    largest = max((unit.whole_bytes(trained=True) for unit in rest), default=0)
    sent = 2 * (weights.root.whole_bytes(trained=True) + largest)
    moments = tuple(_cut(moment, part, gathered, sent, zero) for moment in trace.moments)
    work = []
    for each in trace.work:
        fraction = part if each.phase == "update" else 1  # a rank updates only its part
        work.append(replace(each, flops=round(each.flops * fraction), bytes=round(each.bytes * fraction)))
    return replace(trace, moments=moments, work=tuple(work))


def _cut(moment: Moment, part: float, gathered: int, sent: int, zero: Zero) -> Moment:
    passing = moment.phase in PASSES
    held: dict[Kind, float] = dict(moment.held)
    grads = held.get("gradients", 0)
    held["weights"] = held.get("weights", 0) * part + (gathered if passing else 0)
    held["optimizer"] = held.get("optimizer", 0) * part
    held["gradients"] = grads * (1 if zero == 1 and passing else part)
    if not passing:
        held["temporaries"] = held.get("temporaries", 0) * part
    elif grads and zero > 1:
        held["temporaries"] = held.get("temporaries", 0) + min(sent, 2 * grads)
    return replace(moment, held={kind: round(size) for kind, size in held.items()})
