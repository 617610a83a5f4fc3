"""The records of log.jsonl, one per line, as frozen values.

A line is strict JSON (jq reads it). JSON has no NaN and no infinity, so they are written as the strings "NaN",
"Infinity" and "-Infinity", and become floats again in every field that holds floats. ``kind`` is the lower-case class
name. Logs of a newer version stay readable: an unknown kind becomes ``Unknown``, an unknown field is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from trainwright.errors import OomReport
from trainwright.runs.files import parse_json
from trainwright.runs.json_values import NOT_IN_JSON, Event, Facts, JsonValue, plain, strict
from trainwright.runs.secrets import masked

FORMAT_VERSION = 1  # of the run folder

PlainValue = typing.Annotated[JsonValue, "plain"]
Events = typing.Annotated[Sequence[Event], "plain"]
Values = typing.Annotated[Facts, "plain"]
"""JSON of any nesting, read back by ``plain``: the strings for NaN and infinity become floats again."""

T = TypeVar("T")

_Decoder = Callable[[object], object]
"""Decodes one JSON value as the type of a field. Raises ValueError if it has another type."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """Base of all records. ``time_s`` is Unix time."""

    time_s: float


@dataclass(frozen=True, kw_only=True)
class Started(Record):
    """A process started or resumed the run at ``step``.

    ``died_in_step`` is the step in which the previous process died, if it did; ``accepted`` are the objections to this
    start that the user overruled. ``settings`` are those in the printed header, each with its value and origin.
    """

    step: int
    version: str
    pid: int
    resumed_from: str | None = None
    command: tuple[str, ...] = ()
    died_in_step: int | None = None
    accepted: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION


@dataclass(frozen=True, kw_only=True)
class Step(Record):
    """One optimizer step. ``samples``, ``tokens`` and ``skipped`` (steps) count from the start of the run.

    ``loss`` is the mean over ``weight`` samples or tokens. ``ids_hash`` hashes the sample ids, in order. If the run
    is limited in seconds, ``fractions`` are the fractions of the run that were used at the start of each step since the
    last record; the learning rates are computed from them.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    weight: float
    samples: int
    tokens: int
    step_s: float
    wait_s: float
    skipped: int
    mem_bytes: int
    ids_hash: str
    probed: dict[str, float] = field(default_factory=dict)
    fractions: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Evaluated(Record):
    """The validation loss and metrics after ``step`` steps.

    ``batches`` is the number of batches if a fixed part of the validation set was evaluated, 0 for the full set.
    ``bad_samples`` are samples with NaN or infinity, which were looked for because the loss is not finite.
    """

    step: int
    loss: float
    weight: float
    metrics: dict[str, float]
    seconds: float
    batches: int = 0
    bad_samples: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Saved(Record):
    """A checkpoint was committed. ``path`` is relative to the run folder.

    The write took ``seconds``, and training waited for it for ``blocked_s``.
    """

    step: int
    path: str
    bytes: int
    seconds: float
    blocked_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class NotSaved(Record):
    """A due checkpoint could not be written; training went on. ``reason`` ends with its remedy."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Skipped(Record):
    """An update was not applied. ``scale_*`` is the fp16 loss scale, None in other precisions."""

    step: int
    reason: str
    micro_batch: int | None
    sample_ids: tuple[int, ...]
    scale_before: float | None
    scale_after: float | None


@dataclass(frozen=True, kw_only=True)
class OutOfMemory(OomReport, Record):
    """An attempt at ``step`` ran out of memory. ``next_micro``: see ``OomReport``."""


@dataclass(frozen=True, kw_only=True)
class NotCaptured(Record):
    """From ``step`` on, steps run eagerly, though the recipe asks for CUDA graphs."""

    step: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Quarantined(Record):
    """Samples that could not be read were left out of ``step`` and of all later steps."""

    step: int
    sample_ids: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Watched(Record):
    """One optimizer step as the recorder observed it: the order of its events, and a few numbers.

    ``events`` are ``[kind, value]`` in their order. ``loss`` is the mean of the losses that backward was called on,
    without a loss scale.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    events: Events = ()
    values: Values = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Logged(Record):
    """Figures that a watched loop reported by ``watch.log``."""

    step: int
    figures: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Media(Record):
    """An image, a text or a histogram that the user logged under ``name``.

    ``file`` is relative to the run folder; ``runs/media.py`` reads it.
    """

    step: int
    name: str
    file: str
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Examined(Record):
    """The outcome of an experiment on the replay of ``step``, or of a probe of the watched program."""

    step: int
    experiment: str
    values: Values


@dataclass(frozen=True, kw_only=True)
class Unexamined(Record):
    """The experiments and trials of remedies for which no time was left at the end of a run.

    Examinations took ``examined_s`` seconds beside ``trained_s`` seconds of training. On a CPU both are processor time
    of the training thread, else wall time.
    ``bundle`` is the folder of the last steps, from which they can run later: ``step-00000320``; None if it was not
    saved.
    """

    step: int
    experiments: tuple[str, ...]
    examined_s: float
    trained_s: float
    bundle: str | None = None


@dataclass(frozen=True, kw_only=True)
class Where:
    """The place of a finding; None: unknown, or does not apply.

    ``source`` is the line that causes it, such as ``file.py:42``, as far as it is known; ``shown_at`` is another line
    at which the symptom appears.
    """

    module: str | None = None
    op: str | None = None
    dtype: str | None = None
    micro_batch: int | None = None
    rank: int | None = None
    sample_ids: tuple[int, ...] = ()
    source: str | None = None
    shown_at: str | None = None


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One measurement that supports a finding."""

    measure: str
    seen: PlainValue
    expected: PlainValue = None


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A remedy that was tried, and its result."""

    remedy: str
    result: str


@dataclass(frozen=True, kw_only=True, repr=False)
class Found(Record):
    """A finding, in full: a later record with the same ``code`` replaces it (``runs/findings.py``).

    ``severity`` is critical, warning or info; ``sure`` is between 0 and 1. ``stage`` is the part of a step that it
    concerns; "" in logs of older versions. ``names_cause``: it states the cause, and not only the symptom.
    """

    code: str
    severity: str
    step: int
    symptom: str
    cause: str
    remedy: str
    sure: float
    since_step: int | None = None
    where: Where = Where()
    evidence: tuple[Evidence, ...] = ()
    tried: tuple[Tried, ...] = ()
    consequences: tuple[str, ...] = ()
    stage: str = ""
    names_cause: bool = True

    def __repr__(self) -> str:
        """Return one line, because lists of findings are printed."""
        return f"<{self.severity}: {self.code} (step {self.step}): {self.symptom}>"


@dataclass(frozen=True, kw_only=True)
class Withdrawn(Record):
    """The finding with this ``code`` no longer holds: more was measured, or it is a consequence of another finding."""

    code: str
    step: int


@dataclass(frozen=True, kw_only=True)
class Replayed(Record):
    """A recorded step was replayed from ``bundle``."""

    step: int
    bundle: str
    same_bits: bool
    outcome: str


@dataclass(frozen=True, kw_only=True)
class RunVerdict:
    """The outcome of a run: the most severe word that applies (``report/verdict.py`` lists all), and one sentence.

    ``best_step`` is the step with the best validation loss, if the run went on for too long after it.
    """

    word: str
    sentence: str
    best_step: int | None = None

    def __str__(self) -> str:
        return self.sentence


@dataclass(frozen=True, kw_only=True)
class Ended(Record):
    """The run ended. ``ending`` is finished, stopped, data_exhausted or failed.

    ``energy_kwh`` is the energy of its GPUs and ``usd`` the price of its devices, both over all processes of the run;
    None: unknown. ``co2_g``: grams of CO2 of this energy, if the recipe names the grid.
    """

    ending: str
    reason: str
    step: int
    loss: float | None
    val_loss: float | None
    skipped: int
    seconds: float
    verdict: RunVerdict | None = None
    energy_kwh: float | None = None
    usd: float | None = None
    co2_g: float | None = None


@dataclass(frozen=True, kw_only=True)
class Telemetry(Record):
    """Readings by name: ``host/...``, ``gpu0/...`` (NVML's index), ``cuda0/...`` (torch's index, of its allocator).

    Units are in the names.
    """

    step: int
    values: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Layers(Record):
    """Statistics by layer of one step, in the order of ``layers``, which only the first record of a process names.

    ``grad_norm`` is before clipping; ``update_ratio`` is the norm of the update divided by that of the weights.
    ``act_*`` are over some elements of the layer's output; ``act_log2`` has for each layer the index of its first bin
    and then the percentage of elements by power of two, where bin 0 is 2**-24 and less.
    """

    step: int
    layers: tuple[str, ...] = ()
    grad_norm: tuple[float, ...] = ()
    update_ratio: tuple[float, ...] = ()
    act_mean: tuple[float, ...] = ()
    act_std: tuple[float, ...] = ()
    act_max: tuple[float, ...] = ()
    act_log2: tuple[tuple[int, ...], ...] = ()


OUTPUT_GRAD_LOG2 = range(-48, 8)
"""Powers of two of the histogram of output gradients."""


@dataclass(frozen=True, kw_only=True)
class OutputGrads(Record):
    """Gradients with respect to the outputs of modules in one step, in the order of ``layers``.

    ``layers`` are the names of the modules, in the first record of a process only. ``norm`` is without the loss scale
    and before clipping; NaN: no gradient reached the module. ``log2`` has for each module the index of its first bin
    and then the percentage of elements by power of two, where bin 0 is 2**-48 and less.
    """

    step: int
    layers: tuple[str, ...] = ()
    norm: tuple[float, ...] = ()
    log2: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Unknown(Record):
    """A kind that this version does not support. ``fields`` is the line without ``kind`` and ``time_s``."""

    kind: str
    fields: Facts


KINDS: Mapping[str, type[Record]] = {cls.__name__.lower(): cls for cls in Record.__subclasses__() if cls is not Unknown}
_KIND_OF: Mapping[type[Record], str] = {cls: kind for kind, cls in KINDS.items()}
_WITH_TEXT = (Started, NotSaved, Skipped, OutOfMemory, Quarantined, Found, Examined, Replayed, Ended)
"""Records that hold a command line, or the text of an exception."""
_MAY_HOLD_SECRET = re.compile("://|token|auth|bearer|passw|pwd|passphrase|secret|credential|key", re.IGNORECASE)


def to_json(record: Record) -> str:
    """Return one line without its newline, in ASCII, so that no text of the user can break the line or the encoding."""
    if isinstance(record, Unknown):
        line = {"kind": record.kind, "time_s": record.time_s, **record.fields}
    else:
        line = {"kind": _KIND_OF[type(record)], **record.__dict__}
    try:
        text = _encode(line)
    except ValueError:  # NaN or infinity somewhere: rare, so only these lines pay for the walk
        line = strict(line)
        text = _encode(line)
    if type(record) in _WITH_TEXT and _MAY_HOLD_SECRET.search(text):
        return _encode(masked(strict(line)))
    return text


def from_json(line: str) -> Record:
    """Return the record of one line. Raises ValueError if it is not one."""
    fields = parse_json(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
        raise ValueError("a record is a JSON object with a 'kind'")
    kind = fields.pop("kind")
    if kind in KINDS:
        return construct(KINDS[kind], fields)
    return Unknown(kind=kind, time_s=_float(fields.pop("time_s", "NaN")), fields=fields)


def _fields_of(value: object) -> dict[str, object]:
    """Return the fields of a dataclass, for the encoder.

    Raises TypeError for other objects: a tensor, for example, has a ``__dict__`` and would be logged as ``{}``.
    """
    if dataclasses.is_dataclass(value):
        return vars(value)
    raise TypeError(f"a record holds plain numbers, strings and containers, not {type(value).__name__}")


# One encoder for the whole process: json.dumps with options builds a new one for each call.
_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=_fields_of).encode


def construct(cls: type[T], fields: object) -> T:
    """Return a dataclass from the JSON that ``strict`` made of it. Raises ValueError for other JSON."""
    if not isinstance(fields, dict):
        raise ValueError(f"{cls.__name__} is a JSON object, not {fields!r}")
    decoders = _decoders(typing.cast(type, cls))
    try:
        return cls(**{name: decoders[name](value) for name, value in fields.items() if name in decoders})
    except TypeError as missing:
        raise ValueError(str(missing)) from missing


@functools.cache
def _decoders(cls: type) -> dict[str, _Decoder]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: _decoder(hints[f.name]) for f in dataclasses.fields(cls)}


def _decoder(hint: object) -> _Decoder:
    """Return the decoder of JSON for ``hint``, one of the types of record fields."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return plain
    if origin is types.UnionType:
        inner = _decoder(args[0])
        return lambda value: None if value is None else inner(value)
    if origin is tuple:
        item = _decoder(args[0])
        return lambda value: tuple(item(one) for one in _of(list, value))
    if origin is dict:
        item = _decoder(args[1])
        return lambda value: {key: item(one) for key, one in _of(dict, value).items()}
    if dataclasses.is_dataclass(hint):
        return functools.partial(construct, typing.cast(type, hint))
    if hint is float:
        return _float
    return functools.partial(_of, typing.cast(type, hint))


def _float(value: object) -> float:
    if isinstance(value, str):
        if value not in NOT_IN_JSON:
            raise ValueError(f"not a number: {value!r}")
        return NOT_IN_JSON[value]
    return float(_of(int, value) if not isinstance(value, float) else value)


def _of(wanted: type[T], value: object) -> T:
    if type(value) is not wanted:
        raise ValueError(f"expected {wanted.__name__}, not {value!r}")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise ValueError(f"expected an integer of 64 bits, not {value}")
    return value
