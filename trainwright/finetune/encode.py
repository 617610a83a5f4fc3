"""Encodes examples as token ids with the tokens that carry loss.

Shapes: T tokens of a sequence.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trainwright.finetune.chat import CONTROL_WORD, ChatRenderer, Rendered
from trainwright.finetune.defects import Defect
from trainwright.finetune.layouts import NO_LOSS, ROLES, Example, text_of_message
from trainwright.finetune.signs import prose_of, signs_of

if TYPE_CHECKING:
    from trainwright.finetune.tokenizer import Tokenizer

TrainOn: TypeAlias = Literal["assistant", "all", "last"]
Truncate: TypeAlias = Literal["error", "left", "right", "drop"]
ROLE_CODES = {name: code for code, name in enumerate(ROLES, start=1)} | {"text": len(ROLES) + 1}
PLACEHOLDERS = frozenset(("null", "none", "nan", "n/a", "undefined", "<na>", "todo"))
MIN_REPEATED_WORDS = 4
"""Minimum words of a prompt whose repetition is reported. Short prompts such as "Hello" are repeated legitimately."""


class Encoded(NamedTuple):
    """One sequence: ids (T,), which of them carry loss (T,), role codes (T,), message numbers (T,), and its defects."""

    ids: NDArray[np.int32]
    supervised: NDArray[np.bool_]
    roles: NDArray[np.uint8]
    turns: NDArray[np.uint16]
    defects: Defect


@dataclass(frozen=True)
class Encoder:
    """Encodes examples with one tokenizer and one set of options."""

    tokenizer: Tokenizer
    train_on: TrainOn = "assistant"
    max_length: int | None = None
    truncate: Truncate = "error"
    template_args: Mapping[str, Any] | None = None

    @cached_property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer, self.train_on, self.template_args)

    @cached_property
    def _added(self) -> frozenset[int]:
        return frozenset((*self.tokenizer.get_added_vocab().values(), *self.tokenizer.all_special_ids))

    def encode(self, examples: Sequence[Example], rendered: Sequence[Rendered | None]) -> list[Encoded]:
        """Return the sequences of examples in their order, uncut. ``rendered`` has the text of each conversation."""
        texts = [each.text for each in rendered if each is not None]
        chats = iter(self._chats(texts))
        plain = iter(self._plain([each for each, text in zip(examples, rendered, strict=True) if text is None]))
        return [
            self._inspected(example, next(plain) if text is None else self._of_chat(example, text, next(chats)))
            for example, text in zip(examples, rendered, strict=True)
        ]

    def cut(self, found: Encoded) -> Encoded:
        """Return the sequence cut to ``max_length`` at the side that ``truncate`` names; uncut if it names none."""
        if self.max_length is None or len(found.ids) <= self.max_length or self.truncate in ("error", "drop"):
            return found
        kept = slice(None, self.max_length) if self.truncate == "right" else slice(-self.max_length, None)
        defects = found.defects | Defect.TRUNCATED
        lost = found.supervised.copy()
        lost[kept] = False
        if lost.any():
            defects = (defects | Defect.CUT_ANSWER) & ~(Defect.NO_END if self.truncate == "right" else Defect(0))
        if not found.supervised[kept].any():
            defects |= Defect.UNSUPERVISED
        return Encoded(found.ids[kept], found.supervised[kept], found.roles[kept], found.turns[kept], defects)

    def is_too_long(self, found: Encoded) -> bool:
        return self.max_length is not None and len(found.ids) > self.max_length

    def _chats(self, texts: list[str]) -> list[tuple[list[int], NDArray[np.int64]]]:
        if not texts:
            return []
        out = self.tokenizer(texts, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        return [
            (ids, np.array(offsets, dtype=np.int64).reshape(-1, 2))
            for ids, offsets in zip(out["input_ids"], out["offset_mapping"], strict=True)
        ]

    def _of_chat(self, example: Example, text: Rendered, tokens: tuple[list[int], NDArray[np.int64]]) -> Encoded:
        ids, (starts, ends) = np.array(tokens[0], dtype=np.int32), tokens[1].T
        supervised = np.zeros(len(ids), dtype=np.bool_)
        for begin, end in text.spans:
            supervised |= (starts < end) & (ends > begin) & (ends > starts)
        turns = np.minimum(np.searchsorted(text.ends, starts, side="right"), len(text.ends) - 1).astype(np.uint16)
        codes = np.array([ROLE_CODES[each["role"]] for each in example.messages], dtype=np.uint8)
        roles = codes[turns] if len(turns) else np.zeros(0, np.uint8)
        defects = text.defects
        answers_only = self.train_on != "all" and example.prompt_messages is None
        if answers_only and (supervised & (roles != ROLE_CODES["assistant"])).any():
            defects |= Defect.PROMPT_SUPERVISED
        return Encoded(ids, supervised, roles, turns, defects)

    def _plain(self, examples: Sequence[Example]) -> list[Encoded]:
        """Encode texts as the tokenizer does on its own, with its begin token, and with one end token."""
        if not examples:
            return []
        wholes = [self._with_end((each.prompt or "") + each.completion) for each in examples]
        ids_of = self.tokenizer(wholes, verbose=False)["input_ids"]
        prompts = [each.prompt or "" for each in examples]
        prompt_ids = self.tokenizer(prompts, verbose=False)["input_ids"]
        return [
            self._of_text(example, ids, before)
            for example, ids, before in zip(examples, ids_of, prompt_ids, strict=True)
        ]

    def _of_text(self, example: Example, ids: list[int], prompt: list[int]) -> Encoded:
        array, size, defects = np.array(ids, dtype=np.int32), len(ids), Defect(0)
        marks = CONTROL_WORD.findall(prose_of((example.prompt or "") + example.completion))
        if len(marks) > 1 and any(map(self.renderer.is_split, set(marks))):
            defects |= Defect.SPLIT_CONTROL
        if example.prompt is None:
            roles = np.full(size, ROLE_CODES["text"], dtype=np.uint8)
            return Encoded(array, np.ones(size, np.bool_), roles, np.zeros(size, np.uint16), defects)
        if self.tokenizer.chat_template:
            defects |= Defect.PLAIN_TEXT
        if self._adds_end:
            prompt = prompt[:-1]
        shared = next(
            (at for at, (a, b) in enumerate(zip(prompt, ids, strict=False)) if a != b), min(len(prompt), size)
        )
        if shared < len(prompt):
            defects |= Defect.MERGED_BOUNDARY
        is_answer = np.arange(size) >= shared
        roles = np.where(is_answer, ROLE_CODES["assistant"], ROLE_CODES["user"]).astype(np.uint8)
        supervised = np.ones(size, np.bool_) if self.train_on == "all" else is_answer
        return Encoded(array, supervised, roles, is_answer.astype(np.uint16), defects)

    def _with_end(self, text: str) -> str:
        end = self.tokenizer.eos_token
        return text if not end or text.endswith(end) or self._adds_end else text + end

    @cached_property
    def _adds_end(self) -> bool:
        """True if the tokenizer ends every text."""
        ids = self.tokenizer("a", verbose=False)["input_ids"]
        return bool(ids) and ids[-1] == self.tokenizer.eos_token_id

    def _inspected(self, example: Example, found: Encoded) -> Encoded:
        """Return the sequence with the defects that its ids and its content show."""
        defects = found.defects | _content_defects(example)
        ids, tokenizer = found.ids, self.tokenizer
        if not found.supervised.any():
            defects |= Defect.UNSUPERVISED
        elif not self._ends_answer(found):
            defects |= Defect.NO_END
        bos, eos, unknown = tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id
        if bos is not None and len(ids) > 1 and ids[0] == ids[1] == bos:
            defects |= Defect.DOUBLED_BOS
        if eos is not None and eos != bos and len(ids) > 1 and ids[-1] == ids[-2] == eos:
            defects |= Defect.DOUBLED_EOS
        if unknown is not None and unknown not in (bos, eos) and (ids[found.supervised] == unknown).any():
            defects |= Defect.UNKNOWN_TOKEN
        return found._replace(defects=defects)

    def _ends_answer(self, found: Encoded) -> bool:
        """Return True if the last token that carries loss, white space aside, is a special token."""
        for at in np.flatnonzero(found.supervised)[::-1][:4]:
            token = int(found.ids[at])
            if token in self._added:
                return True
            if str(self.tokenizer.decode([token])).strip():
                return False
        return False


def _content_defects(example: Example) -> Defect:
    found, parts = Defect(0), example.content()
    answers = [text for role, text in parts if role in ("assistant", "text")]
    if example.prompt_messages is not None:
        answers = [text_of_message(each) for each in example.messages[example.prompt_messages :]]
    if any(each.strip().lower() in PLACEHOLDERS for each in answers) and "text" not in {role for role, _ in parts}:
        found |= Defect.PLACEHOLDER
    found |= _answer_defects(answers) | _call_defects(example)
    found |= signs_of(parts, answers, has_turns=bool(example.messages))
    if example.is_rejected:
        found |= Defect.REJECTED_ANSWER
    said = [each for each in example.messages if each["role"] == "assistant"]
    if said and all(each.get(NO_LOSS) for each in said):
        found |= Defect.SWITCHED_OFF
    for earlier in zip(parts, parts[1:], parts[2:], strict=False):
        is_next_question = (earlier[1][0], earlier[2][0]) == ("assistant", "user")
        is_inside = all(len(text.split()) >= MIN_REPEATED_WORDS and text in earlier[2][1] for _, text in earlier[:2])
        if is_next_question and is_inside:
            found |= Defect.REPEATED_TURN
    if any(role == "user" and not text.strip() for role, text in parts):
        found |= Defect.EMPTY_PROMPT
    roles = [role for role, _ in parts]
    if answers and example.messages and "assistant" in roles and roles[-1] != "assistant":
        begins = next(role for role in roles if role not in ("system", "developer"))
        found |= Defect.ANSWER_FIRST if begins == "assistant" else Defect.ENDS_WITHOUT_ANSWER
    for (role, text), (following, after) in pairwise(parts):
        if role == following and role != "tool":
            found |= Defect.REPEATED_TURN if text == after else Defect.SAME_ROLE
        is_answered = (role, following) == ("user", "assistant") and len(text.split()) >= MIN_REPEATED_WORDS
        if is_answered and after.strip().startswith(text.strip()):
            found |= Defect.REPEATS_PROMPT
    if any(role == "system" for role in roles[1:]):
        found |= Defect.LATE_SYSTEM
    return found


def _answer_defects(answers: Sequence[str]) -> Defect:
    found = Defect(0)
    if not answers:
        found |= Defect.NO_ANSWER
    if any(map(_is_blank, answers)):
        found |= Defect.EMPTY_ANSWER
    thinking = [each.rpartition("</think>") for each in answers if "<think>" in each]
    if any("<think>" in after or _is_blank(after) for _, _, after in thinking):
        found |= Defect.OPEN_THINKING
    return found


def _is_blank(text: str) -> bool:
    """Return True for a text without a visible character; zero-width ones are not visible."""
    return all(each.isspace() or unicodedata.category(each) in ("Cc", "Cf") for each in text)


def _call_defects(example: Example) -> Defect:
    found, ids = Defect(0), set[object]()
    schemas = [each.get("function", each) for each in example.tools or ()]
    declared = {each.get("name"): each.get("parameters") for each in schemas if isinstance(each, Mapping)}
    for message in example.messages:
        for call in message.get("tool_calls") or ():
            ids.add(call.get("id"))
            function = call.get("function", call)
            arguments = _arguments(function.get("arguments"))
            if declared and function.get("name") not in declared:
                found |= Defect.UNDECLARED_TOOL
            if arguments is None:
                found |= Defect.BROKEN_ARGUMENTS
            elif not _fits(arguments, declared.get(function.get("name"))):
                found |= Defect.AGAINST_SCHEMA
        answered = message.get("tool_call_id")
        if message["role"] == "tool" and answered is not None and None not in ids and answered not in ids:
            found |= Defect.UNKNOWN_CALL
    return found


def _arguments(arguments: object) -> Mapping[str, Any] | None:
    """Return the arguments of a call; None for text that is not a JSON object."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else arguments or {}
    except ValueError:
        return None
    return found if isinstance(found, Mapping) else None


JSON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
}


MIN_NULL_ARGUMENTS = 3


def _fits(arguments: Mapping[str, Any], schema: object) -> bool:
    """Return False if a required argument is missing, or an argument has another type than in the JSON schema.

    Values of null are no arguments: columnar files fill absent ones with them. If most are null and not in the schema,
    the arguments of all tools were merged, and the model learns to write them.
    """
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    present = {name: value for name, value in arguments.items() if value is not None}
    nulls = arguments.keys() - present.keys() - (properties.keys() if isinstance(properties, Mapping) else set())
    if len(nulls) >= max(MIN_NULL_ARGUMENTS, len(present)):
        return False
    if not isinstance(schema, Mapping) or not isinstance(properties, Mapping):
        return True
    required = schema.get("required")
    return all(name in arguments for name in (required if isinstance(required, list) else ())) and all(
        _has_type(value, properties[name].get("type"))
        for name, value in present.items()
        if isinstance(properties.get(name), Mapping)
    )


def _has_type(value: object, name: object) -> bool:
    kinds = JSON_TYPES.get(name) if isinstance(name, str) else None
    if kinds is None or isinstance(value, bool):
        return kinds is None or name == "boolean"
    return isinstance(value, kinds) or (name == "integer" and isinstance(value, float) and value.is_integer())
