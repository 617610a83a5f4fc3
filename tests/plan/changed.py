"""Returns copies of plans with changed predictions or cadences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from trainwright.plan.make import Plan


def with_cadence(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, cadence=replace(plan.cadence, **changes))


def with_predicted(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, **changes))
