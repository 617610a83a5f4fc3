"""What is measured of gradients, all of it on the replay of a step."""

from __future__ import annotations

from trainwright.doctor.gradient.measure import accumulation as _accumulation  # noqa: F401  registers what it measures
from trainwright.doctor.gradient.measure import custom_functions as _custom_functions  # noqa: F401  registers what it measures
from trainwright.doctor.gradient.measure import derivative as _derivative  # noqa: F401  registers its experiment
from trainwright.doctor.gradient.measure import through_time as _through_time  # noqa: F401  registers what it measures
