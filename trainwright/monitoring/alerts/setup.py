"""Sets up the alerts of a recipe."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from trainwright.monitoring.alerts.channels import Apprise, Channel, Command, Webhook, desktop
from trainwright.monitoring.alerts.rules import AlertRules
from trainwright.monitoring.alerts.watch import AlertWatch
from trainwright.recipe.alerts import Alerts
from trainwright.recipe.byte_size import parse_bytes
from trainwright.runs.folder import RunFolder


def require_channels(ask: Alerts | None) -> None:
    """Raise UsageError before the run for anything that an alert needs and is missing."""
    if ask is not None:
        list(_channels(ask, os.environ))


def _channels(ask: Alerts, environ: Mapping[str, str]) -> Iterator[Channel]:
    if ask.webhook is not None:
        yield Webhook.of_variable(ask.webhook, environ)
    if ask.apprise is not None:
        yield Apprise.of_variable(ask.apprise, environ)
    if ask.command:
        yield Command.of(ask.command)
    if ask.desktop:
        yield desktop()


@contextmanager
def alerting(
    ask: Alerts | None, folder: RunFolder, warn: Callable[[str], None], *, watched: bool = False
) -> Iterator[tuple[AlertWatch, ...]]:
    """Send the alerts of a recipe section within the block. Provides the observers for the steps: none, or one watch.

    The block must end after the last record is in the log. ``watched``: the log is that of a loop under ``tw.watch``.
    """
    if ask is None:
        yield ()
        return
    rules = AlertRules(
        finding=ask.finding,
        loss_above=ask.loss_above,
        no_step_s=ask.no_step_for.value if ask.no_step_for else None,
        disk_below=parse_bytes(ask.disk_below) if ask.disk_below else None,
        ended=ask.ended,
        watched=watched,
    )
    to = [*_channels(ask, os.environ)]
    with AlertWatch(folder, rules, to, every_s=ask.every.value, warn=warn) as watch:
        yield (watch,)
