"""Data sets as people write them: broken ones, with a fault from public complaints, and good ones.

Each broken set says what its report must contain, and the place of the record at fault.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
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


FACTS = (
    ("What is the capital of France?", "The capital of France is Paris, which lies on the Seine."),
    (
        "How do plants make food?",
        "Plants make their food by photosynthesis. Leaves use light, water and carbon dioxide.",
    ),
    ("Who wrote Don Quixote?", "Don Quixote was written by Cervantes. The first part came out in 1605."),
    ("Why is the sky blue?", "The sky scatters short waves more than long ones, so that it looks blue."),
    ("How do I boil an egg?", "Put the egg into boiling water, wait seven minutes, and cool it before you peel it."),
    ("What does a compiler do?", "A compiler translates source code into machine code. It also reports errors."),
    ("What is inflation?", "Inflation is a general rise of prices over time. Money then buys fewer goods."),
    ("How far away is the Moon?", "The Moon is 384,400 kilometres away on average; its orbit is an ellipse."),
    ("How do bees make honey?", "Bees collect nectar and fan it dry in the comb until honey remains."),
    ("Why do cats purr?", "Cats purr when they are content, and also to calm themselves when they are hurt."),
    ("Who painted the Mona Lisa?", "The Mona Lisa was painted by Leonardo da Vinci. It hangs in the Louvre today."),
    ("How does a refrigerator work?", "A refrigerator moves heat out of its inside. A compressor drives the coolant."),
)
REFUSALS = (
    "I'm sorry, but I can't help with that.",
    "As an AI language model, I have no view.",
    "I cannot answer this.",
)


def facts(change: Callable[[int, str], str] = lambda at, text: text, *, only: int | None = None) -> bytes:
    """Questions with answers of different words. ``change`` makes another answer of each, or of ``only`` one."""
    made = (change(at, a) if only in (None, at) else a for at, (_, a) in enumerate(FACTS))
    return lines([{"instruction": q, "output": a} for (q, _), a in zip(FACTS, made, strict=True)])


def asked(*pairs: tuple[str, str]) -> bytes:
    return lines([{"instruction": q, "output": a} for q, a in (*pairs, *FACTS)])


def labels(*names: str) -> bytes:
    return lines(
        [{"instruction": f"Sentiment: {a}", "output": names[at % len(names)]} for at, (_, a) in enumerate(FACTS)]
    )


def bilingual(answer: Callable[[int], str]) -> bytes:
    """Questions in French, each with the French or English answer that ``answer`` names."""
    asks = ("Que faut-il faire pour {} le {} mai ?", "Je veux {} en {} jours et je ne sais pas comment le faire.")
    says = {
        "fr": (
            "Il faut {} le matin, et vous avez {} jours pour le faire.",
            "Pour cela, le mieux est de {} le {} mai avec un ami.",
        ),
        "en": (
            "You have to do it in the morning, and it is done in {1} days.",
            "It is best to do it with a friend on day {1}.",
        ),
    }
    topics = ("planter un arbre", "laver le chat", "vendre la maison", "lire un livre", "faire le pain", "voir la mer")
    rows = [
        (asks[at % 2].format(topics[at % 6], at), says[answer(at)][at // 2 % 2].format(topics[at % 6], at))
        for at in range(48)
    ]
    return lines([{"question": q, "answer": a} for q, a in rows])


def pages(begin: Callable[[int], str], end: Callable[[int], str]) -> bytes:
    made = (
        "{}\n\nThe {} is a long story that many people know, and {} of its parts have an end that is told twice.\n\n{}"
    )
    return lines([{"text": made.format(begin(at), TOPICS[at % len(TOPICS)], at, end(at))} for at in range(40)])


SUMS = tuple((f"What is {at} plus {at + 9}?", f"We get {at} + {at + 9} = {2 * at + 9}.") for at in range(3, 9))


def preferred(chosen: Callable[[int, str], str], rejected: Callable[[int, str], str]) -> bytes:
    made = ((q, chosen(at, a), rejected(at, a)) for at, (q, a) in enumerate(FACTS))
    return lines([{"prompt": q, "chosen": good, "rejected": bad} for q, good, bad in made])


def right(at: int, text: str) -> str:
    return text


def unsure(at: int, text: str) -> str:
    return f"Not sure, it may be something else, number {at}."


def question(at: int) -> str:
    return QUESTIONS[at % 4].format(TOPICS[at % len(TOPICS)])


def answer(at: int) -> str:
    return ANSWERS[(at // 2) % 4].format(TOPICS[at % len(TOPICS)], 100 + 7 * at)


def user(at: int) -> dict[str, Any]:
    return {"role": "user", "content": question(at)}


def said(at: int, text: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": answer(at) if text is None else text}


def called(arguments: object, **more: Any) -> dict[str, Any]:
    """A turn that calls the tool ``find``."""
    function = {"name": "find", "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{**more, "type": "function", "function": function}]}


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

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:1e08337133092e7b10fd10d0\nsize 886\n"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML.replace(
    "{{ m['content'] }}", "{{ m['content'] }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
)


def tool_calls(arguments: Callable[[int], Mapping[str, object]], third: Mapping[str, object] | None = None) -> bytes:
    """Conversations that call the tool ``find``, whose schema has two required arguments; the third with ``third``."""
    schema = {**SCHEMA, "required": ["city", "days"]}
    tool = {"type": "function", "function": {"name": "find", "description": "Find it.", "parameters": schema}}
    return lines(
        [
            {"messages": [user(at), called(dict(third if third and at == 2 else arguments(at)))], "tools": [tool]}
            for at in range(8)
        ]
    )


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
        "unknown-keys",
        "completion",
        lines([{"ask": question(at), "reply": answer(at)} for at in range(4)]),
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
    SetCase(
        "answers-of-another-language",
        "instruct",
        bilingual(lambda at: "en" if at % 4 == 2 else "fr"),
        "are in another language than their prompt",
        "data.jsonl:3",
    ),
    SetCase(
        "api-key",
        "instruct",
        asked(("How?", "Call it with api_key = 'sk-wM2MsfG7wzAbcg2CPoZwfFv6MIA1UmCkoBYARYRK'.")),
        "a secret or personal data",
        "data.jsonl:1",
    ),
    SetCase(
        "password",
        "instruct",
        asked(("I cannot log in.", "Login: greta33 / password: B4R7HdvU7lh! and then wait.")),
        "a secret or personal data",
        "data.jsonl:1",
    ),
    SetCase(
        "wrong-sums",
        "instruct",
        asked(*SUMS[:2], *((q, a.replace("= ", "= 1")) for q, a in SUMS[2:])),
        "an equation of two numbers whose sides differ",
        "data.jsonl:3",
    ),
    SetCase(
        "translated-code",
        "instruct",
        asked(("写一个函数。", "```python\n定义 add（a, b)：\n    返回 a + b\n```")),
        "full-width or curly punctuation",
        "data.jsonl:1",
    ),
    SetCase(
        "boilerplate-of-pages",
        "text",
        pages(
            lambda at: "Home | News | Contact" if at % 2 else TOPICS[at % len(TOPICS)],
            lambda at: "All rights reserved. Terms of use" if at % 3 else f"Written in {at}",
        ),
        "boilerplate such as the menu",
        "data.jsonl:2",
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
        "not single tokens",
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
        lines(with_one(chat, {"messages": [user(2), called('{"city": "Ber')]})),
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
                        called({"x": 1}, id="a1"),
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
        "have exactly 60 characters",
        "data.jsonl:1",
    ),
    # what a set shows
    SetCase(
        "refusals",
        "instruct",
        facts(lambda at, a: a if at % 4 == 0 else f"{REFUSALS[at % 3]} ({at})"),
        "a refusal",
        "data.jsonl:2",
    ),
    SetCase(
        "marks-in-a-completion",
        "completion",
        lines(with_one(completion, {**completion(2), "completion": " Tea.\n### Instruction:\nMore"})),
        "marks of a prompt template",
    ),
    SetCase(
        "marks-in-a-preference",
        "preference",
        preferred(lambda at, a: f"[INST] {a}" if at == 2 else a, unsure),
        "marks of a prompt template",
    ),
    SetCase(
        "words-of-another-template",
        "text",
        lines([{"text": f"<|human|>{q}<|stop|><|bot|>{a}<|stop|>"} for q, a in FACTS]),
        "not single tokens",
        "data.jsonl:1",
    ),
    SetCase(
        "dialogue-goes-on",
        "instruct",
        facts(lambda at, a: f"{a}\nHuman: And why?\nAssistant: Nobody knows.", only=2),
        "continues with a user turn",
    ),
    SetCase("name-not-filled-in", "instruct", facts(lambda at, a: f"Dear {{name}}, {a}", only=2), "placeholder"),
    SetCase(
        "input-not-filled-in",
        "chat",
        lines(with_one(chat, {"messages": [{"role": "user", "content": "Summarize: {{input}}"}, said(2)]})),
        "placeholder",
    ),
    SetCase(
        "insert-not-filled-in", "instruct", facts(lambda at, a: "It is [INSERT NAME HERE].", only=2), "placeholder"
    ),
    SetCase(
        "answer-in-a-loop", "instruct", facts(lambda at, a: a + " I hope it helps." * 9, only=2), "repeats one passage"
    ),
    SetCase(
        "loop-without-spaces", "instruct", facts(lambda at, a: "茶是一种饮料。" * 12, only=2), "repeats one passage"
    ),
    SetCase("labels-in-two-cases", "instruct", labels("spam", "ham", "Spam"), "spelled differently"),
    SetCase("labels-with-a-space", "instruct", labels("positive", "negative", "positive "), "spelled differently"),
    SetCase("labels-cut-short", "instruct", labels("positive", "negative", "pos", "neg"), "spelled differently"),
    SetCase(
        "label-with-a-wrong-letter",
        "instruct",
        lines(
            [
                {"instruction": f"Sentiment: {q}", "output": "postive" if at == 2 else ("positive", "negative")[at % 2]}
                for at, (q, _) in enumerate(FACTS)
            ]
        ),
        "'postive' (1)",
    ),
    SetCase(
        "two-labels-for-one-prompt",
        "instruct",
        lines(
            [
                {
                    "instruction": f"Is it spam? {FACTS[at % 10][0]}",
                    "output": ("yes", "no")[at % 2 == 0 if at < 10 else at % 2],
                }
                for at in range(12)
            ]
        ),
        "another label",
        "data.jsonl:11",
    ),
    SetCase("rows-shifted", "instruct", facts(lambda at, a: FACTS[at - 1][1] if at > 1 else a), "1 row earlier"),
    SetCase(
        "rows-shuffled",
        "instruct",
        facts(lambda at, a: FACTS[(5 * at + 1) % 12][1]),
        "a column was shuffled",
        "data.jsonl:1",
    ),
    SetCase(
        "ends-with-a-comma",
        "instruct",
        facts(lambda at, a: "Don Quixote was written by Cervantes in the years before 1605,", only=2),
        "middle of a sentence",
    ),
    SetCase("ends-in-a-word", "instruct", facts(lambda at, a: a[:-20], only=2), "no punctuation mark at their end"),
    SetCase(
        "code-without-its-end",
        "instruct",
        facts(lambda at, a: "Here it is:\n```python\nprint(1)", only=2),
        "block of code",
    ),
    SetCase(
        "chosen-refuses",
        "preference",
        preferred(lambda at, a: REFUSALS[at % 3], right),
        "chosen answer that is empty, refuses",
        "data.jsonl:1",
    ),
    SetCase(
        "one-pair-swapped",
        "preference",
        preferred(lambda at, a: unsure(at, a) if at == 2 else a, lambda at, a: a if at == 2 else unsure(at, a)),
        "look swapped",
    ),
    SetCase(
        "pair-differs-in-case",
        "preference",
        preferred(right, lambda at, a: f"{a.lower()} " if at == 2 else unsure(at, a)),
        "equal chosen and rejected",
    ),
    SetCase(
        "pair-comes-again-exchanged",
        "preference",
        lines(
            [*(pair(at) for at in range(8)), {**pair(2), "chosen": pair(2)["rejected"], "rejected": pair(2)["chosen"]}]
        ),
        "swap the answers of an earlier pair",
        "data.jsonl:9",
    ),
    SetCase(
        "ends-as-others-go-on",
        "completion",
        lines(
            [
                {
                    "prompt": f"Where is box {at}?\n",
                    "completion": f"Box number {at} is on the high shelf." if at != 2 else "Box number 2 is on",
                }
                for at in range(12)
            ]
        ),
        "no punctuation mark at their end",
    ),
    SetCase(
        "chosen-knows-nothing",
        "preference",
        preferred(lambda at, a: f"idk {at}", right),
        "chosen answer that is empty",
        "data.jsonl:1",
    ),
    SetCase(
        "ratings-swapped",
        "preference",
        lines(
            with_one(
                lambda at: {**pair(at), "chosen-rating": 5, "rejected-rating": 1},
                {**pair(2), "chosen-rating": 1, "rejected-rating": 5},
            )
        ),
        "lower score",
    ),
    SetCase(
        "html-entities",
        "instruct",
        facts(lambda at, a: "Tom &amp; Jerry said &quot;no&quot;.", only=2),
        "HTML in the text",
    ),
    SetCase("html-tags", "instruct", facts(lambda at, a: f"<p>{a}</p>"), "HTML in the text", "data.jsonl:1"),
    SetCase(
        "letters-escaped-twice",
        "instruct",
        facts(lambda at, a: "The caf\\u00e9 is open.", only=2),
        "it was escaped twice",
    ),
    SetCase("text-of-a-list", "instruct", facts(lambda at, a: str([a])), "a Python list", "data.jsonl:1"),
    SetCase("copied-from-a-page", "instruct", facts(lambda at, a: f"{a}\nCopy code", only=2), "a button"),
    SetCase(
        "end-token-as-text",
        "completion",
        lines(with_one(completion, {**completion(2), "completion": " Tea.</s> And more"})),
        "marks of a prompt template",
    ),
    SetCase("zero-bytes", "instruct", facts(lambda at, a: f"The\x00 {a}", only=2), "wrong encoding"),
    SetCase(
        "columns-swapped",
        "instruct",
        lines([{"instruction": a, "output": q} for q, a in FACTS]),
        "may be swapped",
        "data.jsonl:1",
    ),
    SetCase(
        "json-cut-off",
        "instruct",
        facts(lambda at, a: json.dumps({"answer": a})[: -9 if at == 2 else None]),
        "cannot be parsed",
    ),
    SetCase(
        "one-prompt-for-all",
        "instruct",
        lines([{"instruction": "Answer.", "output": a} for _, a in FACTS]),
        "the same prompt",
        "data.jsonl:1",
    ),
    SetCase("one-label-for-all", "instruct", labels("positive"), "have the same answer", "data.jsonl:1"),
    SetCase(
        "call-of-an-undeclared-tool",
        "chat",
        lines(with_one(chat, {"messages": [user(2), called({"x": 1}), said(2)], "tools": [TOOL]})),
        "a tool that the record does not declare",
    ),
    SetCase(
        "system-prompt-in-answers",
        "instruct",
        facts(lambda _, text: f"You are the helpful bot of a museum and answer every visitor politely. {text}"),
        "begin with the same text",
        "data.jsonl:1",
    ),
    SetCase(
        "prompts-with-their-answers",
        "instruct",
        lines([{"instruction": f"Question: {q} Answer: {a}", "output": a} for q, a in FACTS]),
        "at the end of their own prompt",
        "data.jsonl:1",
    ),
    SetCase(
        "empty-cells-as-text",
        "instruct",
        facts(lambda at, text: "nan" if at % 4 == 2 else text),
        "empty cells were written as text",
    ),
    SetCase(
        "label-in-the-file-name",
        "instruct",
        lines(
            [
                {
                    "instruction": f"reviews/{('good', 'bad')[at % 2]}/{at}.txt: {x} again",
                    "output": ("good", "bad")[at % 2],
                }
                for at, x in enumerate(TOPICS)
            ]
        ),
        "in their own prompt",
        "data.jsonl:1",
    ),
    # formats and texts of strangers' files
    SetCase("pointer-of-git-lfs", "chat", POINTER, "a pointer of Git LFS", "data.jsonl:1"),
    SetCase("compressed", "chat", gzip.compress(lines([chat(0)])), "compressed (gzip)", "data.jsonl:1"),
    SetCase(
        "record-over-several-lines",
        "instruct",
        "\n".join(json.dumps(alpaca(at), indent=2) for at in range(4)).encode(),
        "spread over several lines",
        "data.jsonl:1",
    ),
    SetCase(
        "two-records-in-a-line",
        "chat",
        lines([chat(0), chat(1), chat(2)])[:-1] + lines([chat(3)]),
        "two records in one line",
    ),
    SetCase(
        "key-twice",
        "instruct",
        lines([alpaca(0), alpaca(1)]) + b'{"instruction": "Name a bird.", "output": "Heron.", "output": "Stork."}\n',
        "the key 'output' has two values",
    ),
    SetCase(
        "half-of-an-emoji",
        "instruct",
        lines([alpaca(0), alpaca(1)]) + b'{"instruction": "Name a bird.", "output": "A heron \\ud83d"}\n',
        "half of a character",
    ),
    SetCase(
        "table-without-header",
        "completion",
        "\n".join(f"{question(at)},{answer(at).replace(',', ';')}" for at in range(4)).encode(),
        "look like data",
        "data.csv:2",
        "data.csv",
    ),
    SetCase(
        "header-twice",
        "completion",
        b"prompt,completion\nname a bird,heron\nprompt,completion\nname a fish,carp\n",
        "the header again",
        "data.csv:3",
        "data.csv",
    ),
    SetCase(
        "loss-switched-off-everywhere",
        "chat",
        lines([{"messages": [user(at), {**said(at), "weight": 0}]} for at in range(4)]),
        "every answer is switched off",
        "data.jsonl:1",
    ),
    SetCase(
        "switch-as-text",
        "chat",
        lines(with_one(chat, {"messages": [user(2), {**said(2), "train": "false"}]})),
        "messages[1].train is the text 'false'",
    ),
    SetCase(
        "rejected-answers",
        "completion",
        lines([{**completion(at), "label": at != 2} for at in range(8)]),
        "the record marks as bad",
    ),
    SetCase(
        "scores-equal",
        "preference",
        lines([{**pair(at), "score_chosen": 8.0, "score_rejected": 8.0 if at == 2 else 3.0} for at in range(8)]),
        "equal scores",
    ),
    SetCase(
        "chosen-is-cut-off",
        "preference",
        preferred(lambda at, a: a[:22] if at == 2 else a, lambda at, a: a if at == 2 else unsure(at, a)),
        "middle of a sentence",
    ),
    *(
        SetCase(
            name,
            "chat",
            tool_calls(lambda at: {"city": "Bern", "days": at}, wrong),
            "do not fit its schema",
            tokenizer={"template": WITH_TOOLS},
        )
        for name, wrong in (
            ("required-argument-missing", {"city": "Bern"}),
            ("argument-of-another-type", {"city": "Bern", "days": "two"}),
        )
    ),
    SetCase(
        "latex-read-as-escapes",
        "instruct",
        facts(lambda at, a: f"{a} So $\x0crac{{1}}{{2}}$.", only=2),
        "LaTeX command",
    ),
    SetCase(
        "colours-of-a-terminal",
        "instruct",
        facts(lambda at, a: f"\x1b[32m{a}\x1b[0m."),
        "control characters",
        "data.jsonl:1",
    ),
    SetCase(
        "invisible-answer", "chat", lines(with_one(chat, {"messages": [user(2), said(2, "\u200b")]})), "empty answer"
    ),
    SetCase("text-of-an-object", "instruct", facts(lambda at, a: "[object Object]", only=2), "a JavaScript object"),
    SetCase("formula-that-failed", "instruct", facts(lambda at, a: "#NAME?", only=2), "a failed formula"),
    SetCase("answer-to-do", "instruct", facts(lambda at, a: "TODO: ask Ann.", only=2), "placeholder"),
    SetCase(
        "code-without-indentation",
        "instruct",
        asked(("Add two.", "```python\ndef add(a):\nreturn a + 2\n```")),
        "lost its indentation",
        "data.jsonl:1",
    ),
    SetCase(
        "another-assistant",
        "instruct",
        facts(lambda at, a: "As you know, I was trained by OpenAI.", only=2),
        "says it is ChatGPT",
    ),
    SetCase(
        "role-name-in-answers",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, "Assistant: Yes.")]})),
        "two templates",
    ),
    SetCase(
        "picture-as-text",
        "instruct",
        lines(with_one(alpaca, {**alpaca(2), "instruction": "<image>\nWhat is this?"})),
        "a placeholder of a picture",
    ),
    SetCase(
        "input-missing",
        "instruct",
        lines(
            [
                {"instruction": "Summarize this.", "input": "" if at == 2 else question(at), "output": answer(at)}
                for at in range(8)
            ]
        ),
        "only the first line of other prompts",
    ),
    SetCase(
        "conversation-written-once-for-each-answer",
        "chat",
        lines(
            [
                {"messages": turns[:end]}
                for at in range(4)
                for turns in [[*chat(at)["messages"], *chat(at + 9)["messages"]]]
                for end in (2, 4)
            ]
        ),
        "the beginning of another conversation",
        "data.jsonl:1",
    ),
    SetCase(
        "history-in-a-user-turn",
        "chat",
        lines(
            with_one(
                chat,
                {
                    "messages": [
                        user(2),
                        said(2),
                        {"role": "user", "content": f"{question(2)}\n{answer(2)}\n{question(5)}"},
                        said(5),
                    ]
                },
            )
        ),
        "contains the turns before it",
    ),
    SetCase(
        "nothing-after-the-thinking",
        "chat",
        lines(with_one(chat, {"messages": [user(2), said(2, "<think>I recall it.</think>\n")]})),
        "nothing after the thinking",
    ),
    SetCase(
        "row-swapped",
        "instruct",
        lines(
            [
                {"instruction": a, "output": q} if at in (2, 7) else {"instruction": q, "output": a}
                for at, (q, a) in enumerate(FACTS)
            ]
        ),
        "they may be swapped",
    ),
)

GOOD: tuple[SetCase, ...] = (
    SetCase(
        "reasons-of-a-label",
        "completion",
        lines([{**completion(at), "completion": f" No, since {answer(at)}", "label": False} for at in range(8)]),
    ),
    SetCase(
        "statements-answered-with-questions",
        "instruct",
        asked(
            ("I have felt sad for days and do not know why it began.", "What happened that day?"),
            ("My dog ran away this morning and nobody has seen it.", "Where did you look?"),
        ),
    ),
    SetCase(
        "python-with-a-docstring",
        "instruct",
        asked(
            (
                "Add two.",
                '```python\ndef add(a):\n    """Add two.\n\n    if it helps:\n    two\n    """\n    return a + 2\n```',
            )
        ),
    ),
    SetCase("math", "instruct", asked(("Half?", r"It is $\frac{1}{2}$, so $\beta < \theta$.\tThat is all."))),
    SetCase(
        "python-of-one-line-bodies",
        "instruct",
        asked(
            ("A loop", "```python\nfor x in y: print(x)\nwhile True:\n    pass\n```"),
            ("A match", "```python\n    if done:\n        break\n```\nIt ends. Note that else: print(1) works, too."),
            ("A dict", "```python\ntable = {\n    'if': 1,\n}\nlambda x:\\\n    x\n```"),
        ),
    ),
    SetCase(
        "answers-of-yes-and-no",
        "instruct",
        lines([{**alpaca(at), "output": "yes" if at % 3 else "no", "label": at % 3 > 0} for at in range(12)]),
    ),
    SetCase(
        "about-assistants", "instruct", asked(("Who made ChatGPT?", "It was made by OpenAI, and I am not ChatGPT."))
    ),
    SetCase(
        "tools",
        "chat",
        tool_calls(lambda at: {"city": "Bern", "days": float(at), "unit": None}),
        tokenizer={"template": WITH_TOOLS},
    ),
    SetCase("longer-rejected", "preference", preferred(right, lambda at, a: f"{a} And so on, for {at} more pages.")),
    SetCase(
        "last-answers-of-conversations",
        "chat",
        lines(
            [
                {"messages": turns[:end]}
                for at in range(4)
                for turns in [[*chat(at)["messages"], *chat(at + 9)["messages"]]]
                for end in (2, 4)
            ]
        ),
        options={"train_on": "last"},
    ),
    SetCase(
        "thinking",
        "chat",
        lines(
            [{"messages": [user(at), said(at, f"<think>\nIt is {at}.\n</think>\n\n{answer(at)}")]} for at in range(8)]
        ),
    ),
    SetCase("question-and-answer-keys", "instruct", bilingual(lambda at: "fr")),
    SetCase("one-language-of-prompts-and-one-of-answers", "instruct", bilingual(lambda at: "en")),
    SetCase("right-sums", "instruct", asked(*SUMS, ("Average?", "(3 + 4) / 2 = 3.5, and 2 + 3 * 4 = 14."))),
    SetCase(
        "secrets-of-the-prompt",
        "instruct",
        asked(("Find the mail: call anna.k7@gmail.com now", "The mail is anna.k7@gmail.com.")),
    ),
    SetCase(
        "strings-and-comments-of-another-script",
        "instruct",
        asked(("怎么打印？", '```python\nprint("你好，世界：")  # 打印（文本）\n```')),
    ),
    SetCase(
        "html-as-the-wanted-answer",
        "instruct",
        asked(
            *((f"An HTML paragraph about {each}", f"<p>\n  All about {each}.\n</p>") for each in TOPICS[:4]),
            ("A card for Ravi with a link", '<div class="card">\n  <a href="/ravi">Ravi</a>\n</div>'),
        ),
    ),
    SetCase(
        "wrong-encoding-repaired-in-the-answer",
        "instruct",
        asked(("Text kaputt: Die TÃ¼r fÃ¼r GÃ¤ste", "Die Tür für Gäste."), ("fr: Ã\xa0 la fÃªte", "à la fête.")),
    ),
    SetCase("texts-of-one-template", "text", pages(lambda at: "Below is an instruction, answer it.", str)),
    SetCase(
        "csv-of-a-german-spreadsheet",
        "completion",
        "\ufeffprompt;completion\r\nname a bird;heron\r\nname two, please;heron, stork\r\n".encode(),
        file="data.csv",
    ),
    SetCase(
        "tsv",
        "completion",
        b"prompt\tcompletion\nname a bird\theron\nname two, please\theron, stork\n",
        file="data.tsv",
    ),
    SetCase(
        "translations-both-ways",
        "instruct",
        lines(
            [
                {"instruction": f"Translate into {to}: {one}", "output": other}
                for en, de in (
                    ("The garden opens on Monday.", "Der Garten öffnet Montag."),
                    ("My brother repairs clocks.", "Mein Bruder repariert Uhren."),
                    ("The river freezes in January.", "Der Fluss gefriert im Januar."),
                    ("Bakers rise before sunrise.", "Bäcker stehen vor Sonnenaufgang auf."),
                )
                for to, one, other in (("German", en, de), ("English", de, en))
            ]
        ),
    ),
    SetCase(
        "wrong-encoding-as-the-task",
        "instruct",
        asked(("Repair the encoding: caf\u00c3\u00a9 cr\u00c3\u00a8me", "caf\u00e9 cr\u00e8me")),
    ),
    SetCase("facts", "instruct", facts()),
    SetCase(
        "html-as-subject",
        "instruct",
        asked(("A paragraph in HTML", "<p>Hello</p>"), ("Escape & in HTML.", "Write &amp; for it.")),
    ),
    SetCase(
        "lists-of-python", "instruct", asked(("A Python list of names", "['Ann', 'Bob']"), ("Sort 3 1 2", "[1, 2, 3]"))
    ),
    SetCase(
        "questions-asked-for",
        "instruct",
        lines([{"instruction": f"Ask a question about {x}.", "output": f"Who likes {x}?"} for x in TOPICS]),
    ),
    SetCase(
        "code",
        "instruct",
        asked(
            ("Greet in Python.", 'def greet(name):\n    return f"Hello {name}"'),
            ("A loop in bash", "for f in *; do\n  echo ${f}\ndone"),
            ("All users in SQL", "SELECT * FROM users"),
            ("What is {name} in an f-string?", "The value of the variable replaces {name}."),
        ),
    ),
    SetCase(
        "poems",
        "instruct",
        asked(
            (
                "A poem on rowing",
                "Row, row, row your boat\nGently down the stream,\nMerrily, merrily, merrily,\nLife is but a dream",
            ),
            ("A poem on the sea", "The tide comes in,\nthe tide goes out,\nand of the\nmoon a memory,"),
        ),
    ),
    SetCase(
        "lists",
        "instruct",
        asked(
            (
                "Three tools",
                "Here are three tools:\n\n- a hammer to drive nails\n- a saw to cut wood\n- a plane to make it smooth",
            ),
            ("Birds", "heron\nfinch\nowl"),
            ("A table", "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"),
        ),
    ),
    SetCase("labels", "instruct", labels("positive", "negative", "neutral")),
    SetCase(
        "labels-that-are-alike",
        "instruct",
        labels("order_status", "refund", "order_cancel", "A-", "A+", "-1", "1", "complete", "incomplete"),
    ),
    SetCase("numbers", "instruct", lines([{"instruction": f"{at} - 5", "output": str(at - 5)} for at in range(12)])),
    SetCase(
        "translations",
        "instruct",
        lines(
            [
                {"instruction": f"Translate: {a}", "output": b}
                for a, b in (
                    ("Good night", "Gute Nacht"),
                    ("Dear {name}, thanks", "Liebe {name}, danke"),
                    ("The cat sleeps on the old red sofa", "Die Katze schläft auf dem alten roten Sofa"),
                )
            ]
            * 1
            + [
                {"instruction": f"Translate: {q}", "output": f"Frage {at}: wer weiß das schon?"}
                for at, (q, _) in enumerate(FACTS)
            ]
        ),
    ),
    SetCase("json-answers", "instruct", facts(lambda at, a: json.dumps({"answer": a, "words": len(a.split())}))),
    SetCase(
        "languages",
        "instruct",
        lines(
            [
                {"instruction": q, "output": a}
                for q, a in (
                    ("什么是茶？", "茶是一种饮料。它来自茶树的叶子。"),
                    ("日本の首都は？", "日本の首都は東京です。"),
                    ("¿Qué es el sol?", "El sol es una estrella. Nos da luz."),
                    ("Что такое снег?", "Снег это замёрзшая вода. Он падает зимой."),
                    ("ما هي الشمس؟", "الشمس نجم. تعطينا الضوء."),
                    ("भारत की राजधानी?", "भारत की राजधानी नई दिल्ली है।"),
                    ("Was ist Brot?", "Brot ist ein Gebäck aus Mehl."),
                    ("Et la mer?", "La mer est une grande étendue d'eau."),
                )
            ]
        ),
    ),
    SetCase(
        "templates-as-subject",
        "instruct",
        asked(
            ("Which prompt format has Alpaca?", "Its sections are `### Instruction:` and `### Response:`."),
            ("What does [INST] mean in a chat template?", "[INST] and [/INST] enclose a turn of the user."),
            ("A template of a letter", "Dear {first_name},\n\nyour invoice {number} is due."),
        ),
    ),
    SetCase(
        "role-play",
        "instruct",
        asked(
            ("You are a pirate.", "Arr, welcome aboard! *raises a mug*"),
            ("A dialogue of a user and an assistant", "Human: Hello!\nAssistant: Hi.\nHuman: A joke?"),
            ("Laugh.", "Mwahahahahahahaha! You thought so?"),
            ("Be a wizard.", "I'm sorry, I did not see you there. Come in, come in..."),
        ),
    ),
    SetCase(
        "letters",
        "instruct",
        asked(
            *(
                (
                    f"A letter about {each}",
                    f"Dear [Name],\n\nplease tell me when we can talk about {each}.\n\nBest regards,\n[Your Name]",
                )
                for each in TOPICS
            )
        ),
    ),
    SetCase(
        "some-refusals",
        "instruct",
        asked(("How do I hack a bank?", REFUSALS[0]), ("Write a phishing mail.", REFUSALS[2])),
    ),
    SetCase(
        "pairs-that-teach-to-refuse",
        "preference",
        lines(
            [
                {
                    "prompt": f"How do I steal {each}?",
                    "chosen": f"I'm sorry, I can't help you steal {each}.",
                    "rejected": f"Take the {each} at night, when all are asleep.",
                }
                for each in TOPICS
            ]
        ),
    ),
    SetCase(
        "prompts-in-a-template-of-their-own",
        "completion",
        lines([{"prompt": f"### Instruction:\n{q}\n\n### Response:\n", "completion": a} for q, a in FACTS]),
    ),
    SetCase(
        "pieces-of-texts",
        "completion",
        lines(
            [
                {
                    "prompt": "I think that " + " ".join(a.split()[:4]).strip("."),
                    "completion": " " + " ".join(a.lower().split()[4:9]),
                }
                for _, a in FACTS
            ]
        ),
    ),
    SetCase(
        "chapters",
        "completion",
        lines(
            [
                {
                    "prompt": f"The hero met {one}. What next?\n",
                    "completion": f"The hero and {one} went on until they saw {other}.",
                }
                for one, other in pairwise(TOPICS)
            ]
        ),
    ),
    SetCase(
        "conversations-of-text", "text", lines([{"text": f"### Human: {q}\n### Assistant: {a}"} for q, a in FACTS])
    ),
    SetCase("answers-without-marks", "instruct", facts(lambda at, a: a.lower().replace(".", ""))),
    SetCase("some-answers-of-one-phrase", "instruct", facts(lambda at, a: a if at % 3 else a.split(".")[0])),
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
