"""The section ``alerts`` of a recipe: messages about the run."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.byte_size import parse_bytes
from trainwright.recipe.duration import Duration
from trainwright.recipe.section import Section, Text, Texts, require_time


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
    """Messages about the run, to a webhook, apprise, a command or the desktop. Every rule applies to all of them."""

    webhook: Annotated[Text, AfterValidator(_variable)] | None = Field(
        default=None,
        description="The environment variable with the address, which receives {text: ...} as JSON, as Slack expects.",
        examples=["SLACK_WEBHOOK"],
    )
    command: Texts = Field(
        default=(),
        description="A program with its arguments; it receives the alert as JSON on its standard input.",
        examples=[["./notify.sh"]],
    )
    apprise: Annotated[Text, AfterValidator(_variable)] | None = Field(
        default=None,
        description="The environment variable with addresses for the package apprise, such as tgram://, separated by "
        "spaces.",
        examples=["APPRISE_URLS"],
    )
    desktop: bool = Field(default=False, description="A notification on this machine's desktop.")
    finding: Literal["info", "warning", "critical"] | None = Field(
        default="critical", description="The lowest severity of a finding that is sent; null: none."
    )
    loss_above: float | None = Field(
        default=None, description="Alert on a training loss above this, or one that is not finite.", examples=[10.0]
    )
    no_step_for: Duration | None = Field(
        default=Duration(30 * 60, "s"), description="Alert if no step was completed for this long, evaluation included."
    )
    disk_below: Annotated[Text, AfterValidator(_size)] | None = Field(
        default="1GiB", description="Alert if less than this is free on the disk of the run folder."
    )
    ended: bool = Field(default=True, description="Alert at the end of the run, for any reason.")
    every: Duration = Field(
        default=Duration(5 * 60, "s"),
        description="At most one message of each kind in this time; later ones are joined.",
    )

    @field_validator("no_step_for", "every")
    @classmethod
    def _on_the_clock(cls, value: Duration | None) -> Duration | None:
        return require_time(value)

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Alerts:
        if not (self.webhook or self.apprise or self.command or self.desktop):
            rule, remedy = "have no destination", "name a webhook, apprise, a command, or set desktop: true"
            raise RecipeError(Problem("", rule, remedy=remedy))
        return self
