"""Saves a state that is sharded over ranks: each rank writes its part, and the first rank commits the checkpoint.

checkpoints/step-00000400/
    model-00000.safetensors   the parts of the weights that rank 0 wrote, by the names of the tensors
    rest-00000.safetensors    its parts of optimizer, averages and random generators; a rank without parts writes none
    shards.json               the parts of each tensor: file, offset and shape
    state.json, manifest.json as in a checkpoint of one process

torch.distributed.checkpoint plans which rank writes what: each replica is written once, and all ranks write about the
same number of bytes. No tensor is sent to another rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from trainwright.checkpoint.checkpoint import (
    TensorName,
    begin_draft,
    encoded_parts,
    merged,
    put_in_place,
    require_finite,
    storage_errors,
    trained_names,
    values_as_text,
)
from trainwright.checkpoint.codec import StateDict, Tree
from trainwright.checkpoint.manifest import FileEntry, file_entry, name_of, write_manifest
from trainwright.checkpoint.shards import is_divided, local
from trainwright.checkpoint.store import Best, draft_of_step
from trainwright.checkpoint.tensor_file import SHARDS, write_tensors
from trainwright.checkpoint.train_state import TrainState
from trainwright.distributed.group import Ranks
from trainwright.errors import CheckpointError, StorageError, TrainwrightError, text_of
from trainwright.runs.system_calls import fsync

if TYPE_CHECKING:
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem

_SHARED_FOLDER = "all ranks of a sharded model write into one folder: use a folder that all machines share"
_OPTIMIZER_PREFIX = "optimizer.state."
"""Prefix of the names of optimizer tensors, which are equal on all ranks that have them."""


@dataclass(frozen=True)
class _Offer:
    """The tensors that a rank can write. If several ranks have a name in ``single``, only the first writes it."""

    plan: SavePlan
    single: frozenset[str]
    values: StateDict | None
    trained: frozenset[str]


@dataclass(frozen=True)
class SavedPart:
    """The part of a checkpoint that this rank writes.

    Attributes:
        step: Number of completed steps.
        draft: Folder in which the ranks write.
        names: Names of the tensors that this rank writes.
        trained: Names of the trained weights among them.
        values: Content of state.json; empty on other ranks than the first.
        index: Content of shards.json; empty on other ranks than the first.
        tensors: Tensors of this rank: first none, then the live ones, later copies on the host.
    """

    step: int
    draft: Path
    names: tuple[TensorName, ...]
    trained: frozenset[str]
    values: Mapping[str, Tree] = field(default_factory=dict)
    index: Mapping[str, Tree] = field(default_factory=dict)
    tensors: Mapping[TensorName, Tensor] = field(default_factory=dict)


class ShardedSave:
    """Saves a state that is sharded over the ranks of ``world``. All ranks must call each method together.

    Args:
        world: All ranks.
        has_values: True on one rank of each pipeline stage. Its values and unsharded tensors are saved.
    """

    def __init__(self, world: Ranks, *, has_values: bool) -> None:
        self._world, self._has_values = world, has_values
        self._writers: Ranks | None = None

    def tensors(self, state: TrainState) -> dict[TensorName, Tensor]:
        """Return the local tensors of this rank."""
        return {name: local(tensor) for name, tensor in encoded_parts(state)[0].items()}

    def capture(
        self, state: TrainState, folder: Path, run: str, run_metadata: Mapping[str, Tree], guard: Callable[[], None]
    ) -> SavedPart:
        """Return the part of the state that this rank writes, with live tensors.

        The first rank calls ``guard`` and makes the draft folder. If any rank fails, every rank raises the same error.
        """
        if self._writers is None:
            self._writers = self._world.again()
        offer: _Offer | TrainwrightError
        live: dict[TensorName, Tensor] = {}
        try:
            offer, live = self._offer(state)
        except Exception as caught:
            offer = _sendable_error(caught)
        offers = self._world.to_first(offer)
        parts: Sequence[SavedPart | TrainwrightError] | None = None
        if offers is not None:
            try:
                parts = _plan_save(offers, state.step, folder, run, run_metadata, guard)
            except Exception as caught:
                parts = [_sendable_error(caught)] * self._world.size
        part = self._world.from_first(parts)
        if isinstance(part, TrainwrightError):
            raise part
        return replace(part, tensors={name: live[name] for name in part.names})

    def _offer(self, state: TrainState) -> tuple[_Offer, dict[TensorName, Tensor]]:
        from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

        tensors, values = encoded_parts(state)
        replicas = {name for name, each in tensors.items() if is_divided(each) or _is_replicated(name, each)}
        offered = {name: each for name, each in tensors.items() if self._has_values or name in replicas}
        planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({_key_of(name): each for name, each in offered.items()})
        plan = planner.create_local_plan()
        items = [item for item in plan.items if not _is_empty(_data_of(item))]
        single = frozenset(_key_of(name) for name in offered if name not in replicas)
        values_to_send = values if self._has_values else None
        offer = _Offer(replace(plan, items=items), single, values_to_send, trained_names(state.model))
        return offer, {name: local(each) for name, each in offered.items()}

    def write(self, part: SavedPart, folder: Path, best: Best | None = None, run: str = "") -> tuple[Path, int] | None:
        """Write the files of this rank. On the first rank, also wait for the other ranks and commit the checkpoint.

        Returns the path and the size in bytes on the first rank, None on others. May run in a thread. If a process is
        killed at any time, either the complete checkpoint exists or none.

        Raises:
            StorageError: On the first rank, if a rank could not write.
            CheckpointError: On the first rank, if the state is not finite.
            RankError: Another rank was lost.
        """
        assert self._writers is not None
        written = self._writers.to_first(_write_part(part, self._world.rank))
        if written is None:
            return None
        with storage_errors(part.draft):
            files: dict[str, FileEntry] = {}
            for each in written:
                if isinstance(each, TrainwrightError):
                    raise each
                files |= each
            _require_files(part.draft, files)
            (part.draft / SHARDS).write_text(json.dumps(part.index), "utf-8")
            (part.draft / "state.json").write_text(values_as_text(part.values), "utf-8")
            size = write_manifest(part.draft, part.step, asdict(best) if best else None, run, durable=files)
            return put_in_place(part.draft, folder / name_of(part.step), run), size


def _data_of(item: WriteItem) -> TensorWriteData:
    """Return the tensor data of an item. Plans of this module contain only tensors."""
    assert item.tensor_data is not None
    return item.tensor_data


def _is_empty(data: TensorWriteData) -> bool:
    """Return True if the tensor has elements, but this rank has none of them."""
    return data.chunk.sizes.numel() == 0 < data.size.numel()


def _is_replicated(name: TensorName, tensor: Tensor) -> bool:
    part, path = name
    return isinstance(tensor, nn.Parameter) if part == "model" else path.startswith(_OPTIMIZER_PREFIX)


def _plan_save(
    offers: Sequence[_Offer | TrainwrightError],
    step: int,
    folder: Path,
    run: str,
    metadata: Mapping[str, Tree],
    guard: Callable[[], None],
) -> list[SavedPart]:
    """Make the draft folder, and return the part that each rank writes, without tensors."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    taken: set[str] = set()
    plans: list[SavePlan] = []
    values: StateDict = {}
    trained: set[str] = set()
    for offer in offers:
        if isinstance(offer, TrainwrightError):
            raise offer
        trained |= offer.trained
        kept = [item for item in offer.plan.items if item.index.fqn not in taken or item.index.fqn not in offer.single]
        plans.append(replace(offer.plan, items=kept))
        taken |= offer.single
        values = merged(values, offer.values) if offer.values is not None else values
    final, _ = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False).create_global_plan(plans)
    index: dict[str, dict[str, Any]] = {"model": {}, "rest": {}}
    num_bytes = 0
    for rank, plan in enumerate(final):
        for item in plan.items:
            part, name = _name_of_key(item.index.fqn)
            data = _data_of(item)
            dtype = str(data.properties.dtype).removeprefix("torch.")
            entry = index[part].setdefault(name, {"dtype": dtype, "shape": [*data.size], "parts": []})
            place = {"offset": [*data.chunk.offsets], "shape": [*data.chunk.sizes]}
            entry["parts"].append({"file": _file_of(part, rank), **place})
            num_bytes += data.chunk.sizes.numel() * data.properties.dtype.itemsize
    guard()
    draft = draft_of_step(folder, step, run)
    with storage_errors(draft):
        begin_draft(draft, folder / name_of(step), run, num_bytes + len(json.dumps(index)))
    parts = []
    for plan in final:
        names = tuple(_name_of_key(item.index.fqn) for item in plan.items)
        parts.append(SavedPart(step, draft.absolute(), names, frozenset(trained.intersection(n for _, n in names))))
    return [replace(parts[0], values={**values, "metadata": metadata}, index=index), *parts[1:]]


def _write_part(part: SavedPart, rank: int) -> dict[str, FileEntry] | TrainwrightError:
    """Return the files that this rank has written, or the error that prevented it."""
    try:
        require_finite(part.step, part.tensors, part.trained)
        files = {}
        for kind in ("model", "rest"):
            tensors = {name: each for (of, name), each in part.tensors.items() if of == kind}
            if tensors:
                path = part.draft / _file_of(kind, rank)
                write_tensors(tensors, path)
                fsync(path)
                files[path.name] = file_entry(path)
        fsync(part.draft)
        return files
    except FileNotFoundError as error:
        what = f"rank {rank} cannot find {part.draft}, the folder of the first rank: {error.strerror}"
        return StorageError(what, remedy=_SHARED_FOLDER)
    except Exception as error:
        return _sendable_error(error, f"rank {rank} could not write its files: ")


def _require_files(draft: Path, files: Mapping[str, FileEntry]) -> None:
    """Raise StorageError if a file of another rank is missing or has another size on the first rank."""
    for name, entry in files.items():
        path = draft / name
        if not path.is_file() or path.stat().st_size != entry["bytes"]:
            raise StorageError(
                f"{path}, which another rank has written, is missing or has another size on the first rank",
                remedy=_SHARED_FOLDER,
            )


def _sendable_error(error: Exception, start: str = "") -> TrainwrightError:
    """Return the error as one that can be sent to other ranks: without traceback, and short."""
    if isinstance(error, TrainwrightError):
        kind = StorageError if isinstance(error, StorageError) else CheckpointError
        return kind(error.message, remedy=error.remedy)
    kind = StorageError if isinstance(error, OSError) else CheckpointError
    remedy = "free space there or fix its permissions" if kind is StorageError else "fix this error"
    return kind(f"{start}{' '.join(text_of(error).split())[:400]}", remedy=f"{remedy}; older checkpoints are intact")


def _key_of(name: TensorName) -> str:
    return "/".join(name)


def _name_of_key(joined: str) -> TensorName:
    part, _, name = joined.partition("/")
    return part, name


def _file_of(part: str, rank: int) -> str:
    return f"{part}-{rank:05d}.safetensors"
