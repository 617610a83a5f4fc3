"""Finds and loads pretrained models of the ``transformers`` library: a local folder, the hub's cache, or the hub.

Weights are read from safetensors only, so loading never executes code of the model's author. Code in the repository
(``auto_map`` in its config.json) runs only with ``trust_remote_code``.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainwright.errors import (
    StorageError,
    UsageError,
    import_optional,
    nearest,
    require_choice,
    suggest,
    suggest_file,
    text_of,
)

DTYPES: Mapping[str, torch.dtype | None] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "auto": None,
}
"""Names of dtypes; ``auto`` is the dtype that the weights were saved in."""
SAVED_AS = (".json", ".safetensors", ".jinja", ".model", ".txt", ".py")
"""Suffixes of the files that define a model and its tokenizer. Other files, such as a model card, are ignored."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
    "tokenizer.model",
    "vocab.txt",
    "spiece.model",
)
"""A folder with one of these files contains a tokenizer."""
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Pretrained:
    """The origin of a pretrained model, and what its files did not contain.

    Attributes:
        name: The folder or the name on the hub that was passed.
        folder: The folder that was read.
        revision: The commit hash on the hub, or ``sha256:...`` of the files in a local folder.
        dtype: The dtype of the weights.
        new: Parameters that the files do not contain, or contain in another shape. They are newly initialized.
        new_in_base: The part of ``new`` that a pretrained model must have: all but the layers of a new task's head.
        unused: Names in the files that the model does not have.
        use_cache: The value in the config; training sets it to False.
    """

    name: str
    folder: str
    revision: str
    dtype: str
    new: tuple[str, ...] = ()
    new_in_base: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    use_cache: bool | None = None


def pretrained_of(model: nn.Module) -> Pretrained | None:
    """Return the origin of a model that ``load_pretrained`` has loaded, which may be wrapped; None for any other."""
    return next((found for each in model.modules() if (found := vars(each).get("pretrained"))), None)


def require_transformers(needed_for: str) -> Any:
    """Return the module ``transformers``, ready to build models. Raises MissingExtra if it is not installed."""
    import_optional("transformers.modeling_utils", needed_for=needed_for)
    return import_optional("transformers", needed_for=needed_for)


def find_folder(
    name: str | os.PathLike[str], revision: str | None = None, *, code: bool = False, weights: bool = True
) -> Path:
    """Return the folder with the files of a pretrained model.

    A local folder and a model that the hub's cache holds completely are used without any call to the network. Other
    names are downloaded into the cache: configuration, tokenizer and safetensors only.

    Args:
        name: A folder, or a name on the hub such as ``org/model``.
        revision: A commit, tag or branch on the hub. Default: ``main`` as it was when it was downloaded.
        code: Also download the Python files of the repository.
        weights: False if only the tokenizer is needed.

    Raises:
        UsageError: There is no such folder, and the name is neither in the cache nor can it be downloaded.
    """
    text = os.fspath(name)
    folder = Path(text).expanduser()
    if folder.is_dir():
        if revision is not None:
            remedy = "leave revision out; a run records a hash of the files of the folder"
            raise UsageError(f"{text} is a folder, which has no revision {revision!r}", remedy=remedy)
        return folder
    if not _HUB_NAME.fullmatch(text) or isinstance(name, Path) or text[:1] == ".":
        raise UsageError(f"there is no folder {text}", remedy=suggest_file(folder, "a folder with config.json"))
    hub = _hub()
    cached, missing = None, ""
    # Without these patterns, a snapshot that lacks only a README counts as incomplete.
    needed = [*(["config.json"] if weights else TOKENIZER_FILES), *(["*.py"] if code else [])]
    try:
        cached = Path(hub.snapshot_download(text, revision=revision, local_files_only=True, allow_patterns=needed))
        missing = _missing_weights(cached) if weights else ""
        if not weights and not any((cached / name).is_file() for name in TOKENIZER_FILES):
            missing = f"no {TOKENIZER_FILES[0]}"
    except hub.errors.LocalEntryNotFoundError:
        pass
    if cached is not None and not missing:
        return cached
    left_out = {".py": not code, ".safetensors": not weights}
    patterns = [f"*{suffix}" for suffix in SAVED_AS if not left_out.get(suffix)]
    try:
        return Path(hub.snapshot_download(text, revision=revision, allow_patterns=patterns))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        why = "HF_HUB_OFFLINE is set" if hub.constants.is_offline_mode() else text_of(error, lines=1)[:200]
        at = f" at revision {revision}" if revision else ""
        held = f"its copy in the cache is incomplete ({missing})" if missing else "nor in the cache of the hub"
        remedy = f"download it once with a network: hf download {text}{f' --revision {revision}' if revision else ''}"
        raise UsageError(
            f"{text}{at} is no folder in {Path.cwd()}, {held}, and it cannot be downloaded: {why}",
            remedy=f"{remedy}; or give the path of a local folder",
        ) from None


def _hub() -> Any:
    import_optional("huggingface_hub.errors", needed_for="a model by name", package="transformers")
    import huggingface_hub

    return huggingface_hub


def _missing_weights(folder: Path) -> str:
    """Return what the safetensors of a folder lack; "" if they are complete."""
    if not (folder / "config.json").is_file():
        return "no config.json"
    if (folder / INDEX).is_file():
        names = sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
        return next((f"no {name}" for name in names if not (folder / str(name)).is_file()), "")
    return "" if (folder / WEIGHTS).is_file() else f"no {WEIGHTS}"


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises UsageError if it cannot be read."""
    try:
        found = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}", remedy="check the file") from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", remedy="download the model again") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path} holds no JSON object", remedy="download the model again")
    return found


def require_weights(folder: Path) -> None:
    """Raise UsageError unless a folder has a configuration and complete safetensors."""
    if (missing := _missing_weights(folder)) == "":
        return
    if missing == "no config.json" and (folder / "adapter_config.json").is_file():
        base = read_json(folder / "adapter_config.json").get("base_model_name_or_path")
        remedy = f"name its base model{f', {base}' if base else ''}; to train the adapter further, load it with "
        remedy += "peft (PeftModel.from_pretrained(base, folder, is_trainable=True)) and pass it to tw.fit"
        raise UsageError(f"{folder} holds an adapter, not a model", remedy=remedy)
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled and missing == f"no {WEIGHTS}":
        raise UsageError(
            f"the weights of {folder} are pickled ({pickled[0]}), and loading a pickle can execute code",
            remedy="use a revision that has model.safetensors, or convert it once where you trust it: "
            "AutoModel.from_pretrained(...).save_pretrained(FOLDER)",
        )
    cached = re.fullmatch(r"models--(.+?)--(.+)", folder.parent.parent.name)
    remedy = f"hf download {cached[1]}/{cached[2]} --revision {folder.name}" if cached else "copy it again"
    raise UsageError(f"{folder} is no complete pretrained model: {missing}", remedy=remedy)


def revision_of(folder: Path) -> str:
    """Return the commit hash of a snapshot in the hub's cache, else ``sha256:...`` of the model's files in a folder."""
    if folder.parent.name == "snapshots" and _COMMIT.fullmatch(folder.name):
        return folder.name
    files = sorted(path for path in folder.iterdir() if path.suffix in SAVED_AS and path.is_file())
    digest = hashlib.sha256()
    with ThreadPoolExecutor() as threads:  # hashlib releases the GIL
        for path, content in zip(files, threads.map(_file_sha256, files), strict=True):
            digest.update(f"{path.name} {content}\n".encode())
    return f"sha256:{digest.hexdigest()}"


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_pretrained(
    name: str | os.PathLike[str],
    *,
    architecture: str | None = None,
    revision: str | None = None,
    dtype: str = "fp32",
    trust_remote_code: bool = False,
    **config: object,
) -> nn.Module:
    """Load a pretrained model. Under fake tensors, only its configuration is read.

    Args:
        name: A folder, or a name on the hub.
        architecture: Name of the class. Default: the class in its config.json.
        revision: A commit, tag or branch on the hub.
        dtype: fp32, bf16, fp16, or auto for the dtype of the saved weights.
        trust_remote_code: Execute the Python files of the repository if the class is defined there.
        **config: Values that replace those of config.json, such as ``num_labels: 3`` or ``attention_dropout: 0.1``, and
            ``attn_implementation``.

    Returns:
        The model in evaluation mode. ``pretrained_of`` returns its origin.

    Raises:
        UsageError: The model cannot be found, needs code that is not allowed, or its weights do not fit.
    """
    transformers = require_transformers("a pretrained model")
    require_choice("dtype", dtype, DTYPES)
    folder = find_folder(name, revision, code=trust_remote_code)
    require_weights(folder)
    with _quiet(transformers):
        settings = _config(transformers, folder, trust_remote_code)
        options: dict[str, object] = {"trust_remote_code": True} if trust_remote_code else {}
        if "attn_implementation" in config:
            options["attn_implementation"] = config.pop("attn_implementation")
        require_config_keys(settings, config)
        for key, value in config.items():
            setattr(settings, key, value)
        use_cache = getattr(settings, "use_cache", None)
        if use_cache is not None and "use_cache" not in config:
            settings.use_cache = False  # training would store the keys and values of past tokens and never read them
        loader = _class(transformers, folder, settings, architecture, trust_remote_code)
        if _is_simulated():
            saved = DTYPES[dtype] or settings.dtype or torch.float32
            build = getattr(loader, "from_config", None) or loader._from_config
            return build(settings, dtype=saved, **options)  # type: ignore[no-any-return]
        try:
            model, info = loader.from_pretrained(
                folder,
                config=settings,
                dtype=DTYPES[dtype] or "auto",
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # reported below
                output_loading_info=True,
                **options,
            )
        except Exception as error:  # the class of the error varies with the version of transformers
            remedy = "check its files, or load it in Python: transformers.AutoModel.from_pretrained"
            raise UsageError(f"{name} cannot be loaded: {text_of(error, lines=3)[:400]}", remedy=remedy) from error
    model.pretrained = _origin(model, name, folder, info, use_cache)
    return model  # type: ignore[no-any-return]


def _config(transformers: Any, folder: Path, trust_remote_code: bool) -> Any:
    known = read_json(folder / "config.json")
    is_known = known.get("model_type") in transformers.CONFIG_MAPPING
    if known.get("auto_map", {}).get("AutoConfig") and not is_known and not trust_remote_code:
        raise _needs_code(folder)
    try:
        return transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        remedy = "a newer version of transformers may know it: pip install -U transformers"
        raise UsageError(f"{folder}/config.json: {text_of(error, lines=1)[:300]}", remedy=remedy) from error


def _needs_code(folder: Path) -> UsageError:
    files = ", ".join(sorted(path.name for path in folder.glob("*.py"))) or "Python files"
    return UsageError(
        f"{folder} needs code from its repository ({files}), which is not executed",
        remedy="read these files; if you trust them, set trust_remote_code: true beside the name",
    )


def require_config_keys(settings: Any, values: Iterable[str]) -> None:
    """Raise UsageError for a key that a configuration does not have: transformers would store and ignore it."""
    arguments = inspect.signature(type(settings).__init__).parameters
    known = {*arguments, *settings.to_dict(), *settings.attribute_map, "num_labels", "attn_implementation"}
    known -= {"self", "kwargs"}
    for key in values:
        if key not in known:
            raise UsageError(f"{type(settings).__name__} has no key {key!r}", remedy=suggest(key, sorted(known)))


def _class(transformers: Any, folder: Path, settings: Any, architecture: str | None, trust_remote_code: bool) -> Any:
    """Return the class that loads the model: ``architecture``, the class in config.json, or one of the repository."""
    names = [architecture] if architecture else list(getattr(settings, "architectures", None) or ())
    for name in names:
        if hasattr(getattr(transformers, name, None), "from_pretrained"):
            return getattr(transformers, name)
    mapped = [key for key in getattr(settings, "auto_map", None) or {} if key.startswith("AutoModel")]
    if mapped and not architecture:
        if not trust_remote_code:
            raise _needs_code(folder)
        return getattr(transformers, min(mapped, key=lambda key: key == "AutoModel"))  # a class with a head, if any
    if names:
        raise unknown_architecture(transformers, names[0])
    raise UsageError(
        f"{folder}/config.json does not name the class of the model",
        remedy="add architecture: LlamaForCausalLM, or the like, beside the name",
    )


def unknown_architecture(transformers: Any, name: str) -> UsageError:
    """Return the error for a class that ``transformers`` does not have."""
    near = nearest(name, [each for each in dir(transformers) if "For" in each or each.endswith("Model")])
    remedy = f"did you mean {near!r}?" if near else "see the list of models in the transformers documentation"
    return UsageError(f"transformers has no architecture {name!r}", remedy=remedy)


def _is_simulated() -> bool:
    """Return True if new tensors hold no values: fake tensors, or the meta device."""
    probe = torch.empty(0)
    return type(probe) is not Tensor or probe.is_meta


def _origin(
    model: Any, name: str | os.PathLike[str], folder: Path, info: Mapping[str, Any], use_cache: bool | None
) -> Pretrained:
    new = {*info.get("missing_keys", ()), *(each[0] for each in info.get("mismatched_keys", ()))}
    shared = {parameter for parameter, _ in model.named_parameters()} | {buffer for buffer, _ in model.named_buffers()}
    new &= shared  # without tied weights, which are saved under another name
    return Pretrained(
        name=os.fspath(name),
        folder=str(folder.absolute()),
        revision=revision_of(folder),
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        new=tuple(sorted(new)),
        new_in_base=tuple(sorted(_in_base(model, new))),
        unused=tuple(sorted(info.get("unexpected_keys", ()))),
        use_cache=use_cache,
    )


def output_layer(model: Any) -> nn.Module | None:
    """Return the layer that gives the logits of a language model of ``transformers``; None for any other model."""
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def _in_base(model: Any, names: set[str]) -> Iterator[str]:
    """Yield the names that belong to the pretrained part of a model: its base model and the output embedding."""
    base = getattr(model, model.base_model_prefix, model) if model.base_model_prefix else model
    output = output_layer(model)
    inside = {id(parameter) for part in (base, output) if part is not None for parameter in part.parameters()}
    held = {name: id(parameter) for name, parameter in model.named_parameters()}
    for name in names:
        if held.get(name) in inside and ".pooler." not in name:  # only the head of a task reads a pooler
            yield name


def write_hub_files(model: nn.Module, folder: Path) -> bool:
    """Write the files that a model of ``transformers`` needs besides its weights: configurations and tokenizer.

    Args:
        model: The model; it may be wrapped by PEFT.
        folder: An existing folder.

    Returns:
        False for any other model, of which nothing is written.
    """
    inside = hub_model_of(model)
    if inside is None:
        return False
    origin = pretrained_of(model)
    config = copy.deepcopy(inside.config)
    config.architectures = [_class_name(inside)]
    if origin is not None and origin.use_cache is not None:
        config.use_cache = origin.use_cache
    config.save_pretrained(folder)
    if (generation := getattr(inside, "generation_config", None)) is not None:
        generation = copy.deepcopy(generation)
        generation.use_cache = True if origin is None or origin.use_cache is None else origin.use_cache
        with suppress(ValueError):  # its values contradict each other, so that transformers does not save it
            generation.save_pretrained(folder)
    source = Path(origin.folder if origin else str(getattr(inside, "name_or_path", "")) or "-")
    for path in sorted(source.iterdir()) if source.is_dir() else ():
        if path.suffix in SAVED_AS and not path.name.startswith((*_MODEL_FILES, ".")) and path.is_file():
            shutil.copyfile(path, folder / path.name)
    return True


_MODEL_FILES = ("config.json", "generation_config.json", "model", "adapter_", "pytorch_model", "recipe")
"""Beginnings of the names of files that are not a tokenizer's."""


def hub_model_of(model: nn.Module) -> Any | None:
    """Return the model of ``transformers`` that ``model`` is, or that PEFT has wrapped; None for any other model."""
    # `transformers.PreTrainedModel` would import the module, which takes seconds
    base = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    modules = dict(model.named_modules())
    inside = [modules.get(path) for path in ("", "base_model.model")]
    return next((each for each in inside if base is not None and isinstance(each, base)), None)


def _class_name(model: nn.Module) -> str:
    """Return the name of the author's class, which ``fully_shard`` replaces by a subclass."""
    names = [each.__name__ for each in type(model).__mro__]
    return names[names.index("FSDPModule") + 1] if "FSDPModule" in names else names[0]


def build_empty(folder: Path) -> Any:
    """Return the model that the files of ``write_hub_files`` describe, without memory for its weights.

    Raises UsageError if its class is not one of ``transformers``.
    """
    transformers = require_transformers("export --hf")
    with _quiet(transformers), torch.device("meta"):
        config = _config(transformers, folder, trust_remote_code=False)
        model = _class(transformers, folder, config, None, trust_remote_code=False)._from_config(config)
        if (folder / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def save_hub_model(model: Any, folder: Path) -> None:
    """Write weights and configurations of a model of ``transformers``, in shards as transformers makes them."""
    with _quiet(require_transformers("export --hf")):
        model.save_pretrained(folder)


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence messages and progress bars of transformers; missing weights are reported as notes of the plan."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
