"""Plans a recipe on many ranks: computes memory, communication and time of each layout, and chooses the best one.

The rule is the same as in ``plan.layout``: choose the simplest layout that fits and whose step time is within
``STEP_TIME_TOLERANCE`` of the fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trainwright.errors import RecipeError, UsageError
from trainwright.plan.amounts import human_bytes, human_seconds
from trainwright.plan.call_trace import Kind, Moment, Trace, Work
from trainwright.plan.devices import Device
from trainwright.plan.layout import STEP_TIME_TOLERANCE, Layout, evenly_spaced, micro_sizes, slower_or_faster
from trainwright.plan.make import Note
from trainwright.plan.parallel import AXES, Degrees, solve_layout
from trainwright.plan.roofline import StepTime, scaled_time
from trainwright.plan.scale import PASSES, Scaled
from trainwright.plan.splits import ModelShape, require_fitting
from trainwright.plan.traffic import Activations, StepTraffic, Traffic
from trainwright.plan.units import Weights, Zero, shard_layout
from trainwright.recipe import Recipe

MAX_MICRO_SIZES = 8
MAX_PIPELINE_STAGES = 16
DIVIDED_POLICIES = ("none", "block")
"""Activation checkpointing policies that work with tensor and pipeline parallelism."""


@dataclass(frozen=True)
class RankModel:
    """The part of a model that one rank of a tensor group computes.

    Attributes:
        weights: The weights of the full depth.
        activations: Activations by activation checkpointing policy.
        layouts: Layouts by policy, traced with two blocks, or with the complete part if ``blocks`` is None.
        blocks: The traced blocks; None if the part has no equal blocks.
    """

    weights: Weights
    activations: Mapping[str, Activations]
    layouts: Mapping[str, Layout]
    blocks: Blocks | None

    @property
    def layers(self) -> int:
        """The number of equal blocks; 0 where there are none."""
        return self.weights.blocks.times if self.blocks else 0


@dataclass(frozen=True)
class Placement:
    """One layout of one recipe on all ranks: the memory of a rank, and the time of a step.

    ``stage_bytes`` is the peak by pipeline stage. A rank spends in each step ``busy_s`` computing, ``exposed_s``
    waiting for communication that is not overlapped, and ``bubble_s`` waiting for other pipeline stages.
    """

    degrees: Degrees
    zero: Zero
    policy: str
    micro: int
    accumulation: int
    stage_bytes: tuple[int, ...]
    scaled: Scaled
    time: StepTime
    traffic: tuple[Traffic, ...]
    busy_s: float
    exposed_s: float
    bubble_s: float
    fits: bool

    @property
    def peak_bytes(self) -> int:
        return max(self.stage_bytes)

    @property
    def held(self) -> Mapping[Kind, int]:
        """Bytes that a rank of the first stage holds at the peak of one micro-batch."""
        return self.scaled.at(self.micro, self.accumulation).peak.held

    @property
    def step_s(self) -> float:
        return self.busy_s + self.exposed_s + self.bubble_s

    @property
    def exchange_s(self) -> float:
        """The time of all communication, overlapped or not."""
        return sum(each.wait_s for each in self.traffic)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation of a rank."""
        return (self.time.flops - self.time.checkpointing_flops) / (self.step_s * self.time.peak_flops)

    @property
    def complexity(self) -> tuple[int, ...]:
        """A sort key: number of axes besides replication, policy, accumulation. The simplest layout has only zeros."""
        axes = sum(getattr(self.degrees, axis) > 1 for axis in AXES if axis != "replicate")
        return (axes, ("none", "selective", "block").index(self.policy), self.accumulation > 1)

    def __str__(self) -> str:
        shape = f"{self.micro} x {self.accumulation}, checkpointing {self.policy}"
        return f"{self.degrees}, {shape}: {human_bytes(self.peak_bytes)}, {human_seconds(self.step_s)} a step"


@dataclass(frozen=True)
class ManyRanks:
    """Compares layouts of ``size`` samples per step on one device.

    Attributes:
        copies: The model if each rank has a full copy.
        models: The models with divided weights or sequences, by tensor and context degree, without chunks of the loss.
            Context degrees that the model does not support, or whose parts would be too short, are missing.
        device: The device of each rank.
        size: Samples per step.
        precision: The precision of the computation.
        shape: The sizes that limit the model's layouts.
    """

    copies: RankModel
    models: Mapping[tuple[int, int], RankModel]
    device: Device
    size: int
    precision: str
    shape: ModelShape
    _grown: dict[tuple[int, int, str], Scaled] = field(default_factory=dict)
    _sharded: dict[tuple[int, int, int, int, str], Scaled] = field(default_factory=dict)

    def place(self, degrees: Degrees, zero: Zero, policy: str, micro: int) -> Placement:
        """Return the memory of a rank and the time of a step for one layout."""
        model = self._model(degrees)
        scaled, weights = self._scaled(degrees, zero, policy)
        accumulation = -(-self._samples_of_rank(degrees) // micro)
        peak = scaled.peak_bytes(micro, accumulation)
        stages = degrees.pipeline
        kept = _kept_per_micro_batch(scaled, micro) if stages > 1 else 0
        by_stage = tuple(peak + (min(accumulation, stages - stage) - 1) * kept for stage in range(stages))
        time = scaled_time(scaled, micro, accumulation, self.device, self.precision)
        tied = self.shape.tied_bytes
        step = StepTraffic(degrees, zero, weights, model.activations[policy], micro, accumulation, tied)
        traffic = step.traffic(self.device.node, overlaps=self.device.kind == "cuda")
        exposed = exposed_s(traffic, time, accumulation)
        passes = time.step_s - time.by_phase.get("update", 0.0)
        at_end = sum(each.wait_s for each in traffic if each.pass_ == "end")
        return Placement(
            degrees=degrees,
            zero=zero,
            policy=policy,
            micro=micro,
            accumulation=accumulation,
            stage_bytes=by_stage,
            scaled=scaled,
            time=time,
            traffic=traffic,
            busy_s=time.step_s,
            exposed_s=exposed,
            bubble_s=(stages - 1) / accumulation * (passes + exposed - at_end),
            fits=max(by_stage) <= self.device.usable_bytes,
        )

    def all(self, degrees: Sequence[Degrees], zero: Zero = 3) -> list[Placement]:
        """Return every layout with these degrees, combined with each checkpointing policy and micro-batch."""
        return [
            self.place(each, zero, policy, micro)
            for each in degrees
            for policy in self.policies(each)
            for micro in evenly_spaced(micro_sizes(self._samples_of_rank(each)), MAX_MICRO_SIZES)
        ]

    def _samples_of_rank(self, degrees: Degrees) -> int:
        return -(-self.size // degrees.data)

    def policies(self, degrees: Degrees) -> list[str]:
        """Return the activation checkpointing policies that work with these degrees."""
        shares_samples = degrees.ranks > degrees.data
        return [each for each in self._model(degrees).layouts if not shares_samples or each in DIVIDED_POLICIES]

    def _model(self, degrees: Degrees) -> RankModel:
        if degrees.ranks == degrees.replicate:
            return self.copies
        if degrees.expert > 1:
            raise UsageError(
                f"{degrees} is not planned: the memory and the traffic of experts depend on their load",
                remedy="give batch.micro and model.activation_checkpointing, or leave parallel.expert out",
            )
        found = self.models.get((degrees.tensor, degrees.context))
        if found is None:
            raise UsageError(
                f"{degrees} is not planned: divided layers and sequences are for models of three equal blocks or more",
                remedy="plan it with parallel.replicate or parallel.shard, or try it: trainwright verify parallel",
            )
        return found

    def _scaled(self, degrees: Degrees, zero: Zero, policy: str) -> tuple[Scaled, Weights]:
        """Return the memory and work of a rank, and the weights of its stage before sharding."""
        model = self._model(degrees)
        scaled, weights = self._stage(model, degrees.pipeline, policy)
        key = (id(model), degrees.pipeline, degrees.shard, zero, policy)
        if key not in self._sharded:
            self._sharded[key] = shard_layout(scaled, weights, degrees.shard, zero)
        return self._sharded[key], weights

    def _stage(self, model: RankModel, pipeline: int, policy: str) -> tuple[Scaled, Weights]:
        key = (id(model), pipeline, policy)
        if model.blocks is None:
            return model.layouts[policy].scaled, model.weights
        count = max(2, -(-model.layers // pipeline))
        if key not in self._grown:
            self._grown[key] = grow_layout(model.layouts[policy].scaled, model.blocks, count)
        return self._grown[key], model.weights.with_blocks(count)


def exposed_s(traffic: Sequence[Traffic], time: StepTime, accumulation: int) -> float:
    """Return the seconds per step that a rank waits for communication.

    Communication that overlaps a pass costs only the time by which it exceeds the pass. The first exchange of each pass
    is not overlapped.
    """
    total = sum(each.wait_s for each in traffic if not each.hides)
    busy = {
        "forward": time.by_phase.get("forward", 0.0),
        "backward": time.by_phase.get("backward", 0.0) + time.by_phase.get("checkpointing", 0.0),
    }
    for pass_, computing in busy.items():
        rows = [each for each in traffic if each.hides and each.pass_ == pass_]
        first = max((each.wait_s / each.calls * accumulation for each in rows if each.calls), default=0.0)
        total += max(first, sum(each.wait_s for each in rows) - computing)
    return total


def layouts_of(ranks: int, many: ManyRanks) -> list[Degrees]:
    """Return all degrees whose product is ``ranks``; those that leave ranks without samples only if no others exist."""
    found = list(_degrees(ranks, many.models))
    return [each for each in found if each.data <= many.size] or found


def is_trainable(recipe: Recipe, degrees: Degrees, shape: ModelShape) -> bool:
    """Return True if the engine can train the recipe in this layout, which replaces the recipe's layout."""
    parallel = recipe.parallel.model_copy(update={axis: getattr(degrees, axis) for axis in AXES})
    model = recipe.model.model_copy(update={"activation_checkpointing": "none"})
    variant = recipe.model_copy(update={"parallel": parallel, "model": model})
    try:
        solve_layout(variant, degrees.ranks)
        require_fitting(variant, degrees, shape)
    except RecipeError:
        return False
    return True


def _degrees(ranks: int, models: Mapping[tuple[int, int], RankModel]) -> Iterator[Degrees]:
    for (tensor, context), model in models.items():
        if context > 1:  # with parts of sequences, there are no shards or stages
            if ranks % (tensor * context) == 0:
                yield Degrees(replicate=ranks // (tensor * context), tensor=tensor, context=context)
            continue
        for pipeline in _divisors(model.layers or 1):
            if (
                ranks % (tensor * pipeline)
                or pipeline > MAX_PIPELINE_STAGES
                or (pipeline > 1 and model.layers < 2 * pipeline)
            ):
                continue
            data = ranks // (tensor * pipeline)
            shards = _divisors(data) if pipeline == 1 else sorted({1, data})
            for shard in shards:
                yield Degrees(replicate=data // shard, shard=shard, tensor=tensor, pipeline=pipeline)


def best_of(options: Sequence[Placement]) -> Placement:
    """Return the simplest of the placements that fit and are about as fast as the fastest.

    Of equally simple ones, return the one with the least communication. If none fits, return the one with the lowest
    peak.
    """
    fitting = [option for option in options if option.fits]
    if not fitting:
        return min(options, key=lambda option: (option.peak_bytes, option.complexity))
    enough = min(option.step_s for option in fitting) * (1 + STEP_TIME_TOLERANCE)
    return min(
        (each for each in fitting if each.step_s <= enough),
        key=lambda each: (each.complexity, each.exchange_s, each.peak_bytes),
    )


def runners_up(options: Sequence[Placement], best: Placement, count: int = 5) -> list[Placement]:
    """Return the best placements with other degrees: first those that fit, by time, then the rest, by peak memory."""
    by_degrees: dict[Degrees, list[Placement]] = {}
    for option in options:
        if option.degrees != best.degrees:
            by_degrees.setdefault(option.degrees, []).append(option)
    each = [best_of(group) for group in by_degrees.values()]
    each.sort(key=lambda option: (not option.fits, option.step_s if option.fits else option.peak_bytes))
    kinds: dict[tuple[str, ...], Placement] = {}
    for option in each:  # the first of each set of axes, so that the list is diverse
        kinds.setdefault(_axes(option.degrees), option)
    rest = [option for option in each if option not in kinds.values()]
    chosen = [*kinds.values(), *rest][:count]
    return [option for option in each if option in chosen]


def against(option: Placement, best: Placement) -> str:
    """Return the cost of an option compared with the best one, as text."""
    ratio = option.step_s / best.step_s
    if ratio > 2:
        return f"{ratio:.2g} times as long{'' if option.fits else ', and does not fit'}"
    time = slower_or_faster(ratio)
    return time if option.fits else f"{time}, but does not fit"


def choice_notes(best: Placement, options: Sequence[Placement], device: Device) -> tuple[Note, ...]:
    """Return the reasons for the best layout: its memory, compared with full copies, its waits and micro-batch."""
    reasons = [f"{human_bytes(best.peak_bytes)} of {human_bytes(device.usable_bytes)} a rank"]
    copies = [option for option in options if option.degrees.ranks == option.degrees.replicate]
    if copies and best not in copies:
        least = best_of(copies)
        verdict = against(least, best)
        reasons.append(f"copies of the full model would hold {human_bytes(least.peak_bytes)}, {verdict}")
    waits = [f"{best.exposed_s / best.step_s:.0%} of a step waits for communication"]
    if best.bubble_s:
        waits.append(f"{best.bubble_s / best.step_s:.0%} for other stages")
    same = [option for option in options if option.degrees == best.degrees and option.micro == best.micro]
    others = {option.policy: against(option, best) for option in same if option.policy != best.policy}
    again = "; ".join(f"{policy} would be {words}" for policy, words in others.items())
    return (
        Note("parallel", str(best.degrees), "; ".join([*reasons, *waits])),
        Note("micro-batch", f"{best.micro} x {best.accumulation}", f"{human_seconds(best.step_s)} a step"),
        Note("checkpointing", best.policy, again or "the model has no blocks to recompute"),
    )


def _kept_per_micro_batch(scaled: Scaled, micro: int) -> int:
    small, large = (sum(trace.kept.values()) for trace in (scaled.small, scaled.large))
    each = (large - small) / (scaled.sizes[1] - scaled.sizes[0])
    return max(0, round(small + each * (micro - scaled.sizes[0])))


def _axes(degrees: Degrees) -> tuple[str, ...]:
    return tuple(axis for axis in AXES if getattr(degrees, axis) > 1)


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


KindBytes = Mapping[Kind, float]


@dataclass(frozen=True)
class Blocks:
    """The two traced blocks, by path, and the bytes of one block's weights.

    ``trained_fraction`` is (trained weights of one block) / (trained weights of the traced model).
    """

    first: str
    second: str
    weight_bytes: int
    trained_fraction: float


def grow_layout(scaled: Scaled, blocks: Blocks, count: int) -> Scaled:
    """Apply ``grow_trace`` to both traces."""
    return replace(scaled, small=grow_trace(scaled.small, blocks, count), large=grow_trace(scaled.large, blocks, count))


def grow_trace(trace: Trace, blocks: Blocks, count: int) -> Trace:
    """Return the trace of a model with ``count`` blocks, two or more.

    The additional blocks are inserted between the two traced blocks. Until the second block ends its backward pass,
    each additional block holds the bytes that the second block added in its forward pass; after that, the bytes that
    remain of the second block. Peaks within the additional blocks lie between the peaks within the two traced blocks.
    """
    more = count - 2
    if not more:
        return trace
    begin, end = _span(trace.moments, blocks.second)
    forward, after = _added_bytes(trace.moments, blocks)
    kept: dict[Kind, float] = {**forward, "temporaries": 0}  # autocast's copies end with the forward pass
    weight_ratio = 1 + more * blocks.trained_fraction  # trained weights / those of the traced model
    moments = []
    for index, moment in enumerate(trace.moments):
        held: dict[Kind, float] = dict(moment.held)
        added: KindBytes = {} if index < begin else kept if index <= end else after
        if moment.phase == "forward" and index >= begin:
            added = forward
        if moment.phase == "update":
            added = {"gradients": after.get("gradients", 0) if held.get("gradients") else 0}
            held["temporaries"] = held.get("temporaries", 0) * weight_ratio
        for kind, size in added.items():
            held[kind] = max(0, held.get(kind, 0) + more * size)
        held["weights"] = held.get("weights", 0) + more * blocks.weight_bytes
        held["optimizer"] = held.get("optimizer", 0) * weight_ratio
        moments.append(replace(moment, held={kind: round(size) for kind, size in held.items()}))
    work = tuple(_grow_work(each, blocks, count, weight_ratio) for each in trace.work)
    kept_bytes = {path: size * (count - 1 if _within(path, blocks.second) else 1) for path, size in trace.kept.items()}
    return replace(trace, moments=tuple(moments), work=work, kept=kept_bytes)


def _within(module: str, block: str) -> bool:
    return f"{module}.".startswith(f"{block}.")


def _span(moments: Sequence[Moment], block: str) -> tuple[int, int]:
    """Return the index of the first moment in the block's forward pass and of the last in its backward pass."""
    inside = [index for index, moment in enumerate(moments) if _within(moment.module, block)]
    return inside[0], inside[-1]


def _added_bytes(moments: Sequence[Moment], blocks: Blocks) -> tuple[KindBytes, KindBytes]:
    """Return the bytes that a block adds by the end of its forward pass, and by the end of its backward pass."""
    forward = _difference(_last(moments, blocks.first, forward=True), _last(moments, blocks.second, forward=True))
    backward = _difference(_last(moments, blocks.second, forward=False), _last(moments, blocks.first, forward=False))
    kinds = {*forward, *backward} - {"temporaries"}
    return forward, {kind: forward.get(kind, 0) + backward.get(kind, 0) for kind in kinds}


def _last(moments: Sequence[Moment], block: str, *, forward: bool) -> Moment:
    found = [each for each in moments if _within(each.module, block) and (each.phase == "forward") is forward]
    return found[-1]


def _difference(one: Moment, other: Moment) -> KindBytes:
    return {kind: other.held.get(kind, 0) - one.held.get(kind, 0) for kind in {*one.held, *other.held}}


def _grow_work(work: Work, blocks: Blocks, count: int, weight_ratio: float) -> Work:
    if _within(work.module, blocks.second):
        times: float = count - 1
    elif work.phase in PASSES:
        return work
    else:
        times = weight_ratio
    return replace(
        work, calls=round(work.calls * times), flops=round(work.flops * times), bytes=round(work.bytes * times)
    )
