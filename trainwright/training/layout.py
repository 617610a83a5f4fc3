"""Lays a run out over its ranks: checks that the model can be divided, and divides it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from trainwright.assembly.assemble import Parts, at_recipe, build_dataset, build_model, compile_in_place
from trainwright.assembly.stage_plan import StagedModel, ready_to_try, stage_plan
from trainwright.checkpoint.shards import is_divided, local
from trainwright.data.fork import first_samples
from trainwright.data.loading import to_device
from trainwright.data.ready_batches import ReadyBatches
from trainwright.distributed import RankMesh, choose_device
from trainwright.distributed.split_plan import SplitPlan, model_shape, split_plan
from trainwright.engine.evaluate import evaluating
from trainwright.engine.loss import Batch, Loss, LossFn, as_loss_fn, loss_of_part
from trainwright.engine.rank_layout import RankLayout
from trainwright.engine.recover import is_out_of_memory
from trainwright.engine.stage_passes import PipelineStages, StagedPasses, inputs_of
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms
from trainwright.engine.token_batch import ROW_LENGTHS
from trainwright.errors import OutOfMemoryError, Problem, RecipeError, TrainwrightError, UsageError, text_of
from trainwright.models.gpt import TENSOR_PLAN
from trainwright.optim.muon import HEAD_NAMES, head_names
from trainwright.plan.make import Note
from trainwright.plan.parallel import Degrees, solve_layout
from trainwright.plan.splits import require_fitting
from trainwright.recipe import Loaded, Recipe
from trainwright.recipe.resolve import is_live
from trainwright.recipe.schema import Parallel
from trainwright.training.custom_objects import require_custom_step_fits

PIPELINE_WITHOUT_DRY_RUN = Note(
    "dry run", "none", "the stages of a pipeline are not tried beforehand: no times, no first loss"
)


def require_layout(loaded: Loaded, parts: Parts | None, ranks: int) -> None:
    """Raise RecipeError if the model cannot be laid out over ``ranks`` as the recipe requests.

    Needs no communication. A model that a recipe names is built on the meta device for this check. If that fails, the
    model is checked later, when it is built on the real device.
    """
    if parts is not None and parts.custom.advance is not None:
        require_custom_step_fits(loaded, ranks)
    with at_recipe(loaded.source, "parallel"):
        degrees = solve_layout(loaded.recipe, ranks)
    if not degrees.divides_model or loaded.recipe.parallel.open_axes:  # the plan chooses a layout that fits the model
        return
    if (model := parts.model if parts else _model_on_meta(loaded)) is not None:
        _require_shape(model, loaded, degrees)


def _require_shape(model: nn.Module, loaded: Loaded, degrees: Degrees) -> SplitPlan:
    """Return how the layers are divided. Raises RecipeError if the model does not fit the layout."""
    with at_recipe(loaded.source, "parallel"):
        if degrees.tensor > 1 and (problems := list(_of_async_tensor(loaded.recipe))):
            raise RecipeError(problems)
        if degrees.shard > 1 and degrees.expert > 1:
            from trainwright.distributed.sharding import require_several_meshes  # slow to import

            require_several_meshes()
        plan = split_plan(model, loaded.recipe.parallel.plan) if degrees.tensor > 1 else {}
        table = stage_plan(model, loaded.recipe.parallel.stages) if degrees.pipeline > 1 else None
        require_fitting(loaded.recipe, degrees, model_shape(model, plan, table))
    return plan


def _of_async_tensor(recipe: Recipe) -> Iterator[Problem]:
    """Yield what is missing to overlap the communication of tensor parallelism."""
    if not recipe.parallel.async_tensor:
        return
    for is_given, what in (
        (recipe.parallel.sequence, "parallel.sequence: torch overlaps all-gathers and reduce-scatters, not sums"),
        (recipe.model.compile, "model.compile: it is a pass of torch.compile"),
        (choose_device(recipe.device).type == "cuda", "CUDA devices that read each other's memory"),
    ):
        if not is_given:
            yield Problem("parallel.async_tensor", f"needs {what}", got="true", remedy="set this, too, or leave it out")


class LaidOut(NamedTuple):
    """The part of the model on this rank, the stages of a pipeline (if any), and notes for the plan."""

    parts: Parts
    stages: PipelineStages | None = None
    notes: tuple[Note, ...] = ()


def lay_out(parts: Parts, loaded: Loaded, mesh: RankMesh, device: torch.device) -> LaidOut:
    """Divide the model among the ranks, in place. All ranks must have the same weights before.

    Layers are divided first (tensor parallelism), then stages, and finally the remaining weights are sharded.
    """
    exchange_notes = tuple(_exchange_notes(parts.model, parts.loss, loaded.recipe.parallel, mesh))
    if mesh.degrees.ranks == mesh.degrees.replicate:
        return LaidOut(parts, notes=exchange_notes)
    if mesh.degrees.pipeline > 1:
        _require_no_weights(parts.loss)
        if loaded.recipe.optimizer.use == "muon":  # else a stage without the head takes its last layer for the head
            with at_recipe(loaded.source, "optimizer.args"):
                setattr(parts.model, HEAD_NAMES, head_names(parts.model, loaded.recipe.optimizer.args.get("head")))
    stages = _divide_layers(parts, loaded, mesh, device)
    parts = replace(parts, loss=_loss_of_part(parts.loss, parts.model, mesh))
    notes = _shard(parts.model, loaded, mesh) if mesh.degrees.shard > 1 else ()
    return LaidOut(parts, stages, (*exchange_notes, *notes))


def _exchange_notes(model: nn.Module, loss: object, ask: Parallel, mesh: RankMesh) -> Iterator[Note]:
    if ask.sync_batchnorm and mesh.sums.size > 1:
        number = len(SyncedNorms.of((model, loss), mesh.sums).norms)
        why = f"statistics of the samples of all {mesh.sums.size} ranks" if number else "the model has no BatchNorm"
        yield Note("sync_batchnorm", f"{number} BatchNorm{'' if number == 1 else 's'}", why)


def _divide_layers(parts: Parts, loaded: Loaded, mesh: RankMesh, device: torch.device) -> PipelineStages | None:
    ask = loaded.recipe.parallel
    degrees = mesh.degrees
    model = parts.model
    if not degrees.divides_model:
        return None
    from trainwright.assembly.pipeline import Stages, stage_blocks  # slow to import
    from trainwright.distributed.tensor_parallel import apply_tensor_parallelism, overlap_collectives

    plan = _require_shape(model, loaded, degrees)
    if degrees.expert > 1:
        from trainwright.distributed.expert_parallel import divide_experts

        divide_experts(model, mesh.along("expert"))
    by_table = None
    if degrees.pipeline > 1:
        _require_no_statistics(model)
        if (table := stage_plan(model, ask.stages)) is not None:
            by_table = StagedModel(model, table)
            inputs = inputs_of(parts.train.collate([_sample(parts)] * 2)).to(device)
            by_table.require_same(inputs, stage_blocks(len(table.blocks), degrees.pipeline))
    if degrees.tensor > 1:
        if ask.async_tensor:
            overlap_collectives(mesh.along("tensor"))
        divide = partial(apply_tensor_parallelism, model, mesh.along("tensor"), plan, sequence=ask.sequence)
        if getattr(model, "tensor_plan", None) is TENSOR_PLAN and not ask.plan:
            divide()
        else:
            batch = to_device(parts.train.collate([_sample(parts)] * 2), device)
            divide_and_try(model, divide, as_loss_fn(parts.loss), batch, degrees.tensor)
    if degrees.pipeline == 1:
        return None
    return Stages(model, mesh.along("pipeline").get_group(), ask.schedule, device, by_table)


def _sample(parts: Parts) -> object:
    """Return one sample for checking a division of the model."""
    dataset = parts.train.dataset
    if isinstance(dataset, ReadyBatches):
        return dataset.first_row()
    sample = next(first_samples(dataset, 1) if hasattr(dataset, "__getitem__") else iter(dataset), None)
    if sample is None:
        raise UsageError(
            "parallel: the data set is empty, and one sample is needed to check the layout", remedy="check dataset[0]"
        )
    return sample


def _require_no_weights(loss: object) -> None:
    if isinstance(loss, nn.Module) and any(True for _ in loss.parameters()):
        raise UsageError(
            f"parallel.pipeline: the loss is a {type(loss).__name__} with weights, and only the last stage computes "
            "it, so the other stages would never train their copies",
            remedy="move these weights into the last layers of the model, or leave parallel.pipeline out",
        )


def _require_no_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "track_running_stats", False):
            raise UsageError(
                f"parallel.pipeline: {name} is a {type(module).__name__}. torch infers the shapes between stages by a "
                "pass over uninitialized memory, which its running statistics would record",
                remedy="use GroupNorm or LayerNorm, or leave parallel.pipeline out",
            )


def _shard(model: nn.Module, loaded: Loaded, mesh: RankMesh) -> tuple[Note, ...]:
    from trainwright.distributed.sharding import shard_model, units_of

    degrees, zero = mesh.degrees, loaded.recipe.parallel.zero
    if degrees.pipeline > 1 and (single := [name for name, each in model.named_parameters() if each.dim() == 0]):
        raise UsageError(
            f"{single[0]} is 0-dimensional, so it cannot be sharded, and stages do not sum unsharded gradients",
            remedy="make it 1-dimensional, torch.ones(1), or leave parallel.shard or parallel.pipeline out",
        )
    axes = ("replicate", "shard") if degrees.replicate > 1 else ("shard",)
    of_experts = mesh.along(*axes) if degrees.expert > 1 else None
    dense = mesh.dense or mesh.devices
    assert dense is not None
    with at_recipe(loaded.source, "parallel.shard"):
        count = shard_model(model, dense[axes], zero=zero, of_experts=of_experts)
    if loaded.recipe.model.compile:
        model._compiled_call_impl = None  # gathering weights would break the graph of the full model at each unit
        for unit in units_of(model):
            compile_in_place(unit, mode=loaded.recipe.model.compile_mode)
    return (Note("shard", f"{count} units over {degrees.shard} ranks", f"parallel.zero: {zero}"),)


def _loss_of_part(loss: Callable[..., Loss | Tensor], model: nn.Module, mesh: RankMesh) -> Callable[..., Loss | Tensor]:
    """Return the loss of this rank's part of each sequence, or the loss itself without context parallelism.

    ``model`` computes only that part afterwards. Batches are full (ids_BT, target_BT).
    """
    if mesh.degrees.context == 1:
        return loss
    from trainwright.distributed.context_parallel import ContextPart

    part = ContextPart(mesh.along("context"))
    model.take_part(part)  # type: ignore[operator]
    return loss_of_part(loss, part.cut)


def tensor_share(model: nn.Module, degrees: Degrees) -> float:
    """Return the fraction of the weights on this rank under tensor or expert parallelism, before sharding."""
    parameters = list(model.parameters())
    held = sum(local(parameter).numel() for parameter in parameters) * degrees.shard
    is_divided_here = max(degrees.tensor, degrees.expert) > 1
    return min(1.0, held / sum(parameter.numel() for parameter in parameters)) if is_divided_here else 1.0


def rank_layout(parts: Parts, mesh: RankMesh, ask: Parallel, stages: StagedPasses | None) -> RankLayout:
    """Return how the ranks of the mesh divide each step."""
    is_synced = ask.sync_batchnorm and mesh.sums.size > 1
    return RankLayout(
        mesh.sums,
        data=mesh.data,
        exact=ask.exact,
        zero=ask.zero,
        divided=max(mesh.degrees.tensor, mesh.degrees.context, mesh.degrees.expert) > 1,
        copies=mesh.copies,
        stages=stages,
        stream=mesh.stream(divides_sequence=ask.sequence),
        norms=SyncedNorms.of((parts.model, parts.loss), mesh.sums) if is_synced else LOCAL_STATISTICS,
    )


def evaluation_loss(
    loss: Callable[..., Loss | Tensor], mesh: RankMesh, stages: StagedPasses | None
) -> Callable[..., Loss | Tensor]:
    """Return the loss for evaluations. It runs all stages of a pipeline.

    Ranks that share sequences or layers cannot retry an evaluation with fewer samples after an out-of-memory error.
    """
    if mesh.degrees.context == 1 and stages is None:
        return loss
    loss_fn = as_loss_fn(loss)

    def together(model: nn.Module, batch: Batch) -> Loss | Tensor:
        try:
            return loss_fn(model, batch) if stages is None else stages.evaluate(batch, loss_fn)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        raise OutOfMemoryError(
            "out of memory in the evaluation, and a rank that computes it with others cannot retry alone",
            whole=False,
            remedy="evaluate fewer samples at a time (evaluation.batch), or on devices with more memory",
        )

    return together


def _model_on_meta(loaded: Loaded) -> nn.Module | None:
    """Return the model of a recipe on the meta device; None if its code needs values."""
    if is_live(loaded.recipe.model.use):
        return None
    sized = {"vocab_size", "classes"} & loaded.recipe.model.args.keys()
    train = None if sized else build_dataset(loaded, "train")  # not on the meta device: datasets need values
    try:
        with torch.device("meta"):
            return build_model(loaded, train)[0]
    except TrainwrightError:
        raise
    except Exception:
        return None


CHECKED_POSITIONS = 16  # positions of a sequence in the check of a division
MAX_DIFFERENCE_EPS = 1000
"""Maximum relative difference of norms, in units of the machine epsilon. Sums are computed in a different order."""
NOISE_RATIO = 1e-4
"""Gradients smaller than this fraction of the largest one are rounding errors."""


class LossAndNorms(NamedTuple):
    """The loss, and the norm of the gradient of each parameter by name."""

    loss: float
    norms: Mapping[str, float]


def divide_and_try(model: nn.Module, divide: Callable[[], None], loss_fn: LossFn, batch: Any, ranks: int) -> None:
    """Divide the model and check it. All ranks must call it. Raises UsageError if loss or gradients change."""
    batch = _shortened(batch, ranks)
    with ready_to_try(model):
        whole = _try(model, loss_fn, batch)
        divide()
        try:
            divided = _try(model, loss_fn, batch)
        except UsageError:
            raise
        except Exception as error:
            raise _rejection(f"the divided layers raise an error: {text_of(error, lines=1)}") from error
    _require_same(whole, divided, max(torch.finfo(each.dtype).eps for each in model.parameters()))


def _try(model: nn.Module, loss_fn: LossFn, batch: Any) -> LossAndNorms:
    norms: dict[str, Tensor] = {}
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}

    def note(parameter: Tensor) -> None:
        """Record the norm and free the gradient at once, so that not all gradients of the full model are in memory."""
        gradient = parameter.grad
        if gradient is not None and not is_divided(gradient):
            norms[names[parameter]] = gradient.norm()  # type: ignore[index]
            parameter.grad = None

    handles = [each.register_post_accumulate_grad_hook(note) for each in names]  # type: ignore[no-untyped-call]
    try:
        with evaluating(model, loss_fn), torch.enable_grad():
            made = loss_fn(model, batch)
            total = made.total if isinstance(made, Loss) else made
            total.backward()  # type: ignore[no-untyped-call]
    finally:
        for handle in handles:
            handle.remove()
    for parameter, name in names.items():
        gradient = parameter.grad
        if gradient is not None and is_divided(gradient):
            norms[name] = gradient.full_tensor().norm()
        parameter.grad = None
    return LossAndNorms(float(total), {name: float(norm) for name, norm in norms.items()})


def _require_same(whole: LossAndNorms, divided: LossAndNorms, eps: float) -> None:
    if not math.isfinite(whole.loss):
        return
    limit = MAX_DIFFERENCE_EPS * eps
    if not abs(divided.loss - whole.loss) <= limit * max(abs(whole.loss), NOISE_RATIO):
        raise _rejection(f"the loss of two samples is {divided.loss:.6g}, and {whole.loss:.6g} in the full model")
    least = NOISE_RATIO * max(whole.norms.values(), default=0.0)
    for name, norm in whole.norms.items():
        found = divided.norms.get(name, 0.0)
        if not abs(found - norm) <= limit * max(norm, least):
            raise _rejection(f"the gradient of {name} has the norm {found:.4g}, and {norm:.4g} in the full model")


def _rejection(why: str) -> UsageError:
    return UsageError(
        f"parallel.plan would change the training: {why}",
        remedy="include the modules between divided layers: a row layer behind each column layer, per_head for norms "
        "of heads; or leave those modules out, or use parallel.shard",
    )


def _shortened(batch: Any, ranks: int) -> Any:
    """Return the batch with fewer positions, if it consists of token ids of equal length."""
    widths = {each.shape[1] if each.dim() > 1 else 0 for each in tree_leaves(batch) if isinstance(each, Tensor)}
    width = widths.pop() if len(widths) == 1 else 0
    count = min(width, max(CHECKED_POSITIONS, ranks)) // ranks * ranks
    is_of_ids = not any(each.is_floating_point() for each in tree_leaves(batch) if isinstance(each, Tensor))
    if not count or not is_of_ids:
        return batch
    cut = tree_map_only(Tensor, lambda each: each[:, :count], batch)
    if isinstance(cut, Mapping) and ROW_LENGTHS in cut:
        return {**cut, ROW_LENGTHS: [min(each, count) for each in cut[ROW_LENGTHS]]}
    return cut
