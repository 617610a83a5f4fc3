"""The audit of any data set: dicts with labels, and dense targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import trainwright as tw
from tests.finetune.sets import MARKS_NOTHING, chat, lines, question, said, user
from tests.finetune.tokenizers import make_tokenizer
from trainwright.errors import DataError, UsageError
from trainwright.finetune.audit import ModelLimits, SpecialIds, audit_batches, audit_set, limits_of, special_ids
from trainwright.finetune.datasets import Chat
from trainwright.runs.supervision import Supervision, percent, read_supervision

END, PAD = 9, 0


class Samples(Dataset[dict[str, Tensor]]):
    """Sequences with an answer of three tokens and an end; ``edit`` changes the labels of each."""

    def __init__(self, edit: Callable[[Tensor], Tensor] = lambda labels: labels, length: int = 8) -> None:
        self.edit, self.length = edit, length

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.arange(self.length) % 5 + 1
        ids[0], ids[-1] = 1 + index % 6, END
        labels = ids.clone()
        labels[: self.length // 2] = -100
        return {"input_ids": ids, "labels": self.edit(labels), "attention_mask": torch.ones_like(ids)}


def audit_of(dataset: Dataset[Any], collate: Any = None, **options: Any) -> Supervision:
    loader = DataLoader(dataset, batch_size=4, collate_fn=collate)
    batches = [(batch, range(at * 4, at * 4 + 4)) for at, batch in enumerate(loader)]
    found = audit_batches(batches, collate=collate, **{"special": SpecialIds(eos=END, pad=PAD), **options})
    assert found is not None
    return found


def names(audit: Supervision) -> set[str]:
    return {each.name for each in audit.findings}


def without_end(labels: Tensor) -> Tensor:
    return torch.where(labels == END, -100, labels)


class MasksAll:
    """A collate function that looks for a marker which never occurs, as after a change of the template."""

    def __call__(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}


class SomeMasked(Samples):
    """No label of the samples in ``masked`` carries loss."""

    def __init__(self, masked: set[int]) -> None:
        super().__init__()
        self.masked = masked

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        return {**sample, "labels": torch.full_like(sample["labels"], -100)} if index in self.masked else sample


class Unlabelled(Samples):
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": super().__getitem__(index)["input_ids"]}


class LabelsNothing:
    """A collate function that makes the labels, for answers after a marker that never occurs."""

    def __call__(self, samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "labels": torch.full_like(batch["input_ids"], -100)}


def test_a_good_set_is_counted_and_silent() -> None:
    audit = audit_of(Samples())
    assert (audit.samples, audit.total, audit.supervised, audit.findings) == (12, 96, 48, ())
    assert audit.summary().startswith("12 samples, 96 tokens, 50.0 % carry loss")


@pytest.mark.parametrize(
    ("dataset", "options", "name", "says"),
    [
        (Samples(lambda y: torch.full_like(y, -100)), {}, "nothing_supervised", "every label of the data set is -100"),
        (Samples(), {"collate": MasksAll()}, "nothing_supervised", "the collate function MasksAll masks every label"),
        (Samples(without_end), {}, "masked_end", "does not learn to stop"),
        (Samples(without_end), {"special": SpecialIds(eos=END, pad=END)}, "masked_end", "also the padding token"),
        (Samples(lambda y: torch.cat([y[1:], y[-1:] * 0 - 100])), {"model_shifts": True}, "shifted_twice", "again"),
    ],
    ids=["no-labels", "collator", "masked-end", "pad-is-eos", "shifted"],
)
def test_faults_of_any_data_set(dataset: Samples, options: dict[str, Any], name: str, says: str) -> None:
    audit = audit_of(dataset, **options)
    [finding] = [each for each in audit.findings if each.name == name]
    assert says in finding.message and finding.remedy


def test_one_sample_without_labels_is_named() -> None:
    [finding] = audit_of(SomeMasked({7})).findings
    assert (finding.name, finding.place, finding.samples) == ("unsupervised", "sample 7", 1)


def test_labels_that_a_loss_of_the_user_gets_shifted_are_no_fault() -> None:
    assert names(audit_of(Samples(lambda y: torch.cat([y[1:], y[-1:] * 0 - 100])))) == set()


def padded(samples: Sequence[dict[str, Tensor]], *, label: int, left: bool = False) -> dict[str, Tensor]:
    batch = {}
    for name, fill in (("input_ids", PAD), ("labels", label), ("attention_mask", 0)):
        rows = [each[name][: 8 - at % 2] for at, each in enumerate(samples)]
        batch[name] = nn.utils.rnn.pad_sequence(rows, True, fill, "left" if left else "right")
    return batch


@pytest.mark.parametrize("left", [False, True])
def test_padding_is_not_counted(left: bool) -> None:
    audit = audit_of(Samples(), lambda samples: padded(samples, label=-100, left=left))
    assert (audit.total, audit.padding) == (6 * 8 + 6 * 7, 6) and names(audit) == set()


def test_padding_that_carries_loss_is_named() -> None:
    audit = audit_of(Samples(), lambda samples: padded(samples, label=PAD))
    assert names(audit) == {"trained_padding"} and audit.findings[0].place == "sample 1"


@pytest.mark.parametrize("pad", ["<|im_end|>", "<pad>"])
def test_the_collator_of_transformers_masks_an_end_that_is_the_padding(pad: str, tmp_path: Path) -> None:
    from transformers import DataCollatorForLanguageModeling

    tokenizer = make_tokenizer(pad=pad)
    texts = [{"input_ids": tokenizer(f"{question(at)}<|im_end|>")["input_ids"]} for at in range(6)]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    batches = [(collate(texts[at : at + 3]), range(at, at + 3)) for at in (0, 3)]
    audit = audit_batches(batches, special=special_ids(collate), collate=collate)
    assert audit is not None and names(audit) == ({"masked_end"} if pad == "<|im_end|>" else set())
    assert "⟦" in audit.decoded[0].line()
    if audit.findings:
        assert "DataCollatorForLanguageModeling" in audit.findings[0].message


def test_a_masked_language_model_does_not_learn_to_stop() -> None:
    """Its inputs differ from the labels where loss is carried."""

    def corrupted(samples: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = torch.utils.data.default_collate(samples)
        return {**batch, "input_ids": torch.where(batch["labels"] == -100, batch["input_ids"], 7)}

    assert names(audit_of(Samples(without_end), corrupted)) == set()


def test_doubled_begin_tokens_of_any_set() -> None:
    tokenizer = make_tokenizer(bos="<s>", adds_bos=True)
    ids = tokenizer("<s>" + question(0), return_tensors="pt")["input_ids"]
    audit = audit_batches([({"input_ids": ids, "labels": ids}, [0])], special=SpecialIds(bos=tokenizer.bos_token_id))
    assert audit is not None and names(audit) == {"doubled_bos"}


@pytest.mark.parametrize("positions", [None, 7, 8])
def test_samples_longer_than_the_model_of_any_set(positions: int | None) -> None:
    """A rotary model computes with positions beyond those that it was made for."""
    audit = audit_of(Samples(), limits=ModelLimits(positions=positions))
    assert names(audit) == ({"longer_than_the_model"} if positions == 7 else set())


def test_a_run_says_that_its_samples_are_longer_than_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=16, max_position_embeddings=8, **sizes)
    ids = torch.randint(16, (4, 12))
    tw.fit(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}, steps=1, device="cpu")
    assert "more tokens than the model has positions (8)" in capsys.readouterr().out


def test_pixels() -> None:
    images, masks = torch.rand(4, 3, 8, 8), torch.zeros(4, 8, 8, dtype=torch.int64)
    assert audit_batches([((images, masks), range(4))], ignore_index=255) is None  # all of them count
    masks[:, :6] = 255
    audit = audit_batches([((images, masks), range(4))], ignore_index=255)
    assert audit is not None and audit.summary() == "4 samples, 256 pixels, 25.0 % carry loss (ignored: 255)"
    masks[1] = 255
    audit = audit_batches([((images, masks), range(4))], ignore_index=255)
    assert audit is not None and audit.findings[0].message.startswith("1 of 4 samples has no pixel that carries loss")


@pytest.mark.parametrize(
    "batch",
    [
        (torch.rand(4, 3), torch.zeros(4, dtype=torch.int64)),
        (torch.rand(4, 3), torch.rand(4, 2)),
        torch.rand(4, 3),
        {"pixel_values": torch.rand(4, 3), "labels": torch.zeros(4, dtype=torch.int64)},
        ["text"],
    ],
)
def test_other_batches_have_no_audit(batch: object) -> None:
    assert audit_batches([(batch, range(4))]) is None


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 10)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.table(input_ids)  # type: ignore[no-any-return]


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> tw.Loss:
    labels = batch["labels"][:, 1:]
    scores = model(batch["input_ids"])[:, :-1]
    total = nn.functional.cross_entropy(scores.transpose(1, 2), labels, reduction="sum")
    return tw.Loss(total, (labels != -100).sum())


def fit(loader: Any, folder: Path, loss: Any = token_loss, model: nn.Module | None = None) -> tw.Result:
    return tw.fit(model or Tiny(), loader, loss, until="2steps", settings={"folder": str(folder)}, quiet=True)


@pytest.mark.slow
def test_a_run_without_supervision_is_refused(tmp_path: Path) -> None:
    masked = Samples(lambda y: torch.full_like(y, -100))
    for data, collate, says in (
        (Samples(), MasksAll(), "the collate function MasksAll masks every label, although samples have labels"),
        (masked, MasksAll(), "every label of the data set is -100, before MasksAll collates it"),
        (masked, None, "every label of the data set is -100\n"),
        (Unlabelled(), LabelsNothing(), "the collate function LabelsNothing masks every label\n"),
    ):
        with pytest.raises(DataError, match=f"nothing is supervised: {says}"):
            fit(DataLoader(data, batch_size=4, collate_fn=collate), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_first_batch_without_labels_is_no_refusal(tmp_path: Path) -> None:
    result = fit(DataLoader(SomeMasked({0, 1}), batch_size=2), tmp_path)
    [audit] = read_supervision(result.run / "supervision.json")
    assert "unsupervised" in names(audit)


@pytest.mark.slow
def test_pixels_of_a_run(tmp_path: Path) -> None:
    images, masks = torch.rand(8, 1, 4, 4), torch.randint(0, 2, (8, 4, 4))
    masks[:, 0] = 255
    loader = DataLoader(torch.utils.data.TensorDataset(images, masks), batch_size=4)
    result = fit(loader, tmp_path, nn.CrossEntropyLoss(ignore_index=255), nn.Conv2d(1, 2, 1))
    [audit] = read_supervision(result.run / "supervision.json")
    assert (audit.unit, audit.fraction) == ("pixels", 0.75)


@pytest.mark.slow
def test_check_reports_the_audit(tmp_path: Path) -> None:
    found = tw.check(Tiny(), DataLoader(Samples(), batch_size=4), token_loss, until="2steps", quiet=True)
    assert any(each.what == "supervision" and "50.0 % carry loss" in each.seen for each in found.verdicts)
    masked = DataLoader(Samples(), batch_size=4, collate_fn=MasksAll())
    found = tw.check(Tiny(), masked, token_loss, until="2steps", quiet=True)
    [verdict] = [each for each in found.verdicts if each.word == "fail"]
    assert "MasksAll masks every label" in verdict.seen and found.exit_code == 3


def test_percentages_hide_no_token() -> None:
    assert [percent(each) for each in (0.0, 1e-6, 0.5, 0.99999, 1.0)] == [
        "0.0 %",
        "less than 0.1 %",
        "50.0 %",
        "99.9 %",
        "100.0 %",
    ]


def test_numbers_by_role_and_answer(tmp_path: Path) -> None:
    record = {"messages": [{"role": "system", "content": "Be brief."}, user(0), said(0), user(1), said(1)]}
    (tmp_path / "data.jsonl").write_bytes(lines([record, chat(3)]))
    data = Chat(tmp_path / "data.jsonl", tokenizer=make_tokenizer(), cache=tmp_path)
    audit = audit_set(data)
    assert audit.total == sum(map(len, (each["input_ids"] for each in data)))
    assert audit.supervised == sum(int((each["labels"] != -100).sum()) for each in data)
    assert {each.name: each.supervised for each in audit.roles} | {"assistant": 0} == {
        "system": 0,
        "user": 0,
        "assistant": 0,
    }
    first, second = audit.turns
    assert first.name == "answer 1" and first.supervised + second.supervised == audit.supervised
    alone = Chat(tmp_path / "data.jsonl", tokenizer=make_tokenizer(), cache=tmp_path, train_on="last")
    of_second = int((alone[0]["labels"] != -100).sum())
    assert second.supervised == of_second


def test_validation_samples_in_the_training_set_are_named(tmp_path: Path) -> None:
    near = chat(30)["messages"][1]["content"] + " really"
    long = {"messages": [user(30), said(30, f"{near} {near} {question(30)}")]}
    longer = {"messages": [user(30), said(30, f"{near} {near} {question(30)} indeed")]}
    (tmp_path / "train.jsonl").write_bytes(lines([*map(chat, range(10)), long]))
    (tmp_path / "val.jsonl").write_bytes(lines([chat(20), chat(4), longer]))
    train, val = (Chat(tmp_path / f"{x}.jsonl", tokenizer=make_tokenizer(), cache=tmp_path) for x in ("train", "val"))
    leaked, nearly = audit_set(val, "val", train).warnings
    assert (leaked.place, nearly.place) == ("val.jsonl:2", "val.jsonl:3")
    assert "train.jsonl:5" in leaked.message and "train.jsonl:11" in nearly.message


@pytest.mark.parametrize("fraction", [0.1, 0.3])
def test_the_split_keeps_copies_on_one_side(fraction: float, tmp_path: Path) -> None:
    records = [*map(chat, range(60)), *map(chat, range(20))]
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    options: dict[str, Any] = {"tokenizer": make_tokenizer(), "cache": tmp_path, "val_fraction": fraction}
    train = Chat(tmp_path / "data.jsonl", **options)
    val = Chat(tmp_path / "data.jsonl", split="val", **options)
    assert len(train) + len(val) == 80
    assert abs(len(val) / 80 - fraction) < 0.15
    sides = [{bytes(each["input_ids"].numpy().tobytes()) for each in side} for side in (train, val)]
    assert not sides[0] & sides[1]
    assert not {"leaked", "nearly_leaked"} & names(audit_set(val, "val", train))
    np.random.default_rng(0).shuffle(records)  # type: ignore[arg-type]
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    again = Chat(tmp_path / "data.jsonl", split="val", **options)
    assert {bytes(each["input_ids"].numpy().tobytes()) for each in again} == sides[1]


def tiny_gpt(rows: int, positions: int) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=rows, n_layer=1, n_head=1, n_embd=4, n_positions=positions, **ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "positions", "expected"),
    [(1000, 1000, set()), (40, 1000, {"ids_beyond_the_model"}), (1000, 20, {"longer_than_the_model"})],
)
def test_data_that_a_model_cannot_take(rows: int, positions: int, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(lines([*map(chat, range(4))]))
    data = Chat(tmp_path / "data.jsonl", tokenizer=make_tokenizer(), cache=tmp_path)
    audit = audit_set(data, limits=limits_of(tiny_gpt(rows, positions)))
    assert names(audit) == expected
    assert (audit.refusal is not None) is ("ids_beyond_the_model" in expected)


@pytest.mark.parametrize(("eos", "expected"), [("<|im_end|>", set()), ("</s>", {"other_end"})])
def test_another_end_than_that_of_generation_is_noted(eos: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(lines([*map(chat, range(4))]))
    data = Chat(tmp_path / "data.jsonl", tokenizer=make_tokenizer(eos=eos), cache=tmp_path)
    assert names(audit_set(data)) == expected
    assert (
        names(audit_set(data, limits=ModelLimits(ends=(data.tokenizer.convert_tokens_to_ids("<|im_end|>"),)))) == set()
    )


@pytest.mark.parametrize(("token", "is_control"), [("<tool>", False), ("<|im_start|>", True), ("<pad>", True)])
def test_a_special_token_that_ends_no_turn_may_be_in_an_answer(token: str, is_control: bool, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<tool>", "<|im_start|>"]})
    (tmp_path / "data.jsonl").write_bytes(lines([chat(1), {"messages": [user(0), said(0, f"{token} 4 is it.")]}]))
    data = Chat(tmp_path / "data.jsonl", tokenizer=tokenizer, cache=tmp_path)
    assert ("control_in_content" in names(audit_set(data))) == is_control


@pytest.mark.parametrize(
    ("template", "bad", "reasons"),
    [
        (MARKS_NOTHING, 0, ["4 of 4 records have assistant text that {% generation %}"]),
        (MARKS_NOTHING, 4, ["4 of 4 records have no assistant turn"]),
        (MARKS_NOTHING, 3, ["3 of 4 records have no assistant turn", "1 of 4 records have assistant text that {% gen"]),
        (MARKS_NOTHING, 1, ["3 of 4 records have assistant text that {% gen", "1 of 4 records have no assistant turn"]),
    ],
)
def test_the_template_is_named_only_if_it_masks(template: str, bad: int, reasons: list[str], tmp_path: Path) -> None:
    records = [{"messages": [user(at)]} if at < bad else chat(at) for at in range(4)]
    (tmp_path / "data.jsonl").write_bytes(lines(records))
    with pytest.raises(UsageError) as caught:
        Chat(tmp_path / "data.jsonl", tokenizer=make_tokenizer(template), cache=tmp_path)
    found = caught.value.message.removeprefix("nothing is supervised: ").split(", ")
    assert all(text.startswith(each) for text, each in zip(found, reasons, strict=True))
    assert ("roles" in caught.value.remedy) is ("no assistant" in reasons[0])
    assert found[-1].endswith("the first is data.jsonl:2" if bad == 1 else "the first is data.jsonl:1")


@pytest.mark.slow
def test_a_collate_function_that_masks_a_tokenized_set(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(lines([chat(1)] * 4))
    data = Chat(tmp_path / "data.jsonl", tokenizer=make_tokenizer(), cache=tmp_path)
    with pytest.raises(DataError, match="MasksAll masks every label"):
        fit(DataLoader(data, batch_size=2, collate_fn=MasksAll()), tmp_path)
