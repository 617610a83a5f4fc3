"""Generates completions with a vLLM server. Sends the adapters of the policy to it each time they change."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.errors import UsageError, text_of
from trainwright.models.lora import adapters_of, save_adapter

START = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora --max-lora-rank RANK"


class VllmServer:
    """A server that was started with ``vllm serve MODEL --enable-lora`` and permits loading of adapters.

    Args:
        url: The address of the server, such as ``http://localhost:8000``.
        folder: An existing folder that the server can read, for the adapters; null: a temporary folder.
        timeout_s: Maximum time of one request.
    """

    def __init__(self, url: str, folder: str | Path | None = None, timeout_s: float = 600.0) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"vllm: {url!r} is not an address", remedy="write vllm: http://localhost:8000")
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        self._folder = None if folder is None else Path(folder)
        self._prefix = f"policy-{secrets.token_hex(4)}"
        self._seen: tuple[int, ...] = ()
        self._loaded = 0

    def complete(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        *,
        count: int,
        max_tokens: int,
        temperature: float,
        end_ids: Sequence[int],
    ) -> list[list[int]]:
        """Return ``count`` sampled completions of each prompt, with the token of ``end_ids`` at which they stopped.

        The seed of the server is drawn from torch's random generator. Raises UsageError if the server fails.
        """
        seed = int(torch.randint(2**31, (), device="cpu"))
        name = self._load_adapters(model)
        body = {
            "model": name,
            "prompt": [*map(list, prompts)],
            "n": count,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_p": 1.0,
            "top_k": -1,
            "stop_token_ids": [*end_ids],
            "seed": seed,
            "return_token_ids": True,
        }
        answer = json.loads(self._post("/v1/completions", body))
        choices = sorted(answer["choices"], key=lambda each: int(each["index"]))
        wanted = count * len(prompts)
        if len(choices) != wanted:
            what = f"vllm: the server returned {len(choices)} completions instead of {wanted}"
            raise UsageError(what, remedy="look into the log of the server for rejected requests")
        if any(each.get("token_ids") is None for each in choices):
            remedy = "use vLLM 0.10.2 or newer, which returns token ids"
            raise UsageError("vllm: the server returned completions without token ids", remedy=remedy)
        completions = [([*each["token_ids"]], each.get("finish_reason") == "stop") for each in choices]
        return [
            ids if not ended or (ids[-1:] and ids[-1] in end_ids) else [*ids, end_ids[0]] for ids, ended in completions
        ]

    def _load_adapters(self, model: nn.Module) -> str:
        """Send the adapters if they have changed since the last call. Return their name on the server."""
        seen = tuple(each._version for each in model.parameters() if each.requires_grad)
        if seen == self._seen:
            return self._name(self._loaded)
        configs = adapters_of(model)
        if not configs:
            remedy = "train adapters (model.lora), or leave vllm out: then the model generates the completions"
            raise UsageError("vllm: only adapters can be sent to a running server", remedy=remedy)
        self._folder = self._folder or Path(tempfile.mkdtemp(prefix="trainwright-vllm-"))
        folder = self._folder / self._name(self._loaded + 1)
        folder.mkdir(exist_ok=True)
        save_adapter(model.state_dict(), next(iter(configs.values())), folder, about={"format": "pt"})
        loading = {"lora_name": folder.name, "lora_path": str(folder.resolve())}
        self._post("/v1/load_lora_adapter", loading)
        if self._seen:
            self._post("/v1/unload_lora_adapter", {"lora_name": self._name(self._loaded)})
            shutil.rmtree(self._folder / self._name(self._loaded), ignore_errors=True)
        self._seen = seen
        self._loaded += 1
        return folder.name

    def _name(self, number: int) -> str:
        return f"{self._prefix}-{number}"

    def _post(self, path: str, body: dict[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)  # noqa: S310 - http only
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as response:  # noqa: S310
                return bytes(response.read())
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")[:300]
            what = f"vllm: {path} failed with {error.code}: {answer}"
            raise UsageError(what, remedy=f"start the server: {START}") from None
        except OSError as error:
            what = f"vllm: no answer from {self.url}: {text_of(error, lines=1)}"
            raise UsageError(what, remedy=f"start the server: {START}") from None
