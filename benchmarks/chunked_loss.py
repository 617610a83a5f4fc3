"""The loss in chunks relative to the plain loss: peak memory, gradients, time. Ratios below 1 are an improvement.

    python -m benchmarks.chunked_loss [--quick]

Both compute forward and backward pass from the same hidden states and head. The plain loss is that of
``language_model`` without chunks. Peak memory is that of the allocator, from the ``[memory]`` events of torch's
profiler, above the memory before. It includes the gradients, which both need. Errors are relative errors of the
gradients (norms), compared with the plain loss in float64. ``step_*``: forward and backward pass of a small GPT with
this vocabulary, in fp32 and bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.figures import about, arguments, figure, interleaved, ratios, seconds_of
from trainwright.engine.chunked import chunked_cross_entropy
from trainwright.engine.losses import language_model
from trainwright.models.gpt import gpt

VOCABULARY = 50_257
Losses = dict[str, Callable[[], Tensor]]


@dataclass(frozen=True)
class Task:
    """Arguments hidden_ND, weight_VD and target_N of a loss. ``dtype``: that of autocast; None: no autocast."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    dtype: torch.dtype | None = None

    @property
    def leaves(self) -> list[Tensor]:
        return [self.hidden, self.weight]

    def plain(self) -> Tensor:
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return F.cross_entropy(F.linear(self.hidden, self.weight).float(), self.target, reduction="sum")

    def chunked(self) -> Tensor:
        with torch.autocast("cpu", self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            return chunked_cross_entropy(self.hidden, self.weight, self.target)

    def exact(self) -> tuple[Tensor, ...]:
        """Returns the gradients in float64, computed in parts because all logits in float64 may not fit."""
        hidden, weight = (each.detach().double().requires_grad_() for each in self.leaves)
        for rows in torch.arange(len(hidden)).split(256):
            F.cross_entropy(F.linear(hidden[rows], weight), self.target[rows], reduction="sum").backward()
        assert hidden.grad is not None and weight.grad is not None
        return hidden.grad, weight.grad


def task(rows: int, width: int, dtype: torch.dtype | None = None) -> Task:
    """Returns a task with normalized hidden states and a random head. One target in ten is ignored."""
    torch.manual_seed(0)
    target = torch.randint(VOCABULARY, (rows,))
    target[::10] = -100
    head = 0.02 * torch.randn(VOCABULARY, width)
    return Task(torch.randn(rows, width).requires_grad_(), head.requires_grad_(), target, dtype)


def peak_bytes(act: Callable[[], object]) -> int:
    """Returns the peak memory of the CPU allocator during ``act``, above the memory before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        act()
    events = [each for each in seen.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def backward(leaves: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Runs forward and backward pass, and drops the gradients."""
    loss().backward()
    for leaf in leaves:
        leaf.grad = None


def compare(case: str, of: Task, rounds: int) -> None:
    """Prints memory, gradient errors and time of one task."""
    losses: Losses = {"chunked": of.chunked, "plain": of.plain}
    peaks = {name: peak_bytes(lambda loss=loss: backward(of.leaves, loss)) for name, loss in losses.items()}  # type: ignore[misc]
    figure("chunked_loss", f"{case}_peak", [peaks["chunked"] / peaks["plain"]], unit="ratio", against="plain")
    figure("chunked_loss", f"{case}_peak_bytes", [peaks["chunked"]], unit="bytes", against="-")
    exact = of.exact()
    for name, loss in losses.items():
        made = torch.autograd.grad(loss(), of.leaves)
        errors = [float((mine - true).norm() / true.norm()) for mine, true in zip(made, exact, strict=True)]
        figure("chunked_loss", f"{case}_gradient_error_{name}", errors, unit="relative", against="float64")
    del exact, made
    blocks = {name: lambda loss=loss: seconds_of(lambda: backward(of.leaves, loss)) for name, loss in losses.items()}
    seconds = interleaved(blocks, rounds)
    figure("chunked_loss", f"{case}_time", ratios(seconds["chunked"], seconds["plain"]), unit="ratio", against="plain")


def compare_steps(rows: int, width: int, dtype: torch.dtype | None, rounds: int) -> None:
    """Prints memory and time of forward and backward pass of a two-layer GPT with the engine's loss."""
    model = gpt(vocab_size=VOCABULARY, block_size=256, layers=2, heads=4, d_model=width)
    ids = torch.randint(VOCABULARY, (max(1, rows // 256), 257))

    def step(chunked: bool) -> None:
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            loss = language_model(model, (ids[:, :-1], ids[:, 1:]), chunked=chunked).total
        backward(list(model.parameters()), lambda: loss)

    case = f"step_{'fp32' if dtype is None else 'bf16'}"
    peaks = [peak_bytes(lambda: step(True)), peak_bytes(lambda: step(False))]
    figure("chunked_loss", f"{case}_peak", [peaks[0] / peaks[1]], unit="ratio", against="plain")
    blocks = {str(way): lambda way=way: seconds_of(lambda: step(way)) for way in (True, False)}
    seconds = interleaved(blocks, rounds)
    figure("chunked_loss", f"{case}_time", ratios(seconds["True"], seconds["False"]), unit="ratio", against="plain")


def main() -> None:
    options = arguments(__doc__, rounds=(7, 1), rows=(4096, 512), width=(768, 64))
    about("chunked_loss")
    torch.set_num_threads(options.threads)
    for name, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        compare(f"{name}_rows{options.rows}", task(options.rows, options.width, dtype), options.rounds)
    for dtype in (None, torch.bfloat16):
        compare_steps(options.rows // 2, options.width // 2, dtype, options.rounds)


if __name__ == "__main__":
    main()
