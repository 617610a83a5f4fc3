"""Records of every kind of file, each with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.finetune.sets import alpaca, chat, lines, saved
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import UsageError
from trainwright.finetune.datasets import Chat
from trainwright.finetune.read import open_source, validation_split


def places(path: Path) -> list[str]:
    source = open_source(path)
    return [source.place(each.file, each.line) for each in source.records()]


def test_lines_count_empty_ones(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n\n{"text": "b"}\n')
    assert places(tmp_path / "a.jsonl") == ["a.jsonl:2", "a.jsonl:4"]


def test_a_json_list_counts_lines(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([alpaca(0), alpaca(1)], indent=1))
    assert places(tmp_path / "a.json") == ["a.json:2 (record 1)", "a.json:7 (record 2)"]
    (tmp_path / "b.json").write_text(json.dumps([alpaca(0), alpaca(1)]))
    assert places(tmp_path / "b.json") == ["b.json:1 (record 1)", "b.json:1 (record 2)"]
    (tmp_path / "c.json").write_text(json.dumps({"data": [alpaca(0), alpaca(1)]}, indent=1))
    assert places(tmp_path / "c.json") == ["c.json:3 (record 1)", "c.json:8 (record 2)"]


@pytest.mark.parametrize("inside", ["data", "records"])
def test_a_json_object_with_a_list_inside(inside: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, inside: [alpaca(0), alpaca(1)]}))
    assert [each.fields for each in open_source(tmp_path / "a.json").records()] == [alpaca(0), alpaca(1)]


def test_json_lines_in_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(lines([chat(0), chat(1)]))
    assert places(tmp_path / "a.json") == ["a.json:1", "a.json:2"]


def test_a_single_conversation_in_a_json_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(chat(0)))
    assert [each.fields for each in open_source(tmp_path / "a.json").records()] == [chat(0)]


def test_csv_fields_may_have_several_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('prompt,completion\n"one\ntwo",x\nthree,"[1, 2]"\n')
    source = open_source(tmp_path / "a.csv")
    found = list(source.records())
    assert [each.line for each in found] == [2, 4]
    assert found[0].fields == {"prompt": "one\ntwo", "completion": "x"} and found[1].fields["completion"] == [1, 2]


def test_a_folder_of_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_bytes(lines([chat(0), chat(1)]))
    (tmp_path / "README.md").write_text("about")
    assert places(tmp_path) == ["a.jsonl:1", "a.jsonl:2", "b.jsonl:1", "b.jsonl:2"]


def test_a_saved_dataset_and_its_splits(tmp_path: Path) -> None:
    import datasets

    saved([chat(0)])(tmp_path / "one")
    both = {name: datasets.Dataset.from_list([chat(at)]) for at, name in enumerate(("train", "test"))}
    datasets.DatasetDict(both).save_to_disk(str(tmp_path / "both"))
    assert places(tmp_path / "one") == ["one row 0"]
    [record] = open_source(tmp_path / "both", split="test").records()
    assert record.fields["messages"][0]["content"] == chat(1)["messages"][0]["content"]
    with pytest.raises(UsageError, match="no split 'val'") as caught:
        open_source(tmp_path / "both", split="val")
    assert "train, test" in caught.value.remedy


def listed(folder: Path, records: list[dict[str, object]], **entry: object) -> Path:
    """Write a folder as LLaMA-Factory keeps it."""
    (folder / "mine.json").write_text(json.dumps(records))
    (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "mine.json", **entry}}))
    return folder


def test_a_folder_of_llama_factory(tmp_path: Path) -> None:
    columns = {"prompt": "q", "query": "extra", "response": "a"}
    folder = listed(tmp_path, [{"q": "Name a bird.", "extra": "", "a": "A heron."}], columns=columns)
    [record] = open_source(folder).records()
    assert record.fields == {"instruction": "Name a bird.", "input": "", "output": "A heron."}
    digest = open_source(folder).digest
    assert open_source(listed(folder, [record.fields])).digest != digest  # type: ignore[list-item]


def test_conversations_and_rankings_of_llama_factory(tmp_path: Path) -> None:
    tags = {"role_tag": "role", "content_tag": "text", "user_tag": "U", "assistant_tag": "A", "function_tag": "F"}
    turns = [{"role": "U", "text": "Hi"}, {"role": "F", "text": "{}"}, {"role": "A", "text": "Hello"}]
    options: dict[str, object] = {"formatting": "sharegpt", "tags": tags, "columns": {"messages": "talk"}}
    [record] = open_source(listed(tmp_path, [{"talk": turns}], **options)).records()
    assert [each["from"] for each in record.fields["conversations"]] == ["user", "function_call", "assistant"]
    pair: dict[str, object] = {"talk": turns[:1], "good": turns[2], "bad": {"role": "A", "text": "No"}}
    options |= {"ranking": True, "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}}
    [record] = open_source(listed(tmp_path, [pair], **options)).records()
    assert record.fields["prompt"] == [{"from": "user", "value": "Hi"}]
    assert record.fields["rejected"] == [{"from": "assistant", "value": "No"}]


def test_one_of_several_sets_of_llama_factory_is_named(tmp_path: Path) -> None:
    folder = listed(tmp_path, [{"text": "a"}], columns={"prompt": "text"})
    info = json.loads((folder / "dataset_info.json").read_text())
    (folder / "dataset_info.json").write_text(json.dumps({**info, "other": info["mine"]}))
    with pytest.raises(UsageError, match="several data sets") as caught:
        open_source(folder)
    assert "mine, other" in caught.value.remedy
    assert [each.fields["text"] for each in open_source(folder, split="other").records()] == ["a"]


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    for folder in ("one", "two", "three"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.jsonl").write_bytes(lines([chat(0 if folder != "three" else 1)]))
    one, two, three = (open_source(tmp_path / folder / "a.jsonl").digest for folder in ("one", "two", "three"))
    assert one == two != three


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("chat.jsonl", "did you mean .*chats.jsonl"),
        ("./nothing", "no file or folder"),
        ("notes.txt", "no known format"),
        ("empty", "holds no data"),
        ("mixed", "mixes .parquet"),
        ("a.parquet", "not readable"),
    ],
)
def test_mistakes_are_named(name: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chats.jsonl").touch()
    Path("notes.txt").touch()
    Path("empty").mkdir()
    Path("mixed").mkdir()
    Path("mixed/a.parquet").touch()
    Path("mixed/a.csv").touch()
    Path("a.parquet").write_bytes(b"PAR1 nothing")
    if name == "a.parquet":
        [record] = open_source(name).records()
        assert says in record.problem
        return
    with pytest.raises(UsageError, match=f"(?s).*{says}"):
        open_source(name)


def test_a_folder_keeps_its_splits(tmp_path: Path) -> None:
    for name, at in (("train-00000", 0), ("train-00001", 1), ("valid", 2), ("test", 3)):
        (tmp_path / f"{name}.jsonl").write_bytes(lines([chat(at)]))
    assert validation_split(tmp_path) == "valid"
    assert open_source(tmp_path).names == ("train-00000.jsonl", "train-00001.jsonl")
    assert open_source(tmp_path, split="valid").names == ("valid.jsonl",)
    with pytest.raises(UsageError, match="no split 'dev'"):
        open_source(tmp_path, split="dev")
    (tmp_path / "more.jsonl").write_bytes(lines([chat(4)]))  # no split, so all files are one set
    assert validation_split(tmp_path) is None and len(open_source(tmp_path).names) == 5


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("two\n\nlines\n")
    (tmp_path / "a.txt").write_bytes("Gr\u00fc\u00dfe".encode())
    (tmp_path / "c.txt").write_bytes(b"Gr\xfc\xdfe")
    first, second, bad = open_source(tmp_path).records()
    assert (first.fields, second.fields) == ({"text": "Gr\u00fc\u00dfe"}, {"text": "two\n\nlines"})
    assert "not UTF-8" in bad.problem and "iconv" in bad.remedy


@pytest.mark.parametrize(
    ("suffix", "text"), [("jsonl", '{"text": "a"}'), ("json", "[]"), ("csv", "text"), ("txt", "a")]
)
def test_the_remedy_names_the_encoding_that_was_found(suffix: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "texts" / f"a.{suffix}"
    path.parent.mkdir()
    path.write_text(text, encoding="utf-16")
    [record] = open_source(path.parent).records()
    assert record.remedy == f"convert it: iconv -f UTF-16 -t UTF-8 a.{suffix}"
    path.write_bytes(text.encode() + b"\xe9")
    [record] = [each for each in open_source(path.parent).records() if each.remedy]
    assert "iconv -f LATIN1" in record.remedy


def test_records_in_memory_are_written_to_a_file_first() -> None:
    with pytest.raises(UsageError, match="not a list") as raised:
        Chat([chat(0)], tokenizer=make_tokenizer())  # type: ignore[arg-type]
    assert raised.value.remedy is not None and "json.dumps" in raised.value.remedy
