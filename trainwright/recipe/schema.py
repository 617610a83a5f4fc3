"""The schema of a recipe: frozen values, each with a description for users and editors.

It has no derived numbers: what follows from a recipe by arithmetic belongs to the plan. Rules that concern several
keys raise a RecipeError with paths relative to their section; `load.problems_of` makes them absolute.
"""

from __future__ import annotations

import math
import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    AfterValidator,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import CoreSchema

from trainwright.errors import Problem, RecipeError, UsageError
from trainwright.recipe.catalog import (
    CUSTOM_OPTIMIZER,
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OBSERVERS,
    OPTIMIZER_ALIASES,
    OPTIMIZER_NAMES,
    SCHEDULES,
    SINKS,
    SPIKE_POLICIES,
    mode_of,
    optimizer_row,
)
from trainwright.recipe.duration import Duration, DurationField
from trainwright.recipe.formatting import LARGEST_INT, parse_bytes
from trainwright.recipe.grid import grams_per_kwh
from trainwright.recipe.section import (
    ClockTime,
    Count,
    Part,
    SampleId,
    Section,
    ShortName,
    Text,
    TextOrTexts,
    Texts,
    Warmup,
)


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
    timeout: ClockTime | None = Field(
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


PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev"]
TensorStyle = Literal["column", "row", "column_gathered", "input", "per_head", "sequence", "scatter"]
"""The styles of a module under tensor parallelism: docs/how-to/divide-a-model.md."""
StageStyle = Literal["first", "block", "last"]
"""The pipeline stage of a module: the first, the last, or, for a block, one of all stages."""


def _count_or_auto(value: object) -> object:
    if value == "auto" or (type(value) is int and 0 < value <= LARGEST_INT):
        return value
    raise UsageError("must be a whole number above 0, or auto", remedy="write for example 8, or auto")


CountOrAuto = Annotated[
    int | Literal["auto"],
    PlainValidator(_count_or_auto),
    WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"const": "auto"}]}),
]


PLANNED = ("shard", "tensor", "pipeline", "context")
"""The axes whose degree the plan chooses if it is ``auto``. The degree of ``replicate`` is derived from the others."""


class Parallel(Section):
    """How a run is distributed over the processes that torchrun starts. The product of all degrees is their number.

    The bare word ``auto`` leaves all degrees to the plan.
    """

    replicate: CountOrAuto = Field(
        default="auto",
        description="Copies of the model, each trained on its part of every batch; auto: from the number of ranks.",
        examples=[4],
    )
    shard: CountOrAuto = Field(
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
    tensor: CountOrAuto = Field(
        default=1,
        description="Ranks that divide each layer among them and have the same samples; auto as with shard.",
        examples=[2],
    )
    sequence: bool = Field(
        default=False, description="Also divide the operators between the divided layers, along the sequence."
    )
    async_tensor: bool = Field(
        default=False,
        description="Overlap the communication of divided layers with their matrix products (torch.compile, symmetric "
        "memory). Needs CUDA, sequence and model.compile. Not tested on a device.",
    )
    context: CountOrAuto = Field(
        default=1,
        description="Ranks that each compute a part of every sequence; auto as with shard, for long sequences.",
        examples=[2],
    )
    expert: Count = Field(
        default=1,
        description="Ranks that divide the experts of a mixture among them. Each has its part of every batch, and the "
        "ranks exchange tokens.",
        examples=[2],
    )
    plan: dict[str, TensorStyle] = Field(
        default_factory=dict,
        description="How tensor parallelism divides the modules of a model without a built-in plan: a style for "
        "each pattern of names.",
        examples=[{"blocks.*.up": "column", "blocks.*.down": "row"}],
    )
    pipeline: CountOrAuto = Field(
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
        "backward in turn (1f1b), or 1f1b with two stages on each rank (interleaved). zero_bubble also has two, and "
        "computes gradients of weights while a rank would wait. zbv and dualpipev do so, too, and place the last stage "
        "on the rank of the first.",
    )
    sync_batchnorm: bool = Field(
        default=False,
        description="BatchNorm uses the statistics of the samples of all ranks, as in one process.",
    )
    exact: bool = Field(
        default=False,
        description="The same bits on any number of ranks: slices of batch.micro samples, summed in a fixed tree.",
    )
    timeout: ClockTime = Field(
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


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise UsageError(
            "must be the name of an environment variable: the run folder keeps the recipe, and an address is a secret",
            remedy="write for example SLACK_WEBHOOK, and export SLACK_WEBHOOK=https://...",
        )
    return name


def _size(text: str) -> str:
    parse_bytes(text)
    return text


class Alerts(Section):
    """Messages about the run, to a webhook, apprise, a command or the desktop. Every rule applies to all of them."""

    webhook: Annotated[Text, AfterValidator(_variable)] | None = Field(
        default=None,
        description="The environment variable with the address, which receives {text: ...} as JSON, as Slack expects.",
        examples=["SLACK_WEBHOOK"],
    )
    command: Texts = Field(
        default=(),
        description="A program with its arguments; it receives the alert as JSON on its standard input.",
        examples=[["./notify.sh"]],
    )
    apprise: Annotated[Text, AfterValidator(_variable)] | None = Field(
        default=None,
        description="The environment variable with addresses for the package apprise, such as tgram://, separated by "
        "spaces.",
        examples=["APPRISE_URLS"],
    )
    desktop: bool = Field(default=False, description="A notification on this machine's desktop.")
    finding: Literal["info", "warning", "critical"] | None = Field(
        default="critical", description="The lowest severity of a finding that is sent; null: none."
    )
    loss_above: float | None = Field(
        default=None, description="Alert on a training loss above this, or one that is not finite.", examples=[10.0]
    )
    no_step_for: ClockTime | None = Field(
        default=Duration(30 * 60, "s"), description="Alert if no step was completed for this long, evaluation included."
    )
    disk_below: Annotated[Text, AfterValidator(_size)] | None = Field(
        default="1GiB", description="Alert if less than this is free on the disk of the run folder."
    )
    ended: bool = Field(default=True, description="Alert at the end of the run, for any reason.")
    every: ClockTime = Field(
        default=Duration(5 * 60, "s"),
        description="At most one message of each kind in this time; later ones are joined.",
    )

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Alerts:
        if not (self.webhook or self.apprise or self.command or self.desktop):
            rule, remedy = "have no destination", "name a webhook, apprise, a command, or set desktop: true"
            raise RecipeError(Problem("", rule, remedy=remedy))
        return self


_CHECKPOINTING_NAMES = ("none", "block", "selective", "auto")


def _activation_checkpointing(text: str) -> str:
    if text in _CHECKPOINTING_NAMES:
        return text
    if any(each.isdigit() for each in text):
        return _size(text)
    close = get_close_matches(text[:100].lower(), _CHECKPOINTING_NAMES, n=1, cutoff=0.5)
    remedy = f"did you mean {close[0]}?" if close else "block checkpoints each block"
    raise UsageError(f"must be one of {', '.join(_CHECKPOINTING_NAMES)}, or a peak such as 12GiB", remedy=remedy)


_PEAK = {"type": "string", "pattern": "^[0-9.]+ ?[KMGTkmgt]?i?[Bb]$", "examples": ["12GiB"]}
ActivationCheckpointing = Annotated[
    str,
    AfterValidator(_activation_checkpointing),
    WithJsonSchema({"anyOf": [{"enum": list(_CHECKPOINTING_NAMES)}, _PEAK]}),
]
"""One of the names, or the peak memory of a step, such as ``12GiB``."""


DEFAULT_BATCH_SIZE = 32


class Lora(Section):
    """Low-rank adapters: small added matrices are trained, the model's weights stay unchanged."""

    rank: Count = Field(default=8, description="Rank of the added matrices.")
    alpha: float = Field(default=16.0, gt=0, description="The update is scaled by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout before the added matrices.")
    targets: TextOrTexts = Field(
        default=(),
        description="Names of linear layers, or their last parts; all-linear: all but the output layer. An empty list "
        "selects all linear layers inside the repeated blocks of the model.",
        examples=["all-linear"],
    )
    dora: bool = Field(default=False, description="Also train the norm of each column of the weights (DoRA).")
    rslora: bool = Field(default=False, description="Scale the update by alpha / sqrt(rank) (rsLoRA).")
    init: Literal["default", "gaussian", "orthogonal", "pissa", "olora"] = Field(
        default="default",
        description="Initial adapters. pissa and olora start from a decomposition of the weights, and change them.",
    )
    quantize: Literal["none", "nf4", "int4"] = Field(
        default="none",
        description="Keep the frozen linear layers in 4 bits (QLoRA), by torchao.",
    )


class WeightAveraging(Section):
    """Stochastic weight averaging (Izmailov et al. 2018): the mean of the weights late in the run."""

    start: Warmup = Field(default=Duration(0.75, "run"), description="When averaging begins.")
    every: Duration = Field(default=Duration(1, "ep"), description="How often the weights enter the average.")
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate from start on, of the first parameter group; the others keep their ratio to it. "
        "null: as scheduled.",
        examples=[0.05],
    )
    anneal: Warmup = Field(
        default=Duration(10, "ep"),
        description="How long the transition from the scheduled learning rate to lr takes, in steps of every.",
    )
    anneal_by: Literal["cos", "linear"] = Field(default="cos", description="The form of this transition.")
    norm_batches: Count | None = Field(
        default=None,
        description="Training batches that update the BatchNorm statistics of the average at the end; null: one epoch.",
    )


CompileMode: TypeAlias = Literal["auto", "default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


class Model(Part):
    """The model that is trained."""

    use: Annotated[str, ShortName("model", MODELS)] = Field(
        description="A built-in model, or package.module:callable that returns an nn.Module.",
        examples=["gpt"],
    )
    freeze: Texts = Field(default=(), description="Glob patterns of parameter names that are not trained.")
    activation_checkpointing: ActivationCheckpointing = Field(
        default="none",
        description="Recompute activations in backward instead of keeping them: none, those of each block, those of "
        "cheap operators (selective), as the plan chooses (auto), or so that a step peaks below a size (12GiB).",
        examples=["block"],
    )
    compile: Literal[False, True, "blocks"] = Field(
        default=False,
        description="Compile with torch.compile: the full model (true), or its repeated blocks (blocks). Equal blocks "
        "are compiled once, so a deep model starts sooner.",
        examples=["blocks"],
    )
    compile_mode: CompileMode = Field(
        default="default",
        description="Mode of torch.compile. auto: in a long run the fastest mode, measured before the first step; in a "
        "short one the default.",
        examples=["auto", "max-autotune"],
    )
    ema: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of an exponential moving average.", examples=[0.999]
    )
    swa: WeightAveraging | None = Field(
        default=None, description="Stochastic weight averaging.", examples=[{"start": "0.75run"}]
    )
    lora: Lora | None = Field(default=None, description="Train low-rank adapters instead of all weights.")

    @model_validator(mode="after")
    def _no_contradiction(self) -> Model:
        if self.ema is not None and self.swa is not None:
            rule, remedy = "contradicts ema: a run keeps one average of the weights", "keep ema or swa"
            raise RecipeError(Problem("swa", rule, remedy=remedy))
        return self

    @property
    def keeps_average(self) -> bool:
        return self.ema is not None or self.swa is not None


class Fp8(Section):
    """The linear layers that precision: fp8 and mxfp8 apply to, and their scales."""

    scales: Literal["rowwise", "tensorwise"] = Field(
        default="rowwise",
        description="fp8: a scale for each row of a matrix (more accurate), or one for the matrix (faster). mxfp8 "
        "always has one for each 32 values.",
    )
    layers: Texts = Field(
        default=(),
        description="Glob patterns of layer names. Empty: all linear layers but the first and the last.",
        examples=[["blocks.*"]],
    )
    emulate: bool = Field(
        default=False,
        description="Round as fp8 does, but compute in fp32: for tests on any device. Slower than fp32.",
    )


class Objective(Part):
    """The loss that is minimised."""

    use: Annotated[str, ShortName("loss", LOSSES)] = Field(
        default="cross_entropy",
        description="A built-in loss, or package.module:callable.",
        examples=["mse"],
    )
    chunked: Literal["auto", True, False] = Field(
        default="auto",
        description="Compute the logits of a language model in chunks; auto: only if the full logits do not fit "
        "into the memory that the plan has for them.",
    )


class Batch(Section):
    """size = micro * accumulation * ranks. Any two may be given; the plan finds the rest."""

    size: Count | None = Field(
        default=None, description="Samples per optimizer step, over all ranks.", examples=[DEFAULT_BATCH_SIZE]
    )
    micro: CountOrAuto | None = Field(
        default=None,
        description="Samples per forward pass on one rank; auto: the plan chooses what fits the device.",
        examples=[8],
    )
    accumulation: Count | None = Field(
        default=None, description="Forward passes per optimizer step on each rank.", examples=[4]
    )

    @model_validator(mode="before")
    @classmethod
    def _default_size(cls, value: object) -> object:
        if not isinstance(value, dict) or any(value.get(key) not in (None, "auto") for key in cls.model_fields):
            return value
        return {**value, "size": DEFAULT_BATCH_SIZE}

    @model_validator(mode="after")
    def _no_contradiction(self) -> Batch:
        if self.accumulation and self.micro == "auto":
            rule, remedy = "contradicts accumulation: micro is size / accumulation", "leave micro out, or accumulation"
            raise RecipeError(Problem("micro", rule, got="auto", remedy=remedy))
        if self.size is None and self.micro is None:
            rule, remedy = "does not determine the batch alone", "add batch.size or batch.micro"
            raise RecipeError(Problem("accumulation", rule, got=str(self.accumulation), remedy=remedy))
        if self.size is not None and isinstance(self.micro, int) and self.size < self.micro:
            rule, remedy = f"must be at least micro, {self.micro}", f"write size: {self.micro}, or a smaller micro"
            raise RecipeError(Problem("size", rule, got=str(self.size), remedy=remedy))
        return self


class Clip(Section):
    """Gradient clipping before each update."""

    by: Literal["norm", "value", "agc", "none"] = Field(
        default="none",
        description="Global norm, each value, each unit by its weights (agc), or none. norm if only at is given.",
        examples=["norm"],
    )
    at: float = Field(default=1.0, gt=0, description="The bound.")

    @model_validator(mode="before")
    @classmethod
    def _by_norm(cls, value: object) -> object:
        """Set ``by: norm`` if only ``at`` is given, which would otherwise have no effect."""
        return {"by": "norm", **value} if isinstance(value, dict) and "at" in value else value


class Group(Section):
    """Settings for the parameters whose names match."""

    match: Text = Field(description="Glob pattern of parameter names.", examples=["*.embed.*"])
    lr: float | None = Field(default=None, gt=0, description="Peak learning rate of the group.", examples=[1e-4])
    lr_scale: float = Field(default=1.0, gt=0, description="Factor on optimizer.lr.")
    weight_decay: float | None = Field(default=None, ge=0, description="Weight decay of the group.", examples=[0.0])

    @model_validator(mode="after")
    def _one_learning_rate(self) -> Group:
        if self.lr is not None and self.lr_scale != 1.0:
            rule = "contradicts lr: both set the group's learning rate"
            raise RecipeError(Problem("lr_scale", rule, got=str(self.lr_scale), remedy="keep lr or lr_scale"))
        return self


class LrRule(Section):
    """How the learning rate is scaled with the batch size; lr is then the one for base_batch."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="lr times size / base_batch, lr times its square root, or lr unchanged."
    )
    base_batch: Count | None = Field(default=None, description="The batch size that lr was tuned for.", examples=[256])

    @model_validator(mode="after")
    def _base_is_known(self) -> LrRule:
        if self.rule != "none" and self.base_batch is None:
            remedy = "add base_batch: the batch size that optimizer.lr was tuned for"
            raise RecipeError(Problem("base_batch", f"is required by rule: {self.rule}", remedy=remedy))
        return self


class Optimizer(Part):
    """The optimizer, its parameter groups, and gradient clipping."""

    use: Annotated[str, ShortName("optimizer", OPTIMIZER_NAMES)] = Field(
        default="adamw",
        description="A built-in optimizer, a short name of one of pytorch_optimizer, or package.module:callable.",
        examples=["sgd"],
    )
    lr: float | None = Field(
        default=None,
        gt=0,
        description="Peak learning rate; null: the default of the optimizer (1e-3 for adamw).",
        examples=[1e-3],
    )
    weight_decay: float | None = Field(
        default=None,
        ge=0,
        description="Weight decay; null: the default of the optimizer (0.01 for adamw).",
        examples=[0.1],
    )
    decay_norms_and_biases: bool = Field(
        default=True,
        description="false: no weight decay on norms and biases, which get a separate parameter group.",
    )
    groups: Annotated[tuple[Group, ...], Field(strict=False)] = Field(
        default=(), description="Settings by parameter name; the first match applies."
    )
    clip: Clip = Field(default_factory=Clip, description="Gradient clipping.", examples=[{"by": "norm", "at": 1.0}])
    lr_rule: LrRule = Field(default_factory=LrRule, description="Learning rate by batch size.")
    offload: Literal["auto", True, False] = Field(
        default=False,
        description="Moments and update in the host's memory; auto: if a run does not fit the device otherwise.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_rates(cls, value: object) -> object:
        """Fill in the defaults of a built-in optimizer, so that a recipe in a run folder shows numbers."""
        value = {"use": value} if isinstance(value, str) else value
        if not isinstance(value, dict):
            return value
        use = value.get("use", cls.model_fields["use"].default)
        if isinstance(use, str) and use in OPTIMIZER_ALIASES:
            return {**value, "use": OPTIMIZER_ALIASES[use].factory}
        row = optimizer_row(use) if isinstance(use, str) else CUSTOM_OPTIMIZER
        defaults = {"lr": row.lr, "weight_decay": row.weight_decay}
        return {**value, **{key: default for key, default in defaults.items() if value.get(key) is None}}

    @field_validator("args")
    @classmethod
    def _no_key_twice(cls, args: dict[str, object]) -> dict[str, object]:
        twice = [key for key in ("lr", "weight_decay") if key in args]
        if twice:
            rule = "is a key of optimizer and must not be repeated in its args"
            raise RecipeError([Problem(key, rule, remedy=f"write it as optimizer.{key} only") for key in twice])
        return args


class Schedule(Part):
    """The learning rate over the run, as a fraction of the peak."""

    use: Annotated[str, ShortName("schedule", SCHEDULES)] = Field(
        default="constant",
        description="A built-in schedule, or package.module:callable.",
        examples=["cosine"],
    )
    warmup: Warmup = Field(default=Duration(0, "steps"), description="Linear rise to the peak; 0steps: none.")
    floor: float = Field(default=0.0, ge=0, le=1, description="Fraction of the peak learning rate at the end.")
    every: Duration = Field(
        default=Duration(1, "steps"),
        description="How often a scheduler of torch is stepped: 1steps, or 1ep as in loops that step it each epoch.",
        examples=["1ep"],
    )

    @field_validator("every")
    @classmethod
    def _counted(cls, every: Duration) -> Duration:
        if every.unit not in ("steps", "ep"):
            raise UsageError("must be steps or epochs", remedy="write for example 1steps or 1ep")
        return every


class SpikeHandling(Section):
    """The reaction to a gradient norm far above its usual size."""

    policy: Annotated[str, ShortName("spike policy", SPIKE_POLICIES)] = Field(
        default="warn",
        description="warn: only a finding; skip: skip the update; rollback: go back to the last state "
        "in memory and skip the batches since then; off: no detection; or package.module:callable.",
        examples=["skip"],
    )
    factor: float = Field(
        default=8.0, gt=1, description="A gradient norm above this many times its running median is a spike."
    )


class Evaluation(Section):
    """Validation during the run."""

    every: Duration = Field(default=Duration(0.1, "run"), description="How often.")
    batches: Count | None = Field(
        default=None,
        description="Batches per evaluation; null: the full set, or as many as the plan has time for.",
        examples=[50],
    )
    batch: Count | None = Field(default=None, description="Samples per batch; null: as in training.", examples=[64])


class Checkpoint(Section):
    """Saving during the run; the end of a run is always saved."""

    every: Duration | None = Field(
        default=Duration(0.25, "run"),
        description="How often; a fraction of the run at most every 5 s. null: only at the end.",
    )
    at_least_every: ClockTime | None = Field(
        default=Duration(15 * 60, "s"), description="Also when the last checkpoint is this old, by wall-clock time."
    )
    keep: Count = Field(default=2, description="The number of newest checkpoints that are kept.")
    keep_every: Duration | None = Field(
        default=None,
        description="The first checkpoint at or after each multiple of this is kept for ever.",
        examples=["1ep"],
    )
    copy_to: Text | None = Field(
        default=None,
        description="A URL or folder to which each checkpoint is copied during training (fsspec).",
        examples=["s3://bucket/runs"],
    )
    best: Text | None = Field(
        default="loss",
        description="The checkpoint with the best value of this is also kept: loss, or a metric of the validation.",
        examples=["accuracy"],
    )
    best_mode: Literal["min", "max"] = Field(
        default="min",
        description="Whether the smallest or the largest value is best. Default: by the name, if it is a known one.",
    )
    restore_best: bool = Field(
        default=False, description="At the end of the run, the model gets the weights of the best checkpoint."
    )
    asynchronous: bool = Field(
        default=True, description="Training continues while a copy of the state is written (costs its size in memory)."
    )
    signals: Annotated[tuple[Literal["SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP"], ...], Field(strict=False)] = Field(
        default=("SIGTERM", "SIGUSR1", "SIGHUP"),
        description="Signals that make a run save and stop, besides SIGINT.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_mode(cls, value: object) -> object:
        """Fill in ``best_mode`` for a metric whose name shows it."""
        if not isinstance(value, dict) or "best_mode" in value or not isinstance(best := value.get("best"), str):
            return value
        if (mode := mode_of(best)) is None:
            rule = f"is required: it is unknown if a larger {best}, which is checkpoint.best, is better"
            remedy = "set checkpoint.best_mode to max if it is, else to min"
            raise RecipeError(Problem("best_mode", rule, remedy=remedy))
        return {**value, "best_mode": mode}

    @field_validator("keep_every")
    @classmethod
    def _counted(cls, value: Duration | None) -> Duration | None:
        if value is not None and value.unit == "s":
            raise UsageError("must not be a time: it selects steps", remedy="write for example 1000steps or 1ep")
        return value


class Log(Section):
    """The log of the run, and trackers that get a copy."""

    every: Duration = Field(default=Duration(10, "steps"), description="How often a step is logged.")
    sinks: Annotated[
        tuple[Annotated[str, ShortName("sink", SINKS, accepts_references=False)], ...], Field(strict=False)
    ] = Field(default=(), description="Trackers besides the run folder.")
    metrics: bool = Field(
        default=True, description="Also compute metrics of the training batches, over the steps since the last record."
    )
    layers: bool = Field(default=True, description="Statistics by layer at intervals: gradients, updates, activations.")
    retain_grad: Texts = Field(
        default=(),
        description="Glob patterns of module names: at intervals, norms and histograms of the gradients with respect "
        "to their outputs.",
        examples=[["blocks.3.*"]],
    )
    doctor: bool = Field(default=True, description="Observe every step, and diagnose faults on a replay.")
    examine: Literal["budget", "all"] = Field(
        default="budget",
        description="What the doctor examines: as much as 3 % of the training time allows, or everything.",
    )


def _folder_name(name: str) -> str:
    if not re.fullmatch(NAME_PATTERN, name):
        rule = "must be at most 100 letters, digits, '.', '_' and '-', and not begin with '.' or '-'"
        safe = re.sub(r"[^A-Za-z0-9._-]+", "-", name)[:100].strip("-. ")
        raise UsageError(rule, remedy=f"write for example {safe or 'run'}")
    return name


def _folder_path(path: str) -> str:
    if not path.strip() or not path.isprintable():
        raise UsageError("must be the path of a folder", remedy="write for example runs")
    return path


def _grid(value: object) -> str | float:
    if isinstance(value, str):
        grams_per_kwh(value)  # raises for a country that is not in the table
        return value
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise UsageError("must be a country, or grams of CO2 for a kWh", remedy="write for example DE, or 380")


Grid = Annotated[
    str | float,
    PlainValidator(_grid),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]}),
]

NAME_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,99}$"


class Recipe(Section):
    """The complete settings of a run."""

    name: Annotated[str, AfterValidator(_folder_name)] = Field(
        default="run",
        description="Name of the run and of its folder.",
        json_schema_extra={"pattern": NAME_PATTERN},
    )
    preset: Literal["recommended"] | None = Field(
        default=None,
        description="recommended: precision auto, clipping at norm 1, cosine with warm-up, no weight decay on norms "
        "and biases, momentum 0.9 for sgd; each unless the recipe sets it. null: only what is stated.",
        examples=["recommended"],
    )
    seed: int = Field(default=1337, ge=0, le=LARGEST_INT, description="Seed of all random numbers.")
    deterministic: bool = Field(
        default=False,
        description="Only deterministic kernels: the same bits each time. Ranks with copies of the model also replay "
        "every 256th step of each other, which calls model and loss twice more; see `resources.silent_corruption`.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="The device of the run.")
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "mxfp8"] | None = Field(
        default=None,
        description="Arithmetic of forward and backward. null: float32, with TF32 only if torch is set to use it; "
        "fp32: float32 without TF32; auto: the fastest, bf16 or fp16 on a GPU, measured on a CPU; fp8, mxfp8: bf16, "
        "and linear layers in 8 bits.",
        examples=["auto"],
    )
    fp8: Fp8 | None = Field(
        default=None, description="Settings of precision: fp8 and mxfp8.", examples=[{"scales": "tensorwise"}]
    )
    graphs: Literal[False, True, "auto"] = Field(
        default=False,
        description="Capture the steps of one GPU in CUDA graphs, so that the host launches each step at once. auto: "
        "only if the host takes the time of the step, which is measured.",
        examples=["auto"],
    )
    until: Annotated[Duration, DurationField(allow_budget=True)] = Field(
        default=Duration(1, "ep"),
        description="The length of the run, or what it may cost with its resumes (5USD, 2kWh).",
    )
    price: float | None = Field(
        default=None, gt=0, description="US dollars for an hour of one device. null: the table of devices."
    )
    grid: Grid | None = Field(
        default=None,
        description="The electricity grid, for the CO2 of the GPUs: a country such as DE, or grams of CO2 for a kWh. "
        "null: CO2 is not reported.",
        examples=["DE"],
    )
    model: Model = Field(description="The model that is trained.", examples=["gpt"])
    data: Data = Field(description="The training and validation data.", examples=[{"train": "digits"}])
    loss: Objective = Field(default_factory=Objective, description="The loss that is minimised.")
    batch: Batch = Field(default_factory=Batch, description="The number of samples per step.")
    parallel: Parallel = Field(
        default_factory=Parallel, description="How the run is distributed over several processes."
    )
    optimizer: Optimizer = Field(default_factory=Optimizer, description="The optimizer.")
    schedule: Schedule = Field(default_factory=Schedule, description="The learning rate over the run.")
    spikes: SpikeHandling = Field(
        default_factory=SpikeHandling, description="The reaction to a spike of the gradient norm."
    )
    evaluation: Evaluation = Field(default_factory=Evaluation, description="Validation during the run.")
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, description="Saving during the run.")
    observers: Annotated[tuple[Watcher, ...], Field(strict=False)] = Field(
        default=(), description="Observers, which receive each completed step and may end the run."
    )
    metrics: Annotated[tuple[MetricPart, ...], Field(strict=False)] = Field(
        default=(), description="Metrics over the validation set, and over the training batches."
    )
    log: Log = Field(default_factory=Log, description="The log of the run.")
    alerts: Alerts | None = Field(
        default=None, description="Alerts about the run.", examples=[{"webhook": "SLACK_WEBHOOK"}]
    )
    folder: Annotated[str, AfterValidator(_folder_path)] = Field(
        default="runs", description="The folder in which run folders are made."
    )

    @field_validator("until")
    @classmethod
    def _absolute(cls, until: Duration) -> Duration:
        if until.unit == "run":
            raise UsageError("cannot be a fraction of the run that it defines", remedy="write for example 10ep")
        return until

    # A validator of the field, not of the model: it also runs when other sections have problems.
    @field_validator("schedule")
    @classmethod
    def _warmup_fits(cls, schedule: Schedule, info: ValidationInfo) -> Schedule:
        until: Duration | None = info.data.get("until")
        warmup = schedule.warmup
        if until is not None and warmup.unit == until.unit and warmup.value > until.value:
            rule, remedy = f"must not be longer than until, {until}", "write for example 0.05run"
            raise RecipeError(Problem("warmup", rule, got=str(warmup), remedy=remedy))
        return schedule


class _Generator(GenerateJsonSchema):
    def encode_default(self, dft: object) -> object:
        return str(dft) if isinstance(dft, Duration) else super().encode_default(dft)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema, draft 2020-12, of a recipe file."""
    schema = Recipe.model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_without_titles(schema)}


def _without_titles(schema: Any) -> Any:
    """Remove pydantic's titles, which only repeat the keys. A *property* called title is a mapping, not a string."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value) for key, value in schema.items() if key != "title" or isinstance(value, dict)
        }
    return [_without_titles(item) for item in schema] if isinstance(schema, list) else schema
