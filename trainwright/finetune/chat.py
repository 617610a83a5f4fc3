"""Renders conversations with the chat template of a tokenizer, and finds which characters the model should write.

A template with ``{% generation %}`` marks these characters itself. For any other template, prefixes of the conversation
are rendered: an answer is the text between the prompt for it and the end of its turn. The rendered prompt and turn must
be prefixes of the full text. Otherwise the template rewrites a turn when another turn follows, and the model would
never generate the rewritten text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from trainwright.errors import UsageError, text_of
from trainwright.finetune.defects import Defect
from trainwright.finetune.layouts import NO_LOSS, BadRecord, Example, Message

if TYPE_CHECKING:
    from trainwright.finetune.tokenizer import Tokenizer

GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
CONTROL_WORD = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>")
"""Marks of turns in common templates. Each must be one token."""

NOT_WRITTEN = ("role", "type", "id", "tool_call_id", NO_LOSS)
"""Keys of a message or a call whose values a template need not write."""
LEFT_OUT = {"content": Defect.CONTENT_LEFT_OUT, "tool_calls": Defect.CONTENT_LEFT_OUT}


@dataclass(frozen=True)
class Rendered:
    """A conversation as text.

    Attributes:
        text: The text.
        ends: End of each message in it.
        spans: Begin and end of the text that carries loss.
        defects: Defects of the record that its rendering shows.
    """

    text: str
    ends: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]
    defects: Defect


@dataclass(frozen=True)
class ChatRenderer:
    """Renders examples with a tokenizer's chat template, or with another one."""

    tokenizer: Tokenizer
    train_on: str = "assistant"
    template_args: Mapping[str, Any] | None = None

    def require_template(self) -> None:
        """Raise UsageError for a tokenizer without a chat template."""
        if not self.tokenizer.chat_template:
            raise UsageError(
                "the tokenizer has no chat template, so conversations cannot be written as text",
                remedy="use the tokenizer of an instruct model, or set chat_template: FILE.jinja",
            )

    def marks_answers(self, tools: object = None) -> bool:
        """Return True if the template marks assistant turns by ``{% generation %}``."""
        return bool(GENERATION.search(self._template(tools)))

    def render(self, example: Example) -> Rendered:
        """Return the text of a conversation with its spans. Raises BadRecord if the template rejects it."""
        parsed = self._parsed(example.messages)
        is_parsed = parsed != example.messages
        example = replace(example, messages=parsed)
        messages, tools, args = example.messages, example.tools, example.template_args
        marked = self.marks_answers(tools) and example.prompt_messages is None and self.train_on != "all"
        whole, marks = self._render(messages, tools, args, marks=marked)
        ends, rewritten = self._ends(messages, tools, args, whole, marks)
        defects = self._defects(example, whole) | (Defect.PARSED_ARGUMENTS if is_parsed else Defect(0))
        if self.train_on == "all":
            return Rendered(whole, ends, ((0, len(whole)),), defects)
        if example.prompt_messages is not None:
            begin, clean = self._after_prompt(messages[: example.prompt_messages], tools, args, whole)
            defects |= Defect(0) if clean else Defect.OTHER_PROMPT
            return Rendered(whole, ends, ((begin, len(whole)),), defects)
        answers = [at for at, each in enumerate(messages) if each["role"] == "assistant"]
        if marked:
            spans = list(marks)
            if self.train_on == "last" and answers:
                first = ends[answers[-1] - 1] if answers[-1] else 0
                spans = [(max(begin, first), end) for begin, end in spans if end > first]
            starts = (0, *ends)
            off = [(starts[at], ends[at]) for at in answers if messages[at].get(NO_LOSS)]
            spans = [each for each in spans if not any(begin <= each[0] < end for begin, end in off)]
            return Rendered(whole, ends, tuple(spans), defects)
        spans = []
        for at in answers[-1:] if self.train_on == "last" else answers:
            if messages[at].get(NO_LOSS):
                continue
            if at in rewritten:
                defects |= Defect.REWRITTEN_TURN
                continue
            begin, clean = self._after_prompt(messages[:at], tools, args, whole)
            if begin < (ends[at - 1] if at else 0):  # what comes before the turn is rewritten, too
                defects |= Defect.OTHER_PROMPT
                begin = ends[at - 1]
            elif not clean:
                defects |= Defect.OTHER_PROMPT
            spans.append((begin, ends[at]))
        return Rendered(whole, ends, tuple(spans), defects)

    def _parsed(self, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return messages with the arguments of calls as objects, unless the template needs strings."""
        is_text = any(
            isinstance(each.get("function", each).get("arguments"), str)
            for message in messages
            for each in message.get("tool_calls") or ()
        )
        return messages if not is_text or self._wants_text else tuple(map(_with_objects, messages))

    @cached_property
    def _wants_text(self) -> bool:
        """True if the template writes arguments of a call as JSON only if they are a string already."""
        texts = []
        for arguments in ({"topic": "a"}, '{"topic": "a"}'):
            call = {"id": "call00000", "type": "function", "function": {"name": "probe", "arguments": arguments}}
            answer = {"role": "assistant", "content": "", "tool_calls": [call]}
            try:
                texts.append(self._render([{"role": "user", "content": "Hi"}, answer], None, {})[0])
            except BadRecord:
                texts.append("")
        of_object, of_text = texts
        return "topic" in of_text and ("topic" not in of_object or "'topic':" in of_object)

    def _template(self, tools: object) -> str:
        return str(self.tokenizer.get_chat_template(None, tools))

    def _render(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        args: Mapping[str, Any],
        *,
        prompt: bool = False,
        marks: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        values = {**self.tokenizer.special_tokens_map, **(self.template_args or {}), **args}
        shown = _in_parts(messages) if self._wants_parts else messages
        try:
            texts, spans = render_jinja_template(
                conversations=[[_plain(each) for each in shown]],
                tools=list(tools) if tools else None,
                chat_template=self._template(tools),
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=marks,
                **values,
            )
        except Exception as error:  # the template raises what it likes, jinja2 and Python errors included
            what = text_of(error, lines=1).removeprefix("TemplateError: ")
            remedy = "change the record, or use another chat_template"
            raise BadRecord(f"the chat template rejects it: {what}", remedy) from None
        return texts[0], list(spans[0]) if marks else []

    def _ends(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        args: Mapping[str, Any],
        whole: str,
        marks: Sequence[tuple[int, int]],
    ) -> tuple[tuple[int, ...], set[int]]:
        """Return the end of each message in ``whole``, and the assistant turns that the template rewrites.

        ``marks`` are the spans that the template marks. They determine where a rewritten turn ends.
        """
        ends, rewritten = list[int](), set[int]()
        for at, message in enumerate(messages[:-1]):
            least = ends[-1] if ends else 0
            try:
                part = self._render(messages[: at + 1], tools, args)[0]
            except BadRecord:  # a template may reject a conversation that ends there
                ends.append(_end_of_content(whole, message, least))
                continue
            end, rest = self._shared(part, whole)
            if rest and self._says_something(rest):
                if message["role"] == "assistant":
                    rewritten.add(at)
                end = _end_of_content(whole, message, least)
                if message["role"] == "assistant":
                    end = next((stop for begin, stop in marks if begin >= least), end)
            ends.append(max(end, least))
        return (*ends, len(whole)), rewritten

    def _after_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] | None,
        args: Mapping[str, Any],
        whole: str,
    ) -> tuple[int, bool]:
        """Return the position in ``whole`` after the prompt for an answer, and True if it is the full prompt."""
        if not messages:
            return 0, True
        prompt = self._render(messages, tools, args, prompt=True)[0]
        end, rest = self._shared(prompt, whole)
        return end, not rest

    def _shared(self, part: str, whole: str) -> tuple[int, str]:
        """Return the length of the shared beginning, in whole tokens of ``whole``, and the rest of ``part``."""
        if whole.startswith(part):
            return len(part), ""
        one, other = self._encoded(part), self._encoded(whole)
        count = 0
        for mine, others in zip(one["input_ids"], other["input_ids"], strict=False):
            if mine != others:
                break
            count += 1
        starts, offsets = one["offset_mapping"], other["offset_mapping"]
        end = offsets[count][0] if count < len(offsets) else len(whole)
        return end, part[starts[count][0] :] if count < len(starts) else ""

    def _encoded(self, text: str) -> Any:
        return self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)

    def _says_something(self, text: str) -> bool:
        """Return True if a text has more than special tokens and white space."""
        for token in self._added_tokens:
            text = text.replace(token, "")
        return bool(text.strip())

    @cached_property
    def _added_tokens(self) -> list[str]:
        return sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template writes a content only if it is a list of parts, like templates of models for images."""
        from transformers.utils.chat_template_utils import render_jinja_template

        probe = [{"role": "user", "content": "probed"}]
        shown = []
        for messages in (probe, _in_parts(probe)):
            try:
                values = {**self.tokenizer.special_tokens_map, **(self.template_args or {})}
                texts, _ = render_jinja_template([messages], chat_template=self._template(None), **values)
            except Exception:  # the template raises what it likes
                texts = [""]
            shown.append("probed" in texts[0] and "{" not in texts[0].split("probed")[0])
        return shown == [False, True]

    @cached_property
    def _split_words(self) -> list[str]:
        return [word for word in sorted(set(CONTROL_WORD.findall(self._template(None)))) if self.is_split(word)]

    def is_split(self, word: str) -> bool:
        """Return True if the tokenizer has no single token for a control word."""
        return len(self._encoded(word)["input_ids"]) > 1

    @cached_property
    def _special_tokens(self) -> list[str]:
        return [each for each in self.tokenizer.all_special_tokens if len(each) > 1]

    def _defects(self, example: Example, whole: str) -> Defect:
        found = Defect(0)
        template = self._template(example.tools)
        if any(word in whole for word in self._split_words):
            found |= Defect.SPLIT_CONTROL
        if "strftime_now" in template and _writes_today(whole):
            found |= Defect.DATED
        content = "\n".join(str(message.get("content") or "") for message in example.messages)
        named = self.tokenizer.special_tokens_map.values()
        for token in self._special_tokens:  # others, such as <tool>, end no turn: the user added them for the answers
            count = content.count(token)
            if count and (token in named or token in template or whole.count(token) > count):
                found |= Defect.CONTROL_IN_CONTENT
        # A template may drop the thinking of earlier turns, so only the last turn of each role counts.
        last = {(message["role"], key): value for message in example.messages for key, value in message.items()}
        for (role, key), value in last.items():
            if key not in NOT_WRITTEN and not all(_is_in(each, whole) for each in _texts(value)):
                is_system = role in ("system", "developer")
                found |= LEFT_OUT.get(key, Defect.FIELD_LEFT_OUT) if not is_system else Defect.SYSTEM_LEFT_OUT
        if example.tools:
            names = [str(each.get("function", each).get("name", "")) for each in example.tools]
            if not any(name and name in whole for name in names):
                found |= Defect.TOOLS_LEFT_OUT
        return found


def _end_of_content(whole: str, message: Message, least: int) -> int:
    """Return the end of a message's content in ``whole`` after ``least``; ``least`` if it is not there."""
    content = str(message.get("content") or "").strip()
    for text in (content, content.split("</think>")[-1].strip()):
        if text and (found := whole.find(text, least)) >= 0:
            return found + len(text)
    return least


def _with_objects(message: Message) -> Message:
    """Return a message with arguments of calls parsed, if they are a string with a JSON object."""
    if not message.get("tool_calls"):
        return message
    return {**message, "tool_calls": [_with_object(each) for each in message["tool_calls"]]}


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _with_object(call["function"])}
    try:
        arguments = json.loads(call["arguments"])
    except (KeyError, TypeError, ValueError):
        return dict(call)
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else dict(call)


def _texts(value: object) -> Iterator[str]:
    """Yield the texts and numbers inside of a field of a message, without ids and types."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if key not in NOT_WRITTEN:
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
    elif isinstance(value, str | int | float) and not isinstance(value, bool):
        yield str(value)


def _is_in(text: str, whole: str) -> bool:
    """Return True if the end of ``text`` is in ``whole``, as it is or as JSON; the thinking in it may be left out."""
    end = text.rsplit("</think>", maxsplit=1)[-1].strip()[-200:]
    return any(each in whole for each in (end, json.dumps(end)[1:-1], json.dumps(end, ensure_ascii=False)[1:-1]))


def _plain(message: Message) -> Message:
    return {key: value for key, value in message.items() if value is not None and key != NO_LOSS}


def _in_parts(messages: Sequence[Message]) -> list[Message]:
    return [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if each.get("content") else each
        for each in messages
    ]


def _writes_today(whole: str) -> bool:
    from datetime import datetime

    now = datetime.now().astimezone()
    return any(now.strftime(form) in whole for form in ("%d %b %Y", "%Y-%m-%d", "%d %B %Y", "%B %d, %Y"))
