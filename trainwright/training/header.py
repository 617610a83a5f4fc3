"""Makes the header of a run from its recipe, its plan and the live objects."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.utils.data import IterableDataset

from trainwright.checkpoint.chained_optimizer import parts_of
from trainwright.checkpoint.cursor import StepBatch, count_tokens
from trainwright.checkpoint.optimizer_modes import names_with_modes, with_modes
from trainwright.data.ready_batches import ReadyBatches
from trainwright.engine.chunked import logits_bytes
from trainwright.engine.head import head_of, hf_head_of
from trainwright.engine.peers import INTERVAL_STEPS
from trainwright.optim.schedule import SwaSchedule
from trainwright.optim.stepped_schedule import SteppedSchedule
from trainwright.optim.user_optimizers import makes_own_groups
from trainwright.plan.amounts import human_bytes
from trainwright.plan.header import Origin, RunHeader, Setting, origins_in
from trainwright.recipe import OPTIMIZERS, SCHEDULES, Loaded
from trainwright.training.job import Job
from trainwright.training.resume import Earlier


def run_header(job: Job, first: StepBatch, earlier: Earlier | None) -> RunHeader:
    """Return the header of a planned job. ``first`` is the first batch of a step."""
    before = origins_in(earlier.run_metadata["plan"]) if earlier and not job.live else None
    return RunHeader(tuple(_Header(job, first, _Origins(job.loaded, before)).settings()))


@dataclass(frozen=True)
class _Origins:
    """Finds who decided each setting.

    The recipe in the folder of a resumed run states every setting. ``before`` therefore has the origins from the
    beginning of the run; only an override in the current call counts as configured.
    """

    loaded: Loaded
    before: Mapping[str, Origin] | None

    def of(self, name: str, *paths: str) -> Origin:
        """Return the origin of the setting ``name``, which any of ``paths``, or a key below one of them, decides."""
        if any(_covers(path, each) for each in self.loaded.by_plan for path in paths):
            return "planned"
        stated = self.loaded.stated if self.before is None else self.loaded.overridden
        if any(_covers(path, each) for each in stated for path in paths):
            return "configured"
        if self.before is not None:
            return self.before.get(name, "default")
        return (
            "recommended" if any(_covers(path, each) for each in self.loaded.by_preset for path in paths) else "default"
        )


def _covers(path: str, stated: str) -> bool:
    return stated == path or stated.startswith(f"{path}.")


@dataclass(frozen=True)
class _Header:
    job: Job
    first: StepBatch
    origins: _Origins

    def settings(self) -> Iterator[Setting]:
        yield self._setting("optimizer", self._optimizer(), *OPTIMIZER_KEYS)
        yield self._learning_rate()
        yield self._schedule()
        yield self._clip()
        yield self._precision()
        yield Setting("not finite", "an update with NaN or infinity is left out", "default")
        yield self._batch()
        yield self._order()
        yield self._random()
        yield from self._threads()
        yield from self._chosen_kernels()
        yield from self._further()

    def _setting(self, name: str, value: str, *paths: str, why: str = "") -> Setting:
        return Setting(name, value, self.origins.of(name, *paths), why)

    def _why(self, topic: str) -> str:
        return "; ".join(note.why for note in self.job.plan.notes if note.topic == topic)

    def _optimizer(self) -> str:
        ask = self.job.recipe.optimizer
        args = ask.args if self.job.parts.custom.optimizer is None else {}
        described = " + ".join(_described(part) for part in parts_of(self.job.state.optimizer))
        return ", ".join(
            [described, *(f"{name} {value}" for name, value in args.items() if name not in _MOMENTUM_KEYS)]
        )

    def _learning_rate(self) -> Setting:
        groups = self.job.state.optimizer.param_groups
        rates = sorted({float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group})
        shown = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}" if rates else "its own"
        setting = self._setting(
            "lr",
            shown,
            "optimizer.lr",
            "optimizer.groups",
            "optimizer.lr_rule",
            why=self._why("learning rate"),
        )
        given = self.job.parts.custom.optimizer
        brings_its_own = given is not None and (not callable(given) or makes_own_groups(given))
        return Setting(setting.name, shown, "configured", setting.why) if brings_its_own else setting

    def _schedule(self) -> Setting:
        ask = self.job.recipe.schedule
        plan = self.job.plan
        live = self.job.built.schedule
        live = live.base if isinstance(live, SwaSchedule) else live
        why = self._why("schedule")
        if isinstance(live, SteppedSchedule):
            choice = next((note.choice for note in plan.notes if note.topic == "schedule"), live.name)
            return self._setting("schedule", choice, "schedule", why=why)
        parts = [ask.use.rpartition(":")[2]]
        if plan.warmup and ask.use in SCHEDULES:
            parts.append(f"warm-up {_span(plan.warmup)}")
        if ask.use in SCHEDULES and ask.use != "constant":
            parts.append(f"floor {ask.floor:g}")
        return self._setting("schedule", ", ".join(parts), "schedule", why=why)

    def _clip(self) -> Setting:
        ask = self.job.recipe.optimizer.clip
        if self.job.parts.custom.advance is not None:
            return Setting("clip", "done by the custom step", "configured")
        shown = ask.by if ask.by == "none" else f"{ask.by} at {ask.at:g}"
        return self._setting("clip", shown, "optimizer.clip")

    def _precision(self) -> Setting:
        ask, job = self.job.recipe.precision, self.job
        tf32 = [
            name
            for name, on in (("matmuls", job.matmul.matmul != "highest"), ("convolutions", job.matmul.convolutions))
        ]
        value: str = job.plan.precision
        if job.device.type == "cuda" and value == "fp32" and tf32:
            value += f", TF32 in {' and '.join(tf32)}"
        if job.parts.custom.advance is not None:
            value += " outside of torch.autocast in the step function"
        elif ask == "auto":
            return Setting("precision", value, "planned", self._why("precision"))
        return self._setting("precision", value, "precision")

    def _batch(self) -> Setting:
        plan, own = self.job.plan, self.job.parts.train.own_batches
        if own is None:
            value = f"{plan.batch.size} {'samples' if plan.batch.size == plan.batch.micro else plan.batch.how}"
        else:
            joined = self.job.recipe.batch.accumulation or 1
            value = "as the data come" if joined == 1 else f"{joined} batches of the data"
        samples = self.job.parts.train.samples
        if own is None and samples is not None and samples < plan.batch.size:
            value += f", but the data have only {samples}"
        elif self.job.recipe.data.drop_last:
            value += ", a short last batch is left out"
        why = self._why("micro-batch") if "batch.micro" in self.job.loaded.by_plan else ""
        return self._setting("batch", value, "batch", why=why)

    def _order(self) -> Setting:
        train, recipe = self.job.parts.train, self.job.recipe
        if isinstance(train.dataset, ReadyBatches):
            return Setting("order", "as the data come", "configured")
        if train.loader is not None and self.job.draws_as_a_loop:
            return Setting("order", "as a loop over the DataLoader", "configured")
        if train.order is not None:
            return Setting("order", f"that of the {type(train.order.sampler).__name__}", "configured")
        if isinstance(train.dataset, IterableDataset):
            return Setting("order", "as the data come: a stream is not shuffled", "default")
        if recipe.data.shuffle:
            return self._setting("order", f"shuffled by the seed {recipe.seed}", "data.shuffle", "seed")
        return self._setting("order", "that of the dataset", "data.shuffle")

    def _random(self) -> Setting:
        if self.job.parts.custom.generators is not None:
            return Setting("random", "the generators of the process, not seeded", "default")
        return self._setting("random", f"seed {self.job.recipe.seed}", "seed")

    def _threads(self) -> Iterator[Setting]:
        if why := self._why("threads"):
            yield Setting("threads", str(self.job.plan.threads), "planned", why)

    def _chosen_kernels(self) -> Iterator[Setting]:
        """Yield kernels that the plan selected. They compute the same result up to rounding."""
        job, ask = self.job, self.job.recipe.optimizer
        groups = job.state.optimizer.param_groups
        is_free = ask.use in OPTIMIZERS and not {"fused", "foreach"} & ask.args.keys()
        if is_free and any(group.get("fused") for group in groups):
            yield Setting("update", "fused kernel", "planned", "the same update but for rounding")
        if (size := self._chunked_logits()) is not None:
            why = f"the logits of a micro-batch would take {human_bytes(size)}"
            yield Setting("loss", "computed in chunks", "planned", why)

    def _chunked_logits(self) -> int | None:
        """Return the bytes of the full logits if the plan computes the loss in chunks, else None."""
        most = self.job.plan.settled.get("max_logits_bytes")
        model = self.job.parts.model
        head = (head_of(model) or hf_head_of(model)) if isinstance(most, int) else None
        if head is None or not self.first.micro:
            return None
        size = logits_bytes(count_tokens(self.first.micro[0].data), len(head.weight))
        return size if isinstance(most, int) and size > most else None

    def _recomputed(self) -> str:
        """Return the policy of activation checkpointing, or the number of blocks that the plan selected."""
        blocks = self.job.plan.settled.get("recompute")
        if not isinstance(blocks, list):
            return self.job.recipe.model.activation_checkpointing
        count = sum(keep is not None for keep in blocks)
        return f"{count} of {len(blocks)} blocks" if count else "none"

    def _further(self) -> Iterator[Setting]:
        """Yield settings that are off by default."""
        recipe, plan = self.job.recipe, self.job.plan
        model = recipe.model
        if recipe.graphs and self.job.device.type == "cuda":
            shown = "CUDA graphs" if recipe.graphs is True else "CUDA graphs if the host takes the time of a step"
            yield self._setting("graphs", shown, "graphs")
        if model.compile:
            shown = "torch.compile" if model.compile is True else "torch.compile, the blocks"
            shown += "" if model.compile_mode in ("auto", "default") else f", mode {model.compile_mode}"
            yield self._setting("compile", shown, "model.compile", "model.compile_mode")
        if recipe.loss.chunked is True:
            yield self._setting("loss", "computed in chunks", "loss.chunked")
        if (recomputed := self._recomputed()) != "none":
            why = self._why("checkpointing")
            yield self._setting("recompute", recomputed, "model.activation_checkpointing", why=why)
        if recipe.optimizer.offload is True:
            why = self._why("optimizer offload")
            yield self._setting("offload", "moments and update on the host", "optimizer.offload", why=why)
        if model.ema is not None:
            yield self._setting("average", f"of the weights, decay {model.ema:g}", "model.ema")
        if plan.swa is not None:
            shown = f"the mean of the weights every {plan.swa.every:,} steps from step {plan.swa.start:,} on"
            yield self._setting("average", shown, "model.swa")
        if with_modes(self.job.state.optimizer):
            shown = f"of the weights, by {names_with_modes(self.job.state.optimizer)}: evaluated, saved and exported"
            yield self._setting("average", shown, *OPTIMIZER_KEYS)
        if recipe.spikes.policy not in ("warn", "off"):
            yield self._setting("spikes", recipe.spikes.policy, "spikes")
        if recipe.deterministic:
            yield self._setting("kernels", "deterministic", "deterministic")
        if self.job.replays_ranks:
            shown = f"every {INTERVAL_STEPS}th step calls model and loss twice more, for the batches of other ranks"
            yield self._setting("replays", shown, "deterministic")
        if plan.degrees.ranks > 1:
            yield self._setting("ranks", str(plan.degrees), "parallel")


OPTIMIZER_KEYS = ("optimizer.use", "optimizer.args", "optimizer.weight_decay", "optimizer.decay_norms_and_biases")
_MOMENTUM_KEYS = ("momentum", "nesterov")


def _described(optimizer: Optimizer) -> str:
    parts, groups = [type(optimizer).__name__], optimizer.param_groups
    if momentum := {float(group["momentum"]) for group in groups if group.get("momentum")}:
        nesterov = "Nesterov momentum" if any(group.get("nesterov") for group in groups) else "momentum"
        parts.append(f"{nesterov} {_range(momentum)}")
    decays = {float(group.get("weight_decay") or 0.0) for group in groups}
    if decays != {0.0}:
        parts.append(f"weight decay {_range(decays)}")
    return ", ".join(parts) + (f" in {len(groups)} groups" if len(groups) > 1 else "")


def _range(values: set[float]) -> str:
    return f"{min(values):g}" if len(values) == 1 else f"{min(values):g} to {max(values):g}"


def _span(span: int | float) -> str:
    return f"{span:,} steps" if isinstance(span, int) else f"{span:.3g} of the run"
