"""The alerts that a recipe asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from trainwright.engine.observer import Observer
from trainwright.observe.alerts.channels import Channel, Command, Webhook, desktop
from trainwright.observe.alerts.rules import AlertRules
from trainwright.observe.alerts.watch import AlertWatch
from trainwright.recipe import Recipe
from trainwright.recipe.alerts import Alerts
from trainwright.recipe.byte_size import parse_bytes
from trainwright.runlog.folder import RunFolder


def require_channels(recipe: Recipe) -> None:
    """Raises UsageError for what an alert would need and is missing, before the run begins."""
    if recipe.alerts is not None:
        list(_channels(recipe.alerts, os.environ))


def _channels(ask: Alerts, environ: Mapping[str, str]) -> Iterator[Channel]:
    if ask.webhook is not None:
        yield Webhook.of_variable(ask.webhook, environ)
    if ask.command:
        yield Command.of(ask.command)
    if ask.desktop:
        yield desktop()


@contextmanager
def alerting(recipe: Recipe, folder: RunFolder, warn: Callable[[str], None]) -> Iterator[tuple[Observer, ...]]:
    """Inside, somebody is told what the recipe says; gives what observes the steps for that: nothing, or an observer.

    It is left after the log has got its last record.
    """
    ask = recipe.alerts
    if ask is None:
        yield ()
        return
    rules = AlertRules(
        finding=ask.finding,
        loss_above=ask.loss_above,
        no_step_s=ask.no_step_for.value if ask.no_step_for else None,
        disk_below=parse_bytes(ask.disk_below) if ask.disk_below else None,
        ended=ask.ended,
    )
    to = [*_channels(ask, os.environ)]
    with AlertWatch(folder, rules, to, every_s=ask.every.value, warn=warn) as watch:
        yield (watch,)
