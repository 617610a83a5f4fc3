"""Traces the part of a model that one rank computes: the weights, layers and activations that a layout gives to it.

A model with equal blocks is traced with two of them, and ``plan.many_ranks.grow_trace`` adds the others. For tensor
parallelism, the layers are reduced to the part of one rank, so a trace shows the memory of that rank. The communication
between ranks is counted at the divided layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.assembly.assemble import Parts
from trainwright.assembly.checkpointing import find_blocks
from trainwright.assembly.stage_plan import stage_plan
from trainwright.distributed.context_parallel import part_of
from trainwright.distributed.sharding import units_of
from trainwright.distributed.split_plan import SplitPlan, model_shape, split_plan
from trainwright.engine.loss import loss_of_part
from trainwright.errors import UsageError
from trainwright.plan.amounts import human_bytes
from trainwright.plan.batch import solve_batch
from trainwright.plan.devices import Device
from trainwright.plan.make import Note
from trainwright.plan.many_ranks import (
    DIVIDED_POLICIES,
    Blocks,
    ManyRanks,
    Placement,
    RankModel,
    best_of,
    choice_notes,
    is_trainable,
    layouts_of,
)
from trainwright.plan.parallel import AXES, Degrees, solve_layout
from trainwright.plan.splits import ModelShape, require_fitting
from trainwright.plan.trace.blueprint import Blueprint, make_blueprint
from trainwright.plan.trace.fake_tensors import fake_tensors
from trainwright.plan.trace.layouts import POLICIES, LayoutSurvey
from trainwright.plan.trace.operator_call import tensors_in
from trainwright.plan.trace.run_forecast import precision_on
from trainwright.plan.traffic import Activations
from trainwright.plan.units import Unit, Weight, Weights
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.schema import TensorStyle

TRACED_BLOCKS = 2
GATHERS_PER_BLOCK = 2
"""Tensors that context parallelism gathers in each block: keys and values."""
MIN_SEQUENCE_PART = 2048
"""The shortest part of a sequence that ``auto`` considers, in positions. Shorter parts leave little computation between
exchanges; the parts in the training of Llama 3 had 8,192 positions (arXiv:2407.21783, 3.3.2).
"""


Sizes = dict[str, list[int]]


@dataclass
class ExchangeLog:
    """Bytes that one step of the traced model exchanges for divided layers: for each module, the bytes of each call.

    A second call comes from activation checkpointing. ``stream`` has the outputs of blocks. ``parts`` has the keys and
    values that context parallelism gathers, in call order.
    """

    forward: Sizes = field(default_factory=dict)
    backward: Sizes = field(default_factory=dict)
    gathered: Sizes = field(default_factory=dict)
    stream: Sizes = field(default_factory=dict)
    parts: list[int] = field(default_factory=list)

    def clear(self) -> None:
        """Reset for another trace."""
        for each in (self.forward, self.backward, self.gathered, self.stream):
            each.clear()
        self.parts.clear()

    def activations(self, samples: int, paths: Sequence[str]) -> Activations:
        """Return the bytes per sample: for the second block in ``paths``, and for modules outside of all blocks."""
        second, blocks = (f"{paths[1]}.",), tuple(f"{path}." for path in paths)

        def within(sizes: Sizes, call: int) -> tuple[int, ...]:
            return tuple(
                calls[call] // samples for name, calls in sizes.items() if name.startswith(second) and len(calls) > call
            )

        def outside(sizes: Sizes) -> tuple[int, ...]:
            return tuple(calls[0] // samples for name, calls in sizes.items() if not name.startswith(blocks))

        each = GATHERS_PER_BLOCK if self.parts else 0  # two blocks were traced, one after the other
        again = self.parts[2 * each : 3 * each]
        return Activations(
            context_forward=tuple(size // samples for size in self.parts[:each]),
            context_again=tuple(size // samples for size in again),
            stream=max((calls[0] for calls in self.stream.values()), default=0) // samples,
            tensor_forward=within(self.forward, 0),
            tensor_again=within(self.forward, 1),
            tensor_backward=within(self.backward, 0),
            once_forward=outside(self.forward),
            once_backward=outside(self.backward),
            once_gathered=outside(self.gathered),
        )


def survey_ranks(loaded: Loaded, device: Device, *, parts: Parts | None = None, decides: bool = False) -> ManyRanks:
    """Trace what ranks compute of a recipe, once for all layouts on ``device``.

    For tensor and context parallelism, traces all powers of two that fit model, sequences and machine, and the recipe's
    degree. If ``decides``, an axis for which the recipe sets a degree is traced with this degree only.
    """
    recipe, blueprint = loaded.recipe, make_blueprint(loaded, parts)
    size = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation).size
    survey = LayoutSurvey(blueprint, device, precision_on(recipe, device))
    chunked = blueprint.chunked(recipe.batch.micro if isinstance(recipe.batch.micro, int) else 1, device)
    plain = replace(survey, blueprint=replace(blueprint, loaded=_without_chunks(loaded)), caches=False)
    shape = shape_of(blueprint)
    copies = rank_model(survey, POLICIES, chunked=chunked)
    is_same = survey.precision in ("fp32", "tf32") and not any(each.chunked for each in copies.layouts.values())
    one = copies if is_same else rank_model(plain, POLICIES)
    models = {(1, 1): one}
    powers = [2**power for power in range(1, device.node.ranks.bit_length())]
    for each in _traced_degrees(recipe.parallel.tensor, powers, decides):
        if shape.cuts and one.blocks and all(cut.size % each == 0 for cut in shape.cuts):
            models[each, 1] = rank_model(plain, DIVIDED_POLICIES, tensor=each)
    parallel = recipe.parallel
    beside = {1, parallel.tensor} if isinstance(parallel.tensor, int) else {1}  # combining every degree would take long
    for each in _traced_degrees(parallel.context, powers, decides):
        is_written = each == parallel.context
        if one.blocks and (is_written or _has_long_parts(plain.blueprint, shape, each)):
            with nullcontext() if is_written else suppress(UsageError):  # such as for a loss that returns a mean
                for degree in sorted(tensor for tensor in beside if (tensor, 1) in models):
                    models[degree, each] = rank_model(plain, DIVIDED_POLICIES, tensor=degree, context=each)
    return ManyRanks(copies, models, device, size, survey.precision, shape)


def _traced_degrees(setting: int | str, powers: Sequence[int], decides: bool) -> list[int]:
    written = {setting} if isinstance(setting, int) else set[int]()
    return sorted((written if decides and written else {*powers, *written}) - {1})


def _has_long_parts(blueprint: Blueprint, shape: ModelShape, ranks: int) -> bool:
    """Return True if samples are pairs of sequences that ``ranks`` ranks can divide into long parts."""
    sample = blueprint.sample
    if not shape.takes_parts or not isinstance(sample, tuple | list) or len(sample) != 2:
        return False
    lengths = {each.shape[0] if isinstance(each, Tensor) and each.dim() == 1 else 0 for each in sample}
    (length,) = lengths if len(lengths) == 1 else (0,)
    return length % ranks == 0 and length // ranks >= MIN_SEQUENCE_PART


class _LastPart:
    """The sequence part of the last of ``ranks`` ranks; the other parts are assumed to equal it."""

    def __init__(self, ranks: int, gathered: list[int]) -> None:
        self._ranks, self._gathered = ranks, gathered

    def start(self, length: int) -> int:
        return (self._ranks - 1) * length

    def cut(self, x: Tensor) -> Tensor:
        return part_of(x, self._ranks - 1, self._ranks)

    def before(self, x_BHTK: Tensor) -> Tensor:
        whole = torch.cat([x_BHTK] * self._ranks, 2)
        self._gathered.append(whole.nbytes)
        return whole


def _without_chunks(loaded: Loaded) -> Loaded:
    """Return the recipe without chunked loss, which ranks that divide weights do not support."""
    loss = loaded.recipe.loss.model_copy(update={"chunked": False})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"loss": loss}))


def shape_of(blueprint: Blueprint) -> ModelShape:
    """Return the limits that a model sets for its layouts; ``cuts`` is empty without a plan for tensor parallelism."""
    parallel = blueprint.loaded.recipe.parallel
    with fake_tensors():
        model = blueprint.model(torch.device("cpu"))
        table = stage_plan(model, parallel.stages)
        try:
            return model_shape(model, split_plan(model, parallel.plan), table)
        except UsageError:
            return replace(model_shape(model, {}, table), cuts=())


def rank_model(
    survey: LayoutSurvey, policies: Sequence[str], *, tensor: int = 1, context: int = 1, chunked: bool = False
) -> RankModel:
    """Return the part of a survey's model that each of ``tensor`` ranks computes, before sharding.

    If ``context`` is above 1, this rank computes the last part of each sequence. Costs two traces for each policy.
    """
    blueprint, exchanged = survey.blueprint, ExchangeLog()
    divided = partial(_divide_layers, tensor=tensor, styles=blueprint.loaded.recipe.parallel.plan, exchanged=exchanged)
    if context > 1:
        part = _LastPart(context, exchanged.parts)
        divided = partial(_divide_sequences, divided, part)
        blueprint = replace(blueprint, loss=loss_of_part(blueprint.loss, part.cut))
    with fake_tensors():
        model = blueprint.model(torch.device("cpu"))
        divided(model)
        paths, weights = _equal_blocks(model), weights_of(model)
        short = blueprint.bare_model(torch.device("cpu"))
        is_long = len(paths) > TRACED_BLOCKS and _shorten(short)
    if not is_long:
        layouts = {each.checkpointing: each for each in survey.layouts_of(policies, chunked=chunked)}
        return RankModel(weights, dict.fromkeys(layouts, Activations()), layouts, None)
    shorter = replace(survey, blueprint=replace(blueprint, live=short, part=divided))
    samples = shorter.blueprint.sizes(chunked=chunked)[1]
    layouts, activations = {}, {}
    for policy in policies:
        layouts[policy] = shorter.layout(policy, chunked=chunked)
        activations[policy] = exchanged.activations(samples, paths)
    trained = weights.blocks.whole_bytes(trained=True)
    fraction = trained / max(1, weights.with_blocks(TRACED_BLOCKS).whole_bytes(trained=True))
    averages = trained if blueprint.loaded.recipe.model.keeps_average else 0
    blocks = Blocks(paths[0], paths[1], weights.blocks.whole_bytes() + averages, fraction)
    return RankModel(weights, activations, layouts, blocks)


def weights_of(model: nn.Module) -> Weights:
    """Return the parameters of a model by sharding unit: the equal blocks, other units, and the root."""
    paths = set(_equal_blocks(model))
    names = {id(module): name for name, module in model.named_modules()}
    units = units_of(model)
    inside = {id(each) for unit in units for each in unit.parameters()}
    root = Unit(tuple(_weight(each) for each in model.parameters() if id(each) not in inside))
    blocks = [unit for unit in units if names[id(unit)] in paths]
    others = tuple(Unit(tuple(map(_weight, unit.parameters()))) for unit in units if unit not in blocks)
    equal = Unit(tuple(map(_weight, blocks[0].parameters())), len(blocks)) if blocks else Unit((), 0)
    return Weights(root, equal, others)


def _weight(parameter: Tensor) -> Weight:
    rows = parameter.shape[0] if parameter.dim() else 1
    return Weight(rows, parameter.numel() // max(1, rows), parameter.element_size(), parameter.requires_grad)


def _equal_blocks(model: nn.Module) -> list[str]:
    """Return the paths of the repeated blocks, or none if they are not equal."""
    try:
        blocks = find_blocks(model)
    except UsageError:
        return []
    shapes = {tuple((each.shape, each.dtype, each.requires_grad) for each in block.parameters()) for block in blocks}
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in blocks] if len(shapes) == 1 else []


def _shorten(model: nn.Module) -> bool:
    """Remove all but two of the blocks; return True if the model has a list from which they can be removed."""
    paths = _equal_blocks(model)
    holder = model.get_submodule(paths[0].rpartition(".")[0]) if paths else None
    if not isinstance(holder, nn.ModuleList | nn.Sequential):
        return False
    del holder[TRACED_BLOCKS:]
    return True


def _divide_layers(model: nn.Module, *, tensor: int, styles: Mapping[str, TensorStyle], exchanged: ExchangeLog) -> None:
    """Reduce the layers to the part of one of ``tensor`` ranks, and record what ranks exchange in a new trace."""
    exchanged.clear()
    for path in _equal_blocks(model):
        model.get_submodule(path).register_forward_hook(partial(_record_output, path, exchanged.stream))
    if tensor > 1:
        _divide(model, split_plan(model, styles), tensor, exchanged)


def _divide_sequences(divided: Callable[[nn.Module], None], part: _LastPart, model: Any) -> None:
    divided(model)
    if not hasattr(model, "take_part"):
        raise UsageError(f"{type(model).__name__} cannot compute a part of a sequence", remedy="use parallel.tensor")
    model.take_part(part)


def _divide(model: nn.Module, plan: SplitPlan, ranks: int, exchanged: ExchangeLog) -> None:
    smaller: dict[int, nn.Parameter] = {}
    for name, style in plan.items():
        module = model.get_submodule(name)
        if style == "input":
            module.register_forward_pre_hook(partial(_record_input, name, exchanged.backward))
        if style not in ("column", "column_gathered", "row") or not isinstance(module, nn.Linear | nn.Embedding):
            continue
        rows = (style == "row") == isinstance(module, nn.Embedding)
        for key, weight in list(module.named_parameters(recurse=False)):
            if id(weight) not in smaller and (rows or weight.dim() > 1):
                smaller[id(weight)] = _shrink(weight, 0 if rows else 1, ranks)
            setattr(module, key, smaller.get(id(weight), weight))
        if style == "row":
            module.register_forward_hook(partial(_record_output, name, exchanged.forward))
        elif not any(plan.get(above) == "input" for above in _above(name)):
            module.register_forward_pre_hook(partial(_record_input, name, exchanged.backward))
        if style == "column_gathered":
            module.register_forward_hook(partial(_gather, name, exchanged.gathered, ranks))


def _shrink(weight: nn.Parameter, dim: int, ranks: int) -> nn.Parameter:
    shape = list(weight.shape)
    shape[dim] = -(-shape[dim] // ranks)
    return nn.Parameter(weight.detach().new_empty(shape), requires_grad=weight.requires_grad)


def _above(name: str) -> Iterable[str]:
    while name := name.rpartition(".")[0]:
        yield name


def _record_output(name: str, sizes: Sizes, _module: nn.Module, _inputs: object, output: object) -> None:
    sizes.setdefault(name, []).append(next((each.nbytes for each in tensors_in((output,))), 0))


def _record_input(name: str, sizes: Sizes, _module: nn.Module, inputs: object) -> None:
    """Record the size of the input; its gradient has the same size."""
    sizes.setdefault(name, []).append(next((each.nbytes for each in tensors_in((inputs,))), 0))


def _gather(name: str, sizes: Sizes, ranks: int, _module: nn.Module, _inputs: object, output: Tensor) -> Tensor:
    whole = torch.cat([output] * ranks, -1)
    sizes.setdefault(name, []).append(whole.nbytes)
    return whole


def spread(
    loaded: Loaded, device: Device, ranks: int, *, parts: Parts | None = None
) -> tuple[Placement, tuple[Note, ...]]:
    """Return the layout of a recipe on ``ranks`` of a device, and the reasons. Fixed degrees are kept.

    Raises UsageError when no layout fits the memory.
    """
    many = survey_ranks(loaded, device, parts=parts, decides=True)
    if parts is not None and not _may_have_stages(parts):
        many = replace(many, shape=replace(many.shape, blocks=None))
    options = options_of(many, loaded.recipe, ranks)
    best = best_of(options)
    if not best.fits:
        raise UsageError(
            f"no layout of {ranks} ranks fits: {best.degrees} holds {human_bytes(best.peak_bytes)} a rank, and "
            f"{human_bytes(device.usable_bytes)} are usable",
            remedy=f"`trainwright plan RECIPE --ranks {ranks}` shows what each layout holds; or start more ranks",
        )
    return best, choice_notes(best, options, device)


def _may_have_stages(parts: Parts) -> bool:
    """Return True if the user's objects work with pipeline stages: a loss without weights, and batches of one size."""
    batches = parts.train.own_batches
    trains = isinstance(parts.loss, nn.Module) and any(True for _ in parts.loss.parameters())
    return not trains and not (batches is not None and batches.ready)


def options_of(many: ManyRanks, recipe: Recipe, ranks: int) -> list[Placement]:
    """Return the layouts that a recipe allows and that the engine can train."""
    zero = recipe.parallel.zero
    setting = recipe.model.activation_checkpointing
    batch = recipe.batch
    found = []
    for degrees in _degrees(many, recipe, ranks):
        policies = [each for each in many.policies(degrees) if each == setting] or many.policies(degrees)
        if batch.micro == "auto":
            found += [each for each in many.all([degrees], zero) if each.policy in policies]
        else:
            micro = solve_batch(many.size, batch.micro, batch.accumulation, ranks=degrees.data).micro
            found += [many.place(degrees, zero, policy, micro) for policy in policies]
    return found


def _degrees(many: ManyRanks, recipe: Recipe, ranks: int) -> list[Degrees]:
    parallel = recipe.parallel
    if not parallel.open_axes:
        degrees = solve_layout(recipe, ranks)
        require_fitting(recipe, degrees, many.shape)
        return [degrees]
    candidates = [
        each
        for each in layouts_of(ranks, many)
        if all(getattr(parallel, axis) in ("auto", getattr(each, axis)) for axis in AXES)
    ]
    return [each for each in candidates if is_trainable(recipe, each, many.shape)] or [solve_layout(recipe, ranks)]
