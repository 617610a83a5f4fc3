"""The recipe: the user's settings of a run, validated completely before anything runs. Does not import torch."""

from trainwright.recipe.catalog import (
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OBSERVERS,
    OPTIMIZER_ALIASES,
    OPTIMIZER_NAMES,
    OPTIMIZERS,
    SCHEDULES,
    SINKS,
    OptimizerRow,
    Row,
    SinkRow,
    optimizer_row,
)
from trainwright.recipe.duration import Duration
from trainwright.recipe.load import Loaded, dump, dump_masked, from_mapping, load
from trainwright.recipe.schema import (
    Dataset,
    Lora,
    Recipe,
    json_schema,
)
from trainwright.recipe.section import Part
from trainwright.recipe.source import Source, problem, require_unmasked

__all__ = [
    "DATASETS",
    "LOSSES",
    "METRICS",
    "MODELS",
    "OBSERVERS",
    "OPTIMIZERS",
    "OPTIMIZER_ALIASES",
    "OPTIMIZER_NAMES",
    "SCHEDULES",
    "SINKS",
    "Dataset",
    "Duration",
    "Loaded",
    "Lora",
    "OptimizerRow",
    "Part",
    "Recipe",
    "Row",
    "SinkRow",
    "Source",
    "dump",
    "dump_masked",
    "from_mapping",
    "json_schema",
    "load",
    "optimizer_row",
    "problem",
    "require_unmasked",
]
