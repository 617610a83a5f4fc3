"""Runs that clip by zclip and adagc: resumed, watched by the doctor, on several ranks, and as a recipe has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainwright as tw
from tests import ranks
from trainwright.checkpoint.codec import same_bits
from trainwright.checkpoint.manifest import name_of
from trainwright.errors import RecipeError
from trainwright.recipe import from_mapping

SMALL: dict[str, Any] = {"model": "gpt", "data": {"train": "python-topics"}}
CLIPS: dict[str, dict[str, object]] = {
    "zclip": {"by": "zclip", "z": 1.0, "warmup": 6, "decay": 0.8},
    "adagc": {"by": "adagc", "warmup": 6, "ratio": 1.01, "at": 0.5},
}
each_clip = pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
STEPS = 24


@pytest.fixture(autouse=True)
def _in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 8, generator=generator)
    x[::17] *= 20
    return x, (x.sum(1) > 0).long()


def fitted(clip: dict[str, object], name: str, **given: Any) -> tuple[nn.Module, tw.Result]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
    settings = {"log.doctor": False, **given.pop("settings", {})} | {f"optimizer.clip.{k}": v for k, v in clip.items()}
    plain: dict[str, Any] = {"batch": 8, "steps": STEPS, "seed": 1, "lr": 0.05, "optimizer": "sgd", "quiet": True}
    return model, tw.fit(model, data(), nn.CrossEntropyLoss(), name=name, settings=settings, **plain, **given)


def saved(result: tw.Result) -> dict[str, Tensor]:
    folder = result.run / "checkpoints" / name_of(STEPS)
    return ranks.tensors_in(folder, "model", "rest")


def assert_same(one: tw.Result, other: tw.Result) -> None:
    first, second = saved(one), saved(other)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert same_bits(value, second[key]), key


@each_clip
@pytest.mark.process
@pytest.mark.slow
def test_a_resumed_run_clips_as_one_that_was_not_stopped(clip: dict[str, object]) -> None:
    _, straight = fitted(clip, "straight")
    stop = tw.Stop("enough")
    _, half = fitted(clip, "half", observers=[lambda result, state: stop if result.step == 13 else None])
    _, again = fitted(clip, "half", resume=half.run)
    assert half.step == 13
    assert_same(straight, again)
    assert float(saved(again)["stateful.clip.statistics"][0]) == STEPS
    _, other = fitted({"by": "norm", "at": 1e6}, "unclipped")
    assert not same_bits(saved(other)["0.weight"], saved(straight)["0.weight"])


@each_clip
@pytest.mark.process
@pytest.mark.slow
def test_what_the_doctor_replays_does_not_enter_the_statistics(clip: dict[str, object]) -> None:
    _, plain = fitted(clip, "plain")
    _, watched = fitted(clip, "watched", settings={"log.doctor": True, "log.examine": "all"})
    assert_same(plain, watched)


RANKS = """
import json, sys, torch
import trainwright as tw
from tests.training.test_adaptive_clips import fitted

clip, settings, name = json.loads(sys.argv[1])
fitted(clip, name, settings=settings)
"""


@each_clip
@pytest.mark.process
@pytest.mark.slow
def test_ranks_clip_by_the_norms_of_the_whole(clip: dict[str, object], tmp_path: Path) -> None:
    found = []
    cases: list[tuple[str, int, dict[str, int]]] = [("one", 1, {}), ("two", 2, {}), ("shard", 2, {"parallel.shard": 2})]
    for name, count, settings in cases:
        done = ranks.run(RANKS, count, json.dumps([clip, settings, name]), cwd=tmp_path)
        assert [each.returncode for each in done] == [0] * count, [each.stderr for each in done]
        folder = tmp_path / "runs" / name / "checkpoints" / name_of(STEPS)
        found.append(ranks.tensors_in(folder, "model", "rest"))
    for other in found[1:]:
        for key in ("0.weight", "2.bias", "stateful.clip.statistics"):
            torch.testing.assert_close(other[key], found[0][key], rtol=1e-3, atol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("clip", "path", "remedy"),
    [
        ({"by": "norm", "z": 2.0}, "optimizer.clip.z", "leave it out; it has no further key"),
        ({"by": "zclip", "ratio": 1.1}, "optimizer.clip.ratio", "its keys are z, decay, warmup"),
        ({"by": "zclip", "at": 2.0}, "optimizer.clip.at", "leave it out"),
        ({"by": "adagc", "z": 2.0}, "optimizer.clip.z", "its keys are ratio, decay, warmup"),
        ({"by": "adagc", "warmup": 0}, "optimizer.clip.warmup", ""),
    ],
)
def test_a_key_of_another_clip_is_refused(clip: dict[str, object], path: str, remedy: str) -> None:
    with pytest.raises(RecipeError) as caught:
        from_mapping({**SMALL, "optimizer": {"clip": clip}})
    [problem] = caught.value.problems
    assert problem.path == path and remedy in problem.remedy


def test_a_recipe_with_every_default_is_read_back() -> None:
    for name in CLIPS:
        recipe = from_mapping({**SMALL, "optimizer": {"clip": {"by": name}}}).recipe
        assert from_mapping(recipe.model_dump(mode="json")).recipe == recipe
