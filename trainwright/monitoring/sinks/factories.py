"""Finds the sinks that a recipe names."""

from __future__ import annotations

import importlib.util
import pkgutil
from collections.abc import Sequence

from trainwright.errors import MissingExtra
from trainwright.monitoring.sinks import SinkFactory
from trainwright.recipe import SINKS


def sink_factories(names: Sequence[str]) -> dict[str, SinkFactory]:
    """Return the factories of these sinks by name. Raises MissingExtra if a package is not installed."""
    rows = [SINKS[name] for name in dict.fromkeys(names)]
    for row in rows:
        if row.package and importlib.util.find_spec(row.package) is None:
            raise MissingExtra(row.package, needed_for=f"the sink {row.name!r}")
    return {row.name: pkgutil.resolve_name(row.factory) for row in rows}
