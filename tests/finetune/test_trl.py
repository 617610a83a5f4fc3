"""The same tokens and labels as TRL, for chat templates that ship inside of it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.sets import LONG, answer, completion, lines, pair, question, said, user
from tests.finetune.tokenizers import make_tokenizer
from trainwright.finetune.datasets import Chat, Completion, Preference

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

MARKED = (
    *("qwen2_5_training", "qwen3_training", "llama3_training", "gemma3_training", "phi3_training", "glm4moe_training"),
    *("deepseekv3_training", "gptoss_training", "cohere2_training", "lfm2_training", "nemotron_3_nano_training"),
)
"""Templates with {% generation %}."""
UNMARKED = (
    *("llama3", "phi3", "phi3_5", "gemma", "gemma3", "cohere", "cohere2", "lfm2", "qwen2_5_vl", "qwen3_instruct_2507"),
    "qwen3_vl",
)
"""Templates without it. TRL trains with its own copy of each, which has it."""
ALTERNATING = {"gemma"}
"""Templates that reject a system message."""
CONTROL_WORD = re.compile(r"<\|[^|<>\s]{1,40}\|>|<[｜|][^<>]{1,30}[｜|]>|</?[a-z_]+>")


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl")


def tokenizer_for(trl: Any, name: str) -> Any:
    text = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    control = tuple(sorted({*CONTROL_WORD.findall(text), "<s>", "</s>", "<pad>"}))
    return make_tokenizer(text, bos="<s>", eos="</s>", control=control)


def tiny(tokenizer: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=len(tokenizer), n_layer=1, n_head=1, n_embd=4, n_positions=2048, **ids)
    )


def by_trl(kind: str, tokenizer: Any, records: Sequence[Mapping[str, Any]], folder: Path, **options: Any) -> list[Any]:
    """The samples that a trainer of TRL makes of records."""
    import datasets

    trl = importlib.import_module("trl")
    config = getattr(trl, f"{kind}Config")(
        output_dir=str(folder), report_to="none", use_cpu=True, bf16=False, **options
    )
    reference = {"ref_model": tiny(tokenizer)} if kind == "DPO" else {}
    made = getattr(trl, f"{kind}Trainer")(
        model=tiny(tokenizer),
        **reference,
        args=config,
        train_dataset=datasets.Dataset.from_list([dict(each) for each in records]),
        processing_class=tokenizer,
    )
    return list(made.train_dataset)


@pytest.mark.parametrize("name", [*MARKED, *UNMARKED])
def test_conversations(trl: Any, name: str, tmp_path: Path) -> None:
    records = [{"messages": [user(at), said(at), user(at + 1), said(at + 5)]} for at in range(3)]
    if name not in ALTERNATING:
        records.append({"messages": [{"role": "system", "content": "Be brief."}, user(7), said(7)]})
    tokenizer = tokenizer_for(trl, name)
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    ours = Chat(tmp_path / "data.jsonl", tokenizer=tokenizer, cache=tmp_path)
    theirs = by_trl("SFT", tokenizer, records, tmp_path, assistant_only_loss=True, max_length=None)
    assert [each["input_ids"].tolist() for each in ours] == [each["input_ids"] for each in theirs]
    assert [each["labels"].tolist() for each in ours] == [each["labels"] for each in theirs]


def test_completions_cut_on_the_right(trl: Any, tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos="<s>", eos="</s>", adds_bos=True)
    cut = {"prompt": question(1), "completion": LONG}
    lost = {"prompt": LONG, "completion": answer(1)}
    records = [*map(completion, range(4)), cut, lost]
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    options: dict[str, Any] = {"max_length": 60, "truncate": "right"}
    ours = Completion(tmp_path / "data.jsonl", tokenizer=tokenizer, cache=tmp_path, **options)
    theirs = by_trl("SFT", tokenizer, records, tmp_path, max_length=60)
    assert len(ours) == 5
    assert [each["input_ids"].tolist() for each in ours] == [each["input_ids"] for each in theirs]
    assert [each["labels"].tolist() for each in ours] == [each["labels"] for each in theirs]


def test_preferences(trl: Any, tmp_path: Path) -> None:
    tokenizer = tokenizer_for(trl, "llama3")
    records = [*map(pair, range(4))]
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    ours = Preference(tmp_path / "data.jsonl", tokenizer=tokenizer, cache=tmp_path)
    theirs = by_trl("DPO", tokenizer, records, tmp_path, max_length=None)
    for mine, other in zip(ours, theirs, strict=True):
        for side in ("chosen", "rejected"):
            prompt, said_ids = other["prompt_ids"], other[f"{side}_ids"]
            assert mine[f"{side}_input_ids"].tolist() == prompt + said_ids
            assert mine[f"{side}_labels"].tolist() == [-100] * len(prompt) + said_ids
