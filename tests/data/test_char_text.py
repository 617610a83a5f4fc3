"""Character windows: splits, shapes, the vectorised batch, reference figures, refusals."""

from __future__ import annotations

import math
import pickle
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from trainwright.data.text import CharText, python_topics, stdlib_source, text_file
from trainwright.errors import UsageError

TEXT = "".join(random.Random(0).choices("abcdefgh ", k=1000))


def test_items_are_windows_moved_by_one() -> None:
    data = CharText(TEXT, block_size=16)
    for index in range(len(data)):
        x_T, y_T = data[index]
        start = index * 16
        assert data.decode(x_T) == TEXT[start : start + 16]
        assert data.decode(y_T) == TEXT[start + 1 : start + 17]
    assert x_T.dtype == y_T.dtype == torch.int64
    assert len(data) == (900 - 1) // 16 == len([data[index] for index in range(len(data))])
    assert (data.sample_tokens, data.classes, data.deterministic) == (16, 9, True)


def test_the_splits_share_the_vocabulary_and_no_character() -> None:
    train, val = CharText(TEXT, block_size=4), CharText(TEXT, split="val", block_size=4)
    seen_train = "".join(train.decode(train[i][0]) for i in range(len(train)))
    seen_val = "".join(val.decode(val[i][0]) for i in range(len(val)))
    assert TEXT[:900].startswith(seen_train) and len(seen_train) == 896
    assert TEXT[900:].startswith(seen_val) and len(seen_val) == 96
    assert train.vocabulary == val.vocabulary == tuple(sorted(set(TEXT)))
    assert all(train[i][1].max() < 9 for i in range(len(train)))


@pytest.mark.parametrize(("split", "stride"), [("train", 0), ("train", 3), ("train", 1), ("val", 3)])
def test_fetch_equals_collated_items(split: Any, stride: int) -> None:
    data = CharText(TEXT, split=split, block_size=16, stride=stride)
    assert data.stride == (stride if stride and split == "train" else 16)
    indices = np.random.default_rng(0).permutation(len(data))
    x_BT, y_BT = data.fetch_batch(indices)
    want_x, want_y = default_collate([data[int(i)] for i in indices])
    assert torch.equal(x_BT, want_x) and torch.equal(y_BT, want_y)
    assert x_BT.dtype == torch.int64 and x_BT.is_contiguous() and y_BT.is_contiguous()


def test_a_small_stride_reaches_the_last_character_of_the_split() -> None:
    data = CharText(TEXT, block_size=16, stride=1)
    assert data.decode(data[len(data) - 1][1]) == TEXT[900 - 16 : 900]
    assert torch.equal(data[-1][0], data[len(data) - 1][0])
    with pytest.raises(IndexError):
        data[len(data)]


def test_more_than_256_symbols_and_a_lone_surrogate_free_round_trip() -> None:
    wide = "".join(chr(0x4E00 + i % 700) for i in range(3000)) + "aé𝄞" * 10
    data = CharText(wide, block_size=8)
    assert data.classes == 703
    assert data.decode(data.encode(wide)) == wide
    assert data.decode(np.array(data.encode("é𝄞"))) == "é𝄞"
    x_BT, _ = data.fetch_batch(np.arange(3))
    assert data.decode(x_BT.flatten()) == wide[:24]


def test_references_are_entropies_of_the_text_and_scores_on_its_validation_part() -> None:
    text = "ab" * 500
    figures = CharText(text, block_size=8).references()
    assert figures["uniform"] == figures["unigram"] == pytest.approx(math.log(2))
    assert figures["bigram"] == pytest.approx(0, abs=1e-4)
    # add-one counts of 450 a and 450 b, of 450 ab and 449 ba
    assert figures["unigram_val"] == pytest.approx(math.log(2))
    scores = [-math.log(451 / 452)] * 50 + [-math.log(450 / 451)] * 49
    assert figures["bigram_val"] == pytest.approx(sum(scores) / 99)


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the topics differ with the Python version")
def test_the_topics_of_python_3_11() -> None:
    data = python_topics()
    assert (sum(len(python_topics(s)._ids) for s in ("train", "val")), data.classes) == (465_126, 103)
    figures = {name: round(nats, 2) for name, nats in data.references().items()}
    assert {name: figures[name] for name in ("uniform", "unigram", "bigram")} == {
        "uniform": 4.63,
        "unigram": 3.25,
        "bigram": 2.46,
    }


def test_topics_do_not_depend_on_anything_but_python() -> None:
    first, second = python_topics(block_size=128), python_topics(block_size=128)
    assert first.content_sha256() == second.content_sha256()
    assert first.content_sha256() != python_topics("val", block_size=128).content_sha256()
    assert first.content_sha256() != python_topics(block_size=64).content_sha256()
    assert torch.equal(first[100][0], pickle.loads(pickle.dumps(first))[100][0])
    assert 80 < first.classes < 300 and len(first) > 2000


def test_the_standard_library_is_cut_at_the_limit() -> None:
    data = stdlib_source(block_size=64, limit_bytes=200_000)
    assert len(data) == (180_000 - 1) // 64
    assert "def " in data.decode(data.fetch_batch(np.arange(200))[0].flatten())
    assert max(data.vocabulary) < "\x80"


def test_a_file_is_read_and_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text(TEXT, encoding="utf-8")
    assert text_file(path, block_size=16).content_sha256() == CharText(TEXT, block_size=16).content_sha256()
    with pytest.raises(UsageError, match="No such file"):
        text_file(tmp_path / "b.txt")
    with pytest.raises(UsageError, match="Is a directory"):
        text_file(tmp_path)
    path.write_bytes(b"caf\xe9" * 1000)
    with pytest.raises(UsageError, match="not UTF-8 at byte 3"):
        text_file(path)


def test_wrong_arguments_are_refused_with_a_remedy() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"split": "test"}, "split must be"),
        ({"block_size": 0}, "are counts"),
        ({"val_share": 1.0}, "val_share"),
        ({"block_size": 900}, "a window needs 901"),
        ({"split": "val", "val_share": 0.0}, "0 characters"),
    ]
    for options, said in wrong:
        with pytest.raises(UsageError, match=said) as caught:
            CharText(TEXT, **options)
        assert caught.value.remedy
    with pytest.raises(UsageError, match="not in the vocabulary"):
        CharText(TEXT, block_size=4).encode("xyz")
    with pytest.raises(UsageError, match="a window needs"):
        CharText("", block_size=4)


def test_reading_draws_no_random_numbers() -> None:
    before = (torch.get_rng_state(), random.getstate())
    data = CharText(TEXT, block_size=16)
    data.fetch_batch(np.arange(4))
    data[3]
    assert torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]
