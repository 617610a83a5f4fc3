"""Compares the ranks of a run of the engine. Unlike the other examinations, this replays no recorded steps."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.snapshot import LiveObjects
from trainwright.checkpoint.train_state import TrainState
from trainwright.doctor.facts.ranks import RanksFacts
from trainwright.doctor.measure.ranks.engine import EngineRows
from trainwright.doctor.measure.ranks.exchange import Exchange, Meeting, Site, findings_of, raise_alarm, record_of
from trainwright.doctor.measure.ranks.replica import Replica, folded_names
from trainwright.engine.peers import Peers
from trainwright.engine.step import StepResult
from trainwright.engine.witness import StepWitness
from trainwright.errors import text_of
from trainwright.report.findings import lines_of
from trainwright.runs.findings import FindingsWriter
from trainwright.runs.folder import RunFolder
from trainwright.runs.records import Found, Record


class RanksObserver:
    """An Observer of one rank. Rank 0 logs and prints the findings, with ``write`` and ``say``.

    ``are_copies``: every rank holds the full model. ``has_own_samples``: ranks share no samples. A rank without
    progress for ``patience_s`` is reported; an evaluation and a save are no progress. ``seconds`` is the time of the
    doctor, without the exchange between ranks. ``peers`` replays steps of other ranks.
    """

    seconds = 0.0

    def __init__(
        self,
        state: TrainState,
        folder: RunFolder,
        *,
        are_copies: bool,
        has_own_samples: bool,
        patience_s: float,
        write: Callable[[Record], None] = lambda record: None,
        say: Callable[[str], None] = lambda line: None,
        name: str = "run",
        peers: Peers | None = None,
    ) -> None:
        self._folder, self._write, self._say = folder.path, write, say
        roots = [state.model, *([state.loss] if state.loss is not None else [])]
        every = [p for root in roots for p in root.parameters()]
        every += [p for group in state.optimizer.param_groups for p in group["params"]]
        parameters = list({id(p): p for p in every}.values())
        replica = Replica(LiveObjects(roots, parts_of(state.optimizer), parameters), is_split=not are_copies)
        meeting = Meeting(folded_names(replica.names))
        site = Site(self._folder, lambda facts: raise_alarm(facts, write, say))
        self._exchange = Exchange(name, meeting, site, number=0, patience_s=patience_s)
        self._rows = EngineRows(state, replica, self._exchange, has_own_samples=has_own_samples, peers=peers)
        self._facts: RanksFacts | None = None
        self._findings = FindingsWriter(write)
        self._failed: Exception | None = None
        self._is_closed = False

    @property
    def witness(self) -> StepWitness:
        return self._rows

    def observe(self, result: StepResult, state: TrainState) -> None:
        """Reports a step. If that raises, the run continues and its ranks are no longer compared."""
        if self._failed is None:
            try:
                self._rows.note(result)
                self._conclude(result.step)
            except Exception as error:
                self._failed = error

    def findings(self) -> list[Found]:
        """Returns the findings so far, root causes first."""
        return self._findings.findings

    def close(self) -> None:
        """Waits briefly for reports of the other ranks, and prints the findings. Further calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        error = sys.exc_info()[1]
        if self._failed is None:
            self._rows.end()
        self._exchange.close("finished" if error is None else text_of(error)[:300], wait=not _is_interrupt(error))
        self._conclude(self._exchange.step)
        if self._failed is not None:
            self._say(f"the ranks were no longer compared from step {self._exchange.step} on: {text_of(self._failed)}")
        facts = self._facts
        if self.findings():
            for line in lines_of(self.findings(), self._folder):
                self._say(line)
        elif facts is not None and facts.compared:
            self._say(f"the ranks were compared in {facts.compared} steps: nothing found")

    def _conclude(self, step: int) -> None:
        """Runs the doctor if the comparison has new results."""
        facts = self._exchange.facts
        if facts is None or facts is self._facts:
            return
        self._facts = facts
        now = {each.code: each for each in findings_of(facts)}
        if now.keys() != {each.code for each in self.findings()}:
            self._write(record_of(facts, step))
        for code, found in now.items():
            known = self._findings.get(code)
            first = (time.time(), found.step) if known is None else (known.time_s, known.step)
            now[code] = replace(found, time_s=first[0], step=first[1])
        self._findings.update(now.values(), step)


def _is_interrupt(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, Exception)
