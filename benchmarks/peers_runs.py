"""A run of ``benchmarks.peers`` in its own process: ``python -m benchmarks.peers_runs TRAINER CASE PART FOLDER``.

PART is whole, stopped (after step 17) or resumed. Prints one JSON object: the losses of its steps, the weights before
and after, and the fraction of finite weights.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

CASES = ("resume", "nonfinite", "window")
TRAINERS = ("ours", "lightning", "accelerate", "hf", "plain")
STEPS, STOP, SAMPLES, BATCH, WIDTH, CLASSES, LR = 40, 17, 160, 8, 6, 3, 0.05
MICRO, MICROS, FEW = 4, 4, 20
POISONED = 94


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    """Adds noise to a sample each time that it is read."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index] + 0.1 * torch.randn(WIDTH), self.y[index]


class Classifier(nn.Module):
    """A classifier that keeps its training losses. With ``labels``, it returns the loss, as models of transformers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, CLASSES))
        self.losses: list[float] = []

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        logits: Tensor = self.layers(x)
        return logits if labels is None else {"loss": self.loss(logits, labels), "logits": logits}

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = F.cross_entropy(logits, labels)
        self.losses.append(loss.item())
        return loss


@dataclass
class Case:
    """The model, the data and the settings of one case. ``part``: whole, stopped or resumed."""

    name: str
    part: str
    folder: Path
    model: Classifier = field(init=False)
    data: Dataset[Any] = field(init=False)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        count = FEW if self.name == "window" else SAMPLES
        x = torch.randn(count, WIDTH, generator=draw)
        y = (x @ torch.randn(WIDTH, CLASSES, generator=draw)).argmax(1)
        if self.name == "nonfinite":
            x[POISONED] = float("nan")
        self.data = Augmented(x, y) if self.name == "resume" else TensorDataset(x, y)
        torch.manual_seed(0)
        self.model = Classifier(0.2 if self.name == "resume" else 0.0)

    @property
    def stops(self) -> bool:
        return self.part == "stopped"

    @property
    def resumes(self) -> bool:
        return self.part == "resumed"

    @property
    def micro(self) -> int:
        return MICRO if self.name == "window" else BATCH

    @property
    def micros(self) -> int:
        return MICROS if self.name == "window" else 1

    @property
    def steps(self) -> int:
        return 2 if self.name == "window" else STEPS

    @property
    def shuffles(self) -> bool:
        return self.name == "resume"

    def loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.data, self.micro, shuffle=self.shuffles)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), LR, momentum=0.9 if self.name == "resume" else 0.0)


def ours(case: Case) -> None:
    """``tw.fit``, stopped by an observer. It also keeps the losses, because the doctor calls the model, too."""
    import trainwright as tw

    losses: list[float] = []

    class StopAt:
        def observe(self, result: tw.StepResult, state: tw.TrainState) -> tw.Stop | None:
            losses.append(float(result.loss))
            return tw.Stop("seen enough") if case.stops and result.step == STOP else None

    tw.fit(
        case.model,
        case.loader(),
        case.model.loss,
        until=f"{case.steps}steps",
        lr=LR,
        batch=case.micro * case.micros,
        accumulation=case.micros,
        schedule="constant",
        precision="fp32",
        seed=0,
        settings={
            "optimizer": {"use": "sgd", "weight_decay": 0.0, "args": {"momentum": 0.9 if case.shuffles else 0.0}},
            "optimizer.clip.by": "none",
            "folder": str(case.folder),
        },
        observers=[StopAt().observe],
        resume=next(case.folder.iterdir()) if case.resumes else None,
        quiet=True,
    )
    case.model.losses = losses


def plain(case: Case) -> None:
    """A plain loop. In the case ``window``, it trains on full batches."""
    loader = DataLoader(case.data, case.micro * case.micros, shuffle=case.shuffles)
    optimizer, step, file = case.optimizer(case.model), 0, case.folder / "checkpoint.pt"
    if case.resumes:
        saved = torch.load(file, weights_only=True)
        case.model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    for x, y in _endless(loader):
        optimizer.zero_grad()
        case.model.loss(case.model(x), y).backward()
        optimizer.step()
        step += 1
        if step == (STOP if case.stops else case.steps):
            break
    torch.save({"model": case.model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, file)


def _endless(loader: DataLoader[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield from loader


def lightning(case: Case) -> None:
    """Lightning's Trainer with a ModelCheckpoint at the step of the stop."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = case.model

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, y = batch
            return case.model.loss(self.model(x), y)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return case.optimizer(self)

    class StopAt(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
            trainer.should_stop = trainer.should_stop or (case.stops and trainer.global_step == STOP)

    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_steps=case.steps,
        accumulate_grad_batches=case.micros,
        accelerator="cpu",
        callbacks=[ModelCheckpoint(case.folder, "at", every_n_train_steps=STOP), StopAt()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), case.loader(), ckpt_path=str(case.folder / "at.ckpt") if case.resumes else None)


def accelerate(case: Case) -> None:
    """A loop with Accelerate's ``accumulate``, ``save_state`` and ``skip_first_batches``."""
    from accelerate import Accelerator
    from accelerate.utils import set_seed

    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.micros)
    model, optimizer, loader = accelerator.prepare(case.model, case.optimizer(case.model), case.loader())
    step, skip = 0, 0
    if case.resumes:
        accelerator.load_state(str(case.folder / "state"))
        step = STOP
        skip = STOP % len(loader)
    while step < case.steps:
        for x, y in accelerator.skip_first_batches(loader, skip) if skip else loader:
            with accelerator.accumulate(model):
                accelerator.backward(case.model.loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            step += int(accelerator.sync_gradients)
            if case.stops and step == STOP:
                accelerator.save_state(str(case.folder / "state"))
                return
            if step == case.steps:
                return
        skip = 0


def hf(case: Case) -> None:
    """The Trainer of transformers, which saves at the step of the stop."""
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    class StopAt(TrainerCallback):  # type: ignore[misc]
        def on_step_end(
            self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: object
        ) -> None:
            control.should_training_stop = control.should_training_stop or (case.stops and state.global_step == STOP)

    class Rows(Dataset[dict[str, Tensor]]):
        def __len__(self) -> int:
            return len(case.data)  # type: ignore[arg-type]

        def __getitem__(self, index: int) -> dict[str, Tensor]:
            x, y = case.data[index]
            return {"x": x, "labels": y}

    options = TrainingArguments(
        output_dir=str(case.folder),
        max_steps=case.steps,
        per_device_train_batch_size=case.micro,
        gradient_accumulation_steps=case.micros,
        train_sampling_strategy="random" if case.shuffles else "sequential",
        save_steps=STOP,
        learning_rate=LR,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        seed=0,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        label_names=["labels"],
    )
    trainer = Trainer(case.model, options, train_dataset=Rows(), callbacks=[StopAt()])
    trainer.create_optimizer = lambda *_: _set(trainer, case)
    trainer.train(resume_from_checkpoint=case.resumes or None)


def _set(trainer: Any, case: Case) -> torch.optim.Optimizer:
    optimizer = case.optimizer(case.model)
    trainer.optimizer = optimizer
    return optimizer


RUNS: dict[str, Callable[[Case], None]] = {
    "ours": ours,
    "plain": plain,
    "lightning": lightning,
    "accelerate": accelerate,
    "hf": hf,
}


def main() -> None:
    """Runs one case and prints the outcome."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    trainer, name, part, folder = sys.argv[1:]
    case = Case(name, part, Path(folder))
    initial = _weights(case.model)
    with redirect_stdout(sys.stderr):
        RUNS[trainer](case)
    weights = _weights(case.model)
    finite = torch.tensor(weights).isfinite().double().mean().item()
    print(json.dumps({"losses": case.model.losses, "initial": initial, "weights": weights, "finite": [finite]}))


def _weights(model: nn.Module) -> list[float]:
    return [value for p in model.parameters() for value in p.detach().flatten().tolist()]


if __name__ == "__main__":
    main()
