"""Types of the answers to agents. ``note`` marks them as data. ``left_out`` counts removed list items by path."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict


def _shorten(schema: dict[str, Any]) -> None:
    """Remove titles and defaults from a schema. Every session of an agent pays tokens for the schemas of all tools."""
    schema.pop("title", None)
    for each in schema.get("properties", {}).values():
        each.pop("title", None)
        each.pop("default", None)


class AnswerPart(BaseModel):
    model_config = ConfigDict(json_schema_extra=_shorten)


class Answer(AnswerPart):
    note: str = ""
    left_out: dict[str, int] = {}


class RunLine(AnswerPart):
    run: str = ""
    state: str = ""
    verdict: str = ""
    step: int = 0
    loss: float | str | None = None
    val_loss: float | str | None = None
    media: list[str] = []
    began: str = ""


class Runs(Answer):
    runs: list[RunLine] = []
    total: int = 0


class FindingLine(AnswerPart):
    code: str = ""
    severity: str = ""
    step: int = 0
    since_step: int | None = None
    where: str = ""
    line: str = ""
    shown_at: str = ""
    what: str = ""
    seen: list[str] = []
    cause: str = ""
    remedy: str = ""
    tried: list[str] = []
    explains: list[str] = []


class DiagnosisAnswer(Answer):
    run: str = ""
    state: str = ""
    step: int = 0
    verdict: str = ""
    findings: list[FindingLine] = []
    calls: list[str] = []
    optimizers: list[str] = []
    not_examined: list[str] = []
    replay: str = ""


class SourceLines(Answer):
    file: str = ""
    lines: list[str] = []
    shown_file: str = ""
    shown_lines: list[str] = []
    why: str = ""


class EvidenceAnswer(Answer):
    code: str = ""
    expected_and_seen: list[list[str]] = []
    step_loss_gradnorm_lr: list[list[float | int | str | None]] = []
    file: str = ""
    lines: list[str] = []
    replays: list[str] = []


class SeriesAnswer(Answer):
    metric: str = ""
    count: int = 0
    points: list[list[float | int | str | None]] = []
    metrics: list[str] = []


class LayersAnswer(Answer):
    step: int = 0
    columns: list[str] = []
    layers: list[list[float | int | str | None]] = []
    steps: list[int] = []


class MeasurementsAnswer(Answer):
    experiment: str = ""
    step: int = 0
    about: str = ""
    values: dict[str, object] = {}
    fields: dict[str, str] = {}
    experiments: dict[str, str] = {}


class Setup(Answer):
    recipe: dict[str, object] = {}
    optimizers: list[dict[str, object]] = []
    plan: dict[str, object] = {}
    provenance: dict[str, object] = {}


class ComparisonAnswer(Answer):
    runs: list[str] = []
    recipe: dict[str, list[str]] | str = {}
    plan: dict[str, list[str]] | str = {}
    provenance: dict[str, list[str]] | str = {}
    first_difference: list[str] = []
    outcomes: list[dict[str, object]] = []


class PageAnswer(Answer):
    code: str = ""
    page: str = ""


class OutcomeAnswer(Answer):
    outcome: str = ""
    result: dict[str, object] = {}
