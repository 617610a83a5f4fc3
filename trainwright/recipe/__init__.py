"""What the user asks for: a recipe, checked as a whole before anything runs. No torch in this room."""

from trainwright.recipe.duration import Duration, Unit
from trainwright.recipe.editor import json_schema
from trainwright.recipe.load import Loaded, dump, from_mapping, load
from trainwright.recipe.names import DATASETS, LOSSES, MODELS, OPTIMIZERS, SCHEDULES, SINKS, SPIKE_POLICIES
from trainwright.recipe.schema import (
    Batch,
    Checkpoint,
    Clip,
    Data,
    Dataset,
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
    "Part",
    "Recipe",
    "Schedule",
    "Source",
    "SpikeHandling",
    "Unit",
    "dump",
    "from_mapping",
    "json_schema",
    "load",
    "problem",
]
