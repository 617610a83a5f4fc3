"""Recognizes the common layouts of fine-tuning records by their keys, and converts them to examples."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any, Literal, TypeAlias

Use: TypeAlias = Literal["chat", "instruct", "completion", "text", "preference"]
Message: TypeAlias = dict[str, Any]

LAYOUTS: dict[str, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "preference": ("chosen", "rejected"),
    "prompt and completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
    "question and answer": ("question", "answer"),
    "question and response": ("question", "response"),
    "instruction and response": ("instruction", "response"),
    "prompt and response": ("prompt", "response"),
    "query and response": ("query", "response"),
    "input and output": ("input", "output"),
    "text": ("text",),
}
"""The keys that a record of each layout has. Earlier layouts take precedence."""
ASKED = tuple(name for name, keys in LAYOUTS.items() if keys[-1] in ("answer", "response") or keys[0] == "input")
"""Layouts with one key for the question and one for the answer, and perhaps a ``context``."""
USES: dict[Use, tuple[str, ...]] = {
    "chat": ("messages", "sharegpt"),
    "instruct": ("alpaca", *ASKED),
    "completion": ("prompt and completion",),
    "text": ("text",),
    "preference": ("preference",),
}
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the messages layout. ``ROLES.index`` plus 1 is the code of a role; 0 is none."""
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bard", "bing", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function_response", "function"), "tool"),
    "system": "system",
}
LOSS_KEYS = ("weight", "train", "training", "trainable", "loss", "loss_mask")
"""Keys of a message that turn the loss of its answer on or off (0 or false)."""
NO_LOSS = "no_loss"
"""The key of a message whose answer carries no loss. It is removed before the message is rendered."""
MAX_KEY_CHARS = 50
"""Maximum characters of a column name. A longer name is a value in the first row of a table without a header."""
REJECTING_KEYS = ("label", "accepted", "correct", "is_correct", "desirable")
"""Keys of a record whose value false marks its answer as bad. Data for KTO use the first key."""
MAX_LABEL_WORDS = 3
NEGATION = re.compile(r"\W*(?:no|not|false|incorrect|wrong|untrue)\b", re.IGNORECASE)
ALPACA_WITH_INPUT = "{instruction}\n\n{input}"


class BadRecord(Exception):
    """A record that cannot be used: what is wrong, and the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.problem, self.remedy = problem, remedy


@dataclass(frozen=True)
class Example:
    """One sequence to train on: a conversation, or a prompt and its completion.

    Attributes:
        messages: The conversation; empty for plain text.
        tools: Schemas of its tools.
        prompt_messages: Number of messages before the completion; None: every assistant turn is an answer.
        prompt: Plain prompt.
        completion: Plain completion; the full text if ``prompt`` is None.
        template_args: Values for the chat template from the record.
        is_rejected: True if the record marks its answer as a bad one.
    """

    messages: tuple[Message, ...] = ()
    tools: tuple[dict[str, Any], ...] | None = None
    prompt_messages: int | None = None
    prompt: str | None = None
    completion: str = ""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    is_rejected: bool = False

    def content(self) -> list[tuple[str, str]]:
        """Return (role, text) of every part, for comparing examples."""
        if self.messages:
            return [(each["role"], text_of_message(each)) for each in self.messages]
        prompt = [] if self.prompt is None else [("user", self.prompt)]
        return [*prompt, ("assistant" if self.prompt is not None else "text", self.completion)]


@dataclass(frozen=True)
class Pair:
    """A chosen and a rejected example with one prompt. ``scores`` are the record's, if it has any."""

    chosen: Example
    rejected: Example
    scores: tuple[float, float] | None = None


def text_of_message(message: Mapping[str, Any]) -> str:
    """Return the content of a message and its tool calls as JSON."""
    calls = message.get("tool_calls")
    parts = [str(message.get("content") or ""), json.dumps(calls, sort_keys=True) if calls else ""]
    return "\n".join(filter(None, parts))


def layout_of(fields: Mapping[str, Any], use: Use) -> str:
    """Return the layout of a record. Raises BadRecord for keys that the use does not know."""
    present = {name for name, value in fields.items() if value is not None}
    for layout in USES[use]:
        if present.issuperset(LAYOUTS[layout]):
            return layout
    fitting = [layout for layout, keys in LAYOUTS.items() if present.issuperset(keys)]
    others = [each for layout in fitting for each, layouts in USES.items() if layout in layouts]
    keys = " or ".join(" + ".join(LAYOUTS[layout]) for layout in USES[use])
    if others:
        remedy = f"set use: {others[0]} if all records are like this; else convert the file to one layout"
        raise BadRecord(f"the layout {fitting[0]!r} does not fit {use!r}", remedy)
    for layout in USES[use]:
        missing = [key for key in LAYOUTS[layout] if key not in present]
        if len(missing) < len(LAYOUTS[layout]):
            is_null = missing[0] in fields
            raise BadRecord(f"{missing[0]!r} is {'null' if is_null else 'missing'}", "fill it in, or drop the record")
    for key in (key for layout in USES[use] for key in LAYOUTS[layout]):
        if near := get_close_matches(key, [*map(str, fields)], n=1):
            raise BadRecord(f"no key {key!r}, it has {near[0]!r}", f"rename it, or set columns: {{{key}: {near[0]}}}")
    shown = ", ".join(sorted(map(str, fields))) or "none"
    if any(len(str(key)) > MAX_KEY_CHARS for key in fields):
        raise BadRecord(f"its keys ({shown}) look like data", "write the names of the columns above the first row")
    raise BadRecord(f"its keys ({shown}) are of no known layout", f"rename them to {keys}, or set columns")


def example_of(fields: Mapping[str, Any], use: Use, roles: Mapping[str, str]) -> tuple[str, Example | Pair]:
    """Return the layout of a record and its example. Raises BadRecord."""
    layout = layout_of(fields, use)
    found: Example | Pair
    match layout:
        case "messages":
            found = _conversation(fields, fields["messages"], "messages", roles)
        case "sharegpt":
            found = _conversation(fields, fields["conversations"], "conversations", {**SHAREGPT_ROLES, **roles})
        case "alpaca":
            found = _alpaca(fields)
        case _ if layout in ASKED:
            asked, answered = LAYOUTS[layout]
            found = _alpaca(
                {**fields, "instruction": fields[asked], "input": fields.get("context"), "output": fields[answered]},
                (asked, "context", answered),
            )
        case "prompt and completion":
            found = _completion(fields, roles)
        case "text":
            found = Example(completion=_text(fields["text"], "text"))
        case _:
            found = _pair(fields, roles)
    keys = REJECTING_KEYS if layout == "prompt and completion" else REJECTING_KEYS[1:]
    if isinstance(found, Example) and any(fields.get(key) is False for key in keys):
        answer = found.content()[-1][1]  # a short answer, or "No, ...", may state the same as the key
        is_label = len(answer.split()) <= MAX_LABEL_WORDS or NEGATION.match(answer)
        found = replace(found, is_rejected=not is_label)
    return layout, found


def _text(value: object, name: str) -> str:
    if not isinstance(value, str):
        if isinstance(value, float) and value != value:
            raise BadRecord(f"{name} is NaN, an empty cell", "fill it in, or drop the record")
        kind = "null" if value is None else type(value).__name__
        raise BadRecord(f"{name} is {kind}, not text", "write it as a string")
    return value


def _conversation(fields: Mapping[str, Any], value: object, name: str, roles: Mapping[str, str]) -> Example:
    messages = _messages(value, name, roles)
    system = fields.get("system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": _text(system, "system")})
    return Example(tuple(messages), _tools(fields), template_args=_template_args(fields))


def _messages(value: object, name: str, roles: Mapping[str, str]) -> list[Message]:
    if isinstance(value, str):
        raise BadRecord(f"{name} is a string, not a list", "write the list itself, not its text: json.loads first")
    if not isinstance(value, list | tuple):
        raise BadRecord(f"{name} is {type(value).__name__}, not a list", "give a list of messages")
    if not value:
        raise BadRecord(f"{name} is empty", "drop the record")
    return [_message(each, f"{name}[{at}]", roles) for at, each in enumerate(value)]


def _message(value: object, name: str, roles: Mapping[str, str]) -> Message:
    if not isinstance(value, Mapping):
        raise BadRecord(f"{name} is {type(value).__name__}, not an object", "give {role: ..., content: ...}")
    plain = {key: each for key, each in value.items() if each is not None}
    if "role" not in plain and "from" in plain:
        plain = {"role": plain.pop("from"), "content": plain.pop("value", None), **plain}
        roles = {**SHAREGPT_ROLES, **roles}
    if "role" not in plain:
        raise BadRecord(f"{name} has no role, its keys are {', '.join(map(str, value))}", "give role and content")
    role = _role(plain["role"], name, roles)
    for key in LOSS_KEYS:
        if str(plain.get(key)).lower() in ("true", "false", "0", "1") and isinstance(plain[key], str):
            raise BadRecord(
                f"{name}.{key} is the text {plain[key]!r}", "write it without quotes, as a number or a bool"
            )
    switches = {key: plain.pop(key) for key in LOSS_KEYS if isinstance(plain.get(key), bool | int | float)}
    if any(not each for each in switches.values()):
        plain[NO_LOSS] = True
    is_call = plain["role"] == "function_call"
    message = {**plain, "role": role}
    if is_call:
        message |= {"content": "", "tool_calls": _calls_of_text(plain.get("content"), name)}
    elif message.get("tool_calls"):
        _require_calls(message["tool_calls"], name)
        message["content"] = _content(plain.get("content", ""), name)
    elif plain.get("content") is None:
        raise BadRecord(f"{name} has no content", "fill it in, or drop the message")
    else:
        message["content"] = _content(plain["content"], name)
    return {key: each for key, each in message.items() if not (key == "tool_calls" and not each)}


def _role(value: object, name: str, roles: Mapping[str, str]) -> str:
    text = str(value)
    role = roles.get(text, text)
    if role in ROLES:
        return role
    meant = SHAREGPT_ROLES.get(text.lower()) or text.strip().lower()
    if meant not in ROLES:
        meant = next(iter(get_close_matches(meant, ROLES, n=1)), "")
    known = ", ".join(ROLES)
    hint = f"did you mean {meant!r}? rename it, or set roles: {{{text}: {meant}}}" if meant else f"roles are {known}"
    raise BadRecord(f"{name} has the role {text!r}, which no chat template knows", hint)


def _content(value: object, name: str) -> str:
    if isinstance(value, list) and all(isinstance(part, Mapping) for part in value):
        kinds = sorted({str(part.get("type", "text")) for part in value} - {"text"})
        if kinds:
            raise BadRecord(
                f"{name} has parts of {', '.join(kinds)}", "only text can be trained on here; leave them out"
            )
        return "".join(_text(part.get("text"), f"{name}.text") for part in value)
    return _text(value, f"{name}.content")


def _require_calls(calls: object, name: str) -> None:
    if not isinstance(calls, list):
        raise BadRecord(f"{name}.tool_calls is {type(calls).__name__}, not a list", "give a list of calls")
    for call in calls:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise BadRecord(f"{name} calls a tool without a name", "give {function: {name: ..., arguments: {...}}}")


def _calls_of_text(value: object, name: str) -> list[dict[str, Any]]:
    try:
        call = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        call = None
    if not isinstance(call, Mapping) or "name" not in call:
        raise BadRecord(f"{name} is no call of a function", 'give {"name": ..., "arguments": {...}} as JSON')
    return [{"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}}]


def _tools(fields: Mapping[str, Any]) -> tuple[dict[str, Any], ...] | None:
    tools = fields.get("tools")
    if isinstance(tools, str):
        if not tools.strip():
            return None
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise BadRecord(f"tools is not JSON: {error}", "write it with json.dumps") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(each, Mapping) for each in tools):
        raise BadRecord("tools is no list of schemas", "give a list of JSON schemas")
    return tuple(dict(each) for each in tools)


def _template_args(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    found = fields.get("chat_template_kwargs") or {}
    if not isinstance(found, Mapping):
        raise BadRecord("chat_template_kwargs is no object", "give {name: value}")
    return found


def _alpaca(fields: Mapping[str, Any], names: tuple[str, str, str] = ("instruction", "input", "output")) -> Example:
    """Return the example of an Alpaca record. ``names`` are the names of its keys in the file, for error messages."""
    instruction, answer = _text(fields["instruction"], names[0]), _text(fields["output"], names[2])
    context = fields.get("input")
    context = "" if context is None else _text(context, names[1])
    if not instruction.strip() and not context.strip():
        raise BadRecord(f"{names[0]} and {names[1]} are empty", "fill them in, or drop the record")
    question = ALPACA_WITH_INPUT.format(instruction=instruction, input=context) if context.strip() else instruction
    messages: list[Message] = []
    if fields.get("system"):
        messages.append({"role": "system", "content": _text(fields["system"], "system")})
    for turn in fields.get("history") or ():
        if not isinstance(turn, list | tuple) or len(turn) != 2:
            raise BadRecord("history is no list of [instruction, output]", "give pairs")
        messages += [
            {"role": "user", "content": _text(turn[0], "history")},
            {"role": "assistant", "content": _text(turn[1], "history")},
        ]
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return Example(tuple(messages))


def _completion(fields: Mapping[str, Any], roles: Mapping[str, str]) -> Example:
    prompt, completion = fields["prompt"], fields["completion"]
    if isinstance(prompt, str) != isinstance(completion, str):
        remedy = "give both as strings, or both as lists of messages"
        raise BadRecord("one of prompt and completion is text, the other a list of messages", remedy)
    if isinstance(prompt, str):
        return Example(prompt=prompt, completion=_text(completion, "completion"))
    before, after = _messages(prompt, "prompt", roles), _messages(completion, "completion", roles)
    return Example((*before, *after), _tools(fields), len(before), template_args=_template_args(fields))


def _pair(fields: Mapping[str, Any], roles: Mapping[str, str]) -> Pair:
    chosen, rejected, prompt = fields["chosen"], fields["rejected"], fields.get("prompt")
    kinds = {isinstance(each, str) for each in (chosen, rejected)}
    if len(kinds) > 1:
        raise BadRecord("one of chosen and rejected is text, the other a list", "give both in one form")
    scores = _scores(fields)
    if kinds == {True}:
        if prompt is None:
            shared = _shared_turns(chosen, rejected)
            chosen, rejected, prompt = chosen[len(shared) :], rejected[len(shared) :], shared
        if not isinstance(prompt, str):
            raise BadRecord("prompt is a list of messages, chosen is text", "give all in one form")
        texts = Example(prompt=prompt, completion=chosen), Example(prompt=prompt, completion=rejected)
        return Pair(*texts, scores=scores)
    good, bad = _messages(chosen, "chosen", roles), _messages(rejected, "rejected", roles)
    before: list[Message] = []
    if isinstance(prompt, list | tuple):
        before = _messages(prompt, "prompt", roles)
    elif isinstance(prompt, str) and good[0]["role"] == "assistant":
        before = [{"role": "user", "content": prompt}]
    if not before:  # the conversations repeat the prompt
        before = _shared(good, bad)
    count = len(before)
    if not count:
        raise BadRecord("chosen and rejected begin with different messages", "give both the same prompt")
    if not all(each[:count] == before and len(each) > count for each in (good, bad)):
        good, bad = before + good, before + bad
    tools, args = _tools(fields), _template_args(fields)
    one, other = (Example(tuple(each), tools, count, template_args=args) for each in (good, bad))
    return Pair(one, other, scores)


def _shared(good: list[Message], bad: list[Message]) -> list[Message]:
    """Return the messages before the first difference; of equal conversations, all but the last message."""
    limit = min(len(good), len(bad)) - 1
    return good[: next((at for at in range(limit) if good[at] != bad[at]), limit)]


def _shared_turns(chosen: str, rejected: str) -> str:
    r"""Return the common prefix of two texts up to its last turn marker, such as ``\n\nAssistant:``."""
    limit = next((at for at, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
    common = chosen[: min(len(chosen), len(rejected)) if limit is None else limit]
    marks = [each.end() for each in re.finditer(r"\n\n(?:Assistant|Human):", common)]
    return common[: marks[-1]] if marks else ""


def _scores(fields: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return two numbers whose keys contain chosen and rejected, such as ``score_chosen`` or ``rejected-rating``."""
    for key, good in fields.items():
        bad = fields.get(str(key).replace("chosen", "rejected"))
        if (
            "chosen" in str(key)
            and "rank" not in str(key)
            and all(isinstance(each, int | float) for each in (good, bad))
        ):
            return float(good), float(bad)  # type: ignore[arg-type]
    return None
