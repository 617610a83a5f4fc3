"""Built-in datasets: files of token ids, tables, folders of images, mixtures, and padded batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import trainwright as tw
from trainwright.data.images import Images
from trainwright.data.mixture import Mixture
from trainwright.data.padding import differ_in_length
from trainwright.data.tokens import Tokens, block_mask, packed
from trainwright.engine.losses import language_model
from trainwright.errors import UsageError
from trainwright.recipe import DATASETS
from trainwright.recipe.resolve import make
from trainwright.recipe.source import Source

END = 9
IDS = np.array([1, 2, END, 3, 4, 5, END, END, 6, 7, 8, 1, END, 2, 3], dtype=np.uint16)


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    IDS.tofile(tmp_path / "train.bin")
    return tmp_path / "train.bin"


def test_windows_over_a_file_of_ids(ids: Path) -> None:
    found = Tokens(ids, block_size=4)
    assert len(found) == 3 and found.classes == 10
    batch: Any = found.fetch_batch(np.array([2, 0]))
    x, y = batch
    assert x.tolist() == [[6, 7, 8, 1], [1, 2, 9, 3]] and y.tolist() == [[7, 8, 1, 9], [2, 9, 3, 4]]
    for index in range(3):
        for one, of_batch in zip(found[index], found.fetch_batch(np.array([index])), strict=True):  # type: ignore[call-overload]
            assert torch.equal(one, of_batch[0])
    assert len(Tokens(ids, block_size=4, stride=1)) == len(IDS) - 4
    np.save(ids.with_suffix(".npy"), IDS.astype(np.int32))
    assert torch.equal(Tokens(ids.with_suffix(".npy"), block_size=4)[1][1], found[1][1])  # type: ignore[index]
    assert Tokens(ids, block_size=4, vocab_size=50_304).classes == 50_304


def test_documents_of_a_window_know_nothing_of_each_other(ids: Path) -> None:
    row: Any = Tokens(ids, block_size=8, end=END)[0]
    assert row["input_ids"].tolist() == [1, 2, 9, 3, 4, 5, 9, 9]
    assert row["labels"].tolist() == [1, 2, 9, -100, 4, 5, 9, -100]
    assert row["position_ids"].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]
    assert row["documents"].tolist() == [0, 0, 0, 1, 1, 1, 1, 2]


def test_packed_documents_are_computed_as_if_each_were_alone() -> None:
    """Attention with the block mask and reset positions, against one document at a time."""
    torch.manual_seed(0)
    ids_BT = torch.from_numpy(IDS[:13].astype(np.int64))[None]
    batch = packed(ids_BT, END)
    embed, place = torch.randn(10, 16), torch.randn(16, 16)

    def attend(ids: Tensor, at: Tensor, mask: Tensor | None) -> Tensor:
        x = (embed[ids] + place[at])[:, None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)[:, 0]

    together = attend(ids_BT, batch["position_ids"], block_mask(batch["documents"]))
    ends = [0, *(1 + np.flatnonzero(IDS[:13] == END)).tolist()]
    for start, stop in pairwise(ends):
        alone = attend(ids_BT[:, start:stop], torch.arange(stop - start)[None], None)
        torch.testing.assert_close(together[:, start:stop], alone)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"block_size": 15}, "has 15 ids, a window needs 16"),
        ({"dtype": "float32"}, "no integer type"),
        ({"block_size": 0}, "are counts"),
        ({"dtype": "uint32", "block_size": 4}, "holds no ids of uint32"),
    ],
)
def test_a_file_that_cannot_be_read_so_is_refused(ids: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Tokens(ids, **settings)
    with pytest.raises(UsageError, match="cannot read the ids"):
        Tokens(ids.parent / "none.bin")


def rows_of(name: str, count: int) -> list[tuple[str, int]]:
    return [(name, index) for index in range(count)]


def test_a_mixture_has_the_shares_of_its_weights_at_any_time() -> None:
    mixture = tw.mix(
        {"a": rows_of("a", 50), "b": rows_of("b", 7), "c": rows_of("c", 20)}, {"a": 5, "b": 3, "c": 2}, length=100
    )
    for epoch in range(3):
        mixture.order.set_epoch(epoch)
        drawn = [mixture[i][0] for i in mixture.order]
        assert Counter(drawn) == {"a": 50, "b": 30, "c": 20}
        for stop in range(1, 101):
            seen = Counter(drawn[:stop])
            assert all(abs(seen[name] - stop * share) <= 2 for name, share in (("a", 0.5), ("b", 0.3), ("c", 0.2)))


def test_a_set_is_visited_to_its_end_before_it_is_visited_again() -> None:
    mixture = tw.mix([rows_of("a", 50), rows_of("b", 7)], [0.7, 0.3], length=40)
    visited: list[int] = []
    for epoch in range(7):
        mixture.order.set_epoch(epoch)
        visited += [mixture[i][1] for i in mixture.order if mixture[i][0] == "b"]
    passes = [visited[start : start + 7] for start in range(0, 84, 7)]
    assert all(sorted(each) == list(range(7)) for each in passes)
    assert len({tuple(each) for each in passes}) > 6


def test_an_epoch_of_a_mixture_follows_from_its_number_alone() -> None:
    def order(epoch: int, seed: int = 0) -> list[int]:
        mixture = tw.mix([rows_of("a", 50), rows_of("b", 7)], [1, 1], seed=seed)
        mixture.order.set_epoch(epoch)
        return list(mixture.order)

    assert order(4) == order(4) and order(4) != order(5) and order(4) != order(4, seed=1)


@pytest.mark.parametrize(
    ("sets", "weights"),
    [([[1]], [1, 2]), ([[1], []], [1, 2]), ([[1]], [-1]), ({"a": [1]}, [1]), ({"a": [1]}, {"b": 1}), ([[1]], [0])],
)
def test_weights_that_do_not_fit_are_refused(sets: Any, weights: Any) -> None:
    with pytest.raises(UsageError):
        tw.mix(sets, weights)


def test_padding_is_not_counted() -> None:
    samples = [(torch.arange(n) + 1, torch.arange(n)) for n in (3, 1, 4)]
    x, y = tw.pad()(samples)
    assert x.tolist() == [[1, 2, 3, 0], [1, 0, 0, 0], [1, 2, 3, 4]]
    assert y.tolist() == [[0, 1, 2, -100], [0, -100, -100, -100], [0, 1, 2, 3]]
    assert tw.pad(7, multiple_of=8)(samples)[0].shape == (3, 8)


def test_a_padded_batch_of_dicts_has_a_mask() -> None:
    samples = [{"ids": [5] * n, "labels": n, "image": torch.ones(3, 9)} for n in (2, 3)]
    batch = tw.pad(1)(samples)
    assert batch["ids"].tolist() == [[5, 5, 1], [5, 5, 5]] and batch["labels"].tolist() == [2, 3]
    assert batch["mask"].tolist() == [[True, True, False], [True] * 3] and batch["lengths"].tolist() == [2, 3]
    assert batch["image"].shape == (2, 3, 9)
    alike = tw.pad(1)([samples[0], samples[0]])
    assert alike["ids"].tolist() == [[5, 5]] * 2 and alike["mask"].all()


def test_padded_token_ids_have_the_attention_mask_of_a_tokenizer() -> None:
    batch = tw.pad()([{"labels": [7] * (4 - n), "input_ids": [5] * n} for n in (2, 3)])
    assert batch.keys() == {"input_ids", "labels", "attention_mask"}  # any other key reaches the model, too
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("labels", [{"labels": [1.0, 0.0, 1.0]}, {"label": 1}], ids=["multi-label", "other name"])
def test_lists_of_token_ids_are_padded_with_any_labels(labels: dict[str, Any]) -> None:
    samples = [{"input_ids": [5] * n, **labels} for n in (1, 2)]
    seen: list[Any] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        seen.append(batch)
        return model(batch["input_ids"]).mean()

    tw.fit(nn.Embedding(9, 1), samples, loss, batch=2, settings={"data.shuffle": False, "log.doctor": False})
    assert seen[0]["attention_mask"].tolist() == [[1, 0], [1, 1]]
    assert {name: seen[0][name].tolist() for name in labels} == {name: [each] * 2 for name, each in labels.items()}


@pytest.mark.parametrize(
    ("samples", "differ"),
    [
        ([{"ids": [1, 2]}, {"ids": [1]}], True),
        ([([1, 2], 0), ([1], 0)], True),
        ([[1, 2], [1]], True),
        ([torch.ones(2), torch.ones(3)], True),
        ([{"ids": [1, 2]}, {"ids": [3, 4]}], False),
        ([{"ids": [1, 2]}, {"other": [1]}], False),
        ([{"ids": [1, 2]}, None], False),
        ([(1, 2), 3], False),
        ([{"name": "ab"}, {"name": "a"}], False),
    ],
)
def test_which_samples_differ_in_length(samples: list[Any], differ: bool) -> None:
    assert differ_in_length(samples) == differ


def test_an_attention_mask_is_padded_with_zeros_and_is_mask_enough() -> None:
    samples = [{"input_ids": [5] * n, "attention_mask": [1] * n, "label": n} for n in (2, 3)]
    batch = tw.pad(7)(samples)
    assert [*batch] == ["input_ids", "attention_mask", "label"]
    assert batch["input_ids"].tolist() == [[5, 5, 7], [5, 5, 5]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]


def test_the_gradient_of_a_padded_batch_is_that_of_its_samples() -> None:
    """Over all tokens of the batch, in whatever micro-batches: the padding weighs nothing."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(6, 6)
    rows = [(torch.randint(6, (n,)), torch.randint(6, (n,))) for n in (3, 9, 1, 4, 2)]
    loss = [F.cross_entropy(model(x), y, reduction="sum") for x, y in rows]
    (expected,) = torch.autograd.grad(sum(loss) / 19, [model.weight])  # type: ignore[arg-type]
    losses = [language_model(model, tw.pad()(part)) for part in (rows[:2], rows[2:])]
    total, weight = sum(each.total for each in losses), sum(each.weight for each in losses)
    (found,) = torch.autograd.grad(total / weight, [model.weight])  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected)


COLUMNS: dict[str, Any] = {"a": [1, 2, 3], "b": [0.5, 1.5, 2.5], "kind": ["cat", "dog", "cat"], "y": [0.1, 0.2, 0.3]}


def arrays() -> dict[str, Any]:
    return {name: np.array(column) for name, column in COLUMNS.items()}


def frame_of_pandas() -> Any:
    return pytest.importorskip("pandas").DataFrame(COLUMNS)


def table_of_arrow() -> Any:
    return pytest.importorskip("pyarrow").table(COLUMNS)


@pytest.mark.slow
@pytest.mark.parametrize("make_frame", [arrays, frame_of_pandas, table_of_arrow])
def test_a_table_in_memory(make_frame: Callable[[], Any]) -> None:
    found = tw.table(make_frame(), inputs=["a", "b"], target="kind")
    assert found.tensors[0].tolist() == [[1, 0.5], [2, 1.5], [3, 2.5]] and found.tensors[0].dtype == torch.float32
    assert found.tensors[1].tolist() == [0, 1, 0] and found.labels == ("cat", "dog") and found.classes == 2
    assert tw.table(make_frame(), inputs=["a"], target="y").tensors[1].dtype == torch.float32


def test_a_table_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,kind\n1,0.5,cat\n2,1.5,dog\n")
    found = tw.table(tmp_path / "t.csv", inputs=["a", "b"], target="kind")
    assert found[1][0].tolist() == [2, 1.5] and found[1][1] == 1
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(table_of_arrow(), tmp_path / "t.parquet")
    assert len(tw.table(tmp_path / "t.parquet", inputs=["a"], target="y")) == 3


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"inputs": ["c"], "target": "y"}, "no column 'c'"),
        ({"inputs": ["kind"], "target": "y"}, "'kind' holds .*no numbers"),
        ({"inputs": "a", "target": "y"}, "inputs is one text"),
        ({"inputs": [], "target": "y"}, "without inputs"),
        ({"inputs": ["day"], "target": "y"}, r"'day' holds times \(datetime64"),
        ({"inputs": ["gap"], "target": "y"}, "1 of 3 values of the column 'gap' are missing"),
    ],
)
def test_a_column_that_cannot_be_used_is_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        more = {"gap": np.array([1, np.nan, 2]), "day": np.array(["2020-01-01"] * 3, "datetime64[ns]")}
        tw.table(arrays() | more, **settings)


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("none.csv", "none.parquet"):
        with pytest.raises(UsageError, match="cannot read the table"):
            tw.table(tmp_path / name, inputs=["a"], target="y")


def test_a_folder_of_images(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name, value in (("dog", 255), ("cat", 0)):
        (tmp_path / name).mkdir()
        image.new("RGB", (5, 7), (value, 0, 0)).save(tmp_path / name / "1.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    found = Images(tmp_path, size=4)
    assert found.labels == ("cat", "dog") and len(found) == 2
    pixels, code = found[1]
    assert code == 1 and pixels.shape == (3, 4, 4) and pixels[0].eq(1).all() and pixels[1:].eq(0).all()
    assert Images(tmp_path, size=4, grey=True)[0][0].shape == (1, 4, 4)
    with pytest.raises(UsageError, match="no folder with images"):
        Images(tmp_path / "cat")


def test_recipes_name_them(ids: Path) -> None:
    (ids.parent / "t.csv").write_text("a,y\n1,2\n")
    named: dict[str, tuple[dict[str, object], int]] = {
        "tokens": ({"path": str(ids), "block_size": 4}, 3),
        "table": ({"source": str(ids.parent / "t.csv"), "inputs": ["a"], "target": "y"}, 1),
    }
    for name, (args, length) in named.items():
        assert len(make(name, args, DATASETS, "data.train", Source("here"))) == length


def test_a_mixture_is_one_set() -> None:
    mixture = tw.mix([rows_of("a", 5), rows_of("b", 3)], [1, 1])
    assert isinstance(mixture, Mixture) and len(mixture) == 8 and default_collate([mixture[6][1]]) == 1
