"""What one rank computes of a model, traced: the weights, layers and activations that a layout leaves to it.

A model with equal blocks is traced with two of them, and ``plan.grow`` adds the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from trainwright.build.assemble import Parts
from trainwright.build.checkpointing import find_blocks
from trainwright.build.sharding import units_of
from trainwright.errors import UsageError
from trainwright.forecast.blueprint import make_blueprint
from trainwright.forecast.fake_tensors import fake_tensors
from trainwright.forecast.layouts import POLICIES, LayoutSurvey
from trainwright.forecast.run_forecast import precision_on
from trainwright.plan.batch import solve_batch
from trainwright.plan.devices import Device
from trainwright.plan.grow import Blocks
from trainwright.plan.many_ranks import ManyRanks, RankModel
from trainwright.plan.traffic import Activations
from trainwright.plan.units import Unit, Weight, Weights
from trainwright.recipe import Loaded

TRACED_BLOCKS = 2


def survey_ranks(loaded: Loaded, device: Device, *, parts: Parts | None = None) -> ManyRanks:
    """Traces what ranks compute of a recipe, once for all layouts on ``device``."""
    recipe, blueprint = loaded.recipe, make_blueprint(loaded, parts)
    size = solve_batch(recipe.batch.size, recipe.batch.micro, recipe.batch.accumulation).size
    survey = LayoutSurvey(blueprint, device, precision_on(recipe, device))
    plain = replace(survey, blueprint=replace(blueprint, loaded=_without_chunks(loaded)))
    copies = rank_model(survey, POLICIES)
    in_chunks = any(layout.chunked for layout in copies.layouts.values())
    models = {1: rank_model(plain, POLICIES) if in_chunks else copies}
    return ManyRanks(copies, models, device, size, survey.precision)


def _without_chunks(loaded: Loaded) -> Loaded:
    """Ranks that divide weights compute no loss in chunks."""
    loss = loaded.recipe.loss.model_copy(update={"chunked": False})
    return replace(loaded, recipe=loaded.recipe.model_copy(update={"loss": loss}))


def rank_model(survey: LayoutSurvey, policies: Sequence[str]) -> RankModel:
    """The model of a survey as a rank has it before sharding. Costs two traces for each policy."""
    blueprint, made = survey.blueprint, dict[str, int]()
    with fake_tensors():
        model = blueprint.model(torch.device("cpu"))
        paths, weights = _equal_blocks(model), weights_of(model)
        short = blueprint.bare_model(torch.device("cpu"))
        is_long = len(paths) > TRACED_BLOCKS and _shorten(short)
    if not is_long:
        layouts = {each.checkpointing: each for each in survey.layouts(policies)}
        return RankModel(weights, dict.fromkeys(layouts, Activations()), layouts, None)
    shorter = replace(survey, blueprint=replace(blueprint, live=short, part=partial(_noting, made)))
    chunked = shorter.blueprint.chunked(shorter.blueprint.sizes(chunked=False)[0])
    samples = shorter.blueprint.sizes(chunked=chunked)[1]
    layouts, activations = {}, {}
    for policy in policies:
        layouts[policy] = shorter.layout(policy, chunked=chunked)
        activations[policy] = Activations(stream=max(made.values(), default=0) // samples)
    trained = weights.blocks.whole_bytes(trained=True)
    share = trained / max(1, weights.with_blocks(TRACED_BLOCKS).whole_bytes(trained=True))
    averages = trained if blueprint.loaded.recipe.model.ema is not None else 0
    blocks = Blocks(paths[0], paths[1], weights.blocks.whole_bytes() + averages, share)
    return RankModel(weights, activations, layouts, blocks)


def weights_of(model: nn.Module) -> Weights:
    """The parameters of a model by unit, as they are sharded: the equal blocks, other units, and the root."""
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
    """The paths of the repeated blocks; none where they are not equal."""
    try:
        blocks = find_blocks(model)
    except UsageError:
        return []
    shapes = {tuple((each.shape, each.dtype, each.requires_grad) for each in block.parameters()) for block in blocks}
    names = {id(module): name for name, module in model.named_modules()}
    return [names[id(block)] for block in blocks] if len(shapes) == 1 else []


def _shorten(model: nn.Module) -> bool:
    """Leaves two of the blocks; returns whether the model has a list that they can be taken from."""
    paths = _equal_blocks(model)
    holder = model.get_submodule(paths[0].rpartition(".")[0]) if paths else None
    if not isinstance(holder, nn.ModuleList | nn.Sequential):
        return False
    del holder[TRACED_BLOCKS:]
    return True


def _noting(made: dict[str, int], model: nn.Module) -> None:
    """Notes the bytes that each block makes."""
    for path in _equal_blocks(model):
        model.get_submodule(path).register_forward_hook(partial(_note_output, path, made))


def _note_output(name: str, sizes: dict[str, int], module: nn.Module, inputs: object, output: object) -> None:
    sizes[name] = next((each.nbytes for each in _tensors(output)), 0)


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
