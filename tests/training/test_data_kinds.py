"""Any data: every kind trains, and after a SIGKILL within an epoch it goes on as docs/how-to/data.md says of it."""

from __future__ import annotations

import re
import signal

import pytest
from torch.utils.data import default_collate

from tests.forked import Forked
from tests.house import ROOT
from tests.training.data_kinds import KINDS, parts_of
from tests.training.killed import MARK, POSITION, SAVED, UNTIL, Trained, results, table

pytestmark = [pytest.mark.process, pytest.mark.slow]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> list[Trained]:
    folder = tmp_path_factory.mktemp("kinds")
    code = f"from tests.training.killed import *; run(Path({str(folder)!r}), int(sys.argv[1]), 2)"
    halves = [Forked(code, str(first), cwd=ROOT, together=True) for first in (0, 1)]
    assert [half.wait(500) for half in halves] == [0, 0], [half.stdout for half in halves]
    return results(folder)


def test_each_kind_trains_is_killed_and_goes_on(trained: list[Trained]) -> None:
    assert len(trained) == len(KINDS) >= 30
    endings = {each.kind.name: each.statuses for each in trained if each.statuses != [signal.SIGKILL, 0]}
    assert endings == {}, [each.output[-2000:] for each in trained if each.kind.name in endings]
    for each in trained:
        assert list(each.whole) == list(range(1, UNTIL + 1)), each.kind.name
        assert list(each.resumed) == list(range(SAVED + 1, UNTIL + 1)), each.kind.name


def test_where_exactness_is_promised_the_bits_are_equal(trained: list[Trained]) -> None:
    for each in trained:
        if each.kind.exact:
            assert each.in_parts == each.whole, each.kind.name
            assert each.same_weights, each.kind.name
            assert "NOT" not in each.notes.get("resumed", ""), each.kind.name


def test_where_it_is_not_the_resumed_run_says_so_and_goes_on(trained: list[Trained]) -> None:
    inexact = [each for each in trained if not each.kind.exact]
    assert len(inexact) >= 3
    for each in inexact:
        assert each.in_parts != each.whole, each.kind.name
        assert "NOT the same as before: some samples of this epoch may come twice" in each.notes["resumed"]
        assert re.search(r"data +resumed: the first [23\d]+ (batches|positions) of epoch 1 were", each.output)


def test_sample_ids_are_what_the_page_says(trained: list[Trained]) -> None:
    for each in trained:
        rows = each.unwrapped.dataset
        for _, targets, ids in each.whole.values() if each.ids == POSITION else ():
            own = parts_of(default_collate([rows[i] for i in ids]))[1].tolist()
            assert targets == own, each.kind.name
        if "number of the row" in each.ids:
            by_epoch = [ids[0] for _, _, ids in each.whole.values()]
            assert by_epoch.count(0) in (1, 3), each.kind.name


def test_what_a_checkpoint_cannot_keep_is_said(trained: list[Trained]) -> None:
    (kept_nothing,) = [each for each in trained if "state holds an object" in each.kind.name]
    assert "extra: a object cannot be kept in a checkpoint" in kept_nothing.output


def test_the_table_of_the_page_is_what_was_seen(trained: list[Trained]) -> None:
    _, _, page = (ROOT / "docs/how-to/data.md").read_text().partition(MARK)
    assert page == table(trained), "python -m tests.training.killed docs/how-to/data.md"
