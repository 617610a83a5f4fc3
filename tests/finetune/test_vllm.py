"""Completions of GRPO by a server that speaks vLLM's protocol: a real HTTP server with the same model in it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.finetune.tiny import llama
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import UsageError
from trainwright.finetune.grpo import GRPO
from trainwright.finetune.prompts import Prompts
from trainwright.models.lora import add_lora

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft and transformers
LONGEST, COMPLETIONS = 5, 3


def base() -> Any:
    tokenizer = make_tokenizer()
    return llama(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)


class Server(ThreadingHTTPServer):
    """Loads adapters from their folder with PEFT, and completes greedily; the n-th completion has n more tokens."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.models: dict[str, Any] = {}
        self.calls: list[str] = []
        self.status = 200
        self.last: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        from peft import PeftModel

        self.calls.append(path.rpartition("/")[2])
        if path == "/v1/load_lora_adapter":
            self.models[body["lora_name"]] = PeftModel.from_pretrained(base(), body["lora_path"]).eval()
        elif path == "/v1/unload_lora_adapter":
            del self.models[body["lora_name"]]
        else:
            self.last = body
            return {"choices": [*self.choices(body)]}
        return {}

    def choices(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        model, end = self.models[body["model"]], body["stop_token_ids"][0]
        for at, prompt in enumerate(body["prompt"]):
            for number in range(body["n"]):
                ids = list(prompt)
                for _ in range(number + 1):
                    with torch.no_grad():
                        ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
                made = ids[len(prompt) :]
                ended = number < body["n"] - 1
                found = [*made, end] if ended and number else made  # the first is without its end token
                index = at * body["n"] + number
                yield {"index": index, "token_ids": found, "finish_reason": "stop" if ended else "length"}


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = json.dumps(self.server.answer(self.path, body) if self.server.status == 200 else {}).encode()
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def policy() -> Any:
    torch.manual_seed(1)
    model = add_lora(base(), rank=2, alpha=4.0, targets=["q_proj", "v_proj"])
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.5)
    return model


def even(completion_ids: list[list[int]]) -> list[float]:
    return [float(sum(each % 2 == 0 for each in ids)) for ids in completion_ids]


def batch() -> dict[str, Any]:
    prompts = Prompts([{"prompt": text} for text in ("say", "say it now")], tokenizer=make_tokenizer())
    found: dict[str, Any] = prompts.fetch_batch(torch.arange(2).numpy())
    return found


def grpo(url: str, folder: Path | None = None) -> GRPO:
    options: dict[str, Any] = {"completions": COMPLETIONS, "max_new_tokens": LONGEST, "tokenizer": make_tokenizer()}
    return GRPO(even, vllm=url, vllm_folder=folder, **options)


def test_completions_come_from_the_adapters_of_the_policy(server: Server, tmp_path: Path) -> None:
    model, loss = policy(), grpo(server.url, tmp_path)
    rollout = loss._generate_rollout(model, batch())
    model.eval()
    end = make_tokenizer().eos_token_id
    rows = [
        (ids[(mask == 1) & (labels == -100)], ids[labels != -100])
        for ids, mask, labels in zip(rollout.ids, rollout.mask, rollout.labels, strict=True)
    ]
    assert len(rows) == 2 * COMPLETIONS
    for at, (prompt, said) in enumerate(rows):
        number = at % COMPLETIONS
        expected: list[int] = []
        for _ in range(number + 1):
            ids = torch.cat([prompt, torch.tensor(expected, dtype=torch.long)])
            expected.append(int(model(input_ids=ids[None]).logits[0, -1].argmax()))
        assert said.tolist() == (expected if number == COMPLETIONS - 1 else [*expected, end])
    assert server.last["temperature"] == 1.0 and server.last["max_tokens"] == LONGEST


def test_adapters_are_sent_when_they_have_changed(server: Server, tmp_path: Path) -> None:
    model, loss = policy(), grpo(server.url, tmp_path)
    optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.1)

    def step() -> Tensor:
        optimizer.zero_grad()
        found = loss(model, batch()).total
        found.backward()
        optimizer.step()
        return found

    loss(model, batch())
    step()
    assert server.calls == ["load_lora_adapter", "completions", "completions"]
    step()
    assert server.calls[3:] == ["load_lora_adapter", "unload_lora_adapter", "completions"]
    assert len(server.models) == len([*tmp_path.iterdir()]) == 1


def test_the_seed_follows_from_the_random_state(server: Server, tmp_path: Path) -> None:
    model, loss = policy(), grpo(server.url, tmp_path)
    seeds = []
    for state in (5, 5, 6):
        torch.manual_seed(state)
        loss(model, batch())
        seeds.append(server.last["seed"])
    assert seeds[0] == seeds[1] != seeds[2]


def test_mistakes_are_named(server: Server) -> None:
    def generate(model: Any, url: str) -> None:
        grpo(url)(model, batch())

    with pytest.raises(UsageError, match="only adapters"):
        generate(base(), server.url)
    with pytest.raises(UsageError, match="is not an address"):
        generate(policy(), "localhost:8000")
    server.status = 404
    with pytest.raises(UsageError, match="failed with 404") as refused:
        generate(policy(), server.url)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in str(refused.value.remedy)
    with pytest.raises(UsageError, match="no answer from"):
        generate(policy(), "http://127.0.0.1:9")
