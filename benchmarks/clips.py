"""Compares gradient clipping methods on trainings with planted spikes: the final validation loss by method.

    python -m benchmarks.clips [--quick]

A small GPT (AdamW) and an MLP (SGD with momentum) train on built-in data. The gradients of one step in 60 are
multiplied by 1,000, as if by a bad batch. ``*_clean`` has no spikes. ``*_norm`` clips the global norm at 1,
``*_norm_fitted`` at the median norm of the training without spikes, which a user cannot know in advance. ``*_agc_time``
is the time of a clip relative to ``norm``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.figures import about, arguments, figure, interleaved, ratios, seconds_of
from trainwright.data.images import digits
from trainwright.data.text import python_topics
from trainwright.models.gpt import gpt
from trainwright.models.mlp import mlp
from trainwright.optim.clip import ClipFn, global_norm, make_clip

SPIKE, APART = 1000.0, 60


@dataclass(frozen=True)
class Task:
    """A model, its optimizer, and the (inputs, targets) of training and validation."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    train: tuple[Tensor, Tensor]
    val: tuple[Tensor, Tensor]

    def loss(self, model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
        output = model(rows[0])
        return F.cross_entropy(output.flatten(0, -2), rows[1].flatten())


def _rows(dataset: object, count: int) -> tuple[Tensor, Tensor]:
    samples = [dataset[i] for i in range(count)]  # type: ignore[index]
    return torch.stack([torch.as_tensor(x) for x, _ in samples]), torch.stack([torch.as_tensor(y) for _, y in samples])


def gpt_task() -> Task:
    train, val = (_rows(python_topics(block_size=32, split=split), 1400) for split in ("train", "val"))
    vocabulary = int(max(train[0].max(), val[0].max(), train[1].max(), val[1].max())) + 1
    model = partial(gpt, vocab_size=vocabulary, block_size=32, layers=2, heads=2, d_model=32)
    return Task(model, lambda model: AdamW(model.parameters(), lr=3e-3), train, (val[0][:500], val[1][:500]))


def mlp_task() -> Task:
    train, val = _rows(digits(split="train"), 1300), _rows(digits(split="val"), 300)
    return Task(
        partial(mlp, sizes=[64, 64, 10]), lambda model: SGD(model.parameters(), lr=0.05, momentum=0.9), train, val
    )


def trained(task: Task, seed: int, steps: int, clip_of: Callable[[nn.Module], ClipFn], *, spikes: bool) -> list[float]:
    """Trains, and returns the final validation loss and the median norm of the gradients."""
    torch.manual_seed(seed)
    model = task.model()
    optimizer, clip, norms = task.optimizer(model), clip_of(model), list[float]()
    parameters = list(model.parameters())
    for step in range(steps):
        rows = torch.randint(len(task.train[0]), (16,))
        optimizer.zero_grad()
        task.loss(model, (task.train[0][rows], task.train[1][rows])).backward()
        grads = [p.grad for p in parameters if p.grad is not None]
        if spikes and step % APART == APART - 1:
            torch._foreach_mul_(grads, SPIKE)
        norm = global_norm(grads)
        norms.append(float(norm))
        clip(parameters, norm)
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return [float(task.loss(model, task.val)), statistics.median(norms)]


def compare(name: str, task: Task, steps: int, seeds: int) -> None:
    clean = [trained(task, seed, steps, lambda model: make_clip("none"), spikes=False) for seed in range(seeds)]
    figure("clips", f"{name}_clean", [loss for loss, _ in clean], unit="loss", against="-")
    usual = statistics.median(norm for _, norm in clean)
    clips: dict[str, Callable[[nn.Module], ClipFn]] = {
        "none": lambda model: make_clip("none"),
        "norm": lambda model: make_clip("norm", 1.0),
        "norm_fitted": lambda model: make_clip("norm", usual),
        "agc": lambda model: make_clip("agc", 0.01),
    }
    for clip, clip_of in clips.items():
        losses = [trained(task, seed, steps, clip_of, spikes=True)[0] for seed in range(seeds)]
        figure("clips", f"{name}_{clip}", losses, unit="loss", against="clean")
    model = task.model()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    parameters = list(model.parameters())
    norm = global_norm([p.grad for p in parameters if p.grad is not None])
    blocks = {clip: partial(_time, clips[clip](model), parameters, norm) for clip in ("norm", "agc")}
    seconds = interleaved(blocks, 5)
    figure("clips", f"{name}_agc_time", ratios(seconds["agc"], seconds["norm"]), unit="ratio", against="norm")
    figure("clips", f"{name}_norm_time", [each / 100 * 1e6 for each in seconds["norm"]], unit="us", against="-")


def _time(clip: ClipFn, parameters: list[nn.Parameter], norm: Tensor) -> float:
    def act() -> None:
        for _ in range(100):
            clip(parameters, norm)

    return seconds_of(act)


def main() -> None:
    options = arguments(__doc__, steps=(600, 70), seeds=(3, 1))
    about("clips")
    torch.set_num_threads(options.threads)
    compare("gpt", gpt_task(), options.steps, options.seeds)
    compare("mlp", mlp_task(), options.steps, options.seeds)


if __name__ == "__main__":
    main()
