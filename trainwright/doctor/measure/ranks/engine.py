"""Reports of one rank of the Trainwright engine: without hooks, and without extra communication."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from trainwright.checkpoint.checksums import no_checksums
from trainwright.checkpoint.cursor import StepBatch
from trainwright.checkpoint.rng import TorchGenerators
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import exchanged_s
from trainwright.doctor.facts.ranks import NonfiniteFacts, RankStep
from trainwright.doctor.measure.ranks.exchange import Exchange
from trainwright.doctor.measure.ranks.replica import INTERVAL_STEPS, Replica, RowSums, is_due
from trainwright.engine.peers import Peers
from trainwright.engine.step import StepResult
from trainwright.engine.witness import Passes
from trainwright.optim.clip import ClipFn
from trainwright.recorder.numbers import late, lateness


class EngineRows:
    """Makes the reports (RankStep) of this rank. A StepWitness: the engine calls it during a step.

    ``has_own_samples``: no other rank trains on its samples. ``peers`` replays steps of other ranks.
    """

    def __init__(
        self,
        state: TrainState,
        replica: Replica,
        exchange: Exchange,
        *,
        has_own_samples: bool,
        peers: Peers | None = None,
    ) -> None:
        self._optimizer, self._replica, self._exchange = state.optimizer, replica, exchange
        self._has_own_samples, self._peers = has_own_samples, peers
        self._step = state.step
        self._batch: StepBatch | None = None
        self._losses: list[Tensor] = []
        # time outside of communication, and time of the full step
        self._seconds: deque[tuple[float, float]] = deque(maxlen=INTERVAL_STEPS)
        self._last_s, self._exchanged_s = time.perf_counter(), exchanged_s()
        self._late = lateness(replica.parameters[0].device)
        self._pending: deque[Callable[[], None]] = deque()
        exchange.post(replica.first_row(exchange.rank))

    # calls of the engine during a step

    is_listening = True

    def memory_ran_out(self) -> bool:
        return False

    def step_begins(self, state: TrainState, batch: StepBatch, generators: TorchGenerators) -> None:
        self._batch = batch
        self._exchange.at(state.step, "forward")
        if not self._losses:  # the exact mode reports no loss, so the effect of its passes on the weights is unknown
            self._replica.before_update()
        if self._peers is not None:
            self._peers.step_begins(state, batch, self._replica.parameters)

    def can_repeat(self, passes: Passes) -> None: ...
    def gradients_are_cleared(self, optimizer: Optimizer) -> None:
        self._losses.clear()
        if self._peers is not None:
            self._peers.gradients_are_cleared()

    def loss_is_scaled(self, loss: Tensor, scaled: Tensor) -> None:
        self._losses.append(loss.detach())
        self._replica.before_update()
        self._exchange.at(self._step, "backward")

    def gradients_are_multiplied(self, factor: Tensor | float) -> None: ...
    def gradients_are_clipped(self, clip: ClipFn, parameters: Sequence[Tensor], total_norm: Tensor) -> None: ...

    # after the step

    def note(self, result: StepResult) -> None:
        """Records a finished step. Its numbers are read now, or on a GPU some steps later."""
        self._step = result.step
        self._exchange.at(result.step, "between")
        now_s, in_exchanges_s = time.perf_counter(), exchanged_s()
        whole_s = now_s - self._last_s
        self._seconds.append((max(0.0, whole_s - in_exchanges_s + self._exchanged_s), whole_s))
        weights, row, sums = self._replica.after_update(result.step, whole_s, is_due=is_due(result.step)), None, None
        if is_due(result.step):
            row, gradients = self._row(result), [self._replica.gradients(self._optimizer)]
            buffers, moments = self._replica.buffers(without_statistics=False), self._replica.moments()
            sums = RowSums(weights, gradients, no_checksums, buffers, moments)
            sums.replayed = self._peers.step_ends() if self._peers is not None else ()
        read, ids = late([result.loss, result.grad_norm, *self._losses]), self._ids()
        self._pending.append(lambda: self._report(result.step, row, sums, read(), ids))
        self._read_all_but(self._late)
        self._last_s, self._exchanged_s = time.perf_counter(), exchanged_s()

    def end(self) -> None:
        """Reports all steps that are still pending."""
        self._read_all_but(0)

    def _read_all_but(self, count: int) -> None:
        while len(self._pending) > count:
            self._pending.popleft()()

    def _ids(self) -> tuple[int, ...]:
        """Returns the first sample ids of this rank, enough to detect equal samples on other ranks."""
        batch = self._batch
        if batch is None or not self._has_own_samples or not is_due(self._step):
            return ()
        return tuple(int(each) for micro in batch.micro[:4] for each in micro.ids[:64])

    def _row(self, result: StepResult) -> RankStep:
        own, whole = zip(*self._seconds)
        self._seconds.clear()
        return RankStep(
            rank=self._exchange.rank,
            step=result.step,
            groups=self._replica.groups(),
            samples=self._ids(),
            processor="" if self._peers is None else self._peers.processor,
            steps=len(own),
            own_s=statistics.median(own),
            step_s=statistics.median(whole),
        )

    def _report(
        self, step: int, row: RankStep | None, sums: RowSums | None, numbers: list[float], ids: tuple[int, ...]
    ) -> None:
        if row is not None and sums is not None:
            self._exchange.post(self._replica.completed(row, sums))
        if changes := self._replica.changes(step):
            self._exchange.report_changes(changes)
        loss, norm, *own = numbers
        if own and not (math.isfinite(loss) and math.isfinite(norm)):
            bad = [each for each in own if not math.isfinite(each)]
            self._exchange.report_nonfinite(NonfiniteFacts(step=step, own_loss=(bad or own)[0], samples=ids))
