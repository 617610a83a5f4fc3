"""The section ``parallel`` of a recipe: the distribution of a run over the processes that torchrun starts."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, GetJsonSchemaHandler, field_validator, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from trainwright.recipe.duration import Duration
from trainwright.recipe.formatting import LARGEST_INT
from trainwright.recipe.section import Count, Section, require_time

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved"]
TensorStyle = Literal["column", "row", "column_gathered", "input", "per_head", "sequence", "scatter"]
"""The styles of a module under tensor parallelism: docs/how-to/several-gpus.md."""
StageStyle = Literal["first", "block", "last"]
"""The pipeline stage of a module: the first, one of all, the last."""


PLANNED = ("shard", "tensor", "pipeline", "context")
"""The axes whose degree the plan chooses if it is ``auto``; that of the copies is derived."""


class Parallel(Section):
    """How a run is distributed over the processes that torchrun starts. The product of all degrees is their number.

    The bare word ``auto`` leaves all degrees to the plan.
    """

    replicate: Literal["auto"] | Count = Field(
        default="auto",
        description="Copies of the model, each trained on its part of every batch; auto: from the number of ranks.",
        examples=[4],
    )
    shard: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that shard weights, gradients and optimizer state among them (FSDP); auto: the plan "
        "chooses it by memory, communication and links.",
        examples=[8],
    )
    zero: Literal[1, 2, 3] = Field(
        default=3,
        description="What is sharded at all times: 1 the optimizer state and the weights between "
        "steps, 2 also the gradients, 3 also the weights within a step.",
    )
    tensor: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that divide each layer among them and have the same samples; auto as with shard.",
        examples=[2],
    )
    sequence: bool = Field(
        default=False, description="Also divide the operators between the divided layers, along the sequence."
    )
    context: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that each compute a part of every sequence; auto as with shard, for long sequences.",
        examples=[2],
    )
    plan: dict[str, TensorStyle] = Field(
        default_factory=dict,
        description="How tensor parallelism divides the modules of a model without a built-in plan: a style for "
        "each pattern of names.",
        examples=[{"blocks.*.up": "column", "blocks.*.down": "row"}],
    )
    pipeline: Literal["auto"] | Count = Field(
        default=1,
        description="Ranks that each hold a stage of the model: some of its blocks; auto as with shard.",
        examples=[2],
    )
    stages: dict[str, StageStyle] = Field(
        default_factory=dict,
        description="The stage of each module of a model that does not define stages: first, block (divided among "
        "all) or last for each pattern of names.",
        examples=[{"embed": "first", "layers.*": "block", "norm": "last", "head": "last"}],
    )
    schedule: PipelineSchedule = Field(
        default="1f1b",
        description="The order of computation in a pipeline: all forward passes first (gpipe), one forward and one "
        "backward in turn (1f1b), or 1f1b with two stages on each rank (interleaved).",
    )
    sync_batchnorm: bool = Field(
        default=False,
        description="BatchNorm uses the statistics of the samples of all ranks, as in one process.",
    )
    compress: Literal["none", "bf16", "powersgd"] = Field(
        default="none",
        description="Compression of gradients between copies of the model: none, each number rounded to bf16, or two "
        "thin factors of each matrix (PowerSGD).",
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
        """The axes that the plan must choose if there are several ranks."""
        return tuple(axis for axis in PLANNED if getattr(self, axis) == "auto")

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        mapping = handler.resolve_ref_schema(handler(core_schema))
        return {"anyOf": [{"const": "auto", "type": "string"}, mapping], "description": mapping.get("description", "")}

    @field_validator("timeout")
    @classmethod
    def _on_the_clock(cls, value: Duration) -> Duration:
        require_time(value)
        return value
