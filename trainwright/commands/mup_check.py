"""``mup-check RECIPE``: checks that layer outputs and their changes do not depend on the width of the model."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from trainwright.engine.evaluate import evaluating
from trainwright.engine.loss import as_loss_fn
from trainwright.engine.step import make_step
from trainwright.errors import UsageError
from trainwright.optim.clip import make_clip
from trainwright.plan.parallel import in_one_process
from trainwright.recipe.resolve import find
from trainwright.report.chart import Series, line_chart_svg, root
from trainwright.runs.storage import write_output
from trainwright.training.arguments import WHERE
from trainwright.training.custom_objects import require_loss
from trainwright.training.fit import fit_objects
from trainwright.training.job import Job
from trainwright.training.prepare import prepare
from trainwright.training.subject import Built, named

WIDTHS = (64, 128, 256, 512)
STEPS = 4
TOLERANCE = 1 / 3
"""Maximum absolute slope of log size over log width that counts as flat.

Measured on gpt-tiny at widths 64 to 512 and learning rates 2e-3 to 1e-2: -0.20 to 0.31 in muP; in the standard
parametrization 0.47 to 2.31 for every linear layer.
"""
MAX_LINES = 5
_CHART_HEIGHT = 400
Verdict = Literal["grows", "vanishes", "stable"]
BuildOf = Callable[[int], Built]
"""Builds the model, data and loss for a width."""


@dataclass(frozen=True)
class LayerScaling:
    """Mean absolute output of a layer after some steps, and mean absolute change since before the first step, by width.

    A slope is the least-squares slope of log size over log width; None if a size is 0 or not finite.
    """

    name: str
    activations: tuple[float, ...]
    updates: tuple[float, ...]
    activation_slope: float | None
    update_slope: float | None
    verdict: Verdict


@dataclass(frozen=True)
class MupCheck:
    """A coordinate check: Yang et al. 2022, "Tensor Programs V", arXiv 2203.03466, appendix D.1."""

    widths: tuple[int, ...]
    steps: int
    layers: tuple[LayerScaling, ...]
    picture: str = ""

    @property
    def is_stable(self) -> bool:
        return all(layer.verdict == "stable" for layer in self.layers)

    @property
    def exit_code(self) -> int:
        return 0 if self.is_stable else 3

    def lines(self) -> list[str]:
        names = max(map(len, ["layer", *(layer.name for layer in self.layers)]))
        width = ", ".join(map(str, self.widths))
        found = [f"after {self.steps} steps at widths {width}: slope of log size over log width, 0 is flat"]
        found.append(f"{'layer':{names}}  activations  updates  verdict")
        for layer in self.layers:
            slopes = f"{_signed(layer.activation_slope):>11}  {_signed(layer.update_slope):>7}"
            found.append(f"{layer.name:{names}}  {slopes}  {layer.verdict}")
        found += self._conclusion()
        return [*found, f"picture  {self.picture}"] if self.picture else found

    def _conclusion(self) -> Iterator[str]:
        counts = {kind: sum(layer.verdict == kind for layer in self.layers) for kind in ("grows", "vanishes")}
        if self.is_stable:
            yield "verdict  stable: the best learning rate of a narrow model should fit a wide one"
            return
        parts = [f"{count} of {len(self.layers)} layers {_PLURAL[kind]}" for kind, count in counts.items() if count]
        yield f"verdict  {' and '.join(parts)} with the width: the best learning rate changes with it"
        yield "remedy   for the built-in GPT: model.args.init=mup; see docs/how-to/mup.md for other models"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "stable": self.is_stable}


_PLURAL = {"grows": "grow", "vanishes": "vanish"}


def build_by_width(what: str | Path, key: str, settings: Sequence[str]) -> BuildOf:
    """Return a function that builds a recipe with ``key`` set to a width, or calls ``module:function`` with it."""
    text = str(what)
    settings = [*settings, "precision=fp32"]
    if ":" in text and not Path(what).exists():
        function = find(text, {}, "function", WHERE)
        return lambda width: Built(*fit_objects(partial(function, width), None, None, {}, more=settings))
    subject = named(what, settings)
    return lambda width: subject.build([f"{key}={width}"])


def check_widths(build: BuildOf, widths: Sequence[int], *, steps: int, say: Callable[[str], None]) -> MupCheck:
    """Train a new model of each width for some steps on the same data, at the peak learning rate.

    Raises UsageError for fewer than two widths, for layers whose names differ, and for models that cannot be built.
    """
    widths = tuple(sorted(set(widths)))
    if len(widths) < 2 or widths[0] < 1 or steps < 1:
        raise UsageError("mup-check needs at least two widths and one step", remedy="give --widths 64 --widths 128")
    sizes: dict[str, list[tuple[float, float]]] = {}
    for width in widths:
        found = _measure_sizes(build(width), steps)
        say(f"width {width}: {steps} steps, {len(found)} layers")
        if sizes and sizes.keys() != found.keys():
            different = min(sizes.keys() ^ found.keys())
            raise UsageError(
                f"the models of widths {widths[0]} and {width} have different layers, such as {different}",
                remedy="use the width only for layer sizes, not for the number or names of layers",
            )
        for name, pair in found.items():
            sizes.setdefault(name, []).append(pair)
    return MupCheck(widths, steps, tuple(_layer_scaling(name, widths, pairs) for name, pairs in sizes.items()))


def draw(found: MupCheck, out: Path) -> MupCheck:
    """Write an SVG chart of the layers with the steepest slopes. Returns the check with the path of the chart."""
    parts = [root(720, 2 * _CHART_HEIGHT, "coordinate check")]
    for number, (kind, title) in enumerate((("updates", "Change of a layer's output"), ("activations", "Output"))):
        slope = "update_slope" if kind == "updates" else "activation_slope"
        steepest = sorted(found.layers, key=lambda layer: -abs(getattr(layer, slope) or 0.0))[:MAX_LINES]
        chart = line_chart_svg(
            [Series(".".join(layer.name.split(".")[-2:]), found.widths, getattr(layer, kind)) for layer in steepest],
            title=f"{title} after {found.steps} steps, steepest {len(steepest)} of {len(found.layers)} layers",
            x_label="width",
            y_label="mean absolute value",
            log_x=True,
            log_y=True,
        )
        parts.append(chart.replace("<svg ", f'<svg y="{number * _CHART_HEIGHT}" height="{_CHART_HEIGHT}" ', 1))
    write_output(out, "\n".join([*parts, "</svg>"]) + "\n", "--out")
    return replace(found, picture=str(out))


def _measure_sizes(built: Built, steps: int) -> dict[str, tuple[float, float]]:
    """Return (mean absolute output, mean absolute change) of each layer on the first micro-batch."""
    require_loss(built.parts, "mup_check")
    job = prepare(in_one_process(built.loaded), built.parts)
    torch.set_num_threads(job.plan.threads)
    clip = job.recipe.optimizer.clip
    advance = make_step(job.parts.loss, precision=job.precision, clip=make_clip(clip.by, clip.at))
    before: Mapping[str, Tensor] = {}
    after: Mapping[str, Tensor] = {}
    first = None
    for batch in islice(job.batches, steps):
        if first is None:
            first = batch
            before = _outputs(job, batch.micro[0].data)
        advance(job.state, batch)
    if first is not None:
        after = _outputs(job, first.micro[0].data)
    return {name: (float(after[name].abs().mean()), float((after[name] - before[name]).abs().mean())) for name in after}


def _outputs(job: Job, data: object) -> dict[str, Tensor]:
    """Return the outputs of the model and of each layer that has parameters of its own."""
    model, found = job.state.model, dict[str, Tensor]()
    with evaluating(model, job.parts.loss), _record_outputs(model, found):
        as_loss_fn(job.parts.loss)(model, data)
    return found


@contextmanager
def _record_outputs(model: nn.Module, found: dict[str, Tensor]) -> Iterator[None]:
    def keep(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        output = getattr(output, "logits", output)
        if isinstance(output, Tensor) and output.is_floating_point():
            found[name] = output.detach().float().clone()

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not name or next(module.parameters(recurse=False), None) is not None:
                handle = module.register_forward_hook(partial(keep, name or "output of the model"))
                hooks.callback(handle.remove)
        yield


def _layer_scaling(name: str, widths: Sequence[int], pairs: Sequence[tuple[float, float]]) -> LayerScaling:
    activations, updates = (tuple(each) for each in zip(*pairs, strict=True))
    of_activations, of_updates = slope(widths, activations), slope(widths, updates)
    verdict: Verdict = "stable"
    if of_activations is None or of_updates is None or max(of_activations, of_updates) > TOLERANCE:
        verdict = "grows"
    elif of_updates < -TOLERANCE:
        verdict = "vanishes"
    return LayerScaling(name, activations, updates, of_activations, of_updates, verdict)


def slope(widths: Sequence[int], sizes: Sequence[float]) -> float | None:
    """Return the least-squares slope of log size over log width; None if a size is 0 or not finite."""
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return None
    return statistics.linear_regression([math.log(each) for each in widths], [math.log(each) for each in sizes]).slope


def _signed(found: float | None) -> str:
    return "none" if found is None else f"{found:+.2f}"
