"""The communication of a layout in one optimizer step: bytes by collective and by axis of the mesh.

Bytes count the full tensors that are gathered, scattered, reduced or sent. They follow the engine's collectives:
those of FSDP2's units, sums of gradients, and those of tensor, context and pipeline parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainwright.plan.devices import ClusterNode, Collective, group_of, seconds
from trainwright.plan.parallel import Degrees
from trainwright.plan.units import Unit, Weights, Zero


@dataclass(frozen=True)
class Traffic:
    """One kind of exchange: ``calls`` per step with ``num_bytes`` in total, over the ranks along ``axis``.

    ``pass_`` is ``forward``, ``backward``, or the ``end`` of the step. ``hides``: the device computes meanwhile.
    ``wait_s`` is the time of all calls.
    """

    axis: str
    collective: Collective
    what: str
    pass_: str
    calls: int
    num_bytes: int
    wait_s: float
    hides: bool

    def plus(self, more: Traffic) -> Traffic:
        """Return the sum of this exchange and ``more`` of the same kind."""
        sums = {name: getattr(self, name) + getattr(more, name) for name in ("calls", "num_bytes", "wait_s")}
        return replace(self, **sums)

    def to_json(self) -> dict[str, object]:
        """Return a row for ``--json``."""
        return {
            "axis": self.axis,
            "collective": self.collective,
            "what": self.what,
            "pass": self.pass_,
            "calls": self.calls,
            "bytes": self.num_bytes,
            "seconds": self.wait_s,
            "overlaps": self.hides,
        }


@dataclass(frozen=True)
class Activations:
    """Bytes per sample of the activations that ranks exchange.

    ``stream`` is the output of a block. Tensor parallel layers all-reduce the ``tensor_`` tensors in each
    block, and the ``once_`` tensors outside of the blocks, except ``once_gathered``, which they all-gather.
    ``context_`` are the keys and values of full sequences that context parallelism gathers in each block. ``again``
    means that activation checkpointing recomputes a block in backward.
    """

    stream: int = 0
    tensor_forward: tuple[int, ...] = ()
    tensor_backward: tuple[int, ...] = ()
    tensor_again: tuple[int, ...] = ()
    once_forward: tuple[int, ...] = ()
    once_backward: tuple[int, ...] = ()
    once_gathered: tuple[int, ...] = ()
    context_forward: tuple[int, ...] = ()
    context_again: tuple[int, ...] = ()


BUCKET_BYTES = 25 * 2**20
"""Bytes of one bucket when gradients are summed after the last backward pass; the engine's buckets are the same."""


@dataclass(frozen=True)
class StepTraffic:
    """The inputs that decide the traffic of a step.

    ``weights`` are the weights of one rank's stage and tensor part, before sharding. A step has ``accumulation``
    micro-batches of ``micro`` samples. The first and the last stage of a pipeline share ``tied_bytes`` of weights.
    """

    degrees: Degrees
    zero: Zero
    weights: Weights
    activations: Activations
    micro: int
    accumulation: int
    tied_bytes: int = 0

    def traffic(self, node: ClusterNode, *, overlaps: bool) -> tuple[Traffic, ...]:
        """Return all exchanges of a rank in one step. ``overlaps``: the device computes while it exchanges."""
        rows = [*self._shard(), *self._replicate(), *self._tensor(), *self._context(), *self._pipeline()]
        found: dict[tuple[str, Collective, str, str], Traffic] = {}
        for axis, collective, what, pass_, calls, num_bytes, hides in rows:
            group = group_of(self._summing if axis == "replicate" else self.degrees, axis, node)
            wait_s = calls * seconds(collective, num_bytes / calls, group, node)
            key = (axis, collective, what, pass_)
            row = Traffic(*key, calls, num_bytes, wait_s, hides and overlaps)
            found[key] = row if key not in found else found[key].plus(row)
        return tuple(found.values())

    def _shard(self) -> Iterator[_Row]:
        ranks = self.degrees.shard
        if ranks == 1:
            return
        # zero 1: weights and gradients stay whole until the last micro-batch
        once = self.accumulation if self.zero > 1 else 1
        for unit in self.weights.units:
            root = unit is self.weights.root
            yield _row("shard", "all-gather", "weights", "forward", unit, ranks, once)
            if self.zero == 3 and not root:  # the root stays whole from its forward to its backward pass
                yield _row("shard", "all-gather", "weights", "backward", unit, ranks, once)
            yield _row("shard", "reduce-scatter", "gradients", "backward", unit, ranks, once, trained=True)

    @property
    def _summing(self) -> Degrees:
        """Degrees for the sum of gradients: copies and ranks with parts of the same sequences form one group."""
        degrees = self.degrees
        return replace(degrees, replicate=degrees.replicate * degrees.context, context=1)

    def _replicate(self) -> Iterator[_Row]:
        degrees = self._summing
        if degrees.replicate == 1:
            return
        if degrees.shard > 1:
            for unit in self.weights.units:
                whole = unit.whole_bytes(degrees.shard, trained=True) // degrees.shard * unit.times
                yield "replicate", "all-reduce", "gradients", "backward", unit.times, whole, True
            return
        whole = self.weights.whole_bytes(trained=True)
        yield "replicate", "all-reduce", "gradients", "end", -(-whole // BUCKET_BYTES), whole, False

    def _tensor(self) -> Iterator[_Row]:
        if self.degrees.tensor == 1:
            return
        samples = self.micro * self.accumulation
        blocks = self.weights.blocks.times
        activations = self.activations
        for pass_, sizes, once in (
            ("forward", activations.tensor_forward, activations.once_forward),
            ("backward", activations.tensor_backward, activations.once_backward),
            ("backward", activations.tensor_again, ()),
        ):
            if calls := len(sizes) * blocks + len(once):
                whole = (sum(sizes) * blocks + sum(once)) * samples
                yield "tensor", "all-reduce", "activations", pass_, calls * self.accumulation, whole, False
        if activations.once_gathered:
            calls, whole = len(activations.once_gathered) * self.accumulation, sum(activations.once_gathered) * samples
            yield "tensor", "all-gather", "activations", "forward", calls, whole, False

    def _context(self) -> Iterator[_Row]:
        if self.degrees.context == 1:
            return
        samples = self.micro * self.accumulation
        blocks = self.weights.blocks.times
        activations = self.activations
        kinds: tuple[tuple[str, Collective, tuple[int, ...]], ...] = (
            ("forward", "all-gather", activations.context_forward),
            ("backward", "all-gather", activations.context_again),
            ("backward", "reduce-scatter", activations.context_forward),
        )
        for pass_, collective, sizes in kinds:
            if calls := len(sizes) * blocks * self.accumulation:
                yield "context", collective, "keys, values", pass_, calls, sum(sizes) * blocks * samples, False

    def _pipeline(self) -> Iterator[_Row]:
        if self.degrees.pipeline == 1:
            return
        whole = self.activations.stream * self.micro * self.accumulation
        for pass_ in ("forward", "backward"):
            yield "pipeline", "send/recv", "activations", pass_, self.accumulation, whole, True
        if tied := self.tied_bytes // (self.degrees.tensor * self.degrees.shard):
            yield "pipeline", "all-reduce", "tied weights", "end", -(-tied // BUCKET_BYTES), tied, False


_Row = tuple[str, Collective, str, str, int, int, bool]  # axis, collective, what, pass, calls, bytes, overlaps


def _row(
    axis: str, collective: Collective, what: str, pass_: str, unit: Unit, ranks: int, times: int, trained: bool = False
) -> _Row:
    whole = unit.whole_bytes(ranks, trained=trained) * unit.times * times
    return axis, collective, what, pass_, unit.times * times, whole, True
