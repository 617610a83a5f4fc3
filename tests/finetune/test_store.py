"""The cache of tokens: one folder for each content, complete or continued, without executed code."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.finetune.sets import chat, lines, pair
from tests.finetune.tokenizers import CHATML, make_tokenizer
from trainwright.data.fingerprint import fingerprint
from trainwright.data.unwrap import unwrap
from trainwright.errors import StorageError, UsageError
from trainwright.finetune import store
from trainwright.finetune.datasets import Chat, Preference


def written(folder: Path, count: int = 10) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(lines([*map(chat, range(count))]))
    return path


def bits(folder: Path) -> dict[str, str]:
    """Hashes of the files of a cache."""
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "SHARD_RECORDS", 3)


@pytest.mark.usefixtures("small_shards")
def test_tokens_come_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokenizer = written(tmp_path), make_tokenizer()
    first = Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
    before = bits(tmp_path / "cache")

    def refuse(*args: object) -> None:
        raise AssertionError("tokenized again")

    monkeypatch.setattr(store, "_build", refuse)
    again = Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
    assert bits(tmp_path / "cache") == before
    assert len(again) == 10 and again.store.shards == 4
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert first.content_sha256() == again.content_sha256() == fingerprint(again).sha256


@pytest.mark.parametrize(
    "change",
    [
        {"train_on": "last"},
        {"max_length": 500},
        {"template_args": {"x": 1}},
        {"chat_template": CHATML + " "},
        {"tokenizer": make_tokenizer(bos="<s>")},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_setting_is_another_folder(change: Mapping[str, Any], tmp_path: Path) -> None:
    path = written(tmp_path)
    plain = Chat(path, tokenizer=make_tokenizer(), cache=tmp_path / "cache")
    other = Chat(path, **{"tokenizer": make_tokenizer(), "cache": tmp_path / "cache", **change})
    assert plain.store.folder != other.store.folder
    same_tokens = all(torch.equal(one[name], two[name]) for one, two in zip(plain, other) for name in one)
    assert (plain.content_sha256() == other.content_sha256()) is same_tokens


def test_another_content_is_another_folder(tmp_path: Path) -> None:
    plain = Chat(written(tmp_path), tokenizer=make_tokenizer(), cache=tmp_path / "cache")
    other = Chat(written(tmp_path, 11), tokenizer=make_tokenizer(), cache=tmp_path / "cache")
    assert plain.store.folder != other.store.folder and (len(plain), len(other)) == (10, 11)


def killed_after(number: int, path: Path, cache: Path) -> int:
    """Tokenize in a process that is killed in the middle of a write; returns how it ended."""
    child = os.fork()
    if not child:
        replace, left = store._replace, number

        def counted(file: Path, content: bytes) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                file.with_name(f".{file.name}.dead").write_bytes(content[: len(content) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            replace(file, content)

        store._replace = counted  # type: ignore[assignment]
        try:
            Chat(path, tokenizer=make_tokenizer(), cache=cache)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


@pytest.mark.usefixtures("small_shards")
def test_a_kill_loses_at_most_one_shard_and_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, tokenizer = written(tmp_path), make_tokenizer()
    Chat(path, tokenizer=tokenizer, cache=tmp_path / "whole")
    for number in (1, 4, 4):  # in the first shard, in the third, before the mark of completion
        assert killed_after(number, path, tmp_path / "killed") == signal.SIGKILL
    made, encode = list[int](), store._Shard.encode

    def counted(self: Any, records: Any) -> Any:
        made.append(len(records))
        return encode(self, records)  # type: ignore[call-arg]

    monkeypatch.setattr(store._Shard, "encode", counted)
    Chat(path, tokenizer=tokenizer, cache=tmp_path / "killed")
    assert made == []  # all four shards were complete; only the mark was missing
    assert bits(tmp_path / "killed") == bits(tmp_path / "whole")


@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_is_made_again(tmp_path: Path) -> None:
    path, tokenizer = written(tmp_path), make_tokenizer()
    first = Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
    before = bits(tmp_path / "cache")
    file = first.store.folder / "shard-00001.tokens.npy"
    file.write_bytes(file.read_bytes()[:-40])
    again = Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
    assert bits(tmp_path / "cache") == before and len(again) == 10


def test_loading_executes_no_code(tmp_path: Path) -> None:
    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    path, tokenizer = written(tmp_path), make_tokenizer()
    first = Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
    for name in ("shard-00000.tokens.npy", "shard-00000.rows.npy"):
        np.save(first.store.folder / name, np.array([Harmful()], dtype=object), allow_pickle=True)
    assert len(Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")) == 10
    assert not (tmp_path / "executed").exists()


def test_a_set_can_be_pickled_without_its_tokenizer(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = Chat(written(tmp_path), tokenizer=tmp_path / "tokenizer", cache=tmp_path / "cache")
    data[0]
    sent = pickle.dumps(data)
    assert len(sent) < 10_000
    again = pickle.loads(sent)
    assert torch.equal(again[3]["input_ids"], data[3]["input_ids"])
    assert again.tokenizer.decode([0]) == data.tokenizer.decode([0])


def test_two_processes_tokenize_once(tmp_path: Path) -> None:
    path, tokenizer = written(tmp_path), make_tokenizer()
    child = os.fork()
    if not child:  # holds the lock for a while
        try:
            build = store._build

            def slow(*args: Any) -> Any:
                time.sleep(0.2)
                return build(*args)

            store._build = slow  # type: ignore[assignment]
            Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
        finally:
            os._exit(0)
    Chat(path, tokenizer=tokenizer, cache=tmp_path / "cache")
    assert os.waitpid(child, 0)[1] == 0
    assert not list((tmp_path / "cache").rglob(".*"))


def test_long_tokenization_shows_its_progress_on_a_terminal() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, expected in ((Terminal(), "\rtokenizing a.jsonl: 2,000 records"), (io.StringIO(), "")):
        times = iter((0.0, 1.0, 5.0))
        progress = store.TokenizationProgress("a.jsonl", out, lambda times=times: next(times))  # type: ignore[misc]
        progress.show(1000)  # too early
        progress.show(2000)
        assert out.getvalue() == expected
        progress.close()
        assert out.getvalue().endswith("\r" if expected else "")


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StorageError, match="cannot be written"):
        Chat(written(tmp_path), tokenizer=make_tokenizer(), cache=tmp_path / "cache")


def test_lengths_and_batches(tmp_path: Path) -> None:
    data = Chat(written(tmp_path), tokenizer=make_tokenizer(pad="<|im_end|>"), cache=tmp_path / "cache")
    assert data.lengths().tolist() == [len(each["input_ids"]) for each in data]
    batch = data.fetch_batch(np.array([0, 3]))
    sizes = data.lengths()[[0, 3]]
    assert batch["attention_mask"].sum(1).tolist() == sizes.tolist()
    assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()
    for row, at in enumerate((0, 3)):  # the end token keeps its label though it is the padding token, too
        assert torch.equal(batch["labels"][row, : sizes[row]], data[at]["labels"])


def test_short_samples_come_first_in_the_first_epochs(tmp_path: Path) -> None:
    data = Chat(written(tmp_path, 40), tokenizer=make_tokenizer(), cache=tmp_path / "cache", short_first=2)
    order = unwrap(data).order
    assert order is not None and order.is_pure and unwrap(data).dataset is data
    epochs = [np.concatenate([*order.batches(7, epoch)]) for epoch in (0, 1, 2, 0)]
    assert all(sorted(each.tolist()) == list(range(40)) for each in epochs)
    means = [data.lengths()[each].reshape(10, 4).mean(1) for each in epochs]
    is_growing = [bool((np.diff(each) >= 0).all()) for each in means]
    assert is_growing == [True, True, False, True]
    assert (epochs[0] != epochs[1]).any() and (epochs[0] == epochs[3]).all()


def test_lengths_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(lines([*map(pair, range(5))]))
    data = Preference(tmp_path / "data.jsonl", tokenizer=make_tokenizer(), cache=tmp_path / "cache")
    assert len(data) == 5
    assert data.lengths().tolist() == [len(each["chosen_input_ids"]) + len(each["rejected_input_ids"]) for each in data]
    assert data.longest().tolist() == [
        max(len(each["chosen_input_ids"]), len(each["rejected_input_ids"])) for each in data
    ]
    assert {"chosen_attention_mask", "rejected_labels"} <= data.fetch_batch(np.array([0, 1])).keys()


def test_bad_records_can_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(lines([chat(0), {"messages": []}, chat(2)]))
    with pytest.raises(UsageError, match=r"1 record cannot be used:\n  data.jsonl:2: messages is empty"):
        Chat(path, tokenizer=make_tokenizer(), cache=tmp_path / "cache")
    data = Chat(path, tokenizer=make_tokenizer(), cache=tmp_path / "cache", on_bad_record="skip")
    assert [data.place(at) for at in range(len(data))] == ["data.jsonl:1", "data.jsonl:3"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": None}, "no tokenizer"),
        ({"tokenizer": "nowhere/at/all/tokenizer"}, "cannot be loaded|no folder"),
        ({"split": "val"}, "without val_fraction"),
        ({"train_on": "asistant"}, "did you mean 'assistant'"),
        ({"max_length": 1}, "nothing to predict"),
        ({"chat_template": "missing.jinja"}, "cannot be read"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_mistakes_are_named(options: Mapping[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        Chat(written(tmp_path), **{"tokenizer": make_tokenizer(), "cache": tmp_path, **options})


def test_a_small_set_has_a_validation_sample(tmp_path: Path) -> None:
    for count in range(2, 40):
        folder = tmp_path / str(count)
        folder.mkdir()
        sides = [
            Chat(
                written(folder, count),
                tokenizer=make_tokenizer(),
                cache=folder / "cache",
                split=split,
                val_fraction=0.05,
            )
            for split in ("train", "val")
        ]
        assert len(sides[1]) >= 1 and len(sides[0]) + len(sides[1]) == count
