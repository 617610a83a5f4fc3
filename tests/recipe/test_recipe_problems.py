"""Broken recipes: every problem at once, each with path, line, rule and remedy in plain words."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from trainwright.errors import Problem, RecipeError
from trainwright.recipe import load, problem
from trainwright.recipe.source import Place, Source

# The tests below add their lines after these two.
GOOD = "model: gpt\ndata: {train: python-topics}\n"


def problems_in(text: str, tmp_path: Path, overrides: tuple[str, ...] = ()) -> list[Problem]:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RecipeError) as caught:
        load(path, environ={}, overrides=overrides)
    found = list(caught.value.problems)
    for one in found:
        assert one.where and one.rule and one.remedy, one
        assert "Input should" not in str(one) and "pydantic" not in str(one), one
    return found


def line_of(one: Problem) -> int:
    return int(one.where.rsplit(":", 1)[1])


BROKEN = [
    # unknown keys
    ("optimiser: adamw", "optimiser", 3, "not a key of a recipe", "did you mean optimizer?"),
    ("optimizer:\n  lrr: 1", "optimizer.lrr", 4, "not a key of optimizer", "did you mean optimizer.lr?"),
    ("lr: 1e-3", "lr", 3, "not a key", "write it as optimizer.lr"),
    ("warmup: 10steps", "warmup", 3, "not a key", "write it as schedule.warmup"),
    ("every: 10steps", "every", 3, "not a key", "evaluation.every or checkpoint.every or log.every"),
    ("batch: {seed: 1}", "batch.seed", 3, "not a key of batch", "write it as seed, at the top level"),
    ("batch_size: 3", "batch_size", 3, "not a key", "write it as batch.size"),
    ("early_stopping: {patience: 3}", "early_stopping", 3, "not a key", "observers: [{use: early_stopping, args:"),
    ("zzzz: 3", "zzzz", 3, "not a key", "keys here are name, preset, seed"),
    ("loss: {use: mse, reduction: sum}", "loss.reduction", 3, "not a key of loss", "loss.args.reduction"),
    ("optimizer: {use: sgd, momentum: 0.9}", "optimizer.momentum", 3, "not a key", "optimizer.args.momentum"),
    ("1: 2", "1", 3, "keys must be text", "quotes around it"),
    ("optimizer: {groups: [3]}", "optimizer.groups.0", 3, "mapping of keys", "{match: '*.embed.*'}"),
    ("optimizer: {clip: 1.0}", "optimizer.clip", 3, "mapping of keys", "{by: norm, at: 1.0}"),
    # types
    ("optimizer: {lr: '1e-3'}", "optimizer.lr", 3, "must be a number", "remove the quotes: 1e-3"),
    ("seed: '7'", "seed", 3, "whole number", "remove the quotes: 7"),
    ("seed: 1_000", "seed", 3, "whole number", "write 1000"),
    ("seed: 7.0", "seed", 3, "whole number", "write 7"),
    ("seed: seven", "seed", 3, "whole number", "for example 1337"),
    ("name: 2024", "name", 3, "must be text", "'2024'"),
    ("deterministic: yes", "deterministic", 3, "true or false", "write true"),
    ("deterministic: 0", "deterministic", 3, "true or false", "write false"),
    ("log:\n  sinks: wandb", "log.sinks", 4, "must be a list", "[wandb]"),
    ("log: {sinks: [wandb, wandbb]}", "log.sinks.1", 3, "one of tensorboard, wandb", "did you mean wandb?"),
    ("optimizer:", "optimizer", 3, "must be a name, or a mapping", "delete the line"),
    ("batch: 32", "batch", 3, "mapping of keys", "{size: 32}"),
    ("evaluation: [1]", "evaluation", 3, "mapping of keys", "{every: 0.1run}"),
    ("loss: {args: 3}", "loss.args", 3, "mapping of keys", ""),
    # ranges
    ("optimizer: {lr: 0}", "optimizer.lr", 3, "more than 0", "0.001"),
    ("optimizer: {lr: .nan}", "optimizer.lr", 3, "finite", "0.001"),
    ("seed: 99999999999999999999", "seed", 3, "64 bits", "1e30"),
    ("schedule: {floor: 1.5}", "schedule.floor", 3, "at most 1", "0.0"),
    # closed lists
    ("device: gpu", "device", 3, "one of auto, cpu, cuda", "did you mean cuda?"),
    ("optimizer: {clip: {by: off}}", "optimizer.clip.by", 3, "one of norm", "did you mean none?"),
    ("graphs: 3", "graphs", 3, "must be one of false, true, auto", "write one of them"),
    # one of several types
    ("parallel: {shard: x}", "parallel.shard", 3, "above 0, or auto", "for example 8"),
    ("parallel: {tensor: 0}", "parallel.tensor", 3, "above 0, or auto", "for example 8"),
    ("grid: [1]", "grid", 3, "a country, or grams", "for example DE"),
    ("grid: -1", "grid", 3, "a country, or grams", "for example DE"),
    ("grid: ZZ", "grid", 3, "no carbon intensity is known", "grams of CO2"),
    # short names and references
    ("loss: crossentropy", "loss.use", 3, "a known loss", "did you mean cross_entropy?"),
    ("schedule: {use: ''}", "schedule.use", 3, "a known schedule", "one of constant"),
    ("loss: my.losses.fancy", "loss.use", 3, "a known loss", "did you mean my.losses:fancy?"),
    ("loss: my/losses.py:fancy", "loss.use", 3, "a known loss", "my.losses:fancy"),
    ("loss: 'a b:c'", "loss.use", 3, "a known loss", "one of cross_entropy"),
    # durations
    ("until: 10", "until", 3, "which unit", "10steps"),
    ("until: 1.5", "until", 3, "which unit", "1.5ep"),
    ("until: 10epo", "until", 3, "not a unit", "did you mean 10ep"),
    ("until: 0ep", "until", 3, "more than 0", "2ep"),
    ("until: 0.5run", "until", 3, "fraction of the run", "10ep"),
    ("until: [1]", "until", 3, "number with a unit", "1000steps"),
    # names and folders
    ("name: a/b", "name", 3, "letters, digits", "a-b"),
    ("name: ''", "name", 3, "letters, digits", "run"),
    ("name: größe", "name", 3, "letters, digits", "gr-e"),
    ('folder: "a\\0b"', "folder", 3, "path of a folder", "runs"),
    # contradictions
    ("batch: {size: 4, micro: 8}", "batch.size", 3, "at least micro", "size: 8"),
    ("batch: {accumulation: 4}", "batch.accumulation", 3, "the batch alone", "batch.micro"),
    ("until: 5ep\nschedule: {warmup: 6ep}", "schedule.warmup", 4, "longer than until, 5ep", "0.05run"),
    (
        "optimizer: {lr_rule: {rule: linear}}",
        "optimizer.lr_rule.base_batch",
        3,
        "required by rule",
        "base_batch",
    ),
    ("optimizer: {args: {lr: 3}}", "optimizer.args.lr", 3, "must not be repeated", "optimizer.lr only"),
    (
        "optimizer:\n  groups:\n    - match: '*'\n      lr: 1.0\n      lr_scale: 2.0",
        "optimizer.groups.0.lr_scale",
        7,
        "contradicts lr",
        "keep lr or lr_scale",
    ),
    ("optimizer: {groups: [{lr: 1.0}]}", "optimizer.groups.0.match", 3, "is required", "add match"),
    # arguments
    ("loss: {args: {1: 2}}", "loss.args.1", 3, "keys must be text", "quotes"),
    ("loss:\n  args:\n    a: [1, .nan]", "loss.args.a.1", 5, "NaN", "null"),
    # YAML
    ("seed: 1\nname: a\nseed: 2", "seed", 5, "twice: here and at", "keep one"),
    ("seed: !!python/name:os.system x", "seed", 3, "custom tags", "remove the tag"),
]


@pytest.mark.parametrize(("lines", "path", "line", "rule", "remedy"), BROKEN)
def test_one_fault_gives_one_problem(lines: str, path: str, line: int, rule: str, remedy: str, tmp_path: Path) -> None:
    found = problems_in(GOOD + lines + "\n", tmp_path)
    named = [one for one in found if one.path == path]
    assert len(named) == 1, found
    assert line_of(named[0]) == line
    assert rule in named[0].rule
    assert remedy in named[0].remedy
    assert len(found) == 1


@pytest.mark.parametrize(
    ("text", "path", "line", "remedy"),
    [
        ("data: {train: digits}", "model", 1, "add model: gpt"),
        ("model: gpt", "data", 1, "add data: {train: digits}"),
        ("model: gpt\ndata: {val: digits}", "data.train", 2, "add train: digits"),
        ("data: {train: digits}\nmodel: {args: {a: 1}}", "model.use", 2, "add use: gpt"),
    ],
)
def test_missing(text: str, path: str, line: int, remedy: str, tmp_path: Path) -> None:
    (found,) = problems_in(text, tmp_path)
    assert (found.path, found.rule, found.remedy, line_of(found)) == (path, "is required", remedy, line)


def test_every_problem_at_once_in_the_order_of_lines(tmp_path: Path) -> None:
    text = dedent(
        """\
        until: 5ep
        model:
          use: gtp
          lora: {rank: 0}
        schedule:
          warmup: 6ep
        optimizer:
          lr: "1e-3"
          lrr: 4
        data:
          train: digits
        batch: {size: 1, micro: 2}
        seed: 1
        seed: 2
        """
    )
    found = problems_in(text, tmp_path, overrides=("precision=fp4", "nonsense"))
    assert [(one.path, one.where.removeprefix(f"{tmp_path}/")) for one in found] == [
        ("model.use", "r.yaml:3"),
        ("model.lora.rank", "r.yaml:4"),
        ("schedule.warmup", "r.yaml:6"),
        ("optimizer.lr", "r.yaml:8"),
        ("optimizer.lrr", "r.yaml:9"),
        ("batch.size", "r.yaml:12"),
        ("seed", "r.yaml:14"),
        ("", "--set nonsense"),
        ("precision", "--set precision"),
    ]


def test_two_contradictions_in_one_section(tmp_path: Path) -> None:
    found = problems_in(GOOD + "optimizer: {use: adamw, args: {lr: 1.0, weight_decay: 0.1}}", tmp_path)
    assert [one.path for one in found] == ["optimizer.args.lr", "optimizer.args.weight_decay"]


def test_source_falls_back_to_the_nearest_parent() -> None:
    source = Source("gpt.yaml", {"": Place("gpt.yaml", 1), "optimizer": Place("gpt.yaml", 12)})
    assert source.where("optimizer") == "gpt.yaml:12"
    assert source.where("optimizer.clip.at") == "gpt.yaml:12"
    assert source.where("seed") == "gpt.yaml:1"
    assert Source("<python>").where("seed") == "<python>"


def test_later_rooms_can_raise_a_problem_with_its_place() -> None:
    source = Source("gpt.yaml", {"data": Place("gpt.yaml", 3)})
    error = problem(source, "data.train.args.path", "does not exist", "'a.txt'", "check the path")
    assert str(error) == (
        "the recipe has 1 problem:\n"
        "  gpt.yaml:3: data.train.args.path: does not exist (got 'a.txt')\n"
        "    remedy: check the path"
    )
    assert error.exit_code == 2
