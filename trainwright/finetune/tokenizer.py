"""Loads a tokenizer, and identifies it by its content."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from trainwright.errors import MissingExtra, UsageError, text_of
from trainwright.models.pretrained import TOKENIZER_FILES, find_folder, hub_model_of, pretrained_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase


def load_tokenizer(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, or by its name on the Hugging Face hub.

    It is searched in the same way as a model, see ``find_folder``: a folder, or a copy in the hub's cache, is used
    without any call to the network. Model and tokenizer of one name come from the same revision.

    Args:
        name: A folder, such as one that ``save_pretrained`` wrote, or a name such as ``org/model``.
        revision: Branch, tag or commit of the hub repository; None for a folder.
        trust_remote_code: Permit code in the repository to run.

    Returns:
        The tokenizer.

    Raises:
        UsageError: There is no such tokenizer, or it needs its own code.
        MissingExtra: The package transformers is not installed.
    """
    try:
        from transformers import AutoTokenizer
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise MissingExtra("transformers", needed_for="a tokenizer") from None
    folder = find_folder(name, revision, code=trust_remote_code, weights=False)
    if not any((folder / file).exists() for file in TOKENIZER_FILES):
        remedy = "write it there: tokenizer.save_pretrained(folder); or name another tokenizer"
        what = f"none of {', '.join(TOKENIZER_FILES[:2])} ..."
        raise UsageError(f"the folder {folder} has no tokenizer: {what}", remedy=remedy)
    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # the classes of errors differ between versions of transformers
        if "trust_remote_code" in str(error):
            remedy = "read the code in the repository; if you trust it, set trust_remote_code: true"
        else:
            remedy = "save it again: tokenizer.save_pretrained(folder); or download it again"
        raise UsageError(
            f"the tokenizer {str(name)!r} cannot be loaded: {text_of(error, lines=1)}", remedy=remedy
        ) from None


def tokenizer_of(model: nn.Module, user: str, remedy: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer in the folder of a pretrained model.

    ``user`` names the component that needs it. Raises UsageError with ``remedy`` if the model has no folder.
    """
    origin, inside = pretrained_of(model), hub_model_of(model)
    folder = origin.folder if origin is not None else getattr(inside, "name_or_path", "")
    if not folder:
        raise UsageError(f"{user}: the model was not loaded from a folder with a tokenizer", remedy=remedy)
    return load_tokenizer(folder)


def prompt_ids(tokenizer: Tokenizer, prompt: str | list[dict[str, Any]], **template_args: Any) -> list[int]:
    """Return the token ids of a text, or of messages followed by the start of an answer."""
    if isinstance(prompt, str):
        return [*tokenizer(prompt)["input_ids"]]
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False, **template_args)
    return [*tokenizer(text, add_special_tokens=False)["input_ids"]]


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a hash of everything that determines the ids of a text: vocabulary, rules, special tokens, template."""
    digest = hashlib.sha256(type(tokenizer).__name__.encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        digest.update(backend.to_str().encode())
    else:
        digest.update(json.dumps(sorted(tokenizer.get_vocab().items())).encode())
    digest.update(repr(sorted((key, str(value)) for key, value in tokenizer.special_tokens_map.items())).encode())
    digest.update(json.dumps(tokenizer.chat_template, sort_keys=True).encode())
    return digest.hexdigest()
