"""The tokens that carry loss: after the prompt for an answer, up to the end of its turn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.finetune.sets import lines
from tests.finetune.tokenizers import CHATML, make_tokenizer
from trainwright.errors import UsageError
from trainwright.finetune.audit import audit_set
from trainwright.finetune.datasets import Chat, Completion, Instruct, Preference, TokenizedSet

TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "See you"},
]
DROPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'].split('</think>')[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
ENDS_TEXT = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
MARKED = CHATML.replace(
    "\n{{ m['content'] }}<|im_end|>\n",
    "\n{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}\n",
)


def opened(
    folder: Path, record: Mapping[str, Any], kind: type[TokenizedSet] = Chat, tokenizer: Any = None, **options: Any
) -> TokenizedSet:
    (folder / "data.jsonl").write_bytes(lines([record]))
    return kind(folder / "data.jsonl", tokenizer=tokenizer or make_tokenizer(), cache=folder / "cache", **options)


def answers(data: TokenizedSet, prefix: str = "") -> list[str]:
    """The text of each run of tokens that carry loss in the first sample."""
    sample = data[0]
    found: list[list[int]] = [[]]
    for token, label in zip(sample[f"{prefix}input_ids"].tolist(), sample[f"{prefix}labels"].tolist(), strict=True):
        assert label in (-100, token)
        if label == -100:
            found.append([])
        else:
            found[-1].append(token)
    return [data.tokenizer.decode(each) for each in found if each]


def defects(data: TokenizedSet) -> set[str]:
    return {each.name for each in audit_set(data).findings}


@pytest.mark.parametrize(
    ("template", "train_on", "expected"),
    [
        (CHATML, "assistant", ["Hello<|im_end|>\n", "See you<|im_end|>\n"]),
        (CHATML, "last", ["See you<|im_end|>\n"]),
        (MARKED, "assistant", ["Hello<|im_end|>", "See you<|im_end|>"]),
        (MARKED, "last", ["See you<|im_end|>"]),
        (ENDS_TEXT, "assistant", ["Hello<|end|>\n", "See you<|end|>\n<|im_end|>"]),
        (ENDS_TEXT, "last", ["See you<|end|>\n<|im_end|>"]),
    ],
    ids=lambda value: value if value in ("assistant", "last") else "",
)
def test_answers_carry_loss(template: str, train_on: str, expected: list[str], tmp_path: Path) -> None:
    data = opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template), train_on=train_on)
    assert answers(data) == expected
    assert "rewritten_turn" not in defects(data)


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("key", ["weight", "train", "loss_mask"])
def test_a_turn_can_be_switched_off(template: str, key: str, tmp_path: Path) -> None:
    for off, left in ((1, "See you<|im_end|>"), (3, "Hello<|im_end|>")):
        turns = [{**each, key: 0} if at == off else {**each, key: 1} for at, each in enumerate(TURNS)]
        data = opened(tmp_path, {"messages": turns}, tokenizer=make_tokenizer(template))
        assert [each.strip() for each in answers(data)] == [left]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_all_tokens_carry_loss(template: str, tmp_path: Path) -> None:
    data = opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template), train_on="all")
    [text] = answers(data)
    assert text.startswith("<|im_start|>user\nHi") and text.strip().endswith("See you<|im_end|>")


def test_a_turn_that_the_template_rewrites_is_context(tmp_path: Path) -> None:
    thought = [dict(each) for each in TURNS]
    thought[1]["content"], thought[3]["content"] = "<think>a greeting</think>Hello", "<think>done</think>See you"
    data = opened(tmp_path, {"messages": thought}, tokenizer=make_tokenizer(DROPS_THINKING))
    assert answers(data) == ["<think>done</think>See you<|im_end|>\n"]
    assert "greeting" not in data.tokenizer.decode(data[0]["input_ids"])
    assert defects(data) == {"rewritten_turn"}


def test_turns_without_thinking_are_not_rewritten(tmp_path: Path) -> None:
    data = opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(DROPS_THINKING))
    assert len(answers(data)) == 2 and defects(data) == set()


def test_a_prompt_that_the_answer_does_not_continue_is_noted(tmp_path: Path) -> None:
    data = opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(THINKS))
    assert answers(data) == ["Hello<|im_end|>\n", "See you<|im_end|>\n"]
    assert defects(data) == {"other_prompt"}


def test_an_answer_that_continues_the_thinking_of_the_prompt(tmp_path: Path) -> None:
    record = {"messages": [TURNS[0], {"role": "assistant", "content": "<think>ok</think>Hello"}]}
    data = opened(tmp_path, record, tokenizer=make_tokenizer(THINKS))
    assert answers(data) == ["ok</think>Hello<|im_end|>\n"] and defects(data) == set()


def test_all_bytes_of_a_character_carry_loss(tmp_path: Path) -> None:
    template = MARKED.replace("<|im_end|>{% endgen", "{% endgen").replace("{% else %}", "<|im_end|>{% else %}")
    record = {"messages": [TURNS[0], {"role": "assistant", "content": "tea 🍵"}]}
    assert answers(opened(tmp_path, record, tokenizer=make_tokenizer(template))) == ["tea 🍵"]


def test_tool_calls_carry_loss_and_results_do_not(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ m['content'] }}",
        "{{ m['content'] }}{% for c in m.tool_calls or [] %}{{ c.function.name }}({{ c.function.arguments | tojson }})"
        "{% endfor %}",
    )
    call = {"name": "add", "arguments": {"a": 1}}
    record = {
        "conversations": [
            {"from": "human", "value": "1 + 1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ]
    }
    data = opened(tmp_path, record, tokenizer=make_tokenizer(template))
    assert answers(data) == [f'{call["name"]}({{"a": 1}})<|im_end|>\n', "two<|im_end|>\n"]


def test_a_template_for_parts_gets_parts(tmp_path: Path) -> None:
    template = CHATML.replace(
        "{{ m['content'] }}", "{% for p in m['content'] %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
    )
    assert answers(opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template))) == [
        "Hello<|im_end|>\n",
        "See you<|im_end|>\n",
    ]


def test_marks_find_the_end_of_a_turn_that_is_rewritten(tmp_path: Path) -> None:
    template = MARKED.replace(
        "{% generation %}{{ m['content'] }}", "{% generation %}{{ m['content'].split('</think>')[-1] }}"
    )
    thought = [TURNS[0], {"role": "assistant", "content": "<think>a</think>Hello"}, *TURNS[2:]]
    data = opened(tmp_path, {"messages": thought}, tokenizer=make_tokenizer(template))
    assert answers(data) == ["Hello<|im_end|>", "See you<|im_end|>"] and "prompt_supervised" not in defects(data)


def test_instructions(tmp_path: Path) -> None:
    record = {"instruction": "Add", "input": "1 and 1", "output": "2", "history": [["Hi", "Hello"]]}
    data = opened(tmp_path, record, Instruct)
    assert answers(data) == ["Hello<|im_end|>\n", "2<|im_end|>\n"]
    assert "Add\n\n1 and 1" in data.tokenizer.decode(data[0]["input_ids"])


def test_a_completion_ends_once(tmp_path: Path) -> None:
    for text in (" blue", " blue</s>"):
        data = opened(tmp_path, {"prompt": "The sky is", "completion": text}, Completion, make_tokenizer(eos="</s>"))
        assert answers(data) == [" blue</s>"]


def test_a_tokenizer_that_ends_every_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(bos="<s>", eos="</s>", adds_bos=True, adds_eos=True)
    data = opened(tmp_path, {"prompt": "The sky is", "completion": " blue"}, Completion, tokenizer)
    assert answers(data) == [" blue</s>"] and defects(data) == {"plain_text"}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [TURNS[0]], "chosen": [TURNS[1]], "rejected": [TURNS[3]]},
        {"chosen": TURNS[:2], "rejected": [TURNS[0], TURNS[3]]},
        {"prompt": [TURNS[0]], "chosen": TURNS[:2], "rejected": [TURNS[0], TURNS[3]]},
        {"prompt": "Hi", "chosen": [TURNS[1]], "rejected": [TURNS[3]]},
        {"prompt": "Hi", "chosen": TURNS[:2], "rejected": [TURNS[0], TURNS[3]]},
    ],
)
def test_forms_of_a_preference(record: Mapping[str, Any], tmp_path: Path) -> None:
    data = opened(tmp_path, record, Preference)
    assert answers(data, "chosen_") == ["Hello<|im_end|>\n"]
    assert answers(data, "rejected_") == ["See you<|im_end|>\n"]
    assert "<|im_start|>user\nHi<|im_end|>" in data.tokenizer.decode(data[0]["rejected_input_ids"])


def test_a_preference_as_text_without_a_prompt(tmp_path: Path) -> None:
    begin = "\n\nHuman: Hi\n\nAssistant:"
    record = {"chosen": f"{begin} Hello", "rejected": f"{begin} Hell no"}
    data = opened(tmp_path, record, Preference, make_tokenizer(eos="</s>"))
    assert answers(data, "chosen_") == [" Hello</s>"] and answers(data, "rejected_") == [" Hell no</s>"]


@pytest.mark.parametrize(
    ("truncate", "length", "expected"),
    [("right", 20, ["Hello<|im_end|>\n"]), ("left", 10, ["See you<|im_end|>\n"])],
)
def test_long_sequences_are_cut(truncate: str, length: int, expected: list[str], tmp_path: Path) -> None:
    data = opened(tmp_path, {"messages": TURNS}, truncate=truncate, max_length=length)
    assert len(data[0]["input_ids"]) == length
    assert answers(data)[:1] == expected
    assert "truncated" in defects(data)


def test_template_args_reach_the_template(tmp_path: Path) -> None:
    template = "{% if not loud %}{{ raise_exception('quiet') }}{% endif %}" + CHATML
    with pytest.raises(UsageError, match="quiet"):
        opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template))
    assert answers(
        opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template), template_args={"loud": True})
    )
    assert answers(
        opened(tmp_path, {"messages": TURNS, "chat_template_kwargs": {"loud": 1}}, tokenizer=make_tokenizer(template))
    )


def test_a_template_that_writes_the_date_is_noted(tmp_path: Path) -> None:
    template = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}\n" + CHATML
    assert "dated" in defects(opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template)))
    fixed = opened(
        tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template), template_args={"date_string": "1 May 1999"}
    )
    assert "dated" not in defects(fixed)


CALLS = CHATML.replace("{{ m['content'] }}", "{{ m['content'] }}{% for c in m.tool_calls or [] %}CALL{% endfor %}")


def calling(arguments: object) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": "find", "arguments": arguments}}
    return {"messages": [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [call]}]}


@pytest.mark.parametrize(
    ("written", "is_parsed"),
    [
        ('{{ {"name": c.function.name, "arguments": c.function.arguments} | tojson }}', True),
        ('{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments }}}', False),
        ('{"name": "{{ c.function.name }}", "arguments": {{ "" + c.function.arguments }}}', False),
    ],
    ids=["tojson", "printed", "only-text"],
)
def test_arguments_as_json_text_are_not_encoded_twice(written: str, is_parsed: bool, tmp_path: Path) -> None:
    data = opened(tmp_path, calling('{"name": "x"}'), tokenizer=make_tokenizer(CALLS.replace("CALL", written)))
    assert answers(data) == ['{"name": "find", "arguments": {"name": "x"}}<|im_end|>\n']
    assert ("parsed_arguments" in defects(data)) is is_parsed


def test_arguments_that_are_no_object_stay_text(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(CALLS.replace("CALL", "{{ c.function.name }} {{ c.function.arguments | tojson }}"))
    assert answers(opened(tmp_path, calling("x = 1"), tokenizer=tokenizer)) == ['find "x = 1"<|im_end|>\n']


@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"reasoning_content": "First a thought."}, "field_left_out"),
        ({"thinking": "First a thought."}, "field_left_out"),
        ({"name": "Ann"}, "field_left_out"),
        ({"tool_calls": calling({"a": "Rome"})["messages"][1]["tool_calls"]}, "content_left_out"),
    ],
    ids=["reasoning_content", "thinking", "name", "tool_calls"],
)
def test_a_field_that_the_template_leaves_out_is_named(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    data = opened(tmp_path, {"messages": [TURNS[0], {**TURNS[1], **changed}]})
    assert defects(data) == {name}
    [finding] = audit_set(data).findings
    assert (finding.severity, finding.samples, finding.place) == ("warning", 1, "data.jsonl:1")


def test_arguments_that_the_template_leaves_out_are_named(tmp_path: Path) -> None:
    data = opened(tmp_path, calling({"a": "Rome"}), tokenizer=make_tokenizer(CALLS.replace("CALL", "find")))
    assert defects(data) == {"content_left_out"}


def test_an_end_outside_of_generation_is_to_be_moved(tmp_path: Path) -> None:
    template = MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
    [finding] = audit_set(opened(tmp_path, {"messages": TURNS}, tokenizer=make_tokenizer(template))).findings
    assert finding.name == "no_end" and "move the end token" in finding.remedy and "endgeneration" in finding.remedy
