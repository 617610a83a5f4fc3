"""``replay --try CHANGE``: replays a recorded step with one change and compares it with the unchanged step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from trainwright.doctor.context import RunContext
from trainwright.doctor.diagnose import diagnose
from trainwright.doctor.remedies import NUM_UPDATES, TRIALS, NotTried, clip_at, compare_losses
from trainwright.errors import UsageError, require_choice, suggest
from trainwright.recorder.program import mapped
from trainwright.recorder.user_types import Args, Kwargs, TorchFunction
from trainwright.replay.functions import function_name
from trainwright.replay.replayer import UNCHANGED, Intervention, ReplayResult
from trainwright.replay.session import ReplaySession
from trainwright.runs.records import Record

CHANGES = {
    "lr": "lr=FACTOR: multiply the learning rate by FACTOR",
    "fp32": "fp32: everything in float32, without autocast",
    "fp64": "fp64: everything in float64",
    "eval": "eval: the model in eval mode",
    "train": "train: the model in train mode",
    "without": "without=ID,ID: without these samples",
    "clip": "clip=NORM: gradients clipped at NORM",
    "op": "op=NAME: every call of one torch function, such as softmax, in float64",
    "remedy": "remedy=CODE: the remedy of a finding, if a replay can try it",
}
"""Usage text of each change."""
_WITHOUT_VALUE = {
    "fp32": Intervention(dtype="fp32"),
    "fp64": Intervention(dtype="fp64"),
    "eval": Intervention(mode="eval"),
    "train": Intervention(mode="train"),
}


@dataclass(frozen=True)
class Changed:
    """The outcome of a step that was replayed with one change."""

    change: str
    outcome: str


class StepChange(NamedTuple):
    """A change: its text, and a function that tries it on a step and returns the outcome as text."""

    text: str
    run: Callable[[ReplaySession], str]

    def tried(self, session: ReplaySession) -> Changed:
        """Try the change. Raises UsageError if this step does not allow it."""
        try:
            return Changed(self.text, self.run(session))
        except NotTried as why:
            raise UsageError(f"--try {self.text}: {why}", remedy=f"try another change: {', '.join(CHANGES)}") from None


def change_of(text: str, records: Iterable[Record] = ()) -> StepChange:
    """Parse a change such as ``lr=0.1``, ``fp32`` or ``without=17,23``. Raises UsageError.

    ``remedy=CODE`` needs the ``records`` of the run.
    """
    name, _, value = text.partition("=")
    require_choice("--try", name, CHANGES)
    if bool(value) != (name not in _WITHOUT_VALUE):
        problem = "has a value, which it does not accept" if value else "needs a value"
        raise UsageError(f"--try {text} {problem}", remedy=f"give {CHANGES[name]}")
    if name in _WITHOUT_VALUE:
        return StepChange(text, lambda session: _compared(session, _WITHOUT_VALUE[name]))
    if name == "lr":
        factor = _parse_number(text, value)
        return StepChange(text, lambda session: _compared(session, Intervention(lr=factor)))
    if name == "clip":
        norm = _parse_number(text, value)
        return StepChange(text, lambda session: clip_at(session, norm))
    if name == "op":
        return StepChange(text, lambda session: _in_fp64(session, value))
    if name == "without":
        ids = [int(_parse_number(text, each)) for each in value.split(",")]
        return StepChange(text, lambda session: _without(session, ids))
    return StepChange(text, _remedy_trial(value, list(records)))


def _remedy_trial(code: str, records: Sequence[Record]) -> Callable[[ReplaySession], str]:
    findings = {each.found.code: each for each in diagnose(RunContext(records, finished=True)).findings}
    if code not in findings:
        raise UsageError(
            f"the run has no finding {code!r}", remedy=suggest(code, findings) if findings else "try another change"
        )
    trial = findings[code].trial
    if trial is None or trial.name not in TRIALS:
        raise UsageError(
            f"a replay cannot try the remedy of {code}",
            remedy=f"change the code: {findings[code].found.remedy}",
        )
    return lambda session: TRIALS[trial.name].run(session, **trial.args)


def _compared(
    session: ReplaySession,
    changed: Intervention,
    unchanged: Intervention = UNCHANGED,
    *,
    with_updates: bool = True,
) -> str:
    """Compare the step, and the losses of some updates on its batch, with and without the change. Returns text."""
    now, was = session.run(changed), session.run(unchanged)
    if now.error is not None and was.error is None:
        raise NotTried(str(now.error).partition("\n")[0])
    text = f"{_result_text(now)}; unchanged: {_result_text(was)}"
    if not with_updates or was.error is not None:
        return text
    losses = [session.train(NUM_UPDATES, each, repeat=True) for each in (unchanged, changed)]
    return f"{text}; updates on this batch {compare_losses('with the change', *losses)}"


def _result_text(result: ReplayResult) -> str:
    if result.error is not None:
        return f"{type(result.error).__name__}: {str(result.error).partition(chr(10))[0]}"
    words = f"loss {result.loss:.6g}, gradient norm {result.grad_norm:.6g}"
    return words if math.isfinite(result.loss) and math.isfinite(result.grad_norm) else f"not finite ({words})"


def _in_fp64(session: ReplaySession, op: str) -> str:
    calls = 0
    called: set[str] = set()

    def run_in_fp64(function: TorchFunction, args: Args, kwargs: Kwargs) -> object:
        nonlocal calls
        name = function_name(function).strip("_")
        called.add(name)
        if name != op:
            return function(*args, **kwargs)
        calls += 1
        dtypes = [each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()]
        output = function(*cast(Args, mapped(args, _to_double)), **cast(Kwargs, mapped(kwargs, _to_double)))
        is_float = isinstance(output, Tensor) and output.dtype == torch.float64 and dtypes
        return cast(Tensor, output).to(dtypes[0]) if is_float else output

    text = _compared(session, Intervention(ops=run_in_fp64), with_updates=False)
    if not calls:
        known = sorted(each for each in called if each.isidentifier() and not each.startswith("get"))
        raise NotTried(f"the step does not call {op}; it calls {', '.join(known[:20])}")
    return text


def _to_double(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _without(session: ReplaySession, ids: Sequence[int]) -> str:
    known = [each for each in session.ids if each]
    rows = [(micro, each.index(sample)) for micro, each in enumerate(known) for sample in ids if sample in each]
    if len(known) != len(session.ids) or len(rows) != len(ids):
        in_step = ", ".join([str(sample) for each in known for sample in each][:40]) or "unknown"
        raise NotTried(f"the step does not contain these samples; its samples are {in_step}")
    if len({micro for micro, _ in rows}) > 1:
        raise NotTried("these samples are in different micro-batches: name samples of one micro-batch")
    micro = rows[0][0]
    kept = [row for row in range(len(known[micro])) if (micro, row) not in rows]
    if not kept:
        raise NotTried("no sample of the batch would remain")
    only = [micro] if len(known) > 1 else None
    return _compared(session, Intervention(rows=kept, micro=only), Intervention(micro=only))


def _parse_number(text: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise UsageError(
            f"--try {text}: {value!r} is not a number of 0 or more", remedy=CHANGES[text.partition("=")[0]]
        )
    return number
