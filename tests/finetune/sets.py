"""Data sets as people write them: 48 with a fault from public complaints, and 22 good ones.

Each broken set says what its report must contain, and the place of the record at fault.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.finetune.tokenizers import CHATML

ERROR_PAGE = "<html><head><title>502 Bad Gateway</title></head><body>nginx</body></html>"
TOPICS = (
    *("eggs", "Paris", "sorting", "foxes", "wizards", "bread", "tides", "chess", "glass", "rivers", "moths", "paper"),
    *("salt", "clocks", "maps", "ink", "wool", "bees", "kites", "soap"),
)
QUESTIONS = ("What is known about {}?", "Tell me one fact on {}.", "Why do people like {}?", "Describe {} to a child.")
ANSWERS = (
    "Most of what we know of {0} was written down by patient people in number {1}.",
    "{0} came up in {1} letters that a traveller sent home from a cold harbour.",
    "Ask any baker about {0}, and after {1} minutes a story of the old market begins.",
    "Nobody measured {0} before the year {1}; since then two schools argue over it.",
)


def question(at: int) -> str:
    return QUESTIONS[at % 4].format(TOPICS[at % len(TOPICS)])


def answer(at: int) -> str:
    return ANSWERS[(at // 2) % 4].format(TOPICS[at % len(TOPICS)], 100 + 7 * at)


def user(at: int) -> dict[str, Any]:
    return {"role": "user", "content": question(at)}


def said(at: int, text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": answer(at) if text is None else text}


def chat(at: int) -> dict[str, Any]:
    return {"messages": [user(at), said(at)]}


def sharegpt(at: int) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question(at)}, {"from": "gpt", "value": answer(at)}]}


def alpaca(at: int) -> dict[str, Any]:
    return {"instruction": question(at), "input": "", "output": answer(at)}


def completion(at: int) -> dict[str, Any]:
    return {"prompt": question(at), "completion": " " + answer(at)}


def pair(at: int) -> dict[str, Any]:
    return {"prompt": [user(at)], "chosen": [said(at)], "rejected": [said(at, f"No idea about {at}, sorry.")]}


def text(at: int) -> dict[str, Any]:
    return {"text": f"{question(at)} {answer(at)}"}


def lines(records: Sequence[object]) -> bytes:
    return ("\n".join(json.dumps(each, ensure_ascii=False) for each in records) + "\n").encode()


def with_one(make: Callable[[int], Any], changed: object, *, at: int = 2, count: int = 8) -> list[Any]:
    """``count`` good records, of which one is another: by default the third, in line 3."""
    return [changed if number == at else make(number) for number in range(count)]


@dataclass(frozen=True)
class SetCase:
    """A file and how it is used. ``says`` must be in the report, with ``place`` near it."""

    name: str
    use: str
    content: bytes | Callable[[Path], None]
    says: str = ""
    place: str = "data.jsonl:3"
    file: str = "data.jsonl"
    options: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Mapping[str, Any] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        path = folder / self.file
        if isinstance(self.content, bytes):
            path.write_bytes(self.content)
        else:
            self.content(path)
        return path


def parquet(records: Sequence[Mapping[str, Any]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import pyarrow
        from pyarrow import parquet as format_

        format_.write_table(pyarrow.Table.from_pylist(list(records)), path)

    return write


def saved(records: Sequence[Mapping[str, Any]]) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        import datasets

        datasets.Dataset.from_list([dict(each) for each in records]).save_to_disk(str(path))

    return write


MARKS_NOTHING = CHATML.replace("{{ m['content'] }}", "{% generation %}{% endgeneration %}{{ m['content'] }}")
MARKS_USER = CHATML.replace("{{ m['content'] }}", "{% generation %}{{ m['content'] }}{% endgeneration %}")
WITHOUT_END = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
END_OUTSIDE = CHATML.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}{% endgeneration %}"
    "{% else %}{{ m['content'] }}{% endif %}",
)
ALTERNATING = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% endfor %}" + CHATML
)
WITHOUT_SYSTEM = CHATML.replace(
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n",
    "{% if m['role'] != 'system' %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}",
)
TWO_BEGINS = "<s><s>" + CHATML
TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look a word up.", "parameters": {}}}
LONG = " ".join(question(at) for at in range(60))

BROKEN: tuple[SetCase, ...] = (
    # what cannot be read
    SetCase(
        "written-with-str-instead-of-json",
        "chat",
        lines(with_one(chat, chat(2))[:2]) + str(chat(2)).encode() + b"\n" + lines([chat(3)]),
        "json.dumps",
    ),
    SetCase("cut-off-by-a-full-disk", "chat", lines([chat(0), chat(1), chat(2)])[:-30], "middle of a record"),
    SetCase(
        "latin-1",
        "instruct",
        lines([alpaca(0), alpaca(1)]) + '{"instruction": "Übersetze", "output": "schön"}\n'.encode("latin-1"),
        "not UTF-8",
    ),
    SetCase(
        "utf-16-from-excel", "instruct", "\ufeff".encode("utf-16-le") + lines([alpaca(0)]), "UTF-16", "data.jsonl:1"
    ),
    SetCase("empty-file", "chat", b"", "no records", "data.jsonl"),
    SetCase("a-list-in-a-line", "chat", lines(with_one(chat, [user(0), said(0)])), "list, not an object"),
    SetCase(
        "json-list-with-a-comma-missing",
        "instruct",
        ("[\n" + json.dumps(alpaca(0)) + ",\n" + json.dumps(alpaca(1))[:-1] + '"x"}\n]').encode(),
        "not JSON",
        "data.json:3",
        "data.json",
    ),
    SetCase(
        "csv-with-unquoted-commas",
        "completion",
        b"prompt,completion\nname a bird,heron\nname two birds,heron, stork\n",
        "3 fields, the header has 2",
        "data.csv:3",
        "data.csv",
    ),
    SetCase(
        "parquet-with-a-null",
        "completion",
        parquet(with_one(completion, {"prompt": question(2), "completion": None})),
        "'completion' is null",
        "data.parquet row 2",
        "data.parquet",
    ),
    # layouts
    SetCase(
        "question-and-answer-keys",
        "completion",
        lines([{"question": question(at), "answer": answer(at)} for at in range(4)]),
        "of no known layout",
        "data.jsonl:1",
    ),
    SetCase(
        "misspelt-key",
        "chat",
        lines([{"message": chat(at)["messages"]} for at in range(4)]),
        "it has 'message'",
        "data.jsonl:1",
    ),
    SetCase("alpaca-as-chat", "chat", lines([alpaca(at) for at in range(4)]), "set use: instruct", "data.jsonl:1"),
    SetCase("mixed-layouts", "chat", lines(with_one(chat, sharegpt(2))), "layout 'sharegpt'"),
    SetCase(
        "messages-as-string", "chat", lines(with_one(chat, {"messages": json.dumps(chat(2)["messages"])})), "json.loads"
    ),
    SetCase("no-messages", "chat", lines(with_one(chat, {"messages": []})), "messages is empty"),
    SetCase(
        "text-prompt-with-a-list-of-messages",
        "completion",
        lines(with_one(completion, {"prompt": question(2), "completion": [said(2)]})),
        "the other a list",
    ),
    SetCase(
        "missing-output",
        "instruct",
        lines(with_one(alpaca, {"instruction": question(2), "input": ""})),
        "'output' is missing",
    ),
    SetCase(
        "number-as-output", "instruct", lines(with_one(alpaca, {"instruction": "2 + 2", "output": 4})), "output is int"
    ),
    SetCase(
        "missing-rejected",
        "preference",
        lines(with_one(pair, {k: v for k, v in pair(2).items() if k != "rejected"})),
        "'rejected' is missing",
    ),
    # roles and turns
    SetCase(
        "capital-role",
        "chat",
        lines(with_one(chat, {"messages": [user(2), {"role": "Assistant", "content": answer(2)}]})),
        "did you mean 'assistant'",
    ),
    SetCase(
        "sharegpt-names-as-roles",
        "chat",
        lines(with_one(chat, {"messages": [{"role": "human", "content": question(2)}, said(2)]})),
        "did you mean 'user'",
    ),
    SetCase(
        "speaker-names",
        "chat",
        lines(
            with_one(sharegpt, {"conversations": [{"from": "Alice", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]})
        ),
        "role 'Alice'",
    ),
    SetCase(
        "no-content",
        "chat",
        lines(with_one(chat, {"messages": [user(2), {"role": "assistant", "content": None}]})),
        "no content",
    ),
    SetCase(
        "pictures",
        "chat",
        lines(
            with_one(chat, {"messages": [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}, said(2)]})
        ),
        "parts of image",
    ),
    SetCase(
        "roles-do-not-alternate",
        "chat",
        lines(with_one(chat, {"messages": [user(2), user(3), said(2)]})),
        "must alternate",
        tokenizer={"template": ALTERNATING},
    ),
    SetCase("no-answer", "chat", lines(with_one(chat, {"messages": [user(2)]})), "no assistant turn"),
    SetCase(
        "ends-with-a-question",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2), user(3)]})),
        "after the last answer",
    ),
    SetCase("turn-twice", "chat", lines(with_one(chat, {"messages": [user(2), said(2), said(2)]})), "same turn twice"),
    SetCase(
        "two-users-in-a-row",
        "chat",
        lines(with_one(chat, {"messages": [user(2), user(3), said(3)]})),
        "one role in a row",
    ),
    SetCase(
        "late-system",
        "chat",
        lines(with_one(chat, {"messages": [user(2), {"role": "system", "content": "Be brief."}, said(2)]})),
        "system message after",
    ),
    # answers
    SetCase("empty-answer", "chat", lines(with_one(chat, {"messages": [user(2), said(2, "")]})), "empty answer"),
    SetCase("blank-output", "instruct", lines(with_one(alpaca, {**alpaca(2), "output": "  \n"})), "empty answer"),
    SetCase("nan-from-pandas", "instruct", lines(with_one(alpaca, {**alpaca(2), "output": math.nan})), "NaN"),
    SetCase(
        "error-page",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, ERROR_PAGE)]})),
        "error message of a server",
    ),
    SetCase(
        "answer-first",
        "chat",
        lines(with_one(sharegpt, {"conversations": sharegpt(2)["conversations"][::-1]})),
        "an assistant turn first",
    ),
    SetCase(
        "mojibake",
        "instruct",
        lines(with_one(alpaca, {**alpaca(2), "output": "Das Ã¼bliche GetrÃ¤nk heiÃŸt Tee."})),
        "wrong encoding",
    ),
    SetCase(
        "markers-in-the-text",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, "Tea.<|im_end|>\n<|im_start|>user\nMore?")]})),
        "special tokens written inside",
    ),
    SetCase(
        "chosen-equals-rejected",
        "preference",
        lines(with_one(pair, {**pair(2), "rejected": pair(2)["chosen"]})),
        "equal chosen and rejected",
    ),
    SetCase(
        "scores-swapped",
        "preference",
        lines(
            with_one(
                lambda at: {**pair(at), "score_chosen": 8.0, "score_rejected": 3.0},
                {**pair(2), "score_chosen": 2.0, "score_rejected": 9.0},
            )
        ),
        "lower score",
    ),
    SetCase(
        "one-answer-for-all",
        "instruct",
        lines([{**alpaca(at), "output": "I cannot help with that."} for at in range(12)]),
        "have the same answer",
        "data.jsonl:1",
    ),
    SetCase(
        "same-record-again",
        "chat",
        lines([*map(chat, range(8)), chat(2), chat(2)]),
        "repeat an earlier",
        "data.jsonl:9",
    ),
    SetCase(
        "empty-question",
        "chat",
        lines(with_one(chat, {"messages": [{"role": "user", "content": ""}, said(2)]})),
        "empty user turn",
    ),
    SetCase(
        "two-templates",
        "chat",
        lines(
            with_one(
                chat,
                {
                    "messages": [
                        {"role": "user", "content": "### Instruction:\nName a bird.\n\n### Response:\n"},
                        said(2),
                    ]
                },
            )
        ),
        "in two templates",
    ),
    SetCase(
        "llama-marks-in-the-text",
        "instruct",
        lines(with_one(alpaca, {**alpaca(2), "instruction": "<s>[INST] Name a bird. [/INST]"})),
        "in two templates",
    ),
    SetCase(
        "no-difference-after-the-cut",
        "preference",
        lines(
            with_one(
                pair, {"prompt": [user(2)], "chosen": [said(2, LONG + " yes")], "rejected": [said(2, LONG + " no")]}
            )
        ),
        "equal only because max_length cut them",
        options={"max_length": 150, "truncate": "right"},
    ),
    # tokens and masks
    SetCase(
        "template-marks-nothing",
        "chat",
        lines([*map(chat, range(4))]),
        "nothing is supervised",
        "data.jsonl:1",
        tokenizer={"template": MARKS_NOTHING},
    ),
    SetCase(
        "template-marks-users",
        "chat",
        lines([*map(chat, range(4))]),
        "user, system or tool turns that carry loss",
        "data.jsonl:1",
        tokenizer={"template": MARKS_USER},
    ),
    SetCase(
        "template-without-end",
        "chat",
        lines([*map(chat, range(4))]),
        "does not learn to stop",
        "data.jsonl:1",
        tokenizer={"template": WITHOUT_END},
    ),
    SetCase(
        "end-outside-the-mark",
        "chat",
        lines([*map(chat, range(4))]),
        "does not learn to stop",
        "data.jsonl:1",
        tokenizer={"template": END_OUTSIDE},
    ),
    SetCase(
        "template-leaves-out-system",
        "chat",
        lines(with_one(chat, {"messages": [{"role": "system", "content": "Answer as a pirate."}, user(2), said(2)]})),
        "system message that the template leaves out",
        tokenizer={"template": WITHOUT_SYSTEM},
    ),
    SetCase(
        "template-leaves-out-tools",
        "chat",
        lines(with_one(chat, {**chat(2), "tools": [TOOL]})),
        "tools that the template leaves out",
    ),
    SetCase("no-template", "chat", lines([*map(chat, range(4))]), "no chat template", "", tokenizer={"template": None}),
    SetCase(
        "base-tokenizer-with-chatml",
        "chat",
        lines([*map(chat, range(4))]),
        "no single tokens",
        "data.jsonl:1",
        tokenizer={"control": ("<s>", "</s>", "<pad>"), "eos": "</s>"},
    ),
    SetCase(
        "unknown-characters",
        "instruct",
        lines(with_one(alpaca, {**alpaca(2), "output": "茶をどうぞ"})),
        "unknown token",
        tokenizer={"unknown": "<unk>"},
    ),
    SetCase(
        "begin-token-in-the-text",
        "completion",
        lines(with_one(completion, {**completion(2), "prompt": "<s>" + question(2)})),
        "two begin tokens",
        tokenizer={"bos": "<s>", "adds_bos": True},
    ),
    SetCase(
        "template-with-two-begins",
        "chat",
        lines([*map(chat, range(4))]),
        "two begin tokens",
        "data.jsonl:1",
        tokenizer={"template": TWO_BEGINS, "bos": "<s>"},
    ),
    SetCase(
        "longer-than-max-length",
        "chat",
        lines(with_one(chat, {"messages": [{"role": "user", "content": LONG}, said(2)]})),
        "longer than max_length",
        options={"max_length": 200},
    ),
    SetCase(
        "answer-cut-away",
        "chat",
        lines(with_one(chat, {"messages": [{"role": "user", "content": LONG}, said(2)]})),
        "no token that carries loss",
        options={"max_length": 200, "truncate": "right"},
    ),
    SetCase(
        "answer-cut-short",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, LONG)]})),
        "cut off at max_length",
        options={"max_length": 200, "truncate": "right"},
    ),
    SetCase(
        "all-cut-away",
        "chat",
        lines([{"messages": [{"role": "user", "content": f"{at} {LONG}"}, said(at)]} for at in range(4)]),
        "max_length: 100",
        "data.jsonl:1",
        options={"max_length": 100, "truncate": "right"},
    ),
    SetCase(
        "space-at-the-end-of-the-prompt",
        "completion",
        lines(with_one(completion, {"prompt": "the quick brown ", "completion": "fox"})),
        "across the end of the prompt",
    ),
    SetCase(
        "escaped-newlines",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, r"It needs two things:\n- salt\n- water.\nThen stir.")]})),
        "a backslash and the letter n",
    ),
    SetCase(
        "answer-repeats-prompt",
        "completion",
        lines(
            with_one(
                completion, {"prompt": "List three old rivers:", "completion": "List three old rivers: Nile, Po, Ob"}
            )
        ),
        "begins with its whole prompt",
    ),
    SetCase(
        "thinking-without-its-end",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, "<think>The user asks for a bird, so I")]})),
        "no </think> after it",
    ),
    SetCase(
        "call-with-cut-arguments",
        "chat",
        lines(
            with_one(
                chat,
                {
                    "messages": [
                        user(2),
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [
                                {"type": "function", "function": {"name": "find", "arguments": '{"city": "Ber'}}
                            ],
                        },
                    ]
                },
            )
        ),
        "text that is not a JSON object",
    ),
    SetCase(
        "result-for-no-call",
        "chat",
        lines(
            with_one(
                chat,
                {
                    "messages": [
                        user(2),
                        {
                            "role": "assistant",
                            "content": "",
                            "tool_calls": [
                                {"id": "a1", "type": "function", "function": {"name": "find", "arguments": {"x": 1}}}
                            ],
                        },
                        {"role": "tool", "tool_call_id": "b2", "content": "12"},
                        said(2),
                    ]
                },
            )
        ),
        "a call that no earlier turn makes",
    ),
    SetCase(
        "error-of-an-api",
        "instruct",
        lines(with_one(alpaca, {**alpaca(2), "output": "Error code: 429 - {'error': {'message': 'Rate limit'}}"})),
        "error message of a server",
    ),
    SetCase(
        "answers-cut-at-one-length",
        "chat",
        lines([{"messages": [user(at), said(at, answer(at)[:60])]} for at in range(24)]),
        "answers have exactly 60 characters",
        "data.jsonl:1",
    ),
)

GOOD: tuple[SetCase, ...] = (
    SetCase(
        "conversations-with-the-same-last-answer",
        "chat",
        lines(
            [
                {
                    "messages": [
                        user(at),
                        said(at),
                        {"role": "user", "content": "Thank you."},
                        said(at, "You are welcome; ask whenever another question comes to your mind."),
                    ]
                }
                for at in range(12)
            ]
        ),
    ),
    SetCase(
        "code-with-escapes",
        "chat",
        lines(
            with_one(chat, {"messages": [user(2), said(2, r'print("a.\n") writes a line, and r"\n" matches its end.')]})
        ),
    ),
    SetCase(
        "answers-of-one-length",
        "chat",
        lines(
            [
                {"messages": [user(at), said(at, f"The box with the number {at:04} is on the shelf.")]}
                for at in range(12)
            ]
        ),
    ),
    SetCase("messages", "chat", lines([*map(chat, range(12))])),
    SetCase("sharegpt", "chat", lines([*map(sharegpt, range(12))])),
    SetCase(
        "multi-turn", "chat", lines([{"messages": [user(at), said(at), user(at + 1), said(at + 5)]} for at in range(8)])
    ),
    SetCase(
        "with-system",
        "chat",
        lines([{"messages": [{"role": "system", "content": "Be brief."}, user(at), said(at)]} for at in range(8)]),
    ),
    SetCase("system-key", "chat", lines([{**sharegpt(at), "system": "Be brief."} for at in range(8)])),
    SetCase(
        "text-parts",
        "chat",
        lines(
            [
                {"messages": [{"role": "user", "content": [{"type": "text", "text": question(at)}]}, said(at)]}
                for at in range(8)
            ]
        ),
    ),
    SetCase(
        "extra-keys", "chat", lines([{**chat(at), "id": at, "prompt": question(at), "text": "x"} for at in range(8)])
    ),
    SetCase(
        "roles-renamed",
        "chat",
        lines([{"messages": [user(at), {"role": "bot", "content": answer(at)}]} for at in range(8)]),
        options={"roles": {"bot": "assistant"}},
    ),
    SetCase("alpaca", "instruct", lines([*map(alpaca, range(12))])),
    SetCase(
        "alpaca-with-input", "instruct", lines([{**alpaca(at), "input": f"Mind the {TOPICS[-at]}."} for at in range(8)])
    ),
    SetCase(
        "alpaca-as-json-list", "instruct", json.dumps([*map(alpaca, range(8))], indent=2).encode(), file="data.json"
    ),
    SetCase(
        "alpaca-csv",
        "instruct",
        b"instruction,input,output\n" + "\n".join(f'"{question(at)}",,"{answer(at)}"' for at in range(8)).encode(),
        file="data.csv",
    ),
    SetCase("with-byte-order-mark", "chat", b"\xef\xbb\xbf" + lines([*map(chat, range(8))])),
    SetCase("windows-line-ends", "chat", lines([*map(chat, range(8))]).replace(b"\n", b"\r\n")),
    SetCase("empty-lines", "chat", lines([*map(chat, range(8))]).replace(b"\n", b"\n\n")),
    SetCase("no-newline-at-the-end", "chat", lines([*map(chat, range(8))])[:-1]),
    SetCase("prompt-and-completion", "completion", lines([*map(completion, range(8))])),
    SetCase(
        "completion-of-messages",
        "completion",
        lines([{"prompt": [user(at)], "completion": [said(at)]} for at in range(8)]),
    ),
    SetCase(
        "columns-renamed",
        "completion",
        lines([{"q": question(at), "a": " " + answer(at)} for at in range(8)]),
        options={"columns": {"prompt": "q", "completion": "a"}},
    ),
    SetCase("texts", "text", lines([*map(text, range(8))])),
    SetCase(
        "begin-token-added",
        "completion",
        lines([*map(completion, range(8))]),
        tokenizer={"bos": "<s>", "adds_bos": True},
    ),
    SetCase("pad-is-eos", "chat", lines([*map(chat, range(8))]), tokenizer={"pad": "<|im_end|>"}),
    SetCase("preference", "preference", lines([*map(pair, range(8))])),
    SetCase(
        "preference-with-the-prompt-inside",
        "preference",
        lines(
            [
                {"chosen": [user(at), said(at)], "rejected": [user(at), said(at, f"No idea about {at}.")]}
                for at in range(8)
            ]
        ),
    ),
    SetCase(
        "preference-as-text",
        "preference",
        lines(
            [
                {"prompt": question(at), "chosen": " " + answer(at), "rejected": f" No idea about {at}."}
                for at in range(8)
            ]
        ),
    ),
    SetCase("parquet", "chat", parquet([*map(chat, range(8))]), file="data.parquet"),
    SetCase("saved-by-datasets", "chat", saved([*map(chat, range(8))]), file="saved"),
    SetCase(
        "turns-without-loss",
        "chat",
        lines(
            [
                {"messages": [user(at), {**said(at), "weight": 0}, user(at + 1), {**said(at + 5), "weight": 1}]}
                for at in range(8)
            ]
        ),
    ),
    SetCase(
        "markdown-headings",
        "instruct",
        lines(
            [{**alpaca(at), "output": f"### Birds\n\n{answer(at)}\n\n### Input and output\n\nNone."} for at in range(8)]
        ),
    ),
    SetCase(
        "short-answers", "instruct", lines([{**alpaca(at), "output": "yes" if at % 3 else "no"} for at in range(12)])
    ),
    SetCase(
        "umlauts",
        "instruct",
        lines([{**alpaca(at), "output": f"Für Gäste: {at} Brötchen à la carte, naïve Größe €5."} for at in range(8)]),
    ),
    SetCase(
        "cut-by-choice",
        "chat",
        lines([*map(chat, range(8)), {"messages": [user(8), said(8, LONG)]}]),
        options={"max_length": 200, "truncate": "drop"},
    ),
)
assert len({each.name for each in (*BROKEN, *GOOD)}) == len(BROKEN) + len(GOOD)
