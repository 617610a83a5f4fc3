"""Schemas of the JSON files of a run folder, for the parts that are read. A file with another schema is refused.

Values may be of any size, and fields that another version adds are kept.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from trainwright.runs.files import UnreadableFile, read_json


class FileShape(BaseModel):
    """Base of all schemas. Nothing is converted: ``"5"`` is not a number."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True, defer_build=True)


ShapeT = TypeVar("ShapeT", bound=FileShape)


class _Extent(FileShape):
    steps: int | None = None
    seconds: int | float | None = None


class _Note(FileShape):
    topic: str = ""
    choice: str = ""
    why: str = ""


class PlanFile(FileShape):
    """plan.json."""

    device: str = ""
    precision: str = ""
    threads: int = 0
    parameters: int | None = None
    extent: _Extent | None = None
    memory_bytes: dict[str, int] | None = None
    expected_loss: int | float | str | None = None
    notes: list[_Note] = []


class _Git(FileShape):
    commit: str | None
    dirty: bool | None
    diff_sha256: str | None


class _Packages(FileShape):
    versions: dict[str, str]
    count: int
    sha256: str


class _Launch(FileShape):
    job: str = ""
    call: int = 0


class _Objects(FileShape):
    """How to rebuild the objects of a ``tw.fit`` run: by calling ``function``.

    If ``function`` is None, ``reason`` states why rebuilding is impossible.
    """

    function: str | None
    reason: str
    is_seeded: bool


class _Base(FileShape):
    """The pretrained model that a run starts from. ``revision`` is a commit, or a hash of the files.

    ``head`` are the weights that its files do not contain, and that are trained beside adapters.
    """

    name: str
    revision: str
    dtype: str = ""
    head: list[str] = []


class _Seeds(FileShape):
    seed: int | None = None


class ProvenanceFile(FileShape):
    """provenance.json."""

    command: list[str] = []
    git: _Git | None = None
    sources: dict[str, str | None] | None = None
    python: str | None = None
    hostname: str | None = None
    driver: str | None = None
    packages: _Packages | None = None
    environment: dict[str, str] | None = None
    data: dict[str, str | None] | None = None
    base: _Base | None = None
    adapters: dict[str, dict[str, Any]] | None = None
    launch: _Launch | None = None
    objects: _Objects | None = None
    seeds: _Seeds | None = None


class _Module(FileShape):
    name: str
    kind: str
    last: str
    parameters: int
    trained: int
    count: int
    children: list[_Module]


class ModelFile(FileShape):
    """model.json."""

    modules: list[_Module] = []
    reference_losses: dict[str, JsonValue] = {}


class _OperatorTime(FileShape):
    op: str
    phase: str
    calls: float
    host_s: float
    device_s: float


class _ModuleTime(FileShape):
    path: str
    kind: str
    forward_s: float
    backward_s: float


class _ProfileFacts(FileShape):
    steps: int
    step_s: float
    precision: str
    phases: dict[str, float]
    memory: list[int]
    operators: list[_OperatorTime]
    modules: list[_ModuleTime]
    trace: str | None


class _ProfileVerdict(FileShape):
    headline: str
    evidence: list[str]


class ProfileFile(FileShape):
    """profile.json."""

    facts: _ProfileFacts
    verdict: _ProfileVerdict
    next: str
    advice: list[str]


class CrashLoopFile(FileShape):
    """bundle.json of a run that repeatedly died in one step."""

    step: int
    checkpoint: str | None = None


def read_as(path: Path, shape: type[ShapeT]) -> ShapeT:
    """Read a JSON file with this schema. Raises UnreadableFile for any other."""
    try:
        return shape.model_validate(read_json(path))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UnreadableFile(path, f"{where + ': ' if where else ''}{first['msg']}"[:300]) from None


def read_object(path: Path, shape: type[ShapeT]) -> dict[str, Any]:
    """Read a JSON file with this schema as it was written. Raises UnreadableFile for any other."""
    return read_as(path, shape).model_dump(exclude_unset=True)
