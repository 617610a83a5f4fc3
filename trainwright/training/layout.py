"""Lays a run out over its ranks: checks that the model can be divided, and divides it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from trainwright.assembly.assemble import Parts, at_recipe, build_dataset, build_model
from trainwright.assembly.stage_plan import StagedModel, stage_plan
from trainwright.checkpoint.shards import local
from trainwright.checkpoint.train_state import TrainState
from trainwright.data.first_samples import first_samples
from trainwright.data.loading import to_device
from trainwright.data.ready_batches import ReadyBatches
from trainwright.distributed import RankMesh, World
from trainwright.distributed.group import Ranks
from trainwright.distributed.split_plan import SplitPlan, model_shape, split_plan
from trainwright.engine.compressed import GradientSum, PowerSgd, sum_in_bf16, sum_whole
from trainwright.engine.loss import Batch, Loss, LossFn, as_loss_fn
from trainwright.engine.oom_report import is_out_of_memory
from trainwright.engine.rank_layout import RankLayout
from trainwright.engine.sequence_part import loss_of_part
from trainwright.engine.stage_passes import PipelineStages, StagedPasses, inputs_of
from trainwright.engine.synced_norms import LOCAL_STATISTICS, SyncedNorms
from trainwright.errors import OutOfMemoryError, TrainwrightError, UsageError
from trainwright.models.gpt import TENSOR_PLAN
from trainwright.plan.make import Note
from trainwright.plan.parallel import Degrees, solve_layout
from trainwright.plan.splits import require_fitting
from trainwright.recipe import Loaded
from trainwright.recipe.parallel import Parallel
from trainwright.recipe.resolve import is_live
from trainwright.training.custom_step import require_custom_step_fits
from trainwright.training.split_check import divide_and_try

POWERSGD = "powersgd"
PIPELINE_WITHOUT_DRY_RUN = Note(
    "dry run", "none", "the stages of a pipeline are not tried beforehand: no times, no first loss"
)


def require_layout(loaded: Loaded, parts: Parts | None, ranks: int) -> None:
    """Raise RecipeError if the model cannot be laid out over ``ranks`` as the recipe requests.

    Needs no communication. The model of a recipe is built on the meta device; if that fails, it is checked after it is
    built.
    """
    if parts is not None and parts.custom.advance is not None:
        require_custom_step_fits(loaded, ranks)
    with at_recipe(loaded.source, "parallel"):
        degrees = solve_layout(loaded.recipe, ranks)
    if (
        degrees.ranks == degrees.data or loaded.recipe.parallel.open_axes
    ):  # the plan chooses a layout that fits the model
        return
    if (model := parts.model if parts else _model_on_meta(loaded)) is not None:
        _require_shape(model, loaded, degrees)


def _require_shape(model: nn.Module, loaded: Loaded, degrees: Degrees) -> SplitPlan:
    """Return how the layers are divided. Raises RecipeError if the model does not fit the layout."""
    with at_recipe(loaded.source, "parallel"):
        plan = split_plan(model, loaded.recipe.parallel.plan) if degrees.tensor > 1 else {}
        table = stage_plan(model, loaded.recipe.parallel.stages) if degrees.pipeline > 1 else None
        require_fitting(loaded.recipe, degrees, model_shape(model, plan, table.blocks if table else None))
    return plan


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
    stages = _divide_layers(parts, loaded, mesh, device)
    parts = replace(parts, loss=_loss_of_part(parts.loss, parts.model, mesh))
    notes = _shard(parts.model, loaded, mesh) if mesh.degrees.shard > 1 else ()
    return LaidOut(parts, stages, (*exchange_notes, *notes))


def _exchange_notes(model: nn.Module, loss: object, ask: Parallel, mesh: RankMesh) -> Iterator[Note]:
    """Yield notes on gradient compression and synchronized BatchNorms."""
    if ask.compress != "none" and mesh.sums.size > 1:
        from_step = f"; {ask.compress_rank} columns, from step {ask.compress_after + 1:,} on"
        why = "format of exchanged gradients" + (from_step if ask.compress == "powersgd" else "")
        yield Note("compress", ask.compress, why)
    if ask.sync_batchnorm and mesh.sums.size > 1:
        number = len(SyncedNorms.of((model, loss), mesh.sums).norms)
        why = f"statistics of the samples of all {mesh.sums.size} ranks" if number else "the model has no BatchNorm"
        yield Note("sync_batchnorm", f"{number} BatchNorm{'' if number == 1 else 's'}", why)


def _divide_layers(parts: Parts, loaded: Loaded, mesh: RankMesh, device: torch.device) -> PipelineStages | None:
    ask = loaded.recipe.parallel
    degrees = mesh.degrees
    model = parts.model
    if degrees.ranks == degrees.data:
        return None
    from trainwright.assembly.pipeline import Stages, stage_blocks  # slow to import
    from trainwright.distributed.tensor_parallel import apply_tensor_parallelism

    plan = _require_shape(model, loaded, degrees)
    by_table = None
    if degrees.pipeline > 1:
        _require_no_statistics(model)
        if (table := stage_plan(model, ask.stages)) is not None:
            by_table = StagedModel(model, table)
            inputs = inputs_of(parts.train.collate([_sample(parts)] * 2)).to(device)
            by_table.require_same(inputs, stage_blocks(len(table.blocks), degrees.pipeline))
    if degrees.tensor > 1:
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
    from trainwright.distributed.sharding import shard_model

    degrees, zero = mesh.degrees, loaded.recipe.parallel.zero
    if degrees.pipeline > 1 and (single := [name for name, each in model.named_parameters() if each.dim() == 0]):
        raise UsageError(
            f"{single[0]} is 0-dimensional, so it cannot be sharded, and stages do not sum unsharded gradients",
            remedy="make it 1-dimensional, torch.ones(1), or leave parallel.shard or parallel.pipeline out",
        )
    axes = ("replicate", "shard") if degrees.replicate > 1 else ("shard",)
    with at_recipe(loaded.source, "parallel.shard"):
        count = shard_model(model, mesh.along(*axes), zero=zero)
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
    """Return the fraction of the weights on this rank under tensor parallelism, before sharding."""
    parameters = list(model.parameters())
    held = sum(local(parameter).numel() for parameter in parameters) * degrees.shard
    return min(1.0, held / sum(parameter.numel() for parameter in parameters)) if degrees.tensor > 1 else 1.0


def keep_compression(state: TrainState, ask: Parallel, world: World) -> None:
    """Make the error feedback of PowerSGD part of the state of the run."""
    if ask.compress == "powersgd" and isinstance(world, Ranks):
        state.stateful[POWERSGD] = PowerSgd(world, rank=ask.compress_rank, after=ask.compress_after)


def _gradient_sum(state: TrainState, ask: Parallel, world: World) -> GradientSum:
    kept = state.stateful.get(POWERSGD)
    if isinstance(kept, PowerSgd):
        return kept
    return sum_in_bf16 if ask.compress == "bf16" and world.size > 1 else sum_whole


def rank_layout(
    parts: Parts, mesh: RankMesh, ask: Parallel, stages: StagedPasses | None, state: TrainState
) -> RankLayout:
    """Return how the ranks of the mesh divide each step."""
    is_synced = ask.sync_batchnorm and mesh.sums.size > 1
    return RankLayout(
        mesh.sums,
        data=mesh.data,
        exact=ask.exact,
        zero=ask.zero,
        divided=max(mesh.degrees.tensor, mesh.degrees.context) > 1,
        stages=stages,
        stream=mesh.stream(divides_sequence=ask.sequence),
        norms=SyncedNorms.of((parts.model, parts.loss), mesh.sums) if is_synced else LOCAL_STATISTICS,
        sum_gradients=_gradient_sum(state, ask, mesh.sums),
    )


def evaluation_loss(
    loss: Callable[..., Loss | Tensor], mesh: RankMesh, stages: StagedPasses | None
) -> Callable[..., Loss | Tensor]:
    """Return the loss for evaluations. It runs all stages of a pipeline.

    Ranks that share sequences cannot retry an evaluation with fewer samples after an out-of-memory error.
    """
    loss_fn = as_loss_fn(loss)
    if mesh.degrees.context > 1:
        return partial(_together, loss_fn)
    if stages is None:
        return loss

    def through_stages(model: nn.Module, batch: Batch) -> Loss:
        return stages.evaluate(batch, loss_fn)

    return through_stages


def _together(loss_fn: LossFn, model: nn.Module, batch: Batch) -> Loss | Tensor:
    try:
        return loss_fn(model, batch)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    raise OutOfMemoryError(
        "out of memory in the evaluation, and a rank that shares sequences with others cannot retry alone",
        whole=False,
        remedy="evaluate fewer samples at a time (evaluation.batch), or on devices with more memory",
    )


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
