"""``verify parallel``: compares the first steps of a recipe on several ranks with those of one process, and their
speed.
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn

from trainwright.assembly.assemble import at_recipe
from trainwright.checkpoint.cursor import count_tokens
from trainwright.checkpoint.manifest import name_of
from trainwright.checkpoint.rng import preserved_rng, reseed
from trainwright.checkpoint.weights import read_weights
from trainwright.engine.loss import as_loss_fn, call_loss
from trainwright.errors import TrainwrightError, UsageError
from trainwright.plan.batch import batch_of
from trainwright.plan.parallel import AXES, in_one_process, solve_layout
from trainwright.recipe import Loaded, load
from trainwright.runs.reader import read
from trainwright.runs.records import Step
from trainwright.runs.shapes import PlanFile, read_as
from trainwright.training.prepare import prepare

EPS = {"fp32": 2.0**-23, "tf32": 2.0**-10, "bf16": 2.0**-8, "fp16": 2.0**-10, "fp8": 2.0**-4, "mxfp8": 2.0**-4}
"""Machine epsilon of the arithmetic of the forward pass. For bf16, fp8 and mxfp8 half of it (the unit roundoff)."""
MAX_STANDARD_DEVIATIONS = 4
"""Maximum rounding error in standard deviations. At most 1 of 1,500 independent errors has more, see ``rounding``."""
MAX_CONTROL_RATIO = 8
"""Maximum of (distance of the ranks / distance of the control run). The ranks sum in yet another order."""
MAX_ROUNDING_DISTANCE = 0.01
"""Relative distance of the control run above which the cause is not rounding but, for example, batch statistics."""


ALONE_SETTINGS = [f"parallel.{axis}=1" for axis in AXES if axis != "replicate"]
"""Settings that, with ``parallel.replicate=auto``, train in one process, whatever layout the recipe has."""


@dataclass(frozen=True)
class Sums:
    """The size of the sums between inputs and loss, as if all weights were in one chain.

    ``terms`` is the number of terms of all sums together, ``layers`` the number of weights with 2 or more dimensions.
    """

    terms: int
    layers: int

    @classmethod
    def of(cls, model: nn.Module, counted: int) -> Sums:
        """Return the sums of a model. ``counted`` is the number of values in the mean loss."""
        columns = [weight.numel() // max(1, len(weight)) for weight in model.parameters() if weight.dim() > 1]
        return cls(sum(columns) + counted, max(1, len(columns)))


def rounding(sums: Sums, precision: str) -> float:
    """Return the largest relative difference that rounding explains if the same sums are computed in two orders.

    Sums of n terms with independent rounding are with probability 1 - 2 exp(-d^2 / 2) within d sqrt(n) eps / 2 of their
    value if nothing cancels (Higham & Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci.
    Comput. 41, 2019, theorem 2.4), so two such sums differ by at most twice that. Products are added in fp32 in any
    precision. A lower precision rounds the result of each layer once more.
    """
    results = 0.0 if precision == "fp32" else math.sqrt(sums.layers) * EPS[precision]
    return MAX_STANDARD_DEVIATIONS * (math.sqrt(sums.terms) * EPS["fp32"] + results)


REMEDY = "check for a loss that is not a sum over samples, and for values that a rank computes from its own part only"


@dataclass(frozen=True)
class Distance:
    """The largest distances between two runs.

    ``loss`` and ``grad_norm`` are relative differences. ``weights`` is the distance of the tensor that exceeds its
    limit most, relative to the largest value of that tensor.
    """

    loss: float
    grad_norm: float
    weights: float


@dataclass(frozen=True)
class LayoutProof:
    """The result. ``found`` is the distance of the ranks to one process, ``allowed`` the distance that rounding
    explains.

    If ``exact``, both were run with ``parallel.exact`` and must have the same bits. ``speed_up`` is the median step
    time of one process / the median step time of the ranks.
    """

    recipe: Path
    ranks: int
    steps: int
    precision: str
    found: Distance
    allowed: Distance
    exact: bool
    speed_up: float

    @property
    def equal(self) -> bool:
        return all(getattr(self.found, name) <= allowed for name, allowed in asdict(self.allowed).items())

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def lines(self) -> list[str]:
        how = "the same bits, with parallel.exact" if self.exact else "within rounding"
        verdict = how if self.equal else f"NOT {how}"
        rows = [
            f"  {name:<10} {getattr(self.found, name):.3g} (at most {allowed:.3g})"
            for name, allowed in asdict(self.allowed).items()
        ]
        what = f"{self.steps} steps on {self.ranks} ranks against one process, {self.precision}: {verdict}"
        remedy = f"remedy: {REMEDY}"
        return [what, *rows, f"speed-up {self.speed_up:.2f} on {self.ranks} ranks", *([] if self.equal else [remedy])]

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "recipe": str(self.recipe), "equal": self.equal}


RunRanks: TypeAlias = Callable[[Sequence[str], int, Path], tuple[int, str]]
"""Runs ``trainwright`` with these arguments on a number of ranks, in a folder. Returns exit code and output."""


def by_torchrun(words: Sequence[str], ranks: int, _folder: Path) -> tuple[int, str]:
    """Run ranks by torchrun, as the command line does."""
    more = ["--", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}  # as torchrun sets it
    command = [sys.executable, "-m", "trainwright", *words, *more]
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr or done.stdout


def verify_parallel(
    recipe: Path,
    *,
    ranks: int = 2,
    steps: int = 5,
    settings: Sequence[str] = (),
    say: Callable[[str], None] = lambda _text: None,
    run_ranks: RunRanks = by_torchrun,
) -> LayoutProof:
    """Train the first ``steps`` in one process, in one with smaller micro-batches, and on ``ranks``, and compare them.

    The second run shows the effect of rounding alone. If the model draws random numbers (dropout), there is no second
    run, and the others use ``parallel.exact``, because the ranks would otherwise draw different numbers.

    Raises the error of a failed run, and UsageError for a model that uses statistics of its micro-batch, such as
    one with BatchNorm.
    """
    if ranks < 2:
        raise UsageError(f"--ranks {ranks} leaves nothing to compare", remedy="give at least 2")
    settings = (*settings, "parallel.replicate=auto")
    loaded = load(recipe, overrides=list(settings))
    with at_recipe(loaded.source, "parallel"):
        solve_layout(loaded.recipe, ranks)
    folder = Path(tempfile.mkdtemp(prefix="trainwright-verify-"))
    try:
        return _Layouts(loaded, recipe, ranks, steps, tuple(settings), folder, say, run_ranks).prove()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class _Trained:
    """The results of a run: values by step, and its last weights."""

    losses: list[float]
    norms: list[float]
    seconds: list[float]
    weights: dict[str, torch.Tensor]
    precision: str

    def distance(self, other: _Trained, tensor: str) -> Distance:
        """Return the distance to another run. ``tensor`` is the name of the compared weights."""
        return Distance(
            _farthest(self.losses, other.losses),
            _farthest(self.norms, other.norms),
            _apart(self.weights[tensor], other.weights[tensor]),
        )


@dataclass(frozen=True)
class _Layouts:
    """The runs, and their common settings."""

    loaded: Loaded
    path: Path
    ranks: int
    steps: int
    settings: tuple[str, ...]
    folder: Path
    say: Callable[[str], None]
    run_ranks: RunRanks

    def prove(self) -> LayoutProof:
        exact, sums = examine_forward(in_one_process(self.loaded))
        degrees = solve_layout(self.loaded.recipe, self.ranks)
        if exact and degrees.ranks > degrees.replicate:
            raise UsageError(
                "the model draws random numbers (dropout), and with this layout ranks draw different ones than one "
                "process does, so they cannot be compared",
                remedy="turn dropout off: --set model.args.dropout=0, or use parallel.replicate only",
            )
        self.say(
            "the model draws random numbers: all runs use parallel.exact"
            if exact
            else "the model draws no random numbers: rounding is allowed"
        )
        slices = ["parallel.exact=true", *self._smaller(self.ranks)] if exact else []
        alone = self._trained("one process", 1, *slices)
        precision = f"precision={alone.precision}"  # measured once: two runs might measure differently
        smaller = (precision, *self._smaller(2))
        control = None if exact else self._trained("one process, smaller micro-batches", 1, *smaller)
        spread = self._trained(f"{self.ranks} ranks", self.ranks, precision, *slices)
        speed_up = statistics.median(alone.seconds) / statistics.median(spread.seconds)
        found, allowed = max(
            ((alone.distance(spread, each), _allowed(alone, control, each, sums)) for each in alone.weights),
            key=lambda pair: _excess(pair[0].weights, pair[1].weights),
        )
        return LayoutProof(
            self.path, self.ranks, self.steps, alone.precision, found, allowed, exact, round(speed_up, 3)
        )

    def _smaller(self, parts: int) -> list[str]:
        """Return settings with ``parts`` times fewer samples per forward pass."""
        ask = self.loaded.recipe.batch
        batch = batch_of(ask, None)
        return [f"batch.size={batch.size}", f"batch.micro={math.ceil(batch.micro / parts)}", "batch.accumulation=null"]

    def _trained(self, what: str, ranks: int, *more: str) -> _Trained:
        self.say(f"{self.steps} steps: {what}")
        name = what.replace(",", "").replace(" ", "-")
        fixed = [f"until={self.steps}steps", "log.every=1steps", "log.doctor=false", "checkpoint.every=null"]
        fixed += ["evaluation.batches=1", "schedule.warmup=0steps", f"name={name}", f"folder={self.folder / 'runs'}"]
        fixed += ["alerts=null", "metrics=[]", "observers=[]", "checkpoint.restore_best=false"]
        fixed += ALONE_SETTINGS if ranks == 1 else []
        words = [word for each in (*self.settings, *fixed, *more) for word in ("--set", each)]
        code, printed = self.run_ranks(["train", str(self.path), *words], ranks, self.folder)
        if code != 0:
            last = [line for line in printed.splitlines() if line.strip()][-12:]
            text = "\n  ".join(last)
            error = TrainwrightError(
                f"the run of {what} ended with exit code {code}:\n  {text}", remedy="fix the error that it reports"
            )
            error.exit_code = code if code in (1, 2) else 1
            raise error
        return _read(self.folder / "runs" / name, self.steps)


def _excess(found: float, allowed: float) -> float:
    if found == 0.0 or allowed == math.inf:
        return 0.0
    return found / allowed if allowed else math.inf


def _allowed(alone: _Trained, control: _Trained | None, tensor: str, sums: Sums) -> Distance:
    """Return the distance that rounding explains: the limit of ``rounding``, or ``MAX_CONTROL_RATIO`` times the
    distance of the ``control`` run if that is larger, because sums may cancel.

    Without a control run no distance is allowed. Raises UsageError if the control run trains differently.
    """
    if control is None:
        return Distance(0.0, 0.0, 0.0)
    noise, least = alone.distance(control, tensor), rounding(sums, alone.precision)
    farthest = max(noise.loss, noise.grad_norm)
    if farthest > max(MAX_ROUNDING_DISTANCE, MAX_CONTROL_RATIO * least):
        raise UsageError(
            "ranks cannot be compared with one process: even in one process, smaller micro-batches change loss or "
            f"gradient by {farthest:.0%}, so the model uses statistics of its micro-batch",
            remedy="ranks train as smaller micro-batches do; use GroupNorm or LayerNorm instead of BatchNorm",
        )
    return Distance(*(max(MAX_CONTROL_RATIO * each, least) for each in asdict(noise).values()))


def examine_forward(loaded: Loaded) -> tuple[bool, Sums]:
    """Return True if the training forward pass draws random numbers (another seed changes the loss), and its sums."""
    job = prepare(loaded)
    loss_fn, micro = as_loss_fn(job.parts.loss), next(job.batches).micro[0]
    tokens = count_tokens(micro.data) // max(1, micro.size)
    sums = Sums.of(job.state.model, job.plan.batch.size * max(1, tokens))

    def loss_of(seed: int) -> float:
        reseed(seed)
        with torch.no_grad():
            output = call_loss(loss_fn, job.state.model, micro, "the first batch")
        return float(output if isinstance(output, torch.Tensor) else output.total)

    with preserved_rng():
        return loss_of(0) != loss_of(1), sums


def _read(run: Path, steps: int) -> _Trained:
    records = [each for each in read(run / "log.jsonl").records if isinstance(each, Step)]
    if len(records) < steps:
        few = f"add --steps {len(records)}" if records else "give data with a batch of batch.size samples"
        raise UsageError(f"the data gave {len(records)} steps of {steps}", remedy=few)
    weights = read_weights(run / "checkpoints" / name_of(len(records)))
    return _Trained(
        [each.loss for each in records],
        [each.grad_norm for each in records],
        [each.step_s for each in records[1:] or records],
        weights,
        read_as(run / "plan.json", PlanFile).precision,
    )


def _farthest(one: Sequence[float], other: Sequence[float]) -> float:
    return max(abs(a - b) / max(abs(a), 1e-12) if a != b else 0.0 for a, b in zip(one, other, strict=True))


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    if not one.is_floating_point() or not one.numel():
        return 0.0 if torch.equal(one, other) else math.inf
    largest = max(float(one.abs().max()), 1e-12)
    return float((one.double() - other.double()).abs().max()) / largest
