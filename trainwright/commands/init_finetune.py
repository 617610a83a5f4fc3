"""``init finetune``: writes recipes that fine-tune a model on conversations, prompts, texts or preferences."""

from __future__ import annotations

import json
import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.errors import UsageError
from trainwright.finetune.datasets import Chat, Completion, Instruct, OnBadRecord, Preference, Texts, TokenizedSet
from trainwright.finetune.layouts import LAYOUTS, USES, Use
from trainwright.finetune.read import open_source, validation_split
from trainwright.models.pretrained import find_folder, read_json, require_weights

MAX_RECORDS_READ = 1000
"""Records that are read to recognize the layout of a file."""
MIN_BASE_IN_BF16 = 1_000_000_000
"""Adapters of a base model with at least this many weights are trained on bf16 weights, which halves its memory."""
MIN_FULL_BATCHES = 20
"""Steps that an epoch should have. A small data set gets a smaller batch."""
MAX_PADDING_FRACTION = 1 / 3
"""Padding tokens / all tokens of the batches, above which the samples of a micro-batch share one row instead."""
DECODERS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Ends of the class names of decoders. A ``ForConditionalGeneration`` without an encoder also reads images."""
DATASETS: dict[Use, type[TokenizedSet]] = {each.use: each for each in (Chat, Instruct, Completion, Texts, Preference)}


@dataclass(frozen=True)
class Facts:
    """The facts about a model and a file from which the recipes are written.

    Attributes:
        model: Name or path of the model.
        architecture: Class of the model.
        weights: Number of weights.
        limit: Number of positions of the model; None if the configuration does not state it.
        data: Path of the data.
        use: Kind of the data.
        layout: Layout of the records.
        samples: Samples with tokens that carry loss.
        lengths: Median and maximum number of tokens of a sample. A pair counts as its prompt and longer completion.
        longer: Samples that are longer than the limit.
        padding: Fraction of the tokens that are padding if each batch is padded to its longest sample.
        val_split: Name of the validation split of the data; None if a fraction is held out.
        chat_template: A file with a chat template. None: the tokenizer's template.
    """

    model: str
    architecture: str
    weights: int
    limit: int | None
    data: str
    use: Use
    layout: str
    samples: int
    lengths: tuple[int, int]
    longer: int
    padding: float
    val_split: str | None
    chat_template: str | None
    on_bad_record: OnBadRecord

    @property
    def are_pairs(self) -> bool:
        """True for preferences, which are trained on by DPO."""
        return self.use == "preference"

    @property
    def val_fraction(self) -> float:
        """The fraction of the records that is held out; 0 for a file that is too small, or with a validation split."""
        if self.val_split is not None:
            return 0.0
        return 0.05 if self.samples >= 400 else 0.1 if self.samples >= 20 else 0.0

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return _batch_size(self.samples)


def gather(model: str, data: str, *, chat_template: str | None = None, on_bad_record: OnBadRecord = "stop") -> Facts:
    """Read the configuration of the model, and tokenize the file. No weights are read.

    Raises UsageError if there is no such model or file, its layout is not known, or a record cannot be used.
    """
    chat_template = None if chat_template is None else _absolute(chat_template)
    folder = find_folder(model)
    require_weights(folder)
    config = read_json(folder / "config.json")
    _require_decoder(model, config)
    use, layout = _layout(data)
    name, path = _absolute(model), _absolute(data)
    try:
        tokenized = DATASETS[use](path, tokenizer=str(folder), chat_template=chat_template, on_bad_record=on_bad_record)
    except UsageError as error:
        remedy = f"{error.remedy}. Options of init: --chat-template FILE, --on-bad-record skip"
        raise UsageError(error.message, remedy=remedy) from None
    lengths = tokenized.longest()
    known = [config.get(key) for key in ("max_position_embeddings", "n_positions")]
    limit = next((each for each in known if isinstance(each, int)), None)
    return Facts(
        name,
        str((config.get("architectures") or ["unknown"])[0]),
        _count_weights(folder),
        limit,
        path,
        use,
        layout,
        len(tokenized),
        (int(np.median(lengths)), int(lengths.max())),
        0 if limit is None else int((lengths > limit).sum()),
        _padding(lengths if limit is None else np.minimum(lengths, limit), _batch_size(len(lengths))),
        validation_split(path),
        chat_template,
        on_bad_record,
    )


def _require_decoder(model: str, config: Mapping[str, Any]) -> None:
    """Raise UsageError for an encoder, an encoder-decoder, or a model without a language-model head."""
    names = [str(each) for each in config.get("architectures") or ()]
    if config.get("is_encoder_decoder"):
        what, why = "an encoder-decoder", "its labels are a sequence of their own"
    elif names and not any(each.endswith(DECODERS) for each in names):
        what, why = f"a {names[0]}", "it does not predict the next token"
    else:
        return
    raise UsageError(
        f"{model} is {what}, and init finetune writes recipes for decoders (such as LlamaForCausalLM): {why}",
        remedy='tokenize your data, and call tw.fit("FOLDER", data) with the loss that the model returns '
        "(docs/how-to/fine-tune.md)",
    )


def files_of(facts: Facts) -> dict[str, str]:
    """Return the content of each file of the project by its name."""
    return {
        "recipe.yaml": recipe_text(facts, lora=True),
        "full.yaml": recipe_text(facts, lora=False),
        "README.md": _readme(facts),
    }


def run_name(facts: Facts) -> str:
    """Return the name of the run, which joins the names of model and data file."""
    parts = (Path(facts.model).name, Path(facts.data).stem)
    return re.sub(r"[^\w.-]+", "-", "-".join(parts)).strip("-.") or "finetune"


def recipe_text(facts: Facts, *, lora: bool) -> str:
    """Return a recipe as text, with the reason of each choice that follows from the model or the data."""
    name = run_name(facts) if lora else f"{run_name(facts)}-full"
    dtype = "bf16" if lora and facts.weights >= MIN_BASE_IN_BF16 else "fp32"
    held = f", val_fraction: {facts.val_fraction}" if facts.val_fraction else ""
    val_split = f"source_split: {facts.val_split}" if facts.val_split else "split: val" if held else ""
    truncate = "drop" if facts.are_pairs else "right"  # a pair needs the ends of both completions
    cut = f", max_length: {facts.limit}, truncate: {truncate}" if facts.longer else ""
    lines = [
        "# yaml-language-server: $schema=recipe.schema.json",
        f"# {facts.architecture} with {facts.weights:,} weights; {facts.samples:,} {_noun(facts)} ({facts.layout}),",
        f"# {facts.lengths[0]:,} tokens in the median, {facts.lengths[1]:,} at most",
        f"name: {name}",
        f"until: {'1ep' if facts.are_pairs else '3ep'}",
        "model:"
        + ("  # after supervised fine-tuning; its weights at the start are the reference" if facts.are_pairs else ""),
        "  use: hf",
        f"  name: {json.dumps(facts.model)}",
        f"  dtype: {dtype}"
        + ("  # the frozen base in half of the memory; adapters are fp32" if dtype == "bf16" else ""),
    ]
    if lora:
        lines += [
            "  lora:  # all other weights are frozen; with quantize: nf4 they take 4 bits each (QLoRA)",
            "    {rank: 16, alpha: 32.0, dropout: 0.05, targets: all-linear}",
        ]
    lines.append("data:")
    if facts.longer:
        lines.append(
            f"  # {facts.longer:,} {_noun(facts)} are longer than the {facts.limit:,} positions of the model, and are "
            + ("left out" if facts.are_pairs else "cut")
        )
    args = f"path: {json.dumps(facts.data)}{held}{cut}"
    if facts.chat_template is not None:
        args += f", chat_template: {json.dumps(facts.chat_template)}"
    if facts.on_bad_record != "stop":
        args += f", on_bad_record: {facts.on_bad_record}"
    lines.append(f"  train: {{use: {facts.use}, args: {{{args}}}}}")
    if val_split:
        lines.append(f"  val: {{use: {facts.use}, args: {{{args}, {val_split}}}}}")
    if facts.padding > MAX_PADDING_FRACTION and not facts.are_pairs:
        lines.append(f"  # in rows of their own, {facts.padding:.0%} of the tokens of a batch would be padding")
        lines.append("  packing: padding_free")
    lines += _objective(facts, lora)
    if val_split:
        lines.append("evaluation: {every: 0.2run}")
    if val_split and facts.are_pairs:
        lines.append("checkpoint: {best: reward_accuracy, best_mode: max}")
    return "\n".join(lines) + "\n"


def _objective(facts: Facts, lora: bool) -> tuple[str, ...]:
    if facts.are_pairs:
        loss, schedule = "{use: dpo, args: {beta: 0.1}}", "{use: linear, warmup: 0.1run}"
        lr = "1e-5" if lora else "1e-6"
    else:
        loss, schedule = (
            "hf_causal_lm  # counts each token once, over accumulation and ranks",
            "{use: cosine, warmup: 0.03run}",
        )
        lr = "2e-4" if lora else "2e-5"
    return (
        f"loss: {loss}",
        f"batch: {{size: {facts.batch}}}",
        "precision: auto  # bf16 where the device has it",
        f"optimizer: {{use: adamw, lr: {lr}, weight_decay: 0.0, clip: {{by: norm, at: 1.0}}}}",
        f"schedule: {schedule}",
    )


def _noun(facts: Facts) -> str:
    return "pairs" if facts.are_pairs else "samples"


def _batch_size(samples: int) -> int:
    """Return the samples of a step: 16, or fewer if an epoch had less than MIN_FULL_BATCHES steps."""
    most = max(1, samples // MIN_FULL_BATCHES)
    return min(16, 1 << (most.bit_length() - 1))


def _padding(lengths: NDArray[np.int64], batch: int) -> float:
    shuffled = np.random.default_rng(0).permutation(lengths)
    rows = [shuffled[at : at + batch] for at in range(0, len(shuffled), batch)]
    return 1 - float(lengths.sum()) / sum(len(each) * int(each.max()) for each in rows)


def _readme(facts: Facts) -> str:
    template = ""
    if facts.use in ("chat", "instruct"):
        file = facts.chat_template
        template = f", with the chat template `{file}`" if file else ", with its chat template"
    by = ", both by direct preference optimization" if facts.are_pairs else ""
    return f"""# Fine-tuning

`{facts.model}` on the {facts.samples:,} {_noun(facts)} of `{facts.data}` ({facts.layout}){template}.
`recipe.yaml` trains low-rank adapters, `full.yaml` all weights{by}.

    trainwright train recipe.yaml
    trainwright export runs/{run_name(facts)} --merge --hf merged

`merged` loads with `AutoModel` of transformers. `trainwright check recipe.yaml` shows which tokens carry loss, and
`trainwright plan recipe.yaml --device rtx4090` what fits a device.
`trainwright resume runs/{run_name(facts)}` continues a run that was stopped or killed.
"""


def _layout(data: str) -> tuple[Use, str]:
    """Return the use and the layout that most of the first records of a file have."""
    records = [*islice(open_source(data).records(), MAX_RECORDS_READ)]
    if records and all(each.problem for each in records):
        raise UsageError(f"no record of {data} can be read: {records[0].problem}", remedy=records[0].remedy)
    fields = [each.fields for each in records if isinstance(each.fields, dict)]
    found: Counter[str] = Counter()
    for each in fields:
        present = {name for name, value in each.items() if value is not None}
        found.update([next((name for name, keys in LAYOUTS.items() if present.issuperset(keys)), "")])
    layout = found.most_common(1)[0][0] if found else ""
    use = next((use for use, layouts in USES.items() if layout in layouts), None)
    if use is None:
        keys = ", ".join(sorted({str(key) for each in fields[:20] for key in each})) or "none"
        known = "; ".join(" + ".join(keys) for keys in LAYOUTS.values())
        remedy = f"rename the keys to one of: {known}; or write a recipe with data.train.args.columns"
        raise UsageError(f"the records of {data} are of no known layout (their keys: {keys})", remedy=remedy)
    return use, layout


def _absolute(name: str) -> str:
    """Return the absolute path of a file or folder, and any other name unchanged."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _count_weights(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
        total += sum(prod(each["shape"]) for name, each in header.items() if name != "__metadata__")
    return total
