"""What is measured of gradients, all of it on the replay of a step."""

from __future__ import annotations

from trainwright.doctor.gradient.measure import derivative as _derivative  # noqa: F401  registers its experiment
