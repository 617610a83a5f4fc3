"""YAML as the core schema of YAML 1.2 reads it, with the line of everything, and hostile files."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainwright.errors import RecipeError
from trainwright.recipe import from_mapping, load
from trainwright.recipe.yaml_core import MAX_NODES, Document, UnreadableError, read, write

SCALARS: list[tuple[str, Any]] = [
    ("1e-3", 1e-3),
    ("1E5", 1e5),
    ("1.", 1.0),
    (".5", 0.5),
    ("-.5e+2", -50.0),
    ("+1.5", 1.5),
    (".inf", math.inf),
    ("-.INF", -math.inf),
    ("12", 12),
    ("-7", -7),
    ("+7", 7),
    ("010", 10),
    ("08", 8),
    ("0o17", 15),
    ("0x1F", 31),
    ("0b11", "0b11"),
    ("1_000", "1_000"),
    ("12:30", "12:30"),
    ("190:20:30", "190:20:30"),
    ("2024-01-31", "2024-01-31"),
    ("true", True),
    ("False", False),
    ("yes", "yes"),
    ("no", "no"),
    ("on", "on"),
    ("Off", "Off"),
    ("y", "y"),
    ("null", None),
    ("~", None),
    ("", None),
    ("none", "none"),
    ("'1'", "1"),
    ('"true"', "true"),
    ("=", "="),
    ("my.module:fn", "my.module:fn"),
    ("1e", "1e"),
    (".", "."),
    ("e5", "e5"),
    ("!!str 12", "12"),
    ("!!float 12", 12.0),
]


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_scalars(text: str, value: Any) -> None:
    document = read(f"key: {text}", "f.yaml")
    found: Any = document.value
    assert document.problems == []
    assert found == {"key": value}
    assert type(found["key"]) is type(value)


def test_nan_is_a_float() -> None:
    found: Any = read("key: .NaN", "f.yaml").value
    assert math.isnan(found["key"])


@pytest.mark.parametrize(("text", "value"), SCALARS)
def test_written_scalars_read_back_in_both_versions_of_yaml(text: str, value: Any) -> None:
    written = write({"as value": value, "as text": text, "list": [text, value]})
    expected = {"as value": value, "as text": text, "list": [text, value]}
    assert read(written, "f.yaml").value == expected
    assert yaml.safe_load(written) == expected


def test_lines_of_keys_and_items() -> None:
    places = read("a: 1\nb:\n  - x\n  - {c: 2,\n     d: 3}\n", "f.yaml").places
    assert {path: str(place) for path, place in places.items()} == {
        "": "f.yaml:1",
        "a": "f.yaml:1",
        "b": "f.yaml:2",
        "b.0": "f.yaml:3",
        "b.1": "f.yaml:4",
        "b.1.c": "f.yaml:4",
        "b.1.d": "f.yaml:5",
    }


def test_duplicate_key_names_both_lines() -> None:
    (problem,) = read("a: 1\nb: 2\na: 3\n", "f.yaml").problems
    assert (problem.path, problem.where) == ("a", "f.yaml:3")
    assert "f.yaml:1" in problem.rule


def test_anchors_and_merge_keys() -> None:
    text = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 3}\nz:\n  c: 9\n  <<: [*x, *y]\nw: *x\n"
    document = read(text, "f.yaml")
    found: Any = document.value
    assert document.problems == []
    assert found["z"] == {"a": 1, "b": 2, "c": 9}
    assert str(document.places["z.c"]) == "f.yaml:4"
    assert str(document.places["z.a"]) == "f.yaml:1"
    assert found["w"] == {"a": 1, "b": 2}
    assert found["w"] is not found["x"]


@pytest.mark.parametrize(
    ("text", "line", "rule", "remedy"),
    [
        ("a: !!python/object/apply:os.system [ls]", 1, "custom tags", "remove the tag"),
        ("a: 1\nb: !mine 2", 2, "custom tags", "remove the tag"),
        ("a: !!binary aGk=", 1, "custom tags", "remove the tag"),
        ("a: !!set {x, y}", 1, "custom tags", "remove the tag"),
        ("? [a, b]\n: 1", 1, "key must be text", "plain word"),
        ("? {a: b}\n: 1", 1, "key must be text", "plain word"),
        ("a: !!int x", 1, "cannot be read as !!int", "remove the tag"),
        ("a: " + "9" * 5000, 1, "64 bits", "1e30"),
        ("a: 0x" + "f" * 17, 1, "64 bits", "1e30"),
        (r'a: "\ud800"', 1, "valid Unicode", "itself"),
        ("a: 1\n<<: 3", 2, "only a mapping", "anchor"),
    ],
)
def test_small_faults_are_collected(text: str, line: int, rule: str, remedy: str) -> None:
    (problem,) = read(text, "f.yaml").problems
    assert problem.where == f"f.yaml:{line}"
    assert rule in problem.rule
    assert remedy in problem.remedy


def billion_laughs() -> str:
    lines = ["a0: &a0 [lol, lol]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rule", "remedy"),
    [
        ("a:\n\tb: 1", "is not YAML", "spaces"),
        ("a: b: c", "mapping values are not allowed", "quotes"),
        ("a: [1, 2", "is not YAML", "bracket"),
        ("a: 'x", "is not YAML", "quotes"),
        ("a: 1\n b: 2\nc", "is not YAML", ""),
        ("a: @x", "is not YAML", "quotes"),
        ("a: *missing", "undefined alias", "quotes"),
        ("a: 1\n---\na: 2", "single document", "one recipe per file"),
        ("a: \x01", "special characters", "control character"),
        (r'a: "\UFFFFFFFF"', "is not YAML", ""),
        ("%YAML " + "9" * 5000 + ".1\n---\na: 1", "is not YAML", ""),
        (billion_laughs(), f"more than {MAX_NODES}", "aliases"),
        ("a: &a [*a]", "nest deeper", "flatten"),
        ("a: &a {b: *a}", "nest deeper", "flatten"),
        ("a: &a {<<: *a}", "nest deeper", "flatten"),
        ("[" * 150 + "]" * 150, "nest deeper", "flatten"),
        ("[" * 20000, "nest deeper", "flatten"),
        ("? " * 5000, "nest deeper", "flatten"),
        ("- " * 5000, "nest deeper", "flatten"),
        ("a: [" + "1, " * 20000 + "]", f"more than {MAX_NODES}", "aliases"),
    ],
)
def test_hopeless_texts(text: str, rule: str, remedy: str) -> None:
    with pytest.raises(UnreadableError) as caught:
        read(text, "f.yaml")
    problem = caught.value.problem
    assert problem.where.startswith("f.yaml")
    assert rule in problem.rule
    assert remedy in problem.remedy
    assert problem.remedy


def test_syntax_error_names_its_line() -> None:
    with pytest.raises(UnreadableError) as caught:
        read("a: 1\nb:\n  c: 1\n\td: 2\n", "f.yaml")
    assert caught.value.problem.where == "f.yaml:4"


def test_empty_texts() -> None:
    assert read("", "f.yaml") == Document("f.yaml")
    assert read("# nothing\n", "f.yaml").value is None


def complaint(path: Path) -> str:
    with pytest.raises(RecipeError) as caught:
        load(path, environ={})
    (problem,) = caught.value.problems
    assert problem.remedy
    return str(problem)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    def written(content: bytes) -> Path:
        path = tmp_path / "r.yaml"
        path.write_bytes(content)
        return path

    assert "is empty" in complaint(written(b"# only a comment\n"))
    assert "must be a mapping" in complaint(written(b"- a\n"))
    assert "must be a mapping" in complaint(written(b"gpt"))
    assert "r.yaml:2: recipe: is not UTF-8" in complaint(written(b"a: 1\nb: \xff\n"))
    assert "is not UTF-8" in complaint(written("model: gpt".encode("utf-16")))
    assert "larger than" in complaint(written(b"#" * 1_000_001))
    assert "is a folder" in complaint(tmp_path)
    assert "cannot be opened" in complaint(Path("a\0b"))
    assert "cannot be opened" in complaint(Path("x" * 5000))
    assert "cannot be opened" in complaint(tmp_path / "r.yaml" / "r.yaml")


def test_missing_file_names_those_nearby(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt-small.yaml").write_text("model: gpt")
    (tmp_path / "digits.yml").write_text("model: mlp")
    assert f"did you mean {tmp_path}/gpt-small.yaml?" in complaint(tmp_path / "gpt-smal.yaml")
    assert f"did you mean {tmp_path}/gpt-small.yaml?" in complaint(tmp_path / "gpt-small")
    assert "digits.yml" in complaint(tmp_path / "zzz.yaml")
    assert "gpt-tiny.yaml" in complaint(tmp_path / "nowhere" / "gpt-tinny.yaml"), "as of those that ship"


def test_byte_order_mark_is_no_problem(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel: mlp\ndata: {train: digits}\n")
    assert load(path, environ={}).recipe.model.use == "mlp"


def test_not_a_mapping_in_python() -> None:
    with pytest.raises(RecipeError, match="must be a mapping"):
        from_mapping([1])  # type: ignore[arg-type]


def test_a_pipe_is_read_only_where_a_shell_has_made_it(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "recipe.yaml")
    with pytest.raises(RecipeError, match="it is a pipe, not a file"):
        load(tmp_path / "recipe.yaml", environ={})
    reading, writing = os.pipe()
    os.write(writing, b"model: mlp\ndata: {train: digits}\n")
    os.close(writing)
    assert load(f"/dev/fd/{reading}", environ={}).recipe.model.use == "mlp"  # as `trainwright train <(make-recipe)`
    os.close(reading)
