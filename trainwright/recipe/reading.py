"""What a recipe reads and looks at: data, metrics and observers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from trainwright.recipe.catalog import DATASETS, METRICS, OBSERVERS
from trainwright.recipe.duration import Duration
from trainwright.recipe.section import Count, Part, SampleId, Section, Text, on_the_clock
from trainwright.recipe.short_name import ShortName


class Dataset(Part):
    """A dataset."""

    use: Annotated[str, ShortName("dataset", DATASETS)] = Field(
        description="A dataset in the box, or package.module:callable that returns one.", examples=["digits"]
    )


class FurtherSet(Dataset):
    """A further validation set."""

    name: Text = Field(description="What its figures begin with: noisy.loss.", examples=["noisy"])


class Data(Section):
    """What is trained on, and how it is read."""

    train: Dataset = Field(description="The training set.", examples=["digits"])
    val: Dataset | None = Field(default=None, description="The validation set.", examples=["digits"])
    more_val: Annotated[tuple[FurtherSet, ...], Field(strict=False)] = Field(
        default=(), description="Further validation sets; the first one is what the best and patience go by."
    )
    workers: int = Field(default=0, ge=0, le=1024, description="Processes that load data; 0: the training process.")
    prefetch: Count = Field(default=2, description="Batches that each worker loads ahead.")
    timeout: Duration | None = Field(
        default=Duration(30 * 60, "s"),
        description="How long to wait for a batch of the workers before the run is saved and ends; null: for ever.",
    )
    shuffle: bool = Field(default=True, description="A new order of the samples each epoch.")
    drop_last: bool = Field(default=False, description="Leave out the short last batch of an epoch.")
    quarantine: Annotated[tuple[SampleId, ...], Field(strict=False)] = Field(
        default=(), description="Positions in the training set that are never trained on.", examples=[[137, 4021]]
    )
    on_bad_sample: Literal["stop", "quarantine"] = Field(
        default="stop", description="A sample that cannot be read ends the run, or is put in quarantine and named."
    )
    pin_memory: Literal["auto", True, False] = Field(
        default="auto", description="Page-locked host memory for faster copies to a GPU."
    )

    @field_validator("timeout")
    @classmethod
    def _on_the_clock(cls, value: Duration | None) -> Duration | None:
        return on_the_clock(value)


class MetricPart(Part):
    """What is measured over a whole pass."""

    use: Annotated[str, ShortName("metric", METRICS)] = Field(
        description="A metric in the box, or package.module:callable: a class with update, compute and reset, or a "
        "function of (outputs, targets).",
        examples=["accuracy"],
    )
    name: Text | None = Field(default=None, description="What it is called; null: as the callable.", examples=["f1"])

    @property
    def shown_name(self) -> str:
        return self.name or self.use.rpartition(":")[2]


class Watcher(Part):
    """What looks at each step after it is done, and may end the run."""

    use: Annotated[str, ShortName("observer", OBSERVERS)] = Field(
        description="An observer in the box, or package.module:callable: a class, or a function of (result, state).",
        examples=["early_stopping"],
    )
