"""Loads a tokenizer, and identifies it by its content."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from trainwright.errors import MissingExtra, UsageError, suggest_file, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    Tokenizer: TypeAlias = PreTrainedTokenizerBase

FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "tokenizer.model", "vocab.txt", "spiece.model")
"""A folder with one of these files is that of a tokenizer."""


def load_tokenizer(
    name: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, or by its name on the Hugging Face hub.

    A folder is read without any network access. A name is looked up in the local cache of the hub first.

    Args:
        name: A folder, such as one that ``save_pretrained`` wrote, or a name such as ``org/model``.
        revision: Branch, tag or commit of the hub repository.
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
    folder = Path(name).expanduser()
    if _names_a_path(name):
        _require_tokenizer_folder(folder)
    is_local = folder.is_dir()
    try:
        return AutoTokenizer.from_pretrained(
            str(folder) if is_local else str(name),
            revision=None if is_local else revision,
            trust_remote_code=trust_remote_code,
            local_files_only=is_local,
        )
    except Exception as error:  # the classes of errors differ between versions of transformers and the hub client
        what = text_of(error, lines=1)
        if "trust_remote_code" in str(error):
            remedy = "read the code in the repository; if you trust it, set trust_remote_code: true"
        elif is_local:
            remedy = "save it again: tokenizer.save_pretrained(folder)"
        else:
            remedy = "give the folder of a tokenizer, or check the name and the network; HF_HOME is the cache"
        raise UsageError(f"the tokenizer {str(name)!r} cannot be loaded: {what}", remedy=remedy) from None


def _names_a_path(name: str | Path) -> bool:
    text = os.fspath(name)
    return isinstance(name, Path) or Path(text).expanduser().exists() or text.startswith(("/", "./", "../", "~"))


def _require_tokenizer_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}", remedy=suggest_file(folder, "the folder of a tokenizer"))
    if not any((folder / file).exists() for file in FILES):
        remedy = "write it there: tokenizer.save_pretrained(folder)"
        raise UsageError(f"the folder {folder} has no tokenizer: none of {', '.join(FILES[:2])} ...", remedy=remedy)


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
