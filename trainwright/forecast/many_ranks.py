"""What one rank computes of a model, traced: the weights, layers and activations that a layout leaves to it.

A model with equal blocks is traced with two of them, and ``plan.grow`` adds the others. For tensor parallelism the
layers are made as small as a rank has them, so a trace shows what that rank holds; what ranks exchange is counted from
the layers that they divide.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from trainwright.build.checkpointing import find_blocks
from trainwright.errors import UsageError
from trainwright.forecast.fake_tensors import fake_tensors
from trainwright.forecast.layouts import LayoutSurvey
from trainwright.plan.grow import Blocks
from trainwright.plan.many_ranks import RankModel
from trainwright.plan.traffic import Activations
from trainwright.plan.units import Unit, Weight, Weights

TRACED_BLOCKS = 2


@dataclass
class Seen:
    """Bytes of what modules took and made in the last trace, by name."""

    took: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)


def rank_model(survey: LayoutSurvey, policies: Sequence[str]) -> RankModel:
    """The model of a survey as each rank has it that holds whole tensors. Costs two traces for each policy."""
    blueprint = survey.blueprint
    with fake_tensors():
        model = blueprint.model(torch.device("cpu"))
        paths, weights = _equal_blocks(model), weights_of(model)
    if len(paths) <= TRACED_BLOCKS:
        layouts = {each.checkpointing: each for each in survey.layouts(policies)}
        one_unit = Weights(Unit((*weights.root.weights, *weights.blocks.weights * weights.blocks.times)))
        return RankModel(weights if paths else one_unit, Activations(), layouts, None)
    seen = Seen()
    shorter = replace(blueprint, part=partial(_shorten, seen=seen))
    layouts = {each.checkpointing: each for each in replace(survey, blueprint=shorter).layouts(policies)}
    chunked = next(iter(layouts.values())).chunked
    samples = shorter.sizes(chunked=chunked)[1]
    activations = Activations(stream=max(seen.made.values(), default=0) // samples)
    trained = weights.blocks.whole_bytes(trained=True)
    both = weights.with_blocks(TRACED_BLOCKS).whole_bytes(trained=True)
    share = trained / both if both else 0.0
    averages = trained if blueprint.loaded.recipe.model.ema is not None else 0
    blocks = Blocks(paths[0], paths[1], weights.blocks.whole_bytes() + averages, share)
    return RankModel(weights, activations, layouts, blocks)


def weights_of(model: nn.Module) -> Weights:
    """The parameters of a model by unit: each block, and the root with the rest. A tied one counts once."""
    blocks = [model.get_submodule(path) for path in _equal_blocks(model)]
    inside = {id(each) for block in blocks for each in block.parameters()}
    root = Unit(tuple(_weight(each) for each in model.parameters() if id(each) not in inside))
    if not blocks:
        return Weights(root)
    return Weights(root, Unit(tuple(map(_weight, blocks[0].parameters())), len(blocks)))


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


def _shorten(model: nn.Module, seen: Seen) -> None:
    """Leaves two of the blocks, and notes what they make."""
    paths = _equal_blocks(model)
    holder = model.get_submodule(paths[0].rpartition(".")[0])
    assert isinstance(holder, nn.ModuleList | nn.Sequential)
    del holder[TRACED_BLOCKS:]
    for path in paths[:TRACED_BLOCKS]:
        model.get_submodule(path).register_forward_hook(partial(_note, path, seen))


def _note(path: str, seen: Seen, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
    first = next(iter(_tensors(output)), None)
    seen.made[path] = first.nbytes if first is not None else 0


def _tensors(value: object) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
