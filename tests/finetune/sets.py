"""Data sets as people write them: broken ones, with a fault from public complaints, and good ones.

Each broken set says what its report must contain, and the place of the record at fault.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
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


BASE64 = base64.b64encode(random.Random(0).randbytes(600)).decode()
BASE64_LINES = "\n".join(BASE64[at : at + 76] for at in range(0, 760, 76))
NAMES_ZH = "这部电影的原名是一个很长的名字，大家都知道。"


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


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(at: int, text: object = None) -> dict[str, Any]:
    return {"role": "user", "content": question(at) if text is None else text}


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


def of_use(use: str) -> Callable[..., SetCase]:
    def make(
        name: str, content: bytes | Callable[[Path], None], *about: str, template: object = CHATML, **more: Any
    ) -> SetCase:
        tokenizer = {} if template == CHATML else {"tokenizer": {"template": template}}
        return SetCase(name, use, content, *about, **tokenizer, **more)

    return make


in_chat, instruct, complete, prefer, plain = map(of_use, ("chat", "instruct", "completion", "preference", "text"))


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


ALL = "data.jsonl:1"
"""The place of a fault that all records have."""


def third(make: Callable[[int], Any], changed: object = None, **fields: object) -> bytes:
    """Good records, of which the third is ``changed``, or has other ``fields``."""
    return lines(with_one(make, {**make(2), **fields} if changed is None else changed))


def third_chat(*messages: dict[str, Any]) -> bytes:
    return third(chat, {"messages": messages})


def third_fact(change: str | Callable[[str], str]) -> bytes:
    return facts(lambda at, a: change if isinstance(change, str) else change(a), only=2)


def many(make: Callable[[int], Any], count: int = 8) -> bytes:
    return lines([make(at) for at in range(count)])


def chats(messages: Callable[[int], list[dict[str, Any]]], count: int = 8) -> bytes:
    return many(lambda at: {"messages": messages(at)}, count)


def outputs(output: Callable[[int], str], count: int = 8) -> bytes:
    return many(lambda at: {**alpaca(at), "output": output(at)}, count)


BROKEN: tuple[SetCase, ...] = (
    # what cannot be read
    in_chat(
        "written-with-str-instead-of-json",
        lines(with_one(chat, chat(2))[:2]) + str(chat(2)).encode() + b"\n" + lines([chat(3)]),
        "json.dumps",
    ),
    in_chat("cut-off-by-a-full-disk", lines([chat(0), chat(1), chat(2)])[:-30], "middle of a record"),
    instruct(
        "latin-1",
        lines([alpaca(0), alpaca(1)]) + '{"instruction": "Übersetze", "output": "schön"}\n'.encode("latin-1"),
        "not UTF-8",
    ),
    instruct("utf-16-from-excel", "\ufeff".encode("utf-16-le") + lines([alpaca(0)]), "UTF-16", ALL),
    in_chat("empty-file", b"", "no records", "data.jsonl"),
    in_chat("a-list-in-a-line", third(chat, [user(0), said(0)]), "list, not an object"),
    instruct(
        "json-list-with-a-comma-missing",
        ("[\n" + json.dumps(alpaca(0)) + ",\n" + json.dumps(alpaca(1))[:-1] + '"x"}\n]').encode(),
        "not JSON",
        "data.json:3",
        "data.json",
    ),
    complete(
        "csv-with-unquoted-commas",
        b"prompt,completion\nname a bird,heron\nname two birds,heron, stork\n",
        "3 fields, the header has 2",
        "data.csv:3",
        "data.csv",
    ),
    complete(
        "parquet-with-a-null",
        parquet(with_one(completion, {"prompt": question(2), "completion": None})),
        "'completion' is null",
        "data.parquet row 2",
        "data.parquet",
    ),
    # layouts
    complete("unknown-keys", many(lambda at: {"ask": question(at), "reply": answer(at)}, 4), "of no known layout", ALL),
    in_chat("misspelt-key", many(lambda at: {"message": chat(at)["messages"]}, 4), "it has 'message'", ALL),
    instruct(
        "answers-of-another-language",
        bilingual(lambda at: "en" if at % 4 == 2 else "fr"),
        "are in another language than their prompt",
        "data.jsonl:3",
    ),
    instruct(
        "api-key",
        asked(("How?", "Call it with api_key = 'sk-wM2MsfG7wzAbcg2CPoZwfFv6MIA1UmCkoBYARYRK'.")),
        "a secret or personal data",
        ALL,
    ),
    instruct(
        "password",
        asked(("I cannot log in.", "Login: greta33 / password: B4R7HdvU7lh! and then wait.")),
        "a secret or personal data",
        ALL,
    ),
    instruct(
        "wrong-sums",
        asked(*SUMS[:2], *((q, a.replace("= ", "= 1")) for q, a in SUMS[2:])),
        "an equation of two numbers whose sides differ",
        "data.jsonl:3",
    ),
    instruct(
        "translated-code",
        asked(("写一个函数。", "```python\n定义 add（a, b)：\n    返回 a + b\n```")),
        "full-width or curly punctuation",
        ALL,
    ),
    plain(
        "boilerplate-of-pages",
        pages(
            lambda at: "Home | News | Contact" if at % 2 else TOPICS[at % len(TOPICS)],
            lambda at: "All rights reserved. Terms of use" if at % 3 else f"Written in {at}",
        ),
        "boilerplate such as the menu",
        "data.jsonl:2",
    ),
    in_chat("alpaca-as-chat", many(alpaca, 4), "set use: instruct", ALL),
    in_chat("mixed-layouts", third(chat, sharegpt(2)), "layout 'sharegpt'"),
    in_chat("messages-as-string", third(chat, {"messages": json.dumps(chat(2)["messages"])}), "json.loads"),
    in_chat("no-messages", third_chat(), "messages is empty"),
    complete(
        "text-prompt-with-a-list-of-messages",
        third(completion, {"prompt": question(2), "completion": [said(2)]}),
        "the other a list",
    ),
    instruct("missing-output", third(alpaca, {"instruction": question(2), "input": ""}), "'output' is missing"),
    instruct("number-as-output", third(alpaca, {"instruction": "2 + 2", "output": 4}), "output is int"),
    prefer(
        "missing-rejected", third(pair, {k: v for k, v in pair(2).items() if k != "rejected"}), "'rejected' is missing"
    ),
    # roles and turns
    in_chat(
        "capital-role", third_chat(user(2), {"role": "Assistant", "content": answer(2)}), "did you mean 'assistant'"
    ),
    in_chat(
        "sharegpt-names-as-roles", third_chat({"role": "human", "content": question(2)}, said(2)), "did you mean 'user'"
    ),
    in_chat(
        "speaker-names",
        third(sharegpt, {"conversations": [{"from": "Alice", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}),
        "role 'Alice'",
    ),
    in_chat("no-content", third_chat(user(2), {"role": "assistant", "content": None}), "no content"),
    in_chat("pictures", third_chat(user(2, [{"type": "image", "url": "a.png"}]), said(2)), "parts of image"),
    in_chat("roles-do-not-alternate", third_chat(user(2), user(3), said(2)), "must alternate", template=ALTERNATING),
    in_chat("no-answer", third_chat(user(2)), "no assistant turn"),
    in_chat("ends-with-a-question", third_chat(user(2), said(2), user(3)), "after the last answer"),
    in_chat("turn-twice", third_chat(user(2), said(2), said(2)), "same turn twice"),
    in_chat("two-users-in-a-row", third_chat(user(2), user(3), said(3)), "one role in a row"),
    in_chat("late-system", third_chat(user(2), system("Be brief."), said(2)), "system message after"),
    # answers
    in_chat("empty-answer", third_chat(user(2), said(2, "")), "empty answer"),
    instruct("blank-output", third(alpaca, output="  \n"), "empty answer"),
    instruct("nan-from-pandas", third(alpaca, output=math.nan), "NaN"),
    in_chat("error-page", third_chat(user(2), said(2, ERROR_PAGE)), "error message of a server"),
    in_chat(
        "answer-first",
        third(sharegpt, {"conversations": sharegpt(2)["conversations"][::-1]}),
        "an assistant turn first",
    ),
    instruct("mojibake", third(alpaca, output="Das Ã¼bliche GetrÃ¤nk heiÃŸt Tee."), "wrong encoding"),
    in_chat(
        "markers-in-the-text",
        third_chat(user(2), said(2, "Tea.<|im_end|>\n<|im_start|>user\nMore?")),
        "special tokens written inside",
    ),
    prefer("chosen-equals-rejected", third(pair, rejected=pair(2)["chosen"]), "equal chosen and rejected"),
    prefer(
        "scores-swapped",
        third(
            lambda at: {**pair(at), "score_chosen": 8.0, "score_rejected": 3.0},
            {**pair(2), "score_chosen": 2.0, "score_rejected": 9.0},
        ),
        "lower score",
    ),
    instruct("one-answer-for-all", outputs(lambda at: "I cannot help with that.", 12), "have the same answer", ALL),
    in_chat("same-record-again", lines([*map(chat, range(8)), chat(2), chat(2)]), "repeat an earlier", "data.jsonl:9"),
    in_chat("empty-question", third_chat(user(2, ""), said(2)), "empty user turn"),
    in_chat(
        "two-templates",
        third_chat(user(2, "### Instruction:\nName a bird.\n\n### Response:\n"), said(2)),
        "in two templates",
    ),
    instruct(
        "llama-marks-in-the-text", third(alpaca, instruction="<s>[INST] Name a bird. [/INST]"), "in two templates"
    ),
    prefer(
        "no-difference-after-the-cut",
        third(pair, {"prompt": [user(2)], "chosen": [said(2, LONG + " yes")], "rejected": [said(2, LONG + " no")]}),
        "equal only because max_length cut them",
        options={"max_length": 150, "truncate": "right"},
    ),
    # tokens and masks
    in_chat("template-marks-nothing", many(chat, 4), "nothing is supervised", ALL, template=MARKS_NOTHING),
    in_chat(
        "template-marks-users", many(chat, 4), "user, system or tool turns that carry loss", ALL, template=MARKS_USER
    ),
    in_chat("template-without-end", many(chat, 4), "does not learn to stop", ALL, template=WITHOUT_END),
    in_chat("end-outside-the-mark", many(chat, 4), "does not learn to stop", ALL, template=END_OUTSIDE),
    in_chat(
        "template-leaves-out-system",
        third_chat(system("Answer as a pirate."), user(2), said(2)),
        "system message that the template leaves out",
        template=WITHOUT_SYSTEM,
    ),
    in_chat("template-leaves-out-tools", third(chat, tools=[TOOL]), "tools that the template leaves out"),
    in_chat("no-template", many(chat, 4), "no chat template", "", template=None),
    in_chat(
        "base-tokenizer-with-chatml",
        many(chat, 4),
        "not single tokens",
        ALL,
        tokenizer={"control": ("<s>", "</s>", "<pad>"), "eos": "</s>"},
    ),
    instruct("unknown-characters", third(alpaca, output="茶をどうぞ"), "unknown token", tokenizer={"unknown": "<unk>"}),
    complete(
        "begin-token-in-the-text",
        third(completion, prompt="<s>" + question(2)),
        "two begin tokens",
        tokenizer={"bos": "<s>", "adds_bos": True},
    ),
    in_chat(
        "template-with-two-begins",
        many(chat, 4),
        "two begin tokens",
        ALL,
        tokenizer={"template": TWO_BEGINS, "bos": "<s>"},
    ),
    in_chat(
        "longer-than-max-length",
        third_chat(user(2, LONG), said(2)),
        "longer than max_length",
        options={"max_length": 200},
    ),
    in_chat(
        "answer-cut-away",
        third_chat(user(2, LONG), said(2)),
        "no token that carries loss",
        options={"max_length": 200, "truncate": "right"},
    ),
    in_chat(
        "answer-cut-short",
        third_chat(user(2), said(2, LONG)),
        "cut off at max_length",
        options={"max_length": 200, "truncate": "right"},
    ),
    in_chat(
        "all-cut-away",
        chats(lambda at: [user(2, f"{at} {LONG}"), said(at)], 4),
        "max_length: 100",
        ALL,
        options={"max_length": 100, "truncate": "right"},
    ),
    complete(
        "space-at-the-end-of-the-prompt",
        third(completion, {"prompt": "the quick brown ", "completion": "fox"}),
        "across the end of the prompt",
    ),
    in_chat(
        "escaped-newlines",
        third_chat(user(2), said(2, "It needs two things:\\n- salt\\n- water.\\nThen stir.")),
        "a backslash and the letter n",
    ),
    complete(
        "answer-repeats-prompt",
        third(completion, {"prompt": "List three old rivers:", "completion": "List three old rivers: Nile, Po, Ob"}),
        "begins with its whole prompt",
    ),
    in_chat(
        "thinking-without-its-end",
        third_chat(user(2), said(2, "<think>The user asks for a bird, so I")),
        "no </think> after it",
    ),
    in_chat("call-with-cut-arguments", third_chat(user(2), called('{"city": "Ber')), "text that is not a JSON object"),
    in_chat(
        "result-for-no-call",
        third_chat(
            user(2), called({"x": 1}, id="a1"), {"role": "tool", "tool_call_id": "b2", "content": "12"}, said(2)
        ),
        "a call that no earlier turn makes",
    ),
    instruct(
        "error-of-an-api",
        third(alpaca, output="Error code: 429 - {'error': {'message': 'Rate limit'}}"),
        "error message of a server",
    ),
    in_chat(
        "answers-cut-at-one-length",
        chats(lambda at: [user(at), said(at, answer(at)[:60])], 24),
        "have exactly 60 characters",
        ALL,
    ),
    # what a set shows
    instruct(
        "refusals", facts(lambda at, a: a if at % 4 == 0 else f"{REFUSALS[at % 3]} ({at})"), "a refusal", "data.jsonl:2"
    ),
    complete(
        "marks-in-a-completion",
        third(completion, completion=" Tea.\n### Instruction:\nMore"),
        "marks of a prompt template",
    ),
    prefer(
        "marks-in-a-preference",
        preferred(lambda at, a: f"[INST] {a}" if at == 2 else a, unsure),
        "marks of a prompt template",
    ),
    plain(
        "words-of-another-template",
        lines([{"text": f"<|human|>{q}<|stop|><|bot|>{a}<|stop|>"} for q, a in FACTS]),
        "not single tokens",
        ALL,
    ),
    instruct(
        "dialogue-goes-on",
        third_fact(lambda a: f"{a}\nHuman: And why?\nAssistant: Nobody knows."),
        "continues with a user turn",
    ),
    instruct("name-not-filled-in", third_fact(lambda a: f"Dear {{name}}, {a}"), "placeholder"),
    in_chat("input-not-filled-in", third_chat(user(2, "Summarize: {{input}}"), said(2)), "placeholder"),
    instruct("insert-not-filled-in", third_fact("It is [INSERT NAME HERE]."), "placeholder"),
    instruct("answer-in-a-loop", third_fact(lambda a: a + " I hope it helps." * 9), "repeats one passage"),
    instruct("loop-without-spaces", third_fact("茶是一种饮料。" * 12), "repeats one passage"),
    instruct("labels-in-two-cases", labels("spam", "ham", "Spam"), "spelled differently"),
    instruct("labels-with-a-space", labels("positive", "negative", "positive "), "spelled differently"),
    instruct("labels-cut-short", labels("positive", "negative", "pos", "neg"), "spelled differently"),
    instruct(
        "label-with-a-wrong-letter",
        lines(
            [
                {"instruction": f"Sentiment: {q}", "output": "postive" if at == 2 else ("positive", "negative")[at % 2]}
                for at, (q, _) in enumerate(FACTS)
            ]
        ),
        "'postive' (1)",
    ),
    instruct(
        "two-labels-for-one-prompt",
        many(
            lambda at: {
                "instruction": f"Is it spam? {FACTS[at % 10][0]}",
                "output": ("yes", "no")[at % 2 == 0 if at < 10 else at % 2],
            },
            12,
        ),
        "another label",
        "data.jsonl:11",
    ),
    instruct("rows-shifted", facts(lambda at, a: FACTS[at - 1][1] if at > 1 else a), "1 row earlier"),
    instruct("rows-shuffled", facts(lambda at, a: FACTS[(5 * at + 1) % 12][1]), "a column was shuffled", ALL),
    instruct(
        "ends-with-a-comma",
        third_fact("Don Quixote was written by Cervantes in the years before 1605,"),
        "middle of a sentence",
    ),
    instruct("ends-in-a-word", third_fact(lambda a: a[:-20]), "no punctuation mark at their end"),
    instruct("code-without-its-end", third_fact("Here it is:\n```python\nprint(1)"), "block of code"),
    prefer(
        "chosen-refuses", preferred(lambda at, a: REFUSALS[at % 3], right), "chosen answer that is empty, refuses", ALL
    ),
    prefer(
        "one-pair-swapped",
        preferred(lambda at, a: unsure(at, a) if at == 2 else a, lambda at, a: a if at == 2 else unsure(at, a)),
        "look swapped",
    ),
    prefer(
        "pair-differs-in-case",
        preferred(right, lambda at, a: f"{a.lower()} " if at == 2 else unsure(at, a)),
        "equal chosen and rejected",
    ),
    prefer(
        "pair-comes-again-exchanged",
        lines(
            [*(pair(at) for at in range(8)), {**pair(2), "chosen": pair(2)["rejected"], "rejected": pair(2)["chosen"]}]
        ),
        "swap the answers of an earlier pair",
        "data.jsonl:9",
    ),
    complete(
        "ends-as-others-go-on",
        many(
            lambda at: {
                "prompt": f"Where is box {at}?\n",
                "completion": f"Box number {at} is on the high shelf." if at != 2 else "Box number 2 is on",
            },
            12,
        ),
        "no punctuation mark at their end",
    ),
    prefer("chosen-knows-nothing", preferred(lambda at, a: f"idk {at}", right), "chosen answer that is empty", ALL),
    prefer(
        "ratings-swapped",
        third(
            lambda at: {**pair(at), "chosen-rating": 5, "rejected-rating": 1},
            {**pair(2), "chosen-rating": 1, "rejected-rating": 5},
        ),
        "lower score",
    ),
    instruct("html-entities", third_fact("Tom &amp; Jerry said &quot;no&quot;."), "HTML in the text"),
    instruct("html-tags", facts(lambda at, a: f"<p>{a}</p>"), "HTML in the text", ALL),
    instruct("letters-escaped-twice", third_fact("The caf\\u00e9 is open."), "it was escaped twice"),
    instruct("text-of-a-list", facts(lambda at, a: str([a])), "a Python list", ALL),
    instruct("copied-from-a-page", third_fact(lambda a: f"{a}\nCopy code"), "a button"),
    complete("end-token-as-text", third(completion, completion=" Tea.</s> And more"), "marks of a prompt template"),
    instruct("zero-bytes", third_fact(lambda a: f"The\x00 {a}"), "wrong encoding"),
    instruct("columns-swapped", lines([{"instruction": a, "output": q} for q, a in FACTS]), "may be swapped", ALL),
    instruct(
        "json-cut-off", facts(lambda at, a: json.dumps({"answer": a})[: -9 if at == 2 else None]), "cannot be parsed"
    ),
    instruct(
        "one-prompt-for-all", lines([{"instruction": "Answer.", "output": a} for _, a in FACTS]), "the same prompt", ALL
    ),
    instruct("one-label-for-all", labels("positive"), "have the same answer", ALL),
    in_chat(
        "call-of-an-undeclared-tool",
        third(chat, {"messages": [user(2), called({"x": 1}), said(2)], "tools": [TOOL]}),
        "a tool that the record does not declare",
    ),
    instruct(
        "system-prompt-in-answers",
        facts(lambda _, text: f"You are the helpful bot of a museum and answer every visitor politely. {text}"),
        "begin with the same text",
        ALL,
    ),
    instruct(
        "prompts-with-their-answers",
        lines([{"instruction": f"Question: {q} Answer: {a}", "output": a} for q, a in FACTS]),
        "at the end of their own prompt",
        ALL,
    ),
    instruct(
        "empty-cells-as-text",
        facts(lambda at, text: "nan" if at % 4 == 2 else text),
        "empty cells were written as text",
    ),
    instruct(
        "label-in-the-file-name",
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
        ALL,
    ),
    # formats and texts of strangers' files
    in_chat("pointer-of-git-lfs", POINTER, "a pointer of Git LFS", ALL),
    in_chat("compressed", gzip.compress(lines([chat(0)])), "compressed (gzip)", ALL),
    instruct(
        "record-over-several-lines",
        "\n".join(json.dumps(alpaca(at), indent=2) for at in range(4)).encode(),
        "spread over several lines",
        ALL,
    ),
    in_chat(
        "two-records-in-a-line", lines([chat(0), chat(1), chat(2)])[:-1] + lines([chat(3)]), "two records in one line"
    ),
    instruct(
        "key-twice",
        lines([alpaca(0), alpaca(1)]) + b'{"instruction": "Name a bird.", "output": "Heron.", "output": "Stork."}\n',
        "the key 'output' has two values",
    ),
    instruct(
        "half-of-an-emoji",
        lines([alpaca(0), alpaca(1)]) + b'{"instruction": "Name a bird.", "output": "A heron \\ud83d"}\n',
        "half of a character",
    ),
    complete(
        "table-without-header",
        "\n".join(f"{question(at)},{answer(at).replace(',', ';')}" for at in range(4)).encode(),
        "look like data",
        "data.csv:2",
        "data.csv",
    ),
    complete(
        "header-twice",
        b"prompt,completion\nname a bird,heron\nprompt,completion\nname a fish,carp\n",
        "the header again",
        "data.csv:3",
        "data.csv",
    ),
    in_chat(
        "loss-switched-off-everywhere",
        chats(lambda at: [user(at), {**said(at), "weight": 0}], 4),
        "4 of 4 records have answers that are switched off",
        ALL,
    ),
    in_chat(
        "switch-as-text", third_chat(user(2), {**said(2), "train": "false"}), "messages[1].train is the text 'false'"
    ),
    complete("rejected-answers", many(lambda at: {**completion(at), "label": at != 2}), "the record marks as bad"),
    prefer(
        "scores-equal",
        many(lambda at: {**pair(at), "score_chosen": 8.0, "score_rejected": 8.0 if at == 2 else 3.0}),
        "equal scores",
    ),
    prefer(
        "chosen-is-cut-off",
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
    instruct("latex-read-as-escapes", third_fact(lambda a: f"{a} So $\x0crac{{1}}{{2}}$."), "LaTeX command"),
    instruct("colours-of-a-terminal", facts(lambda at, a: f"\x1b[32m{a}\x1b[0m."), "control characters", ALL),
    in_chat("invisible-answer", third_chat(user(2), said(2, "\u200b")), "empty answer"),
    instruct("text-of-an-object", third_fact("[object Object]"), "a JavaScript object"),
    instruct("formula-that-failed", third_fact("#NAME?"), "a failed formula"),
    instruct("answer-to-do", third_fact("TODO: ask Ann."), "placeholder"),
    instruct(
        "code-without-indentation",
        asked(("Add two.", "```python\ndef add(a):\nreturn a + 2\n```")),
        "lost its indentation",
        ALL,
    ),
    instruct("another-assistant", third_fact("As you know, I was trained by OpenAI."), "says it is ChatGPT"),
    in_chat("role-name-in-answers", third_chat(user(2), said(2, "Assistant: Yes.")), "two templates"),
    plain(
        "picture-in-a-document",
        third(text, text=f"How a kite is built.\n\n![plan](data:image/png;base64,{BASE64[:300]})\n\nThen fly it."),
        "its bytes in base64",
    ),
    instruct("attachment-as-text", third_fact(f"See the plan:\n{BASE64_LINES}"), "its bytes in base64"),
    instruct(
        "answers-of-another-script",
        facts(lambda at, a: "Это довольно известная история, о которой знают многие." if at in (2, 6, 9) else a),
        "are in another language than their prompt",
    ),
    prefer(
        "quarter-of-pairs-swapped",
        preferred(lambda at, a: unsure(at, a) if at % 4 == 2 else a, lambda at, a: a if at % 4 == 2 else unsure(at, a)),
        "3 of 12 pairs (25.0 %) look swapped",
    ),
    in_chat(
        "arguments-of-all-tools-merged",
        third_chat(user(2), called({"city": "Bern", "days": None, "amount": None, "shop": None}), said(2)),
        "most are null",
    ),
    in_chat(
        "arguments-of-all-tools-merged-against-the-schema",
        tool_calls(
            lambda at: {"city": "Bern", "days": at},
            {"city": "Bern", "days": 2, "amount": None, "shop": None, "day": None},
        ),
        "most are null",
        template=WITH_TOOLS,
    ),
    instruct("picture-as-text", third(alpaca, instruction="<image>\nWhat is this?"), "a placeholder of a picture"),
    instruct(
        "input-missing",
        many(
            lambda at: {
                "instruction": "Summarize this.",
                "input": "" if at == 2 else question(at),
                "output": answer(at),
            }
        ),
        "only the first line of other prompts",
    ),
    in_chat(
        "conversation-written-once-for-each-answer",
        lines(
            [
                {"messages": turns[:end]}
                for at in range(4)
                for turns in [[*chat(at)["messages"], *chat(at + 9)["messages"]]]
                for end in (2, 4)
            ]
        ),
        "the beginning of another conversation",
        ALL,
    ),
    in_chat(
        "history-in-a-user-turn",
        third_chat(user(2), said(2), user(2, f"{question(2)}\n{answer(2)}\n{question(5)}"), said(5)),
        "contains the turns before it",
    ),
    in_chat(
        "nothing-after-the-thinking",
        third_chat(user(2), said(2, "<think>I recall it.</think>\n")),
        "nothing after the thinking",
    ),
    instruct(
        "row-swapped",
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
        "one-follow-up",
        "chat",
        chats(lambda at: [user(at), said(at), user(at, "In one word, please."), said(at, TOPICS[at][::-1])], 20),
    ),
    complete(
        "reasons-of-a-label",
        many(lambda at: {**completion(at), "completion": f" No, since {answer(at)}", "label": False}),
    ),
    instruct(
        "statements-answered-with-questions",
        asked(
            ("I have felt sad for days and do not know why it began.", "What happened that day?"),
            ("My dog ran away this morning and nobody has seen it.", "Where did you look?"),
        ),
    ),
    instruct(
        "python-with-a-docstring",
        asked(
            (
                "Add two.",
                '```python\ndef add(a):\n    """Add two.\n\n    if it helps:\n    two\n    """\n    return a + 2\n```',
            )
        ),
    ),
    instruct("math", asked(("Half?", "It is $\\frac{1}{2}$, so $\\beta < \\theta$.\\tThat is all."))),
    instruct(
        "python-of-one-line-bodies",
        asked(
            ("A loop", "```python\nfor x in y: print(x)\nwhile True:\n    pass\n```"),
            ("A match", "```python\n    if done:\n        break\n```\nIt ends. Note that else: print(1) works, too."),
            ("A dict", "```python\ntable = {\n    'if': 1,\n}\nlambda x:\\\n    x\n```"),
        ),
    ),
    instruct(
        "answers-of-yes-and-no",
        many(lambda at: {**alpaca(at), "output": "yes" if at % 3 else "no", "label": at % 3 > 0}, 12),
    ),
    instruct("about-assistants", asked(("Who made ChatGPT?", "It was made by OpenAI, and I am not ChatGPT."))),
    in_chat("tools", tool_calls(lambda at: {"city": "Bern", "days": float(at), "unit": None}), template=WITH_TOOLS),
    prefer("longer-rejected", preferred(right, lambda at, a: f"{a} And so on, for {at} more pages.")),
    in_chat(
        "last-answers-of-conversations",
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
    in_chat("thinking", chats(lambda at: [user(at), said(at, f"<think>\nIt is {at}.\n</think>\n\n{answer(at)}")])),
    instruct("question-and-answer-keys", bilingual(lambda at: "fr")),
    instruct("one-language-of-prompts-and-one-of-answers", bilingual(lambda at: "en")),
    instruct("right-sums", asked(*SUMS, ("Average?", "(3 + 4) / 2 = 3.5, and 2 + 3 * 4 = 14."))),
    instruct(
        "secrets-of-the-prompt", asked(("Find the mail: call anna.k7@gmail.com now", "The mail is anna.k7@gmail.com."))
    ),
    instruct(
        "strings-and-comments-of-another-script",
        asked(("怎么打印？", '```python\nprint("你好，世界：")  # 打印（文本）\n```')),
    ),
    instruct(
        "html-as-the-wanted-answer",
        asked(
            *((f"An HTML paragraph about {each}", f"<p>\n  All about {each}.\n</p>") for each in TOPICS[:4]),
            ("A card for Ravi with a link", '<div class="card">\n  <a href="/ravi">Ravi</a>\n</div>'),
        ),
    ),
    instruct(
        "wrong-encoding-repaired-in-the-answer",
        asked(("Text kaputt: Die TÃ¼r fÃ¼r GÃ¤ste", "Die Tür für Gäste."), ("fr: Ã\xa0 la fÃªte", "à la fête.")),
    ),
    plain("texts-of-one-template", pages(lambda at: "Below is an instruction, answer it.", str)),
    complete(
        "csv-of-a-german-spreadsheet",
        "\ufeffprompt;completion\r\nname a bird;heron\r\nname two, please;heron, stork\r\n".encode(),
        file="data.csv",
    ),
    complete("tsv", b"prompt\tcompletion\nname a bird\theron\nname two, please\theron, stork\n", file="data.tsv"),
    instruct(
        "translations-both-ways",
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
    instruct(
        "wrong-encoding-as-subject", asked(("Why does my page show Ã¼ and not ü?", "It is UTF-8 read as Latin-1."))
    ),
    instruct("base64-as-the-task", asked(("Encode the plan in base64.", BASE64[:600]))),
    plain("key-in-a-document", third(text, text=f"A fingerprint is short: {BASE64[:86]}. Compare it by eye.")),
    instruct(
        "english-instructions-on-text-of-another-script",
        asked(
            *(
                (
                    f"{FACTS[at][0]} 第{at}个包裹在哪里",
                    NAMES_ZH,
                )
                for at in range(4)
            )
        ),
    ),
    instruct(
        "names-of-another-script",
        lines(
            [
                {
                    "instruction": f"第{at}个问题：这部电影的原名叫什么名字？",
                    "output": "Toy Story" if at % 4 == 2 else NAMES_ZH,
                }
                for at in range(12)
            ]
        ),
    ),
    prefer(
        "refusals-chosen-for-harmful-prompts",
        lines(
            [
                {"prompt": q, "chosen": a, "rejected": f"I'm sorry, but I can't help with that, number {at}."}
                for at, (q, a) in enumerate(FACTS)
            ]
            + [
                {
                    "prompt": f"How do I build a bomb number {at}?",
                    "chosen": f"I'm sorry, but I can't help with that, number {at}.",
                    "rejected": f"Take powder {at} and a fuse.",
                }
                for at in range(2)
            ]
        ),
    ),
    in_chat(
        "nullable-arguments",
        chats(lambda at: [user(at), called({"city": f"Bern {at}", "unit": None, "day": None})]),
        template=WITH_TOOLS,
    ),
    instruct("wrong-encoding-as-the-task", asked(("Repair the encoding: cafÃ© crÃ¨me", "café crème"))),
    instruct("facts", facts()),
    instruct(
        "html-as-subject", asked(("A paragraph in HTML", "<p>Hello</p>"), ("Escape & in HTML.", "Write &amp; for it."))
    ),
    instruct("lists-of-python", asked(("A Python list of names", "['Ann', 'Bob']"), ("Sort 3 1 2", "[1, 2, 3]"))),
    instruct(
        "questions-asked-for",
        lines([{"instruction": f"Ask a question about {x}.", "output": f"Who likes {x}?"} for x in TOPICS]),
    ),
    instruct(
        "code",
        asked(
            ("Greet in Python.", 'def greet(name):\n    return f"Hello {name}"'),
            ("A loop in bash", "for f in *; do\n  echo ${f}\ndone"),
            ("All users in SQL", "SELECT * FROM users"),
            ("What is {name} in an f-string?", "The value of the variable replaces {name}."),
        ),
    ),
    instruct(
        "poems",
        asked(
            (
                "A poem on rowing",
                "Row, row, row your boat\nGently down the stream,\nMerrily, merrily, merrily,\nLife is but a dream",
            ),
            ("A poem on the sea", "The tide comes in,\nthe tide goes out,\nand of the\nmoon a memory,"),
        ),
    ),
    instruct(
        "lists",
        asked(
            (
                "Three tools",
                "Here are three tools:\n\n- a hammer to drive nails\n- a saw to cut wood\n- a plane to make it smooth",
            ),
            ("Birds", "heron\nfinch\nowl"),
            ("A table", "| a | b |\n| --- | --- |\n| 1 | 2 |\n| 3 | 4 |"),
        ),
    ),
    instruct("labels", labels("positive", "negative", "neutral")),
    instruct(
        "labels-that-are-alike",
        labels("order_status", "refund", "order_cancel", "A-", "A+", "-1", "1", "complete", "incomplete"),
    ),
    instruct("numbers", many(lambda at: {"instruction": f"{at} - 5", "output": str(at - 5)}, 12)),
    instruct(
        "translations",
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
    instruct("json-answers", facts(lambda at, a: json.dumps({"answer": a, "words": len(a.split())}))),
    instruct(
        "languages",
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
    instruct(
        "templates-as-subject",
        asked(
            ("Which prompt format has Alpaca?", "Its sections are `### Instruction:` and `### Response:`."),
            ("What does [INST] mean in a chat template?", "[INST] and [/INST] enclose a turn of the user."),
            ("A template of a letter", "Dear {first_name},\n\nyour invoice {number} is due."),
        ),
    ),
    instruct(
        "role-play",
        asked(
            ("You are a pirate.", "Arr, welcome aboard! *raises a mug*"),
            ("A dialogue of a user and an assistant", "Human: Hello!\nAssistant: Hi.\nHuman: A joke?"),
            ("Laugh.", "Mwahahahahahahaha! You thought so?"),
            ("Be a wizard.", "I'm sorry, I did not see you there. Come in, come in..."),
        ),
    ),
    instruct(
        "letters",
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
    instruct("some-refusals", asked(("How do I hack a bank?", REFUSALS[0]), ("Write a phishing mail.", REFUSALS[2]))),
    prefer(
        "pairs-that-teach-to-refuse",
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
    complete(
        "prompts-in-a-template-of-their-own",
        lines([{"prompt": f"### Instruction:\n{q}\n\n### Response:\n", "completion": a} for q, a in FACTS]),
    ),
    complete(
        "pieces-of-texts",
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
    complete(
        "chapters",
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
    plain("conversations-of-text", lines([{"text": f"### Human: {q}\n### Assistant: {a}"} for q, a in FACTS])),
    instruct("answers-without-marks", facts(lambda at, a: a.lower().replace(".", ""))),
    instruct("some-answers-of-one-phrase", facts(lambda at, a: a if at % 3 else a.split(".")[0])),
    in_chat(
        "conversations-with-the-same-last-answer",
        chats(
            lambda at: [
                user(at),
                said(at),
                user(2, "Thank you."),
                said(at, "You are welcome; ask whenever another question comes to your mind."),
            ],
            12,
        ),
    ),
    in_chat(
        "code-with-escapes", third_chat(user(2), said(2, 'print("a.\\n") writes a line, and r"\\n" matches its end.'))
    ),
    in_chat(
        "answers-of-one-length",
        chats(lambda at: [user(at), said(at, f"The box with the number {at:04} is on the shelf.")], 12),
    ),
    in_chat("messages", many(chat, 12)),
    in_chat("sharegpt", many(sharegpt, 12)),
    in_chat("multi-turn", chats(lambda at: [user(at), said(at), user(at + 1), said(at + 5)])),
    in_chat("with-system", chats(lambda at: [system("Be brief."), user(at), said(at)])),
    in_chat("system-key", many(lambda at: {**sharegpt(at), "system": "Be brief."})),
    in_chat("text-parts", chats(lambda at: [user(2, [{"type": "text", "text": question(at)}]), said(at)])),
    in_chat("extra-keys", many(lambda at: {**chat(at), "id": at, "prompt": question(at), "text": "x"})),
    in_chat(
        "roles-renamed",
        chats(lambda at: [user(at), {"role": "bot", "content": answer(at)}]),
        options={"roles": {"bot": "assistant"}},
    ),
    instruct("alpaca", many(alpaca, 12)),
    instruct("alpaca-with-input", many(lambda at: {**alpaca(at), "input": f"Mind the {TOPICS[-at]}."})),
    instruct("alpaca-as-json-list", json.dumps([*map(alpaca, range(8))], indent=2).encode(), file="data.json"),
    instruct(
        "alpaca-csv",
        b"instruction,input,output\n" + "\n".join(f'"{question(at)}",,"{answer(at)}"' for at in range(8)).encode(),
        file="data.csv",
    ),
    in_chat("with-byte-order-mark", b"\xef\xbb\xbf" + lines([*map(chat, range(8))])),
    in_chat("windows-line-ends", lines([*map(chat, range(8))]).replace(b"\n", b"\r\n")),
    in_chat("empty-lines", lines([*map(chat, range(8))]).replace(b"\n", b"\n\n")),
    in_chat("no-newline-at-the-end", lines([*map(chat, range(8))])[:-1]),
    complete("prompt-and-completion", many(completion)),
    complete("completion-of-messages", many(lambda at: {"prompt": [user(at)], "completion": [said(at)]})),
    complete(
        "columns-renamed",
        many(lambda at: {"q": question(at), "a": " " + answer(at)}),
        options={"columns": {"prompt": "q", "completion": "a"}},
    ),
    plain("texts", many(text)),
    complete("begin-token-added", many(completion), tokenizer={"bos": "<s>", "adds_bos": True}),
    in_chat("pad-is-eos", many(chat), tokenizer={"pad": "<|im_end|>"}),
    prefer("preference", many(pair)),
    prefer(
        "preference-with-the-prompt-inside",
        many(lambda at: {"chosen": [user(at), said(at)], "rejected": [user(at), said(at, f"No idea about {at}.")]}),
    ),
    prefer(
        "preference-as-text",
        many(lambda at: {"prompt": question(at), "chosen": " " + answer(at), "rejected": f" No idea about {at}."}),
    ),
    in_chat("parquet", parquet([*map(chat, range(8))]), file="data.parquet"),
    in_chat("saved-by-datasets", saved([*map(chat, range(8))]), file="saved"),
    in_chat(
        "turns-without-loss",
        chats(lambda at: [user(at), {**said(at), "weight": 0}, user(at + 1), {**said(at + 5), "weight": 1}]),
    ),
    instruct("markdown-headings", outputs(lambda at: f"### Birds\n\n{answer(at)}\n\n### Input and output\n\nNone.")),
    instruct("short-answers", outputs(lambda at: "yes" if at % 3 else "no", 12)),
    instruct("umlauts", outputs(lambda at: f"Für Gäste: {at} Brötchen à la carte, naïve Größe €5.")),
    in_chat(
        "cut-by-choice",
        lines([*map(chat, range(8)), {"messages": [user(8), said(8, LONG)]}]),
        options={"max_length": 200, "truncate": "drop"},
    ),
)
assert len({each.name for each in (*BROKEN, *GOOD)}) == len(BROKEN) + len(GOOD)
