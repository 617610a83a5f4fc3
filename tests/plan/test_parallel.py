"""Possible layouts of ranks, and the errors of impossible ones."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.errors import RecipeError
from trainwright.plan.memory import memory_bytes
from trainwright.plan.parallel import Degrees, nearest, place_of, solve_degrees, solve_layout
from trainwright.recipe import from_mapping
from trainwright.recipe.schema import Parallel


def test_what_is_auto_follows_from_the_ranks() -> None:
    assert solve_degrees(Parallel(), 6) == Degrees(6)
    found = solve_degrees(Parallel(shard=4), 8)
    assert found == Degrees(2, 4) and (found.ranks, found.data, str(found)) == (8, 8, "{replicate: 2, shard: 4}")


@pytest.mark.parametrize(
    ("ask", "ranks", "said"),
    [
        (Parallel(shard=4), 6, ["{replicate: 2, shard: 3} or {shard: 6}", "--nproc-per-node 8"]),
        (Parallel(shard=4), 2, ["{shard: 2}", "--nproc-per-node 4"]),
        (Parallel(replicate=3), 2, ["for 2 ranks: {replicate: 2};", "--nproc-per-node 3"]),
        (Parallel(replicate=2, shard=2), 8, ["{replicate: 4, shard: 2}", "--nproc-per-node 4"]),
    ],
)
def test_the_nearest_layouts_are_named(ask: Parallel, ranks: int, said: list[str]) -> None:
    with pytest.raises(RecipeError, match=f"must be the number of ranks, {ranks}") as caught:
        solve_degrees(ask, ranks)
    assert all(each in str(caught.value) for each in said), str(caught.value)


def test_tensor_ranks_are_neighbours_and_stages_lie_farthest_apart() -> None:
    degrees = Degrees(replicate=2, shard=3, tensor=2, pipeline=2)
    places = [place_of(degrees, rank) for rank in range(degrees.ranks)]
    assert len(set(places)) == 24
    assert places[:3] == [Degrees(0, 0, 0, 0, 0, 0), Degrees(0, 0, 1, 0, 0, 0), Degrees(0, 1, 0, 0, 0, 0)]
    assert places[6] == Degrees(1, 0, 0, 0, 0, 0) and places[12] == Degrees(0, 0, 0, 1, 0, 0)
    assert nearest(Degrees(tensor=3), 8)[0] in (Degrees(2, tensor=4), Degrees(4, tensor=2))


def test_what_does_not_go_with_synced_norms_is_refused_all_at_once() -> None:
    asked = {"model": {"use": "resnet", "compile": True}, "data": {"train": "digits"}}
    parallel = {"sync_batchnorm": True, "exact": True, "tensor": 2}
    recipe = from_mapping({**asked, "parallel": parallel}).recipe
    with pytest.raises(RecipeError) as raised:
        solve_layout(recipe, 4)
    for rule in (
        "cannot be true with parallel.exact",
        "cannot be true with model.compile",
        "not shown to work with parallel.tensor",
    ):
        assert rule in str(raised.value)


def test_what_does_not_go_with_sharding_is_refused_all_at_once() -> None:
    asked = {
        "until": "1steps",
        "model": {"use": "mlp", "compile": True},
        "data": {"train": "digits"},
        "optimizer": {"use": "lamb"},
        "batch": {"micro": 2},
        "parallel": {"shard": 2, "exact": True},
    }
    quantized = from_mapping(
        {**asked, "model": {"use": "mlp", "lora": {"quantize": "nf4"}}, "optimizer": "adamw"}
    ).recipe
    with pytest.raises(RecipeError, match=r"model.lora.quantize: does not work with parallel.shard"):
        solve_layout(quantized, 2)
    recipe = from_mapping(asked).recipe
    with pytest.raises(RecipeError) as caught:
        solve_layout(recipe, 2)
    assert [each.path for each in caught.value.problems] == ["parallel.exact", "optimizer.use"]
    assert solve_layout(from_mapping({**asked, "parallel": {"replicate": 2}}).recipe, 2) == Degrees(2)


def test_each_rank_holds_its_part() -> None:
    def held(**layout: Any) -> dict[str, int]:
        return memory_bytes("adamw", {}, parameters=1000, trainable=1000, activations=7, **layout)

    assert held(shard=4) == {"weights": 1000, "gradients": 1000, "optimizer": 2000, "activations": 7}
    assert held(shard=4, zero=2) == {"weights": 5000, "gradients": 1000, "optimizer": 2000, "activations": 7}
    assert held(shard=4, zero=1) == {"weights": 5000, "gradients": 5000, "optimizer": 2000, "activations": 7}
    assert held(zero=1) == {"weights": 4000, "gradients": 4000, "optimizer": 8000, "activations": 7}
