"""Data of other libraries, each the real one: trained, killed within an epoch, resumed; all by ``make others``."""

from __future__ import annotations

import signal

import pytest

from tests.forked import Forked
from tests.house import ROOT
from tests.training.killed import SAVED, UNTIL, Trained, results
from tests.training.library_kinds import ALL, AUGMENTED, KINDS, OfLibrary

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    folder = tmp_path_factory.mktemp("kinds")
    code = (
        "from tests.training.killed import *\n"
        f"from tests.training.library_kinds import KINDS\nrun(Path({str(folder)!r}), 0, 1, KINDS)"
    )
    process = Forked(code, cwd=ROOT, together=True)
    assert process.wait(300) == 0, process.stdout
    return {each.kind.name: each for each in results(folder, KINDS)}


@pytest.mark.parametrize("of", ALL, ids=lambda of: of.name)
def test_data_of_a_library_go_on_as_is_said(of: OfLibrary, request: pytest.FixtureRequest) -> None:
    pytest.importorskip(of.library)
    each: Trained = request.getfixturevalue("trained")[of.name]
    assert each.statuses == [signal.SIGKILL, 0], each.output[-2000:]
    assert list(each.resumed) == list(range(SAVED + 1, UNTIL + 1))
    assert (each.in_parts == each.whole and each.same_weights) == of.exact
    if of.name == AUGMENTED:  # the samples are the right ones: what its workers draw is not in its state
        assert [step[1] for step in each.in_parts.values()] == [step[1] for step in each.whole.values()]
        assert "as exactly as that says where it was" in each.notes["resumed"]
    else:
        assert ("NOT the same as before" in each.notes.get("resumed", "")) != of.exact
