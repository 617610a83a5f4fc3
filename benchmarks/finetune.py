"""Supervised fine-tuning of a model of ``transformers``: the cost of ``tw.fit``, and the gain of padding-free batches.

    python -m benchmarks.finetune [--rounds 3] [--steps 80] [--turns 60] [--quick] [--threads 1]

A Llama of 0.4 million parameters is trained on 256 samples whose lengths are skewed: the median is 39 tokens, the
longest 192. The plain loop pads each batch and calls ``model(**batch).loss``, as the documentation of ``transformers``
does, with the same AdamW. ``tw.fit`` has its defaults: doctor, log and checkpoints. For ``in_turn``, both are processes
with one thread. They take turns of 16 steps (an epoch) with the same order of samples; after 60 turns, each has trained
for about two minutes. With two threads, which wait for each other by spinning, the ratio was 0.83 or 1.07 by chance.
The other figures are from blocks with equal numbers of steps; each round begins with another block. Times are those
after the first 16 steps.

``in_turn``       all steps of ``tw.fit`` with padded batches, as a ratio to the plain loop, in CPU time of the process
``in_turn_median``  the same for the median step, which leaves out saves and examinations
``padding_free``  samples per second with ``data.packing: padding_free``, as a ratio to padded batches in ``tw.fit``
``bfd``           the same with rows of 256 tokens, packed by best fit decreasing
``NAME_cpu``      the same two figures in CPU time of the training thread
``padding``       fraction of the tokens of padded batches that are padding
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

import trainwright as tw
from benchmarks.figures import about, arguments, figure, ratios
from benchmarks.turns import Child, TurnsOver, wait_for_turn
from trainwright.data.padding import TokenRows
from trainwright.finetune.packing import Packed

VOCAB, SAMPLES, BATCH, ROW_TOKENS, LR = 500, 256, 16, 256, 1e-3
EPOCH = SAMPLES // BATCH
FIRST = 16
"""Steps that are not counted."""

Samples = list[dict[str, Tensor]]


def make_model() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB, max_position_embeddings=ROW_TOKENS, use_cache=False, **sizes))


def make_samples() -> Samples:
    draw = torch.Generator().manual_seed(0)
    lengths = (torch.randn(SAMPLES, generator=draw) * 0.9 + 3.6).exp().clamp(8, 192).long().tolist()
    ids = [torch.randint(VOCAB, (length,), generator=draw) for length in lengths]
    return [{"input_ids": each, "labels": each} for each in ids]


class Clock:
    """Wall time and CPU time of the training thread after each step."""

    def __init__(self) -> None:
        self.times_s: list[tuple[float, float]] = []

    def observe(self, result: object, state: object) -> None:
        self.times_s.append((time.perf_counter(), time.thread_time()))

    def step_s(self) -> tuple[float, float]:
        """Return the mean wall time and CPU time of the steps after the first."""
        counted = self.times_s[min(FIRST, len(self.times_s) // 2) :]
        wall, cpu = (each[-1] - each[0] for each in zip(*counted, strict=True))
        return wall / (len(counted) - 1), cpu / (len(counted) - 1)


class Turns:
    """Measures the CPU seconds of each step, and waits for the next turn after each epoch."""

    def __init__(self) -> None:
        self._begin_s = time.process_time()
        self._steps_s: list[float] = []

    def observe(self, result: object = None, state: object = None) -> None:
        self._steps_s.append(time.process_time() - self._begin_s)
        if len(self._steps_s) == EPOCH:
            answer, self._steps_s = self._steps_s, []
            wait_for_turn(answer)
        self._begin_s = time.process_time()


def child(variant: str) -> None:
    """Trains in its own folder until the parent process ends the turns."""
    turns = Turns()
    with tempfile.TemporaryDirectory(prefix="finetune-", ignore_cleanup_errors=True) as folder, suppress(TurnsOver):
        os.chdir(folder)
        if variant == "plain":
            by_hand(make_samples(), turns)
        else:
            by_fit("none", shuffle=False)(make_samples(), 1_000_000, turns)


def by_hand(samples: Samples, turns: Turns) -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, fused=True)
    loader: Any = torch.utils.data.DataLoader(samples, BATCH, collate_fn=TokenRows())  # type: ignore[arg-type]
    while True:
        for batch in loader:
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
            turns.observe()


def in_turn(turns: int) -> tuple[float, float]:
    """Return the ratios ``tw.fit`` / plain loop: of all steps after the first turn, and of the median step."""
    children = {variant: Child("benchmarks.finetune", variant) for variant in ("plain", "fit")}
    steps_s: dict[str, list[float]] = {variant: [] for variant in children}
    try:
        for each in children.values():
            each.answer()
        for _ in range(turns):
            for variant, each in children.items():
                steps_s[variant] += each.turn()
    finally:
        for each in children.values():
            each.close()
    fit, plain = steps_s["fit"], steps_s["plain"]
    return sum(fit) / sum(plain), statistics.median(fit) / statistics.median(plain)


def by_fit(
    packing: object, rows_per_step: int = BATCH, *, shuffle: bool = True
) -> Callable[[Samples, int, Clock | Turns], None]:
    def run(samples: Samples, steps: int, clock: Clock | Turns) -> None:
        tw.fit(
            make_model(),
            samples,
            "hf_causal_lm",
            batch=rows_per_step,
            steps=steps,
            lr=LR,
            seed=1,
            settings={"data.packing": packing, "data.shuffle": shuffle, "optimizer.weight_decay": 0.0},
            observers=[clock.observe],
            quiet=True,
        )

    return run


def padding(samples: Samples) -> float:
    """Returns the fraction of padding in the batches of a shuffled epoch."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    lengths = [len(samples[at]["input_ids"]) for at in order]
    padded = sum(max(part) * len(part) for part in _parts(lengths))
    return 1 - sum(lengths) / padded


def _parts(values: Sequence[int]) -> list[Sequence[int]]:
    return [values[at : at + BATCH] for at in range(0, len(values), BATCH)]


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        torch.set_num_threads(1)
        child(sys.argv[2])
        return
    options: Any = arguments(__doc__, rounds=(3, 1), steps=(80, 8), turns=(60, 1))
    torch.set_num_threads(options.threads)
    about("finetune")
    samples = make_samples()
    packed = Packed(samples, ROW_TOKENS)
    samples_per_row = len(samples) / len(packed)
    rows = max(1, round(BATCH / samples_per_row))
    blocks = {
        "padded": by_fit("none"),
        "padding_free": by_fit("padding_free"),
        "bfd": by_fit({"by": "bfd", "max_length": ROW_TOKENS}, rows),
    }
    seen: dict[str, list[Clock]] = {name: [] for name in blocks}
    in_turns = [in_turn(options.turns) for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        os.chdir(folder)
        for number in range(options.rounds):
            at = number % len(blocks)
            for name in [*blocks][at:] + [*blocks][:at]:
                clock = Clock()
                blocks[name](samples, options.steps, clock)
                seen[name].append(clock)
        os.chdir("/")
    for name, values in zip(("in_turn", "in_turn_median"), zip(*in_turns, strict=True), strict=True):
        figure("finetune", name, list(values), unit="ratio", against="plain loop")
    samples_per_step = {"padded": BATCH, "padding_free": BATCH, "bfd": rows * samples_per_row}
    for at, kind in enumerate(("", "_cpu")):
        sample_s = {
            name: [clock.step_s()[at] / samples_per_step[name] for clock in clocks] for name, clocks in seen.items()
        }
        for name in ("padding_free", "bfd"):
            gain = ratios(sample_s["padded"], sample_s[name])
            figure("finetune", f"{name}{kind}", gain, unit="ratio", against="padded batches")
    figure("finetune", "padding", [padding(samples)], unit="share", against="all tokens")


if __name__ == "__main__":
    main()
