"""Pipeline stages of a model that was not written for them, by the names of its modules.

The plan is a table from patterns of module names to ``first``, ``block`` or ``last``. It comes from the recipe, or from
``transformers``. A stage is the model itself, with modules of other stages replaced by pass-through modules.
``StagedModel.require_same`` tests that all stages together compute the same as the full model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.checkpoint.rng import preserved_rng
from trainwright.checkpoint.weights import fill_zeros
from trainwright.distributed.split_plan import StagePlan, names_like
from trainwright.errors import UsageError, text_of
from trainwright.recipe.schema import StageStyle

TRANSFORMERS_STAGES: Mapping[str, Mapping[str, StageStyle]] = {
    "gpt2": {
        "transformer.wte": "first",
        "transformer.wpe": "first",
        "transformer.drop": "first",
        "transformer.h.*": "block",
        "transformer.ln_f": "last",
        "lm_head": "last",
    }
}
"""Tables by ``model_type``, for models of ``transformers`` without a ``_pp_plan``."""
MAX_POSITIONS_TRIED = 16  # positions of a sequence in the test of the stages
MAX_RELATIVE_DIFFERENCE = 1e-5
"""Maximum difference of the stages from the full model, relative to the largest output. Only rounding may differ."""
_EXAMPLE_TABLE = "parallel.stages: {embed: first, 'layers.*': block, norm: last, head: last}"
_SHARD_REMEDY = "or use parallel.shard, which divides any model"


def stage_plan(model: nn.Module, requested: Mapping[str, StageStyle]) -> StagePlan | None:
    """Return the ``requested`` plan, or the plan from ``transformers``.

    Returns None if there is no plan, or the model itself defines its stages. Raises UsageError if a requested pattern
    matches nothing, nothing is divided, or a weight is in no part or in two.
    """
    if hasattr(model, "stage_ends") and not requested:
        return None
    table = requested or _transformers_table(model)
    if not table:
        return None
    found: dict[StageStyle, list[str]] = {"first": [], "block": [], "last": []}
    for pattern, part in table.items():
        found[part] += names_like(pattern, model, "parallel.stages" if requested else None)
    plan = StagePlan(tuple(found["first"]), tuple(found["block"]), tuple(found["last"]))
    if not plan.blocks:
        raise UsageError("parallel.stages divides nothing: it names no block", remedy=f"write {_EXAMPLE_TABLE}")
    _require_each_weight_once(model, plan)
    return plan


def _transformers_table(model: Any) -> Mapping[str, StageStyle]:
    """Return the table of a model of ``transformers``: a module that gets ids or embeddings as input is ``first``."""
    kind = str(getattr(getattr(model, "config", None), "model_type", None))
    if kind in TRANSFORMERS_STAGES:
        return TRANSFORMERS_STAGES[kind]
    plan: Mapping[str, Sequence[Sequence[str]]] = getattr(model, "_pp_plan", None) or {}
    modules, found = dict(model.named_modules()), dict[str, StageStyle]()
    for name, (inputs, _) in plan.items():
        is_list = isinstance(modules.get(name), nn.ModuleList)
        is_first = {"input_ids", "inputs_embeds"} & {*inputs}
        found[f"{name}.*" if is_list else name] = "block" if is_list else "first" if is_first else "last"
    return found


def _require_each_weight_once(model: nn.Module, plan: StagePlan) -> None:
    """Raise UsageError unless each weight is in exactly one part.

    A weight in no part would be trained separately on every stage.
    """
    parts = [f"{name}." for name in (*plan.first, *plan.blocks, *plan.last)]
    for name, _ in model.named_parameters():
        places = [part[:-1] for part in parts if name.startswith(part)]
        if len(places) != 1:
            where = f"in two parts, {places[0]} and {places[1]}" if places else "in no part"
            raise UsageError(
                f"parallel.stages: the weight {name} is {where}, and each must be in one",
                remedy=f"name its module first, block or last, as in {_EXAMPLE_TABLE}",
            )


class _Elsewhere(nn.Module):
    """Stands in for a module of another stage: passes its first input on.

    An embedding of other inputs, such as positions, returns zeros, because the first stage has added it already.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.width = module.embedding_dim if isinstance(module, nn.Embedding) else None

    def forward(self, x: Tensor, *_more: object, **_named: object) -> Tensor:
        if x.is_floating_point():
            return x
        if self.width is None:
            raise ValueError(f"a module of another stage is called with {x.dtype}, not with the input of the stage")
        return torch.zeros(*x.shape, self.width, device=x.device)


class StagedModel:
    """A model that is divided by a plan. Call ``require_same`` before ``keep`` divides it."""

    def __init__(self, model: nn.Module, plan: StagePlan) -> None:
        self.model, self.plan = model, plan
        self._takes_embedded = "inputs_embeds" in signature(type(model).forward).parameters
        self._made: type[Any] | None = None

    def require_same(self, inputs: Tensor, shares: Sequence[Sequence[int]]) -> None:
        """Run the stages one after the other, each with its part of the blocks.

        Raises UsageError if the result differs from the full model's.
        """
        if not inputs.is_floating_point() and inputs.dim() > 1:
            inputs = inputs[:, :MAX_POSITIONS_TRIED]
        with torch.no_grad(), preserved_rng(), ready_to_try(self.model):
            try:
                made = self.model(inputs)
                self._made = None if isinstance(made, Tensor) else type(made)
                whole, x = _tensor_of(made), inputs
                for number, blocks in enumerate(shares):
                    ends = {"is_first": number == 0, "is_last": number == len(shares) - 1}
                    with self._without(self.plan.elsewhere(blocks, **ends)):
                        x = self._forward(x, is_first=number == 0)
            except UsageError:
                raise
            except Exception as error:
                raise self._cannot(f"a stage cannot be computed: {text_of(error, lines=1)}") from error
        difference = float((x - whole).abs().max()) if x.shape == whole.shape else float("inf")
        if not difference <= MAX_RELATIVE_DIFFERENCE * float(whole.abs().max()):
            raise self._cannot(f"the stages differ from the whole model: {difference:.2g} away")

    def keep(self, blocks: Collection[int], *, is_first: bool, is_last: bool) -> None:
        """Remove the modules that other ranks compute; the names of the rest do not change."""
        for name in self.plan.elsewhere(blocks, is_first=is_first, is_last=is_last):
            self.model.set_submodule(name, _Elsewhere(self.model.get_submodule(name)))

        def forward(_model: nn.Module, x: Tensor) -> Tensor:
            return self._forward(x, is_first=is_first)

        self.model.forward = MethodType(forward, self.model)

    def as_returned(self, output: Tensor) -> object:
        """Return the output of the last stage, in the form that the full model returns."""
        return output if self._made is None else self._made(logits=output)

    def _forward(self, x: Tensor, *, is_first: bool) -> Tensor:
        forward: Any = type(self.model).forward
        embedded = not is_first and self._takes_embedded
        return _tensor_of(forward(self.model, inputs_embeds=x) if embedded else forward(self.model, x))

    @contextmanager
    def _without(self, names: Sequence[str]) -> Iterator[None]:
        own = {name: self.model.get_submodule(name) for name in names}
        for name, module in own.items():
            self.model.set_submodule(name, _Elsewhere(module))
        try:
            yield
        finally:
            for name, module in own.items():
                self.model.set_submodule(name, module)

    def _cannot(self, why: str) -> UsageError:
        return UsageError(
            f"parallel.pipeline: {type(self.model).__name__} cannot be divided this way: {why}",
            remedy=f"let its forward be embedding, blocks one after the other, and output layer; {_SHARD_REMEDY}",
        )


def _tensor_of(made: Any) -> Tensor:
    """Return a tensor, or the logits of an output of ``transformers``."""
    found = made if isinstance(made, Tensor) else getattr(made, "logits", None)
    if not isinstance(found, Tensor):
        raise UsageError(
            f"parallel.pipeline: the model gives a {type(made).__name__}, and stages send one tensor",
            remedy=f"return a tensor, {_SHARD_REMEDY}",
        )
    return found


@contextmanager
def ready_to_try(model: nn.Module) -> Iterator[None]:
    """Context without dropout and with random weights instead of zero weights, which would hide differences.

    The random weights are the same on all ranks. The model may be divided within the context.
    """
    modes = [(module, module.training) for module in model.modules()]
    zeros = fill_zeros(model.named_parameters())
    model.eval()
    try:
        yield
    finally:
        for name in zeros:
            nn.init.zeros_(model.get_parameter(name))
        for module, mode in modes:
            module.training = mode
