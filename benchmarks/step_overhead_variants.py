"""The runs that ``step_overhead.py`` compares. Each call runs one of them in this process.

    python -m benchmarks.step_overhead_variants \
        '{"task": "mlp", "variant": "fit", "steps": 2000, "device": "cpu", "optimizer": {}}'

Prints one JSON object. ``times_s``: the time after each step (or after each logged step); ``steps``: the numbers of
these steps; ``run_s``: the seconds from the first line of the run's code to its last, without importing the library.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

FIRST = 64
"""Number of first steps that are not counted, because Trainwright examines more of them."""
LR, CLIP_AT, WARMUP = 1e-3, 1.0, 20


@dataclass
class Task:
    """The task that every variant trains: a model, its data in memory, and the loss of a batch."""

    name: str
    batch_size: int
    steps: int
    device: str = "cpu"

    def make_model(self) -> nn.Module:
        """Returns an MLP 20-64-64-10, whose step is mostly overhead, or a GPT with 4 layers of width 128."""
        if self.name == "mlp":
            return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        from trainwright.models.gpt import gpt

        return gpt(vocab_size=103, block_size=64, layers=4, heads=4, d_model=128)

    def make_data(self) -> tuple[Tensor, Tensor]:
        """Returns the inputs and targets of 64 batches."""
        draw = torch.Generator().manual_seed(0)
        count = 64 * self.batch_size
        if self.name == "mlp":
            return torch.randn(count, 20, generator=draw), torch.randint(10, (count,), generator=draw)
        ids = torch.randint(103, (count, 65), generator=draw)
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    @staticmethod
    def loss(output: Tensor, target: Tensor) -> Tensor:
        """Returns the mean cross-entropy over samples or tokens."""
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields shuffled batches, epoch after epoch."""
        x, y = self.make_data()
        for _ in range(-(-self.steps // 64)):
            for ids in torch.randperm(len(x)).split(self.batch_size):
                yield x[ids].to(self.device), y[ids].to(self.device)


def make_task(name: str, steps: int, device: str = "cpu") -> Task:
    return Task(name, {"mlp": 64, "gpt": 12}[name], steps, device)


@dataclass
class Clock:
    """Records the time after each step. It is an Observer of ``tw.fit``; other loops call it.

    It waits for a GPU after step FIRST and after the last step, so that the time between them includes its work.
    """

    steps: int
    device: str
    times_s: list[float] = field(default_factory=list)

    def __call__(self) -> None:
        if self.device != "cpu" and len(self.times_s) + 1 in (FIRST, self.steps):
            torch.cuda.synchronize()
        self.times_s.append(time.perf_counter())

    def observe(self, result: object, state: object) -> None:
        self()

    def close(self) -> None: ...


def factor(steps: int) -> Callable[[int], float]:
    """Returns a function from the step to the fraction of the peak learning rate: warm-up and cosine."""
    return lambda step: min(1.0, (step + 1) / WARMUP) * 0.5 * (1 + math.cos(math.pi * min(1.0, step / steps)))


def adamw(model: nn.Module, implementation: dict[str, bool]) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0, **implementation)  # type: ignore[arg-type]


def plain(task: Task, clock: Clock, implementation: dict[str, bool] | None = None) -> None:
    model = task.make_model().to(task.device)
    optimizer = adamw(model, implementation or {})
    scheduler = LambdaLR(optimizer, factor(task.steps))
    batches = task.batches()
    for _ in range(task.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_AT)
        optimizer.step()
        scheduler.step()
        clock()


def fit(task: Task, clock: Clock, settings: dict[str, object] | None = None) -> dict[str, bool]:
    """``tw.fit`` with the settings of the plain loop. Returns the implementation of AdamW that was chosen."""
    import trainwright as tw

    result = tw.fit(
        task.make_model(),
        task.make_data(),
        task.loss,
        until=f"{task.steps}steps",
        lr=LR,
        batch=task.batch_size,
        schedule="cosine",
        warmup=f"{min(WARMUP, task.steps // 2)}steps",
        clip=CLIP_AT,
        settings={"optimizer.weight_decay": 0.0, **(settings or {})},
        observers=[clock],
        quiet=True,
    )
    assert result.state is not None
    group = result.state.optimizer.param_groups[0]
    return {name: True for name in ("fused", "foreach") if group.get(name)}


def command(task: Task) -> dict[str, object]:
    """``trainwright train recipe.yaml``. Returns the times of every tenth step from its log."""
    Path("parts.py").write_text(
        "import torch\n"
        "from benchmarks.step_overhead_variants import make_task\n"
        f"task = make_task({task.name!r}, {task.steps})\n"
        "model, loss = task.make_model, task.loss\n"
        "def data():\n    return torch.utils.data.TensorDataset(*task.make_data())\n"
    )
    Path("recipe.yaml").write_text(
        f"until: {task.steps}steps\n"
        "precision: fp32\n"
        "model: parts:model\n"
        "data: {train: parts:data}\n"
        "loss: parts:loss\n"
        f"batch: {{size: {task.batch_size}}}\n"
        f"optimizer: {{use: adamw, lr: {LR}, weight_decay: 0.0, clip: {{by: norm, at: {CLIP_AT}}}}}\n"
        f"schedule: {{use: cosine, warmup: {min(WARMUP, task.steps // 2)}steps}}\n"
    )
    from trainwright.cli import app

    sys.argv = ["trainwright", "train", "recipe.yaml"]
    with Path("output.txt").open("w") as output, redirect_stdout(output), suppress(SystemExit):
        app()
    records = [json.loads(line) for line in next(Path("runs").glob("*/log.jsonl")).read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    return {"times_s": [record["time_s"] for record in steps], "steps": [record["step"] for record in steps]}


def fabric(task: Task, clock: Clock) -> None:
    """The plain loop with Lightning Fabric, as in its documentation."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=task.device, devices=1)
    model = task.make_model()
    model, optimizer = fabric.setup(model, adamw(model, {}))
    scheduler = LambdaLR(optimizer, factor(task.steps))
    batches = task.batches()
    for _ in range(task.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP_AT)
        optimizer.step()
        scheduler.step()
        clock()


def accelerate(task: Task, clock: Clock) -> None:
    """The plain loop with Accelerate, as in its documentation."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=task.device == "cpu")
    model = task.make_model()
    optimizer = adamw(model, {})
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, LambdaLR(optimizer, factor(task.steps)))
    batches = task.batches()
    for _ in range(task.steps):
        x, y = next(batches)
        optimizer.zero_grad()
        loss = task.loss(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP_AT)
        optimizer.step()
        scheduler.step()
        clock()


class Batches:
    """A loader of all batches of a run, with a length. ``names``: keys of a batch that is a dict."""

    batch_size = None

    def __init__(self, task: Task, names: tuple[str, str] | None = None) -> None:
        self.task, self.names = task, names

    def __len__(self) -> int:
        return self.task.steps

    def __iter__(self) -> Iterator[object]:
        for _, batch in zip(range(self.task.steps), self.task.batches()):
            yield dict(zip(self.names, batch)) if self.names else batch


def transformers(task: Task, clock: Clock) -> None:
    """The HF Trainer with its defaults: it logs, saves every 500 steps, and clips at 1.0."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.make_model()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = self.net(x)
            return {"loss": task.loss(output, labels), "logits": output}

    class Ticks(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            clock()

    class InMemory(Trainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Batches:
            return Batches(task, ("x", "labels"))

    arguments = TrainingArguments(
        output_dir="hf",
        max_steps=task.steps,
        learning_rate=LR,
        lr_scheduler_type="cosine",
        warmup_steps=WARMUP,
        disable_tqdm=True,
        report_to="none",
        use_cpu=task.device == "cpu",
    )
    InMemory(model=WithLoss(), args=arguments, train_dataset=[0], callbacks=[Ticks()]).train()


def lightning(task: Task, clock: Clock) -> None:
    """Lightning's Trainer with its defaults: a logger, and a checkpoint at the end of the epoch."""
    from lightning import Callback, LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = task.make_model()

        def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = task.loss(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = adamw(self, {})
            scheduler = LambdaLR(optimizer, factor(task.steps))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    class Ticks(Callback):
        def on_train_batch_end(self, *_: object, **__: object) -> None:
            clock()

    trainer = Trainer(
        accelerator=task.device,
        devices=1,
        max_steps=task.steps,
        gradient_clip_val=CLIP_AT,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks()],
        default_root_dir="lightning",
    )
    trainer.fit(Module(), train_dataloaders=Batches(task))


OURS: dict[str, dict[str, object]] = {"fit": {}, "fit_no_doctor": {"log.doctor": False}}
"""Settings of ``tw.fit`` by variant."""
BY_HAND = {"fabric": fabric, "accelerate": accelerate, "transformers": transformers, "lightning": lightning}
LIBRARIES = {"fabric": "lightning.fabric", **{name: name for name in BY_HAND if name != "fabric"}}
VARIANTS = ("plain", "plain_same_optimizer", *OURS, "train", *BY_HAND)


def run(task: Task, variant: str, optimizer: dict[str, bool]) -> dict[str, object]:
    """Runs one variant and returns its measurements."""
    if variant == "train":
        return command(task)
    clock, chosen = Clock(task.steps, task.device), None
    importlib.import_module("trainwright.training.fit" if variant in OURS else LIBRARIES.get(variant, "torch"))
    begin_s = time.perf_counter()
    if variant in OURS:
        chosen = fit(task, clock, OURS[variant])
    elif variant in BY_HAND:
        BY_HAND[variant](task, clock)
    else:
        plain(task, clock, optimizer if variant == "plain_same_optimizer" else {})
    run_s = time.perf_counter() - begin_s
    steps = list(range(1, len(clock.times_s) + 1))
    return {"times_s": clock.times_s, "steps": steps, "run_s": run_s, "optimizer": chosen}


if __name__ == "__main__":
    request = json.loads(sys.argv[1])
    torch.manual_seed(0)
    task = make_task(request["task"], request["steps"], request["device"])
    measured = run(task, request["variant"], request["optimizer"])
    print()
    print(json.dumps(measured), flush=True)
