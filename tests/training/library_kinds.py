"""Kinds of data from other libraries, which are skipped if the library is not installed."""

from __future__ import annotations

import io
import tarfile
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests.training.data_kinds import BATCH, SIZE, Kind, Rows, X, Y


def hugging_face() -> Any:
    """Rows are dicts of lists, like the result of ``map(tokenize)``."""
    from datasets import Dataset

    return Dataset.from_dict({"x": X.tolist(), "label": Y.tolist()})


def stream_of_hugging_face() -> Any:
    return hugging_face().to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=10)


def dictionary_of_hugging_face() -> Any:
    from datasets import DatasetDict

    return DatasetDict({"train": hugging_face(), "validation": hugging_face().select(range(BATCH))})


def stateful_loader(workers: int) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-not-found]

    return StatefulDataLoader(Rows(), batch_size=BATCH, shuffle=True, num_workers=workers)


def web_loader() -> Any:
    import webdataset  # type: ignore[import-not-found]

    file = Path(tempfile.mkdtemp()) / "rows.tar"
    with tarfile.open(file, "w") as tar:
        for at in range(SIZE):
            for name, content in (("x.npy", _as_npy(X[at].numpy())), ("cls", str(int(Y[at])).encode())):
                info = tarfile.TarInfo(f"{at:03}.{name}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    rows = webdataset.WebDataset(str(file), shardshuffle=False).shuffle(10).decode().to_tuple("x.npy", "cls")
    return webdataset.WebLoader(rows.batched(BATCH), batch_size=None)


def grain_iterable() -> Any:
    import grain  # type: ignore[import-not-found]

    rows = grain.MapDataset.range(SIZE).shuffle(seed=3).map(lambda i: {"x": X[i].numpy(), "y": Y[i].numpy()})
    return rows.batch(BATCH).to_iter_dataset()


def frame_of_pandas() -> Any:
    from pandas import DataFrame  # type: ignore[import-untyped]

    import trainwright as tw

    columns = {f"x{at}": X[:, at].numpy() for at in range(4)} | {"y": Y.numpy()}
    return tw.table(DataFrame(columns), inputs=[f"x{at}" for at in range(4)], target="y")


def _as_npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class OfLibrary(NamedTuple):
    library: str
    name: str
    make: Callable[[], Any]
    exact: bool = True

    @property
    def is_installed(self) -> bool:
        try:
            import_module(self.library)
        except ImportError:
            return False
        return True


AUGMENTED = "torchdata `StatefulDataLoader` with 2 workers that augment"

ALL = [
    OfLibrary("datasets", "Hugging Face `Dataset`", hugging_face),
    OfLibrary("datasets", "Hugging Face `Dataset` with a format of torch", lambda: hugging_face().with_format("torch")),
    OfLibrary("datasets", "Hugging Face `DatasetDict`", dictionary_of_hugging_face),
    OfLibrary("datasets", "Hugging Face `IterableDataset`", stream_of_hugging_face),
    OfLibrary("pandas", "table of pandas (`tw.table`)", frame_of_pandas),
    OfLibrary("torchdata", "torchdata `StatefulDataLoader`", lambda: stateful_loader(0)),
    OfLibrary("torchdata", AUGMENTED, lambda: stateful_loader(2), exact=False),
    OfLibrary("webdataset", "WebDataset's `WebLoader`, shuffled from the clock", web_loader, exact=False),
    OfLibrary("grain", "Grain `IterDataset`", grain_iterable),
]

KINDS = [Kind(each.name, each.make, each.exact) for each in ALL if each.is_installed]
