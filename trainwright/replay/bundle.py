"""Bundles: files from which another process replays watched steps. A bundle is written at an incident.

bundles/step-XXXXXXXX/
  tensors.safetensors  the state before the steps, and the inputs of the steps
  bundle.json          kind "step", notes of the writer, and the recorded programs of the steps
  manifest.json        sizes and sha256

A crash loop leaves a folder of the same name that holds a checkpoint instead; its bundle.json has another kind.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.manifest import INVALID_CONTENT_ERRORS, name_of, step_of, verify, write_manifest
from trainwright.checkpoint.rng import RngBag, preserved_rng
from trainwright.checkpoint.snapshot import LiveObjects, Snapshot, is_plain
from trainwright.checkpoint.staging import on_host
from trainwright.checkpoint.tensor_file import write_tensors
from trainwright.errors import CheckpointError, UsageError, text_of
from trainwright.recorder.program import (
    Call,
    ClipGradients,
    Constant,
    Instruction,
    Multiply,
    OptimizerStep,
    RecordedStep,
    ZeroGrad,
    mapped,
)
from trainwright.recorder.ring import Ring
from trainwright.replay.replayer import Replayer
from trainwright.replay.serialization import Named, Reader, Writer
from trainwright.replay.structure import Structure, difference
from trainwright.runs.files import BUNDLE, UnreadableFile, read_json
from trainwright.runs.json_values import Facts, plain, strict
from trainwright.runs.storage import make_subfolder, storage_error
from trainwright.runs.system_calls import fsync

KIND = "step"
CRASH_LOOP = "crash-loop"
FORMAT = 2
NAME = "bundle.json"
_TENSORS = "tensors.safetensors"


class BundleError(UsageError):
    """A bundle is missing, damaged or forged, or does not fit the model on which it is replayed."""


@dataclass(frozen=True)
class Bundle:
    """A bundle that was read.

    Attributes:
        blind: The reason why its step cannot be replayed; None if it can.
        about: The notes of the writer.
        recorded_on: Type of the device on which the steps were recorded.
        recorded_by: Version of torch that recorded them.
        steps: The recorded steps, which begin at ``snapshot``. The last one is ``step``.

    Weights and inputs are present even if the step cannot be replayed.
    """

    path: Path
    step: int
    about: Facts
    blind: str | None
    recorded_on: str
    recorded_by: str
    device: torch.device
    structure: Structure
    snapshot: Snapshot
    steps: Sequence[RecordedStep]

    def bound(self, subject: LiveObjects, names: Sequence[str]) -> tuple[Snapshot, list[RecordedStep]]:
        """Returns the state and the steps, bound to the parameters of live objects with the structure of the bundle.

        ``subject.parameters`` must have the order of ``structure.parameters``. Raises BundleError.
        """
        self._require_fit(subject, names)

        def live(leaf: object) -> object:
            if not isinstance(leaf, Named):
                return leaf
            parameter = subject.parameters[leaf.number]
            return Constant(parameter, parameter._version)

        def bound(each: Instruction) -> Instruction:
            with_tensors = [one.name for one in fields(each) if one.name in ("args", "kwargs", "gradient")]
            return replace(each, **{name: mapped(getattr(each, name), live) for name in with_tensors})

        return self.snapshot, [replace(each, program=[bound(one) for one in each.program]) for each in self.steps]

    def _require_fit(self, subject: LiveObjects, names: Sequence[str]) -> None:
        now = Structure.of(subject, names)
        then = self.structure
        for what, ours, theirs in (
            ("parameter", now.parameters, then.parameters),
            ("module", now.modules, then.modules),
            ("buffer", now.buffers, then.buffers),
        ):
            if ours != theirs:
                raise self._misfit(difference(what, ours, theirs))
        if now.optimizers != then.optimizers:
            raise self._misfit(
                f"the optimizers are {_class_names(now.optimizers)}, in the bundle {_class_names(then.optimizers)}, or "
                "their groups hold other parameters"
            )
        live = [*subject.parameters, *(module._buffers[name] for module, name in subject.buffers())]
        stored = [*self.snapshot.parameters, *self.snapshot.buffers]
        for name, one, other in zip([*now.parameters, *now.buffers], live, stored):
            if _dtype_and_shape(one) != _dtype_and_shape(other):
                raise self._misfit(f"{name} is {_dtype_and_shape(one)}, in the bundle {_dtype_and_shape(other)}")
        _require_plain(subject.modules, self.snapshot.attributes, self._misfit)

    def _misfit(self, what: str) -> BundleError:
        return BundleError(
            f"{self.path} does not fit the model: {what}",
            remedy="let --model name a function that builds the model (and optimizer) of the watched run",
        )


# Writing


def keep(folder: Path, replayer: Replayer, ring: Ring, step: int, about: Mapping[str, object]) -> Path | None:
    """Writes the bundle of a step that the ring still holds; returns None if it does not. Raises StorageError.

    A step that cannot be replayed is written with its inputs and the last weights before it.
    """
    found = ring.steps_to(step)
    if found is None:
        older = [each for each in ring.snapshots if each.step <= step]
        at = [each for each in ring.steps if each.step == step]
        if not older or not at:
            return None
        found = older[-1], at
    return write_bundle(folder, replayer.subject, replayer.names, *found, about)


def write_bundle(
    folder: Path,
    subject: LiveObjects,
    names: Sequence[str],
    snapshot: Snapshot,
    steps: Sequence[RecordedStep],
    about: Mapping[str, object],
) -> Path:
    """Writes ``folder/step-XXXXXXXX`` for the last of ``steps``, which begin at ``snapshot``. Returns its path.

    ``about`` is JSON. An older bundle of that step is replaced. A process that is killed here leaves the old bundle,
    the new bundle, or none. Raises StorageError if the bundle cannot be written.
    """
    step = steps[-1].step
    target = folder / name_of(step)
    if target.is_dir() and kind_of(target) != KIND:
        target = target.with_name(f"{target.name}-watched")  # does not replace the bundle of a crash loop
    tensors, body = encode(_body(subject, names, snapshot, steps))
    aside, replaced = folder / f".{target.name}.{os.getpid()}.draft", folder / f".{target.name}.old"
    with _storage_errors(target, aside):
        make_subfolder(folder)  # not the run folder: if that was renamed, this would create a second one
        _sweep(folder)
        aside.mkdir()
        write_tensors(on_host(tensors), aside / _TENSORS)
        head = {
            "kind": KIND,
            "format": FORMAT,
            "step": step,
            "steps": [each.step for each in steps],
            "replayable": not body["lost"],
            "why": body["lost"],
        }
        (aside / NAME).write_text(json.dumps({**head, "about": strict(about), "body": body}, allow_nan=False))
        write_manifest(aside, step)
        if target.exists():
            target.rename(replaced)
        aside.rename(target)
        fsync(folder)
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def _body(
    subject: LiveObjects, names: Sequence[str], snapshot: Snapshot, steps: Sequence[RecordedStep]
) -> dict[str, object]:
    writer = Writer({id(p): number for number, p in enumerate(subject.parameters)})
    first, last = snapshot.step, steps[-1].step
    if [each.step for each in steps] != list(range(first, last + 1)):
        writer.lost.append(
            f"the state before step {last} was not stored; the nearest stored one is that before step {first}"
        )
    state = {each.name: getattr(snapshot, each.name) for each in fields(snapshot) if each.name not in ("rng", "reach")}
    return {
        "structure": vars(Structure.of(subject, names)),
        "device": str(subject.parameters[0].device if subject.parameters else "cpu"),
        "torch": torch.__version__,
        "snapshot": {name: writer.value(each, "the state") for name, each in state.items()},
        "rng": writer.value(snapshot.rng.state_dict(), "the state"),
        "way": [writer.step(each) for each in steps],
        "lost": list(dict.fromkeys(writer.lost)),
    }


@contextmanager
def _storage_errors(target: Path, aside: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        cause = error if isinstance(error, OSError) else OSError(str(error))
        raise storage_error(cause, target, "write") from error


def _sweep(folder: Path) -> None:
    """Removes partial bundles of a killed process, and restores those that it was replacing."""
    for draft in folder.glob(".step-*.draft"):
        shutil.rmtree(draft, ignore_errors=True)
    for replaced in folder.glob(".step-*.old"):
        target = folder / replaced.name.removeprefix(".").removesuffix(".old")
        with suppress(OSError):
            shutil.rmtree(replaced) if target.exists() else replaced.rename(target)


def prune(folder: Path, keep: int = 8) -> None:
    """Deletes all bundles of steps except the first one and the newest ones, so that ``keep`` remain."""
    paths = list(folder.glob("step-*"))
    found = sorted((step_of(path) or 0, path) for path in paths if len(paths) > keep and kind_of(path) == KIND)
    for _, path in found[1 : max(1, len(found) - keep + 1)]:
        doomed = path.with_name(f".{path.name}.draft")
        with suppress(OSError):
            path.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


# Reading


def kind_of(path: Path) -> str | None:
    """Returns the kind of a bundle: "step", "crash-loop", or None if the folder is no bundle."""
    try:
        about = read_json(path / NAME, BUNDLE)
    except UnreadableFile:
        return None
    return str(about.get("kind", CRASH_LOOP)) if isinstance(about, dict) else None


def steps_of(path: Path) -> list[int]:
    """Returns the steps that a bundle lists, ascending."""
    with suppress(UnreadableFile, ValueError, LookupError, TypeError):
        return sorted(int(each) for each in read_json(path / NAME, BUNDLE)["steps"])
    return []


def read_bundle(path: Path | str) -> Bundle:
    """Reads a bundle without executing anything in it.

    Its tensors are placed on the type of device that they were recorded on, or on the CPU if it is missing here. Raises
    BundleError for a bundle that is missing, damaged, or not in the format of ``write_bundle``.
    """
    path = Path(path)
    with _errors_as_forged(path):
        try:
            verify(path, (_TENSORS, NAME))
        except CheckpointError as error:
            raise BundleError(error.message, remedy="use another bundle, or replay the run itself") from None
        head = read_json(path / NAME, BUNDLE)
        if (head["kind"], head["format"]) != (KIND, FORMAT):
            raise ValueError(f"it is of kind {head['kind']!r} and format {head['format']!r}")
        body = decode(load_file(path / _TENSORS), head["body"])
        device = _available(torch.device(str(body["device"])))
        lost = [str(each) for each in body["lost"]]
        reader = Reader(len(body["structure"]["parameters"]), device, whole=not lost)
        structure = _structure(body["structure"])
        snapshot = _snapshot(reader, body)
        steps = [reader.step(each) for each in body["way"]]
        _require_sound(structure, snapshot, steps)
        return Bundle(
            path,
            steps[-1].step,
            about=plain(head["about"]),
            blind="; ".join(lost) or None,
            recorded_on=torch.device(str(body["device"])).type,
            recorded_by=str(body["torch"]),
            device=device,
            structure=structure,
            snapshot=snapshot,
            steps=steps,
        )


@contextmanager
def _errors_as_forged(path: Path) -> Iterator[None]:
    """Converts every error that malformed data can cause to BundleError."""
    try:
        yield
    except BundleError:
        raise
    except (UnreadableFile, *INVALID_CONTENT_ERRORS) as error:
        raise BundleError(
            f"{path} is not a valid bundle of Trainwright ({text_of(error)[:300]})",
            remedy="use another bundle, or replay the run itself",
        ) from None


def _available(device: torch.device) -> torch.device:
    return device if device.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")


def _structure(stored: Facts) -> Structure:
    optimizers = [(str(name), [[int(n) for n in group] for group in groups]) for name, groups in stored["optimizers"]]
    names = {each: [str(name) for name in stored[each]] for each in ("parameters", "modules", "buffers", "roots")}
    return Structure(**names, trained=[each is True for each in stored["trained"]], optimizers=optimizers)


def _snapshot(reader: Reader, body: Facts) -> Snapshot:
    rng = RngBag.from_state_dict(reader.value(body["rng"]))
    with preserved_rng():
        rng.restore()  # raises if a generator refuses its state
    return Snapshot(**{name: reader.value(each) for name, each in body["snapshot"].items()}, rng=rng, reach=None)


def _require_sound(structure: Structure, snapshot: Snapshot, steps: Sequence[RecordedStep]) -> None:
    """Raises ValueError if an index is out of range, or the state does not have this structure."""
    parameters = len(structure.parameters)
    optimizers = len(structure.optimizers)
    numbers = [number for state in snapshot.states for number in state]
    numbers += [number for _, groups in structure.optimizers for group in groups for number in group]
    chosen: list[int] = []
    for each in (each for recorded in steps for each in recorded.program):
        match each:
            case Call(root=root, training=training):
                if not 0 <= root < len(structure.roots) or len(training) != len(structure.modules):
                    raise ValueError("a call of a model that does not exist")
            case OptimizerStep(optimizer=number):
                chosen.append(number)
            case ZeroGrad(optimizer=int() as number):
                chosen.append(number)
            case ClipGradients(parameters=some) | Multiply(parameters=list() as some):
                numbers += some
    are_parameters = all(type(each) is int and 0 <= each < parameters for each in numbers)
    if not are_parameters or not all(0 <= each < optimizers for each in chosen):
        raise ValueError("a parameter or an optimizer that does not exist")
    lengths = [
        len(snapshot.parameters),
        len(structure.trained),
        len(snapshot.buffers),
        len(snapshot.attributes),
        len(snapshot.states),
    ]
    if lengths != [parameters, parameters, len(structure.buffers), len(structure.modules), optimizers]:
        raise ValueError("the state is not that of these modules")
    if not all(isinstance(each, Tensor) for each in snapshot.parameters) or not steps:
        raise ValueError("a weight is no tensor, or there is no step")
    for (_, groups), stored in zip(structure.optimizers, snapshot.groups):
        if len(groups) != len(stored) or not all(isinstance(group, dict) and "params" not in group for group in stored):
            raise ValueError("the groups are not those of these optimizers")


def _require_plain(
    modules: Sequence[nn.Module],
    attributes: Sequence[Mapping[str, object]],
    misfit: Callable[[str], BundleError],
) -> None:
    """Raises ``misfit`` if a stored attribute, or the live one that it replaces, is not a plain value."""
    for module, stored in zip(modules, attributes):
        for name, value in stored.items():
            live = inspect.getattr_static(module, name, None)
            if not (is_plain(name, value) and is_plain(name, live)):
                raise misfit(f"{type(module).__name__}.{name} is a {type(live).__name__}")


def _class_names(optimizers: Sequence[tuple[str, object]]) -> str:
    return ", ".join(name for name, _ in optimizers) or "none"


def _dtype_and_shape(value: object) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
