"""The catalog: one row for each built-in model, dataset, loss, optimizer, schedule and sink.

A row names its factory as ``package.module:callable`` and nothing is imported here, so a recipe can be checked on a
machine without torch. To add one: a row here, the factory in its room, a test. The schema, "did you mean", the memory
arithmetic, offload, the rules of resume and docs/reference/catalog.md are derived from the rows, or tested against
them.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar


@dataclass(frozen=True)
class Row:
    """``name`` is the name in a recipe, ``factory`` is ``package.module:callable``, ``doc`` one sentence for users.

    ``keys`` are arguments of the factory that a recipe may also write beside ``use`` instead of in ``args``.
    """

    name: str
    factory: str
    doc: str
    keys: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(frozen=True)
class SinkRow(Row):
    """A tracker. ``package`` is what it imports and what pip installs; "" if it needs nothing."""

    package: str = ""


@dataclass(frozen=True)
class OptimizerRow(Row):
    """The properties of an optimizer that recipe, plan and assembly need without importing it."""

    state_per_weight: float
    """Bytes kept for each trained weight, relative to the 4 bytes of a weight in fp32."""
    decoupled: bool
    """True if weight decay stays out of the moments, as in AdamW; False if it is added to the gradient (L2)."""
    lr: float | None = 1e-3
    """The factory's default learning rate; None for an optimizer that is not built-in."""
    weight_decay: float | None = 0.0
    """The factory's default weight decay; None for an optimizer that is not built-in."""
    fused: bool = False
    """True if torch has a fused implementation, chosen by ``fused=True``."""
    needs_for_state: str = ""
    """The argument that makes it keep state, such as momentum."""
    keeps_state: bool = True
    """True if it keeps state when that argument is not given."""
    adds_state: tuple[str, ...] = ()
    """Arguments that, when true, keep one more value for each weight."""
    splits_state: tuple[str, ...] = ()
    """Arguments that decide which state each weight has. A resume cannot change them."""
    groups: str = ""
    """The factory of its parameter groups, if the usual ones do not fit: see ``optim.choose``."""
    group_args: tuple[str, ...] = ()
    """Arguments of ``groups`` that the factory does not accept."""
    why_not_offloaded: str = ""
    """The reason why its state should not move to the host's memory; "" if it may."""

    def values_per_weight(self, args: Mapping[str, object]) -> float:
        if self.needs_for_state and not args.get(self.needs_for_state, self.keeps_state):
            return 0
        return self.state_per_weight + sum(bool(args.get(name)) for name in self.adds_state)


R = TypeVar("R", bound=Row)


def _by_name(*rows: R) -> dict[str, R]:
    return {row.name: row for row in rows}


MODELS = _by_name(
    Row("gpt", "trainwright.models.gpt:gpt", "A decoder-only transformer of any size."),
    Row("gpt2", "trainwright.models.gpt:gpt2", "GPT-2 in its four published sizes."),
    Row("moe-gpt", "trainwright.models.moe:moe_gpt", "A GPT with mixtures of experts, balanced by biases."),
    Row("bert", "trainwright.models.bert:bert", "An encoder for masked language modelling, of any size."),
    Row("bert-published", "trainwright.models.bert:bert_published", "BERT base and large as published."),
    Row("vit", "trainwright.models.vit:vit", "A Vision Transformer of any size."),
    Row("vit-published", "trainwright.models.vit:vit_published", "Vision Transformers in their published sizes."),
    Row("resnet", "trainwright.models.resnet:resnet", "A ResNet for small images."),
    Row("unet", "trainwright.models.unet:unet", "A U-Net for segmentation."),
    Row("actor-critic", "trainwright.models.mlp:actor_critic", "A policy and a value, for PPO."),
    Row("lstm", "trainwright.models.lstm:lstm", "An LSTM language model."),
    Row("mlp", "trainwright.models.mlp:mlp", "Linear layers with an activation between them."),
    Row(
        "hf",
        "trainwright.models.hf:hf_model",
        "A model of the transformers library: pretrained weights by name, or new ones by architecture.",
        keys=("name", "architecture", "revision", "dtype", "trust_remote_code"),
    ),
    Row("timm", "trainwright.models.image_libraries:timm_model", "An image model of the timm library."),
    Row("torchvision", "trainwright.models.image_libraries:torchvision_model", "An image model of torchvision."),
)

DATASETS = _by_name(
    Row("python-topics", "trainwright.data.text:python_topics", "Characters of Python's help topics."),
    Row("masked-topics", "trainwright.data.text:masked_topics", "The same with characters hidden, for an encoder."),
    Row("stdlib-source", "trainwright.data.text:stdlib_source", "Characters of the source of Python's library."),
    Row("text-file", "trainwright.data.text:text_file", "Characters of a text file."),
    Row("tokens", "trainwright.data.tokens:Tokens", "Ids of tokens in a file, memory-mapped: nanoGPT's train.bin."),
    Row("table", "trainwright.data.table:table", "Columns of a .csv or .parquet file."),
    Row("images", "trainwright.data.images:Images", "A folder of images in folders named for their classes."),
    Row("digits", "trainwright.data.images:digits", "1,797 images of handwritten digits, 8 x 8."),
    Row("shapes", "trainwright.data.shapes:shapes", "Generated images of geometric shapes, to classify or segment."),
    Row(
        "chat",
        "trainwright.finetune.datasets:Chat",
        "Conversations: messages, or sharegpt's conversations.",
        keys=("path",),
    ),
    Row(
        "instruct",
        "trainwright.finetune.datasets:Instruct",
        "Instruction, input and output, as in Alpaca.",
        keys=("path",),
    ),
    Row("completion", "trainwright.finetune.datasets:Completion", "A prompt and its completion.", keys=("path",)),
    Row(
        "text", "trainwright.finetune.datasets:Texts", "Texts, each of which is trained on completely.", keys=("path",)
    ),
    Row(
        "preference",
        "trainwright.finetune.datasets:Preference",
        "A chosen and a rejected answer for a prompt.",
        keys=("path",),
    ),
    Row(
        "prompts",
        "trainwright.finetune.prompts:Prompts",
        "Prompts to complete, and the columns for a reward function.",
        keys=("path",),
    ),
    Row("episodes", "trainwright.data.episodes:episodes", "Seeds of episodes, for a loss that plays."),
)

LOSSES = _by_name(
    Row("cross_entropy", "trainwright.engine.losses:cross_entropy", "Cross-entropy of class logits."),
    Row("language_model", "trainwright.engine.losses:language_model", "Cross-entropy of the next token."),
    Row("mse", "trainwright.engine.losses:mse", "Mean squared error."),
    Row("hf_causal_lm", "trainwright.engine.losses:hf_causal_lm", "Next token, for a model of transformers."),
    Row("dpo", "trainwright.finetune.losses:DPO", "Direct preference optimization: chosen over rejected completions."),
    Row("grpo", "trainwright.finetune.grpo:GRPO", "Policy optimization: completions are scored by your function."),
    Row("bradley_terry", "trainwright.finetune.losses:bradley_terry", "Reward model: chosen above rejected."),
    Row("distillation", "trainwright.finetune.losses:Distillation", "The distribution of a teacher, for each token."),
    Row("reinforce", "trainwright.engine.policy_gradient:Reinforce", "Policy gradient: the loss plays episodes."),
    Row("of_model", "trainwright.engine.loss:ModelLoss", "The loss that the model itself returns."),
)

METRICS = _by_name(
    Row("accuracy", "trainwright.engine.named_metrics:accuracy", "Fraction of targets that are predicted."),
    Row("top_k", "trainwright.engine.named_metrics:top_k", "Fraction of targets among the k best classes."),
    Row("top5", "trainwright.engine.named_metrics:top5", "The same with k: 5."),
    Row("precision", "trainwright.engine.named_metrics:precision", "Macro average of the precision."),
    Row("recall", "trainwright.engine.named_metrics:recall", "Macro average of the recall."),
    Row("specificity", "trainwright.engine.named_metrics:specificity", "Macro average of the specificity."),
    Row("f1", "trainwright.engine.named_metrics:f1", "Macro average of the F1 score."),
    Row("balanced_accuracy", "trainwright.engine.named_metrics:balanced_accuracy", "Mean of the recall of each class."),
    Row("auroc", "trainwright.engine.named_metrics:auroc", "Area under the ROC curve, macro average."),
    Row("average_precision", "trainwright.engine.named_metrics:average_precision", "Area under precision and recall."),
    Row("matthews", "trainwright.engine.named_metrics:matthews", "Matthews correlation coefficient."),
    Row("cohen_kappa", "trainwright.engine.named_metrics:cohen_kappa", "Agreement beyond chance."),
    Row("calibration_error", "trainwright.engine.named_metrics:calibration_error", "Expected calibration error."),
    Row("iou", "trainwright.engine.named_metrics:iou", "Intersection over union, macro average."),
    Row("perplexity", "trainwright.engine.named_metrics:perplexity", "exp of the mean cross-entropy."),
    Row("lm_eval", "trainwright.finetune.lm_eval:LmEval", "Tasks of lm-eval on a model of transformers."),
    Row("mae", "trainwright.engine.named_metrics:mae", "Mean absolute error."),
    Row("mse", "trainwright.engine.named_metrics:mse", "Mean squared error."),
    Row("rmse", "trainwright.engine.named_metrics:rmse", "Root of the mean squared error."),
    Row("mape", "trainwright.engine.named_metrics:mape", "Mean absolute error relative to the target."),
    Row("r2", "trainwright.engine.named_metrics:r2", "Coefficient of determination."),
    Row("pearson", "trainwright.engine.named_metrics:pearson", "Pearson correlation."),
    Row("spearman", "trainwright.engine.named_metrics:spearman", "Rank correlation."),
)

_SMALLER_IS_BETTER = ("loss", "error", "perplexity", "mae", "mse", "rmse", "mape")


def mode_of(metric: str) -> Literal["min", "max"] | None:
    """Return "min" or "max" if the name of a validation metric shows which value is best, else None.

    It may contain the name of a built-in metric, as in ``half.accuracy``, ``f1.0`` or ``val_f1``.
    """
    if "neg" in metric:  # scikit-learn's neg_mean_squared_error
        return None
    for part in reversed(metric.split(".")):
        if part.endswith(_SMALLER_IS_BETTER):
            return "min"
        if any(f"_{part}".endswith(f"_{name}") for name in METRICS if name != "lm_eval"):
            return "max"
    return None


OPTIMIZERS = _by_name(
    OptimizerRow(
        "sgd",
        "torch.optim:SGD",
        "Stochastic gradient descent, with momentum if args has it.",
        state_per_weight=1,
        decoupled=False,
        fused=True,
        needs_for_state="momentum",
        keeps_state=False,
    ),
    OptimizerRow(
        "adam",
        "torch.optim:Adam",
        "Adam; its weight decay is L2.",
        state_per_weight=2,
        decoupled=False,
        fused=True,
        adds_state=("amsgrad",),
    ),
    OptimizerRow(
        "adamw",
        "torch.optim:AdamW",
        "Adam with decoupled weight decay.",
        state_per_weight=2,
        decoupled=True,
        weight_decay=0.01,
        fused=True,
        adds_state=("amsgrad",),
    ),
    OptimizerRow(
        "adamw8bit",
        "trainwright.optim.quantized:AdamW8bit",
        "AdamW with moments of 8 bits and a scale per block of 256 values.",
        state_per_weight=2 * (1 + 4 / 256) / 4,
        decoupled=True,
        weight_decay=0.01,
        splits_state=("block_size",),
        why_not_offloaded="its moments take a quarter of AdamW's memory already",
    ),
    OptimizerRow(
        "adamw4bit",
        "trainwright.optim.quantized:AdamW4bit",
        "AdamW with moments of 4 bits and a scale per block of 128 values.",
        state_per_weight=2 * (1 / 2 + 4 / 128) / 4,
        decoupled=True,
        weight_decay=0.01,
        splits_state=("block_size",),
        why_not_offloaded="its moments take an eighth of AdamW's memory already",
    ),
    OptimizerRow(
        "adafactor",
        "torch.optim:Adafactor",
        "Adam's second moment as a row and a column; lr bounds the relative step.",
        state_per_weight=0,
        decoupled=True,
        lr=1e-2,
        why_not_offloaded="its factored moments are next to nothing, so moving them frees nothing",
    ),
    OptimizerRow(
        "muon",
        "trainwright.optim.muon:Muon",
        "Momentum with orthogonalised updates for hidden matrices, AdamW for all else.",
        state_per_weight=1,
        decoupled=True,
        lr=0.02,
        splits_state=("head",),
        groups="trainwright.optim.muon:groups_of_recipe",
        group_args=("head", "adamw_lr", "adamw_betas", "adamw_eps"),
        why_not_offloaded="its matrix products would run on the host, hundreds of times slower than on a GPU",
    ),
    OptimizerRow(
        "lamb",
        "trainwright.optim.lamb:Lamb",
        "Adam whose update of each matrix is scaled to the norm of the matrix, for very large batches.",
        state_per_weight=2,
        decoupled=True,
    ),
    OptimizerRow(
        "lars",
        "trainwright.optim.lamb:Lars",
        "Momentum whose learning rate per layer follows the norm of the weights, for very large batches.",
        state_per_weight=1,
        decoupled=False,
        lr=0.1,
        needs_for_state="momentum",
    ),
)

CUSTOM_OPTIMIZER = OptimizerRow(
    "",
    "",
    "An optimizer that is not built-in.",
    state_per_weight=2,
    decoupled=True,
    lr=None,
    weight_decay=None,
    adds_state=("amsgrad",),
)
"""Assumptions about ``package.module:callable``: it keeps the same state as AdamW."""

OPTIMIZER_ALIASES = _by_name(
    Row("ademamix", "pytorch_optimizer:AdEMAMix", "AdamW with a second, slower average of the gradients."),
    Row("adan", "pytorch_optimizer:Adan", "Adam with Nesterov momentum from differences of gradients."),
    Row("adopt", "pytorch_optimizer:ADOPT", "Adam that normalizes by the second moment of the step before."),
    Row("came", "pytorch_optimizer:CAME", "Factored second moments, scaled by the confidence in them."),
    Row("lion", "pytorch_optimizer:Lion", "The sign of an interpolated momentum."),
    Row("mars", "pytorch_optimizer:MARS", "AdamW with variance-reduced gradients."),
    Row("prodigy", "pytorch_optimizer:Prodigy", "AdamW that estimates its learning rate; lr is a factor on it."),
    Row("schedulefree", "pytorch_optimizer:ScheduleFreeAdamW", "AdamW with averaged weights and no schedule."),
    Row("schedulefree_sgd", "pytorch_optimizer:ScheduleFreeSGD", "SGD with averaged weights and no schedule."),
    Row("soap", "pytorch_optimizer:SOAP", "Adam in the eigenbasis of Shampoo's preconditioner."),
    Row("stableadamw", "pytorch_optimizer:StableAdamW", "AdamW with update clipping as in Adafactor."),
)
"""Short names of optimizers of the package pytorch_optimizer. A recipe is read as if it named the factory."""
OPTIMIZER_NAMES: Mapping[str, Row] = ChainMap[str, Row](OPTIMIZER_ALIASES, OPTIMIZERS)  # type: ignore[arg-type]
"""All short names. Iteration yields the built-in optimizers first."""

SCHEDULES = _by_name(
    Row("constant", "trainwright.optim.schedule:ConstantSchedule", "The peak learning rate to the end."),
    Row("cosine", "trainwright.optim.schedule:Cosine", "Half a cosine from the peak to the floor."),
    Row("restarts", "trainwright.optim.schedule:Restarts", "Repeated cosines from the peak."),
    Row("polynomial", "trainwright.optim.schedule:Polynomial", "A power of the fraction of the run that is left."),
    Row("linear", "trainwright.optim.schedule:Linear", "A straight line from the peak to the floor."),
    Row("step", "trainwright.optim.schedule:StepDecay", "Multiplied by gamma after each equal span."),
    Row("wsd", "trainwright.optim.schedule:WSD", "Warm-up, the peak for most of the run, a decay at its end."),
)

OBSERVERS = _by_name(
    Row(
        "early_stopping",
        "trainwright.monitoring.early_stopping:EarlyStopping",
        "Ends the run when the validation no longer improves.",
    ),
    Row(
        "generate",
        "trainwright.finetune.generations:Generations",
        "Shows completions of some prompts before the first step and after each evaluation.",
    ),
)

SINKS = _by_name(
    SinkRow(
        "tensorboard",
        "trainwright.monitoring.sinks.tensorboard:TensorBoard",
        "Event files in the run folder.",
        package="tensorboard",
    ),
    SinkRow(
        "wandb",
        "trainwright.monitoring.sinks.wandb:WeightsAndBiases",
        "Weights & Biases, offline unless WANDB_MODE is set.",
        package="wandb",
    ),
    SinkRow(
        "mlflow",
        "trainwright.monitoring.sinks.mlflow:MLflow",
        "MLflow, in mlflow.db beside the runs unless MLFLOW_TRACKING_URI is set.",
        package="mlflow",
    ),
    SinkRow(
        "trackio",
        "trainwright.monitoring.sinks.trackio:Trackio",
        "Trackio, in trackio/ beside the runs unless TRACKIO_DIR is set.",
        package="trackio",
    ),
    SinkRow(
        "openmetrics",
        "trainwright.monitoring.sinks.openmetrics:OpenMetrics",
        "An endpoint for Prometheus on this machine, port 9464.",
        package="prometheus_client",
    ),
    SinkRow(
        "csv", "trainwright.monitoring.sinks.csv_file:CsvFile", "metrics.csv in the run folder: step, name, value."
    ),
)

SPIKE_POLICIES: tuple[str, ...] = ("warn", "skip", "rollback", "off")


def optimizer_row(use: str) -> OptimizerRow:
    """Return the row of a built-in optimizer, or ``CUSTOM_OPTIMIZER`` for any other."""
    return OPTIMIZERS.get(use, CUSTOM_OPTIMIZER)
