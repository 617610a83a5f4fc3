"""How a run is spread over the processes that torchrun starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from trainwright.recipe.duration import Duration
from trainwright.recipe.section import Count, Section, on_the_clock
from trainwright.recipe.showing import LARGEST_INT

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
TensorStyle = Literal["column", "row", "column_gathered", "input", "per_head", "sequence", "scatter"]
"""How tensor parallelism treats a module: docs/how-to/several-gpus.md."""
StageStyle = Literal["first", "block", "last"]
"""Which stage of a pipeline has a module: the first, one of all, the last."""


PLANNED = ("shard", "tensor", "pipeline", "context")
"""The axes whose degree the plan chooses where it is ``auto``; that of the copies follows."""


class Parallel(Section):
    """How a run is spread over the processes that torchrun starts. The product of all degrees is their number.

    The bare word ``auto`` leaves all degrees to the plan.
    """

    replicate: Literal["auto"] | Count = Field(
        default="auto",
        description="Copies of the model, each trained on its share of every batch; auto: what the ranks give.",
        examples=[4],
    )
    shard: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that divide weights, gradients and optimizer state among them (FSDP); auto: the plan "
        "chooses it by memory, exchanges and links.",
        examples=[8],
    )
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="What sharded ranks hold a part of at all times: 1 the optimizer state and the weights between "
        "steps, 2 also the gradients, 3 also the weights within a step.",
    )
    tensor: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that divide each layer among them and have the same samples; auto as with shard.",
        examples=[2],
    )
    sequence: bool = Field(
        default=False, description="What lies between the divided layers is divided too, along the sequence."
    )
    context: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that each compute a part of every sequence; auto as with shard, for long sequences.",
        examples=[2],
    )
    plan: dict[str, TensorStyle] = Field(
        default_factory=dict,
        description="How tensor parallelism divides the modules of a model that has no plan of its own: a style for "
        "each pattern of names.",
        examples=[{"blocks.*.up": "column", "blocks.*.down": "row"}],
    )
    pipeline: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that each have a stage of the model: some of its blocks; auto as with shard.",
        examples=[2],
    )
    stages: dict[str, StageStyle] = Field(
        default_factory=dict,
        description="Which stage has which modules of a model that does not say so itself: first, block (divided among "
        "all) or last for each pattern of names.",
        examples=[{"embed": "first", "layers.*": "block", "norm": "last", "head": "last"}],
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="In which order stages compute: all forward passes first (gpipe), one forward and one backward in "
        "turn (1f1b), or so with two stages on each rank (interleaved).",
    )
    sync_batchnorm: bool = Field(
        default=False,
        description="BatchNorm has the statistics of the samples of all ranks, as in one process, and not of its own.",
    )
    compress: Literal["none", "bf16", "powersgd"] = Field(
        default="none",
        description="What copies of the model send of their gradients: all, each number rounded to bf16, or two thin "
        "factors of each matrix (PowerSGD).",
    )
    compress_rank: Count = Field(default=4, description="Columns of the factors of PowerSGD.", examples=[8])
    compress_after: Annotated[int, Field(ge=0, le=LARGEST_INT)] = Field(
        default=1000, description="Steps before PowerSGD begins; a tenth of the run is usual.", examples=[200]
    )
    exact: bool = Field(
        default=False,
        description="The same bits on any number of ranks: slices of batch.micro samples, summed in a fixed tree.",
    )
    timeout: Duration = Field(
        default=Duration(10 * 60, "s"), description="How long a rank waits for the others before the run ends."
    )

    @model_validator(mode="before")
    @classmethod
    def _bare_auto(cls, value: object) -> object:
        return dict.fromkeys(PLANNED, "auto") if value == "auto" else value

    @property
    def open_axes(self) -> tuple[str, ...]:
        """Those that the plan must choose, of several ranks."""
        return tuple(axis for axis in PLANNED if getattr(self, axis) == "auto")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [{"const": "auto", "type": "string"}, mapping], "description": mapping.get("description", "")}

    @field_validator("timeout")
    @classmethod
    def _on_the_clock(cls, value: Duration) -> Duration:
        on_the_clock(value)
        return value
