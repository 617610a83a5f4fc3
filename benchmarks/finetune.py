"""Supervised fine-tuning of a model of ``transformers``: the cost of ``tw.fit``, and the gain of padding-free batches.

    python -m benchmarks.finetune [--rounds 5] [--steps 80] [--quick] [--threads 1]

A Llama of 0.4 million parameters is trained on 256 samples whose lengths are skewed: the median is 39 tokens, the
longest 192. Every block of a round trains it for the same number of steps with the same AdamW; the next round begins
with another block. The plain loop pads each batch and calls ``model(**batch).loss``, as the documentation of
``transformers`` does; in the same process, one of its steps follows each step of ``tw.fit``, so that other work on the
machine disturbs both equally. ``tw.fit`` has everything at its default: the doctor, the log and checkpoints. Times are
those after the first steps.

``in_turn``       a step of ``tw.fit`` with padded batches, as a ratio to the plain loop, in CPU time of the process
``in_turn_median``  the same for the median step, which leaves out saves and examinations
``padding_free``  samples in a second with ``data.packing: padding_free``, as a ratio to padded batches in ``tw.fit``
``bfd``           the same with rows of 256 tokens, packed by best fit; each with ``_cpu``, too
``padding``       fraction of the tokens of padded batches that are padding
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

import trainwright as tw
from benchmarks.figures import about, arguments, figure, ratios
from trainwright.data.token_rows import TokenRows
from trainwright.finetune.packing import Packed

VOCAB, SAMPLES, BATCH, ROW_TOKENS, LR = 500, 256, 16, 256, 1e-3
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


class PlainLoop:
    """An observer that takes one step of a plain loop after each step of a run, with the CPU time of both."""

    def __init__(self, samples: Samples) -> None:
        self.model = make_model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0, fused=True)
        loader: Any = torch.utils.data.DataLoader(samples, BATCH, shuffle=True, collate_fn=TokenRows())  # type: ignore[arg-type]
        self.batches = (batch for each in cycle([loader]) for batch in each)
        self.of_run_s: list[float] = []
        self.own_s: list[float] = []
        self.end_s = 0.0

    def observe(self, result: object, state: object) -> None:
        begin_s = time.process_time()
        self.of_run_s.append(begin_s - self.end_s)
        self.optimizer.zero_grad()
        self.model(**next(self.batches)).loss.backward()
        self.optimizer.step()
        self.end_s = time.process_time()
        self.own_s.append(self.end_s - begin_s)

    def ratios(self) -> tuple[float, float]:
        """Return the ratio of all steps after the first, and that of the medians."""
        begin = min(FIRST, len(self.own_s) // 2)
        run, own = self.of_run_s[begin:], self.own_s[begin:]
        return sum(run) / sum(own), statistics.median(run) / statistics.median(own)


def by_fit(packing: object, rows_per_step: int = BATCH) -> Callable[[Samples, int, Clock | PlainLoop], None]:
    def run(samples: Samples, steps: int, clock: Clock | PlainLoop) -> None:
        tw.fit(
            make_model(),
            samples,
            "hf_causal_lm",
            batch=rows_per_step,
            steps=steps,
            lr=LR,
            seed=1,
            settings={"data.packing": packing, "optimizer.weight_decay": 0.0},
            observers=[clock.observe],
            quiet=True,
        )

    return run


def padding(samples: Samples) -> float:
    """Fraction of padding in batches of a shuffled epoch."""
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(1)).tolist()
    lengths = [len(samples[at]["input_ids"]) for at in order]
    padded = sum(max(part) * len(part) for part in _parts(lengths))
    return 1 - sum(lengths) / padded


def _parts(values: Sequence[int]) -> list[Sequence[int]]:
    return [values[at : at + BATCH] for at in range(0, len(values), BATCH)]


def main() -> None:
    options: Any = arguments(__doc__, rounds=(5, 1), steps=(80, 8))
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
    beside: list[PlainLoop] = []
    with tempfile.TemporaryDirectory(prefix="finetune-") as folder:
        os.chdir(folder)
        for number in range(options.rounds):
            at = number % len(blocks)
            for name in [*blocks][at:] + [*blocks][:at]:
                clock = Clock()
                blocks[name](samples, options.steps, clock)
                seen[name].append(clock)
            beside.append(PlainLoop(samples))
            by_fit("none")(samples, options.steps, beside[-1])
        os.chdir("/")
    for name, values in zip(
        ("in_turn", "in_turn_median"), zip(*(each.ratios() for each in beside), strict=True), strict=True
    ):
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
