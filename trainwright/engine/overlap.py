"""Overlaps the all-reduce of gradients with the last backward pass of a step.

As in torch's DistributedDataParallel, hooks that run after the accumulation of each gradient fill buckets, and complete
buckets are all-reduced asynchronously. The loss weights of the ranks are exchanged before the backward pass, when the
last loss is known. Therefore the sums equal the result of ``World.sum_`` after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, distributed

from trainwright.checkpoint.rng import seed_of
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import BUCKET_BYTES, Ranks, buckets_of, flattened, raising_rank_error
from trainwright.engine.loss import Accumulated
from trainwright.engine.rank_sums import combine
from trainwright.errors import RankError

MIN_BUCKETS = 12
"""Minimum number of buckets, unless buckets get too small. The link is idle until the first bucket is complete, and the
last bucket is sent after the pass. In a small GPT, these two have 4 and 7 % of the weights with 12 buckets, 11 and 12 %
with 8. On gloo, a bucket costs each rank about 0.25 ms of CPU time, so more buckets do not pay in a pass of 50 ms."""
MIN_BUCKET_BYTES = 2**18
"""Minimum size of a bucket. The all-reduce of a smaller bucket is dominated by latency."""


class OtherRankFailed(Exception):
    """Another rank could not compute its part of the step, so this attempt ends here."""


class _Bucket(NamedTuple):
    """Parameters whose gradients are summed together, and the ids of parameters without a complete gradient."""

    parameters: list[Tensor]
    waiting: set[int]


class OverlappedSum:
    """Sums gradients during the last backward pass of each step. All ranks must have the same parameters.

    All ranks sum the same buckets in the same order. The last parameters come first, because their gradients are
    complete first. Parameters that not all ranks used in the previous step come last, because a bucket waits for all
    earlier ones. A parameter without a gradient on this rank contributes zeros. After an error a rank sends zeros for
    the remaining buckets, so that no other rank waits. Then all ranks repeat the step.

    ``is_enabled`` becomes False if a gradient changed after it was sent, as under reentrant activation checkpointing.
    """

    def __init__(self, world: Ranks) -> None:
        self.is_enabled = True
        self._world = world
        self._on_error: Callable[[], None] | None = None
        self._rare: set[int] = set()
        self._reset([])

    def _reset(self, parameters: Sequence[Tensor]) -> None:
        usual = [p for p in parameters if id(p) not in self._rare]
        rare = [p for p in parameters if id(p) in self._rare]
        max_bytes = min(BUCKET_BYTES, max(MIN_BUCKET_BYTES, sum(p.nbytes for p in parameters) // MIN_BUCKETS))
        in_order = [*[*buckets_of(usual, max_bytes)][::-1], *buckets_of(rare, max_bytes)]
        self._buckets = [_Bucket(each, {*map(id, each)}) for each in in_order]
        self._flats: list[Tensor] = []
        self._works: list[distributed.Work] = []
        self._has_changed = False

    @contextmanager
    def attempt(self) -> Iterator[None]:
        """Context for the passes of a step. After an error of this rank, completes its exchanges."""
        self._on_error = self._report_failure
        try:
            yield
        except (OtherRankFailed, RankError):  # after a lost rank, an exchange may wait until the timeout
            raise
        except Exception:
            if self._on_error is not None:
                self._on_error()
            raise
        finally:
            self._on_error = None

    def _report_failure(self) -> None:
        self._world.least(0)  # the other ranks call this in ``last_backward``

    @contextmanager
    def last_backward(self, state: TrainState, done: Accumulated, device: torch.device) -> Iterator[Accumulated]:
        """Context of the last backward pass. Yields the results of the forward passes, combined over all ranks.

        Raises OtherRankFailed if another rank could not compute its forward passes.
        """
        self._on_error = None
        if not self._world.least(1):
            raise OtherRankFailed
        done = combine(done, self._world, device)
        parameters = [p for p in state.parameters if p.requires_grad]
        self._reset(parameters)
        self._on_error = self._send_zeros
        bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}

        def on_accumulated(parameter: Tensor) -> None:
            bucket = bucket_of[id(parameter)]
            if id(parameter) not in bucket.waiting:
                self._has_changed = True
            bucket.waiting.discard(id(parameter))
            while len(self._flats) < len(self._buckets) and not self._buckets[len(self._flats)].waiting:
                self._send(state, done)

        handles = [p.register_post_accumulate_grad_hook(on_accumulated) for p in parameters]  # type: ignore[no-untyped-call]
        try:
            yield done
        finally:
            for handle in handles:
                handle.remove()
        while len(self._flats) < len(self._buckets):
            self._send(state, done)
        self._on_error = None
        self._wait()

    @torch.no_grad()
    def _send(self, state: TrainState, done: Accumulated) -> None:
        """Start the all-reduce of the next bucket. Gradients become views of the bucket, which saves memory."""
        parameters = self._buckets[len(self._flats)].parameters
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        if any(grad.is_sparse for grad in grads):  # an error is raised after the pass
            self._has_changed = True
            grads = [torch.zeros_like(p) for p in parameters]
        flat = flattened(grads)
        state.scaler.unscale_([flat])
        if done.correction is not None:
            flat.mul_(done.correction)
        for parameter, part in zip(parameters, _views(flat, parameters), strict=True):
            if parameter.grad is not None and parameter.grad.is_contiguous():
                parameter.grad = part
        self._start(flat)

    def _send_zeros(self) -> None:
        for bucket in self._buckets[len(self._flats) :]:
            first = bucket.parameters[0]
            self._start(first.new_zeros(sum(p.numel() for p in bucket.parameters)))
        self._wait()

    def _start(self, flat: Tensor) -> None:
        with raising_rank_error("sum gradients"):
            work = distributed.all_reduce(flat, group=self._world.group, async_op=True)
        assert work is not None
        self._flats.append(flat)
        self._works.append(work)

    def _wait(self) -> None:
        with raising_rank_error("sum gradients"):
            for work in self._works:
                work.wait()

    @torch.no_grad()
    def settle(self) -> bool:
        """Set ``.grad`` to the sums, also where only other ranks have a gradient. All ranks must call it.

        Returns False if a gradient changed after it was sent; the step must then start again without overlap.
        """
        parameters = [p for bucket in self._buckets for p in bucket.parameters]
        here = [p.grad is not None for p in parameters]
        local = torch.tensor([*here, self._has_changed], dtype=torch.uint8, device="cpu")
        seeds = self._world.gather(torch.tensor([seed_of(str(local.tolist()))], device="cpu"))
        of_ranks = local[None] if bool((seeds == seeds[0]).all()) else self._world.gather(local)
        *present, has_changed = of_ranks.amax(0).tolist()
        self._rare = {id(p) for p, is_everywhere in zip(parameters, of_ranks.amin(0).tolist()) if not is_everywhere}
        if has_changed:
            self.is_enabled = False
        else:
            parts = [part for b, flat in zip(self._buckets, self._flats) for part in _views(flat, b.parameters)]
            for parameter, part, is_present in zip(parameters, parts, present, strict=True):
                if parameter.grad is None and is_present:
                    parameter.grad = part
                elif parameter.grad is not None and parameter.grad.data_ptr() != part.data_ptr():
                    parameter.grad.copy_(part)
        self._reset([])
        return not has_changed


def _views(flat: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    parts = torch.split(flat, [p.numel() for p in parameters])
    return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]
