"""Whom a recipe tells what happens to its run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.byte_size import parse_bytes
from trainwright.recipe.duration import Duration
from trainwright.recipe.section import Section, Text, Texts, on_the_clock


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(
            "must be the name of an environment variable: the run folder keeps the recipe, and an address is a secret",
            remedy="write for example SLACK_WEBHOOK, and export SLACK_WEBHOOK=https://...",
        )
    return name


def _size(text: str) -> str:
    parse_bytes(text)
    return text


class Alerts(Section):
    """Messages about the run, to a webhook, a command or the desktop; all rules go to all that are named."""

    webhook: Annotated[Text, AfterValidator(_variable)] | None = Field(
        default=None,
        description="The environment variable that holds the address; it gets {text: ...} as JSON, as Slack takes it.",
        examples=["SLACK_WEBHOOK"],
    )
    command: Texts = Field(
        default=(),
        description="A program with its arguments; it gets the alert as JSON on its standard input.",
        examples=[["./notify.sh"]],
    )
    desktop: bool = Field(default=False, description="A notification on this machine's desktop.")
    finding: Literal["info", "warning", "critical"] | None = Field(
        default="critical", description="The least severity of a finding that is told; null: none is."
    )
    loss_above: float | None = Field(
        default=None, description="A training loss above this, or one that is not finite.", examples=[10.0]
    )
    no_step_for: Duration | None = Field(
        default=Duration(30 * 60, "s"), description="No step was completed for this long, evaluation included."
    )
    disk_below: Annotated[Text, AfterValidator(_size)] | None = Field(
        default="1GiB", description="Less than this is free where the run folder lies."
    )
    ended: bool = Field(default=True, description="The run ended, however.")
    every: Duration = Field(
        default=Duration(5 * 60, "s"),
        description="At most one message of a kind in this time; later ones are joined.",
    )

    @field_validator("no_step_for", "every")
    @classmethod
    def _on_the_clock(cls, value: Duration | None) -> Duration | None:
        return on_the_clock(value)

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Alerts:
        if not (self.webhook or self.command or self.desktop):
            rule, remedy = "are sent to nobody", "name a webhook, a command, or set desktop: true"
            raise RecipeError(Problem("", rule, remedy=remedy))
        return self
