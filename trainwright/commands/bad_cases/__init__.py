"""``tw.bad_cases`` and ``trainwright errors``: finds the worst predictions of a model, and likely wrong labels."""

from __future__ import annotations

from trainwright.commands.bad_cases.find import bad_cases as bad_cases
from trainwright.commands.bad_cases.find import errors_in_folds as errors_in_folds
from trainwright.commands.bad_cases.find import errors_of_run as errors_of_run
