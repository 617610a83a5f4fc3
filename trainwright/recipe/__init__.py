"""The recipe: what a user asks for, validated as a whole before anything runs. No torch in this room."""

from trainwright.recipe.catalog import (
    DATASETS,
    LOSSES,
    MODELS,
    OBSERVERS,
    OPTIMIZERS,
    SCHEDULES,
    SINKS,
    SPIKE_POLICIES,
    OptimizerRow,
    Row,
    SinkRow,
    optimizer_row,
)
from trainwright.recipe.duration import Duration, Unit
from trainwright.recipe.editor import json_schema
from trainwright.recipe.load import Loaded, dump, from_mapping, load
from trainwright.recipe.reading import Data, Dataset
from trainwright.recipe.schema import (
    Batch,
    Checkpoint,
    Clip,
    Evaluation,
    Group,
    Log,
    Lora,
    LrRule,
    Model,
    Objective,
    Optimizer,
    Recipe,
    Schedule,
    SpikeHandling,
)
from trainwright.recipe.section import Part
from trainwright.recipe.source import Source, problem

__all__ = [
    "DATASETS",
    "LOSSES",
    "MODELS",
    "OBSERVERS",
    "OPTIMIZERS",
    "SCHEDULES",
    "SINKS",
    "SPIKE_POLICIES",
    "Batch",
    "Checkpoint",
    "Clip",
    "Data",
    "Dataset",
    "Duration",
    "Evaluation",
    "Group",
    "Loaded",
    "Log",
    "Lora",
    "LrRule",
    "Model",
    "Objective",
    "Optimizer",
    "OptimizerRow",
    "Part",
    "Recipe",
    "Row",
    "Schedule",
    "SinkRow",
    "Source",
    "SpikeHandling",
    "Unit",
    "dump",
    "from_mapping",
    "json_schema",
    "load",
    "optimizer_row",
    "problem",
]
