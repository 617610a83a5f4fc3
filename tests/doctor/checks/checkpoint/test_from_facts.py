"""Checks of checkpoints on measurements."""

from __future__ import annotations

import pytest

from tests.doctor.checks.loops import made_of
from trainwright.doctor.discovery import check_of
from trainwright.doctor.facts.calls import OverwrittenFacts, ResumeFacts


@pytest.mark.parametrize(("fraction", "found"), [(1.0, True), (0.1, False)])
def test_a_new_head_alone_is_a_fine_tune(fraction: float, found: bool) -> None:
    check = check_of("checkpoint.loaded_weights_overwritten")
    assert check is not None
    facts = ResumeFacts(overwritten=OverwrittenFacts(weights=8, gone=1, fraction=fraction))
    assert bool(made_of(check, (1, facts))) == found
