"""``verify plain``: compares the first steps of a run bit for bit with the equivalent loop written by hand.

    for batch in data:
        optimizer.zero_grad()
        loss(model(inputs), target).backward()
        optimizer.step()

For objects, the loop iterates over the user's DataLoader. For a recipe, it has further lines with functions of torch:
the learning rate of its schedule, ``torch.autocast``, ``clip_grad_norm_``, one backward pass for each micro-batch.
"""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.cursor import tensors_in
from trainwright.checkpoint.rng import RngBag
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.loading import to_device
from trainwright.engine.loss import Loss, ModelLoss, as_loss_fn
from trainwright.engine.step import StepResult
from trainwright.errors import UsageError
from trainwright.monitoring.terminal import Console
from trainwright.optim.clip import ModelOrder
from trainwright.optim.user_optimizers import Factory, takes_first
from trainwright.plan.parallel import in_one_process
from trainwright.recipe import LOSSES, OPTIMIZERS, Loaded, Recipe, Source, load
from trainwright.recipe.resolve import find, import_factory
from trainwright.runs.folder import RunFolder
from trainwright.training.arguments import ORDER, call_for_arguments
from trainwright.training.fit import fit
from trainwright.training.open_run import Extra
from trainwright.training.options import OptimizerLike
from trainwright.training.prepare import prepare
from trainwright.training.result import Result
from trainwright.training.run import process_settings, train
from trainwright.training.subject import copied

STEPS = 20
WHERE = Source("verify plain")


@dataclass(frozen=True)
class PlainDifference:
    """The first value that differs: ``what`` is a loss or the name of a weight, after ``step`` steps."""

    step: int
    what: str
    ours: float
    plain: float

    def __str__(self) -> str:
        distance = abs(self.ours - self.plain) / max(abs(self.plain), 1e-30)
        return f"step {self.step}, {self.what}: {self.ours!r}, in the loop {self.plain!r} (relative {distance:.1e})"


@dataclass(frozen=True)
class PlainProof:
    """Equal losses, weights and buffers, or the first ``difference``. ``loop`` describes the loop."""

    steps: int
    tensors: int
    loop: str
    precision: str
    difference: PlainDifference | None = None
    notes: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.difference is None

    @property
    def exit_code(self) -> int:
        return 0 if self.equal else 1

    def lines(self) -> list[str]:
        if self.difference is None:
            first = f"{self.steps} losses and {self.tensors} tensors of the model have the bits of {self.loop}"
        else:
            first = f"NOT the same bits as {self.loop}: {self.difference}"
        return [f"{first}; {self.precision}", *self.notes]

    def to_json(self) -> dict[str, object]:
        return {"equal": self.equal, **asdict(self)}


def verify_plain(
    model: nn.Module,
    data: object,
    loss: str | Callable[..., object] | None = None,
    optimizer: str | OptimizerLike | None = None,
    *,
    steps: int = STEPS,
) -> PlainProof:
    """Compare the first steps of ``tw.fit(model, data, loss, optimizer=optimizer)`` with the plain loop.

    Both train copies, so the objects are unchanged. The random generators are restored. Data other than a DataLoader
    have no defined order, so the loop then uses the batches of ``tw.fit``.

    Args:
        model: The module to train.
        data, loss: As in ``tw.fit``.
        optimizer: An optimizer over parameters of the model, several of them, a name, or a function that makes one.
        steps: Number of compared steps.

    Returns:
        A PlainProof; ``proof.equal`` is True if all losses and weights have the same bits.

    Raises:
        UsageError: The objects cannot be copied, or ``tw.fit`` raises it.

    Example:
        >>> proof = tw.verify_plain(model, DataLoader(dataset, 32, shuffle=True), nn.CrossEntropyLoss(), optimizer)
        >>> print(*proof.lines())
    """
    before = RngBag.capture()
    try:
        ours = _Objects(*copied(model, data, loss, optimizer))
        plain = _Objects(*copied(model, data, loss, optimizer))
        with tempfile.TemporaryDirectory(prefix="trainwright-verify-") as folder, process_settings():
            seen = _Steps()
            result = fit(
                ours.model,
                ours.data,
                ours.loss,  # type: ignore[arg-type]
                optimizer=ours.optimizer,  # type: ignore[arg-type]
                steps=steps,
                observers=[seen],
                quiet=True,
                settings={"folder": folder, "checkpoint.every": None},
            )
            planned = json.loads(RunFolder.open(result.run).plan.read_text())
            torch.set_num_threads(planned["threads"])
            before.restore()
            return _compared(result, seen, plain, planned)
    finally:
        before.restore()


@dataclass(frozen=True)
class _Objects:
    model: nn.Module
    data: object
    loss: object
    optimizer: object


@dataclass
class _Steps:
    """The losses and the batches of steps. As an observer it collects those of a run."""

    losses: list[Tensor] = field(default_factory=list)
    batches: list[tuple[Any, ...]] = field(default_factory=list)

    def observe(self, result: StepResult, _state: TrainState) -> None:
        self.losses.append(result.loss.detach().clone())
        self.batches.append(tuple(copy.deepcopy(micro.data) for micro in result.batch.micro))

    def close(self) -> None: ...


def _compared(result: Result, seen: _Steps, plain: _Objects, planned: dict[str, Any]) -> PlainProof:
    state = result.state
    assert state is not None
    device = next(state.model.parameters()).device
    notes, loop = list[str](), "the plain loop over the loader"
    if isinstance(plain.data, DataLoader):
        batches = _first_of(plain.data, len(seen.batches), device)
        trial = _Objects(*copied(plain.model, plain.data, plain.loss, plain.optimizer))
        random = RngBag.capture()
        reference = _run(trial, state, batches, device)
        if (at := _first_other_batch(reference.batches, seen.batches)) is None:
            return _proof(result, seen, reference, trial.model, loop, planned, notes)
        random.restore()
        notes.append(
            f"the loader alone gives another batch in step {at + 1}: the random numbers of a dataset or a collate "
            "function follow from (seed, epoch, position) in a run"
        )
    loop = "the plain loop over the batches of tw.fit"
    reference = _run(plain, state, iter(seen.batches), device)
    return _proof(result, seen, reference, plain.model, loop, planned, notes)


def _first_of(loader: Iterable[object], count: int, device: torch.device) -> Iterator[tuple[Any, ...]]:
    """Yield the first ``count`` batches of a loop over a loader, epoch after epoch."""
    epochs = chain.from_iterable(repeat(loader))
    return ((to_device(batch, device),) for batch in islice(epochs, count))


def _run(objects: _Objects, state: TrainState, batches: Iterable[tuple[Any, ...]], device: torch.device) -> _Steps:
    """Run the plain loop. An optimizer that is named is fused if the optimizer of the run is."""
    model = objects.model.to(device)
    if not model.training:
        model.train()
    loss_fn = _loss_of(objects.loss, device)
    optimizers = _optimizers(objects, model, state)
    found = _Steps()
    for batch in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = _mean(loss_fn(model, batch[0]))
        loss.backward()  # type: ignore[no-untyped-call]
        for optimizer in optimizers:
            optimizer.step()
        found.losses.append(loss.detach().clone())
        found.batches.append(batch)
    return found


def _loss_of(loss: object, device: torch.device) -> Callable[[nn.Module, Any], Loss | Tensor]:
    if isinstance(loss, str):
        loss = import_factory(LOSSES[loss].factory) if loss in LOSSES else find(loss, {}, "loss", WHERE)
        loss = loss() if isinstance(loss, type) else loss
    if isinstance(loss, nn.Module):
        loss.to(device)
    return as_loss_fn(ModelLoss() if loss is None else loss)  # type: ignore[arg-type]


def _mean(output: Loss | Tensor) -> Tensor:
    return output.total / output.weight if isinstance(output, Loss) else output


def _optimizers(objects: _Objects, model: nn.Module, state: TrainState) -> list[Optimizer]:
    chosen = "adamw" if objects.optimizer is None else objects.optimizer
    if isinstance(chosen, Optimizer):
        return list(parts_of(chosen))
    if isinstance(chosen, list | tuple):
        return list(chosen)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if isinstance(chosen, str) and chosen in OPTIMIZERS:
        row = OPTIMIZERS[chosen]
        if row.groups:
            raise UsageError(
                f"{chosen} makes parameter groups, which a plain loop would have to make too",
                remedy="pass the optimizer itself",
            )
        fused = {"fused": True} if any(group.get("fused") for group in state.optimizer.param_groups) else {}
        made: object = import_factory(row.factory)(parameters, **fused)
    else:
        factory: Factory = find(chosen, {}, "optimizer", WHERE) if isinstance(chosen, str) else chosen  # type: ignore[assignment]
        made = factory(model if takes_first(factory, "model") else parameters)
    return list(made) if isinstance(made, list | tuple) else list(parts_of(made))  # type: ignore[arg-type]


def _first_other_batch(plain: Sequence[tuple[Any, ...]], ours: Sequence[tuple[Any, ...]]) -> int | None:
    for at, (one, other) in enumerate(zip(plain, ours)):
        tensors, others = (tensors_in(each[0]) for each in (one, other))
        if len(tensors) != len(others) or not all(map(_same, tensors, others)):
            return at
    return None if len(plain) == len(ours) else min(len(plain), len(ours))


def _equal(one: Tensor, other: Tensor) -> Tensor:
    """Return True for each element that is equal in both. NaN equals NaN, and no number."""
    return torch.isclose(one, other, rtol=0.0, atol=0.0, equal_nan=True)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bool(_equal(one, other).all())


def _proof(
    result: Result,
    seen: _Steps,
    reference: _Steps,
    model: nn.Module,
    loop: str,
    planned: dict[str, Any],
    notes: list[str],
) -> PlainProof:
    assert result.state is not None
    ours, plain = dict(result.state.model.state_dict()), dict(model.state_dict())
    if result.skipped:
        notes.append(f"{result.skipped} updates were not finite: tw.fit skips them, and the loop does not")
    return PlainProof(
        steps=len(seen.losses),
        tensors=len(ours),
        loop=loop,
        precision=f"{planned['precision']} on {planned['device']}, threads: {planned['threads']}",
        difference=_first_difference(seen.losses, reference.losses, ours, plain),
        notes=tuple(notes),
    )


def _first_difference(
    losses: Sequence[Tensor], plain_losses: Sequence[Tensor], ours: dict[str, Tensor], plain: dict[str, Tensor]
) -> PlainDifference | None:
    for step, (one, other) in enumerate(zip(losses, plain_losses, strict=True), start=1):
        if not _same(one.float(), other.float()):
            return PlainDifference(step, "loss", float(one), float(other))
    for name, tensor in ours.items():
        if not _same(tensor, plain[name]):
            at = int((~_equal(tensor, plain[name])).flatten().nonzero()[0])
            values = [float(each.flatten()[at]) for each in (tensor, plain[name])]
            return PlainDifference(len(losses), f"{name}, element {at}", *values)
    return None


def verify_plain_of(what: str, *, steps: int = STEPS, settings: Sequence[str] = ()) -> PlainProof:
    """Compare the first steps of a recipe, or of ``module:function`` that returns arguments of ``tw.fit``, with a loop.

    The function returns ``(model, data, loss)`` or ``(model, data, loss, optimizer)``.
    """
    if ":" not in what or Path(what).exists():
        return verify_plain_recipe(load(what, overrides=settings), what, steps=steps, settings=settings)
    if settings:
        raise UsageError("--set changes a recipe, and a function has none", remedy="change what the function returns")
    made = call_for_arguments(what)
    if other := made.keys() - set(ORDER):
        raise UsageError(
            f"{what} returned {' and '.join(sorted(other))}, which a plain loop does not have",
            remedy="return (model, data, loss, optimizer), or fewer of them",
        )
    return verify_plain(**{"data": None, **made}, steps=steps)


def verify_plain_recipe(loaded: Loaded, recipe: str, *, steps: int, settings: Sequence[str]) -> PlainProof:
    """Compare the first steps of a recipe with a loop that uses functions of torch."""
    _require_comparable(loaded)
    with tempfile.TemporaryDirectory(prefix="trainwright-verify-") as folder:
        trial = [*settings, *_settings(loaded.recipe, steps, Path(folder))]
        seen = _Steps()
        keep: Extra = lambda _job, _folder, _progress: seen  # noqa: E731
        result = train(in_one_process(load(recipe, overrides=trial)), quiet=True, extras=[keep], console=Console())
        planned = json.loads(RunFolder.open(result.run).plan.read_text())
        again = in_one_process(load(recipe, overrides=[*trial, f"precision={planned['precision']}", "name=again"]))
        with process_settings():
            return _recipe_by_hand(again, result, seen, planned)


def _settings(recipe: Recipe, steps: int, folder: Path) -> list[str]:
    """Return the settings of a trial: a number of steps, and nothing that ends it earlier or takes long."""
    warmup = recipe.schedule.warmup
    fits = warmup.unit == "run" or (warmup.unit == "steps" and warmup.value < steps)
    return [
        f"until={steps}steps",
        *([] if fits else ["schedule.warmup=0.25run"]),
        "data.val=null",
        "data.more_val=[]",
        "checkpoint.every=null",
        "checkpoint.restore_best=false",
        "observers=[]",
        "metrics=[]",
        "spikes.policy=warn",
        "model.ema=null",
        "model.swa=null",
        "log.sinks=[]",
        "alerts=null",
        f"folder={json.dumps(str(folder))}",
    ]


def _require_comparable(loaded: Loaded) -> None:
    recipe = loaded.recipe
    for wrong, what, remedy in (
        (recipe.optimizer.clip.by == "agc", "clips by agc, for which torch has no function", "clip by norm"),
        (recipe.precision == "fp16", "computes in fp16, whose loss scale is not compared", "--set precision=bf16"),
        (recipe.optimizer.offload is not False, "offloads the optimizer", "--set optimizer.offload=false"),
    ):
        if wrong:
            raise UsageError(f"the recipe {what}", remedy=remedy)


def _recipe_by_hand(loaded: Loaded, result: Result, seen: _Steps, planned: dict[str, Any]) -> PlainProof:
    job = prepare(loaded)
    torch.set_num_threads(planned["threads"])
    model = job.state.model
    optimizer = job.state.optimizer
    clip = loaded.recipe.optimizer.clip
    loss_fn, schedule = as_loss_fn(job.parts.loss), job.built.schedule
    parameters = ModelOrder()(model, [p for group in optimizer.param_groups for p in group["params"]])
    base = [group["lr"] for group in optimizer.param_groups]
    extent = job.plan.extent.steps or 1
    losses: list[Tensor] = []
    for step, batch in zip(range(len(seen.losses)), job.batches):
        factor = schedule(step, min(step / extent, 1.0))
        for group, lr in zip(optimizer.param_groups, base) if factor is not None else ():
            group["lr"] = lr * factor
        optimizer.zero_grad()
        is_low = job.plan.precision in ("bf16", "fp8", "mxfp8")
        with torch.autocast(job.device.type, torch.bfloat16, enabled=is_low):
            parts = _parts([loss_fn(model, micro.data) for micro in batch.micro], [len(m.ids) for m in batch.micro])
        for part in parts:
            part.backward()  # type: ignore[no-untyped-call]
        if clip.by == "norm":
            clip_grad_norm_(parameters, clip.at)
        elif clip.by == "value":
            clip_grad_value_(parameters, clip.at)
        optimizer.step()
        losses.append(sum((part.detach() for part in parts[1:]), parts[0].detach()))
    return _proof(result, seen, _Steps(losses), model, "a loop with the functions of torch", planned, [])


def _parts(outputs: Sequence[Loss | Tensor], sizes: Sequence[int]) -> list[Tensor]:
    """Return the contribution of each micro-batch to the mean loss of the step."""
    weight = sum(each.weight for each in outputs if isinstance(each, Loss))
    return [
        each.total / weight if isinstance(each, Loss) else each * (size / sum(sizes)) if len(sizes) > 1 else each
        for each, size in zip(outputs, sizes, strict=True)
    ]
