"""The sections of a recipe for data, metrics and observers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from trainwright.errors import Problem, RecipeError
from trainwright.recipe.catalog import DATASETS, METRICS, OBSERVERS
from trainwright.recipe.duration import Duration
from trainwright.recipe.section import Count, Part, SampleId, Section, ShortName, Text, require_time


class Dataset(Part):
    """A dataset."""

    use: Annotated[str, ShortName("dataset", DATASETS)] = Field(
        description="A built-in dataset, or package.module:callable that returns one.", examples=["digits"]
    )


class FurtherSet(Dataset):
    """A further validation set."""

    name: Text = Field(description="The prefix of its figures, as in noisy.loss.", examples=["noisy"])


class Packing(Section):
    """How samples of tokens of different lengths share a forward pass."""

    by: Literal["none", "bfd", "padding_free"] = Field(
        default="none",
        description="none: rows padded to the longest sample; bfd: whole samples packed into rows of max_length by "
        "best fit decreasing, batch.size counts rows; padding_free: the samples of a micro-batch in one row.",
    )
    max_length: Count | None = Field(default=None, description="bfd: the largest number of tokens in a row.")

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"by": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _length_is_of_rows(self) -> Packing:
        if self.by == "bfd" and self.max_length is None:
            rule, remedy = "is required by bfd", "write packing: {by: bfd, max_length: 2048}"
            raise RecipeError(Problem("max_length", rule, remedy=remedy))
        if self.by != "bfd" and self.max_length is not None:
            rule, remedy = f"has no effect on by: {self.by}", "leave it out, or write by: bfd"
            raise RecipeError(Problem("max_length", rule, got=str(self.max_length), remedy=remedy))
        return self


class Data(Section):
    """The training and validation data, and how they are read."""

    train: Dataset = Field(description="The training set.", examples=["digits"])
    val: Dataset | None = Field(default=None, description="The validation set.", examples=["digits"])
    more_val: Annotated[tuple[FurtherSet, ...], Field(strict=False)] = Field(
        default=(), description="Further validation sets; the best checkpoint and patience use the first one."
    )
    packing: Packing = Field(
        default_factory=Packing,
        description="Samples of tokens: padded, packed into rows, or padding-free.",
        examples=["padding_free"],
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
        default="stop", description="A sample that cannot be read ends the run, or is put in quarantine and reported."
    )
    pin_memory: Literal["auto", True, False] = Field(
        default="auto", description="Page-locked host memory for faster copies to a GPU."
    )

    @field_validator("timeout")
    @classmethod
    def _on_the_clock(cls, value: Duration | None) -> Duration | None:
        return require_time(value)


class MetricPart(Part):
    """A metric that is computed over a whole pass."""

    use: Annotated[str, ShortName("metric", METRICS)] = Field(
        description="A built-in metric, or package.module:callable: a class with update, compute and reset, or a "
        "function of (outputs, targets).",
        examples=["accuracy"],
    )
    name: Text | None = Field(
        default=None, description="The name of the metric; null: that of the callable.", examples=["f1"]
    )

    @property
    def shown_name(self) -> str:
        return self.name or self.use.rpartition(":")[2]


class Watcher(Part):
    """An observer, which receives each completed step and may end the run."""

    use: Annotated[str, ShortName("observer", OBSERVERS)] = Field(
        description="A built-in observer, or package.module:callable: a class, or a function of (result, state).",
        examples=["early_stopping"],
    )
