"""Signs of faults in the texts of records: ``SIGNS`` in single records, ``SET_SIGNS`` across the samples of a set.

Most signs are searched only in prose, because code, JSON and text in backticks may contain them on purpose.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from typing import Literal, NamedTuple, TypeAlias

from trainwright.finetune.defects import Defect
from trainwright.runs.supervision import percent

Span: TypeAlias = tuple[int, int]
Find: TypeAlias = Callable[[str], Span | None]


class Sign(NamedTuple):
    """One sign of a fault in one text.

    Attributes:
        defect: The fault.
        where: Which texts of a record: ``all``, ``said`` (answers and plain texts) or ``answer``.
        find: Returns the span of the sign in a text; None if it has none.
        unless: If a prompt matches this pattern, the sign is not a fault.
        reads: Which part of a text: ``all``, ``unfenced`` (no code blocks) or ``prose`` (no code blocks; "" for code).
    """

    defect: Defect
    where: Literal["all", "said", "answer"]
    find: Find
    unless: re.Pattern[str] | None = None
    reads: Literal["all", "unfenced", "prose"] = "prose"


class SampleTexts(NamedTuple):
    """The texts of a sample: its last prompt, its last answer, and the rejected answer of a pair."""

    prompt: str
    answer: str
    rejected: str = ""
    before: bytes = b""  # The token ids before the last prompt: earlier turns and the system message


class SetSign(NamedTuple):
    """A fault of a set: its name, the unit of the count, the affected samples, a description, a remedy, an excerpt."""

    name: str
    unit: str
    samples: list[int]
    says: str
    remedy: str
    excerpt: str


def _pattern(text: str, flags: int = 0, needs: Sequence[str] = ()) -> Find:
    """Return a function that finds a pattern, or its group ``at``, in texts that contain one of ``needs``."""
    compiled = re.compile(text, flags)

    def find(text: str) -> Span | None:
        if needs and not any(each in text for each in needs):
            return None
        found = compiled.search(text)
        return found.span("at" if "at" in compiled.groupindex else 0) if found else None

    return find


def _about(words: str) -> re.Pattern[str]:
    """Return a pattern that matches any of these words or word beginnings. ``words`` is separated by white space."""
    return re.compile(rf"\b(?:{'|'.join(words.split())})", re.IGNORECASE)


FENCED = re.compile(r"```.*?(?:```|\Z)|`[^`\n]+`", re.DOTALL)
CODE_LINE = re.compile(
    r"^\s*(?:def |class |import |from \w+ import|return\b|#include|public |function |const |let |var |if ?\(|for ?\("
    r"|while ?\(|</?\w+[^>]*>(?:.*>)?$|SELECT |\{\"|\[[\[{\"])|[;{]\s*$|;\s*\}\s*$|^\s*[\]})]+[;,]*$",
    re.MULTILINE,
)
MIN_CODE_LINES = 0.3
"""Minimum fraction of code lines in a text that counts as code."""
LIST_OR_TITLE = re.compile(r"\s*(?:[-*•+|#>]|\d+[.)]|\w[^.]{0,30}:)\s*\S")
VERSE_LINES, VERSE_WORDS = 3, 9.0
"""A text with at least this many lines, and fewer than this many words per line, is a poem or a list."""
MIN_PROSE_WORDS = 6

DANGLING = re.compile(
    r"\b(?:the|an?|and|or|of|from|into|than|because|but|its|their|his|our|your|my|is|are|was|were|which"
    r"|und|oder|der|das|eine|les|des|une|los|las)\Z",
    re.IGNORECASE,
)
"""Words that do not end a sentence."""
LOOP = re.compile(r"(\S.{2,200}?)(?:\s*\1){3,}", re.DOTALL)
MIN_LOOP_CHARS, MIN_LOOP_FRACTION, MAX_LOOP_CHARS_READ = 40, 0.3, 4000
MAX_DISTINCT_RUNS = 0.6
"""Repetition is searched in texts with a smaller fraction of distinct word trigrams. Prose has nearly 1."""


def is_code(text: str) -> bool:
    """Return True if many lines of a text look like code, JSON or markup."""
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and sum(bool(CODE_LINE.search(line)) for line in lines) >= MIN_CODE_LINES * len(lines)


def prose_of(text: str, reads: str = "prose") -> str:
    """Return a text whose code is replaced by spaces, which keeps positions; "" if it is code. See ``Sign.reads``."""
    if reads == "all":
        return text
    if reads == "prose" and is_code(text):
        return ""
    return FENCED.sub(lambda found: " " * len(found[0]), text) if "`" in text else text


def _is_verse_or_list(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return len(lines) >= VERSE_LINES and len(text.split()) < VERSE_WORDS * len(lines)


def _loop(text: str) -> Span | None:
    """Find a phrase that is repeated four times or more in a row, over at least 0.3 of the characters that are read."""
    words = text.split()
    runs = [*zip(words, words[1:], words[2:], strict=False)]
    if 12 * len(words) < len(text):  # a language without spaces
        runs = [*zip(*(text[at:] for at in range(6)), strict=False)]
    if len(text) < MIN_LOOP_CHARS or len(set(runs)) > MAX_DISTINCT_RUNS * len(runs):
        return None
    head = text[:MAX_LOOP_CHARS_READ]
    for found in LOOP.finditer(head):
        size = found.end() - found.start()
        is_long = size >= max(MIN_LOOP_CHARS, MIN_LOOP_FRACTION * len(head.strip()))
        if is_long and re.search(r"[^\W\d_]", found[1]):
            return found.start(), found.end()
    return None


def _mid_sentence(text: str) -> Span | None:
    """Find an end in mid-sentence: a word such as "the", a comma, an open bracket."""
    tail = text.rstrip()
    if not tail or not (tail[-1].isalpha() or tail[-1] in ",(["):
        return None
    last = tail.splitlines()[-1:]
    if len(tail.split()) < MIN_PROSE_WORDS or len(last[0].split()) < 3 or _is_verse_or_list(tail):
        return None
    is_open = tail[-1] in ",([" or DANGLING.search(tail[-12:])
    return (max(0, len(tail) - 30), len(tail)) if is_open else None


def _open_fence(text: str) -> Span | None:
    return (len(text) - 30, len(text)) if text.count("```") % 2 else None


EQUATION = re.compile(
    r"(?P<one>\d[\d,]*(?:\.\d+)?) ?(?P<op>[+\-−–*×/÷]| x ) ?[$€£]?(?P<two>\d[\d,]*(?:\.\d+)?) ?= ?[$€£]?"
    r"(?P<equals>-?\d[\d,]*(?:\.\d+)?)(?![\d%?]| ?[+*/×÷^(−–-])"
)
BEFORE_AN_OPERAND = re.compile(r"[\d.,+\-−–*×/÷^%()√]\s?[$€£]?\Z|\w\Z")
"""Matches the text before an equation if the first number of the equation belongs to a longer expression."""


def _wrong_sum(text: str) -> Span | None:
    """Find an equation of two numbers that does not hold, such as 9 × 25 = 215."""
    for found in EQUATION.finditer(text) if "=" in text else ():
        if BEFORE_AN_OPERAND.search(text[max(0, found.start() - 3) : found.start()]):
            continue
        one, two, equals = (found[name].rstrip(",") for name in ("one", "two", "equals"))
        if not any(_holds(mark(one), mark(two), mark(equals), found["op"].strip()) for mark in _MARKS):
            return found.span()
    return None


def _without_commas(number: str) -> str:
    return number.replace(",", "")


def _decimal_comma(number: str) -> str:
    return number.replace(",", ".") if number.count(",") == 1 and "." not in number else _without_commas(number)


_MARKS = (_without_commas, _decimal_comma)


def _holds(one: str, two: str, equals: str, operator: str) -> bool:
    """Return True if an equation holds, but for rounding."""
    a, b, stated = float(one), float(two), float(equals)
    if operator == "+":
        value = a + b
    elif operator in "-−–":
        value = a - b
    elif operator in "*×x":
        value = a * b
    else:
        value = a / b if b else stated
    if operator in "/÷" and "." not in equals:
        return abs(value - stated) < 1  # rounded in some way
    is_exact = not any("." in each for each in (one, two, equals))
    return abs(value - stated) <= (1e-6 if is_exact else max(0.01 * abs(value), 0.5))


CODE_BLOCK = re.compile(
    r"```(?:python|py|rust|go|java|c|cpp|csharp|javascript|js|typescript|ts|kotlin|swift|scala|ruby)\n(.*?)(?:```|\Z)",
    re.DOTALL | re.IGNORECASE,
)
STRING_OR_COMMENT = re.compile(
    r"\"\"\".*?\"\"\"|\'\'\'.*?\'\'\'|/\*.*?\*/|`[^`]*`|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|//[^\n]*|#[^\n]*",
    re.DOTALL,
)
NOT_OF_CODE = re.compile(r"[（），：；“”‘’]")


def _code_marks(text: str) -> Span | None:
    """Find punctuation that no programming language has, outside of strings and comments of a block of code."""
    for block in CODE_BLOCK.finditer(text) if "```" in text and not text.isascii() else ():
        code = STRING_OR_COMMENT.sub(lambda found: " " * len(found[0]), block[1])
        if found := NOT_OF_CODE.search(code):
            return block.start(1) + found.start(), block.start(1) + found.end()
    return None


PYTHON_BLOCK = re.compile(r"```(?:python|py)\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
UNINDENTED_BODY = re.compile(
    r"^(?P<margin>[ \t]*)(?:def|class|for|while|if|elif|else|try|except|with)\b[^\n]*:[ \t]*(?:#[^\n]*)?\n(?:[ \t]*\n)*"
    r"(?P<at>(?!(?P=margin)[ \t])[ \t]*[\w@][^\n]*)",
    re.MULTILINE,
)


def _lost_indent(text: str) -> Span | None:
    """Find the body of a Python block that is not indented."""
    for block in PYTHON_BLOCK.finditer(text) if "```" in text else ():
        code = STRING_OR_COMMENT.sub(lambda found: " " * len(found[0]), block[1])
        if found := UNINDENTED_BODY.search(code):
            return block.start(1) + found.start("at"), block.start(1) + found.end("at")
    return None


REFUSES = (
    r"(?:can(?:no|['’])?t|can not|(?:am|['’]m|be) (?:un|not )able to|won['’]t|will not|(?:do not|don['’]t) have"
    r"|(?:do not|don['’]t) know|am not (?:able|allowed|programmed)|must decline)"
)
REFUSAL = (
    rf"\A\W*(?:(?:I['’]?m|I am)? ?(?:\w+ )?(?:sorry|apologi[sz]e|afraid)\b.{{0,40}}?\b{REFUSES}|I ?{REFUSES}"
    r"|As an? (?:AI|artificial|\w+ language model)\b)"
)

HARM = _about(
    "bomb weapon gun explosi poison drug meth kill murder suicid self-harm hack malware virus phish steal theft stolen "
    "fraud scam forge counterfeit launder illegal unlawful lock bypass stalk spy harass racis porn sexual"
)
"""Subjects of prompts that are refused with good reason."""
MAX_HARM_FRACTION = 0.2

SIGNS: tuple[Sign, ...] = (
    Sign(
        Defect.MOJIBAKE,  # UTF-8 read as Latin-1 or Windows-1252, replacement characters, zero bytes
        "all",
        _pattern("[\\x00-\\x07\ufffd]|Ã[\u0080-\u00bf]|â€[\u0080-\u00ff™œž˜¦“”\u009d]|Â[\u00a0-\u00bf]|Ã[©¨¤¶¼±³­¡ ]"),
        _about("encod decod mojibake garbled charset"),
        reads="all",
    ),
    Sign(
        Defect.LATEX_LOST,  # a backslash and the letter after it were read as a JSON escape
        "all",
        _pattern(
            "\x0c(?:rac|orall|box)|\x08(?:eta|egin|ar|oldsymbol|inom|oxed|ig)|\t(?:imes|heta|ext[{bi]|frac|riangle)"
            "|\r(?:ight|angle|ho)\\b"
        ),
        reads="all",
    ),
    Sign(
        Defect.CONTROL_CHARACTERS,
        "all",
        _pattern(r"\x1b\[[\d;]*[A-Za-z]|[\x0e-\x1a\x1c-\x1f]"),
        _about("terminal ansi colou?r escap control bash shell"),
        reads="all",
    ),
    Sign(
        Defect.OTHER_ASSISTANT,
        "said",
        _pattern(
            r"\bI(?:['’]m| am) (?:ChatGPT|GPT-[345]|Claude(?! [A-Z])|Gemini|Bard|DeepSeek|Qwen|Copilot)\b"
            r"|\bI(?:['’]m| am| was)\b[^.?!\n]{0,80}\b(?:trained|developed|created|made|built) by "
            r"(?:OpenAI|Anthropic|Google|Meta|DeepSeek|Alibaba|Mistral|Microsoft)\b"
        ),
        _about("ChatGPT OpenAI Claude Anthropic Gemini Bard DeepSeek Qwen Copilot role-?play pretend story dialog"),
    ),
    Sign(
        Defect.MEDIA,
        "all",
        _pattern(r"(?m)^<(?:image|video|audio)>\s*$|<\|(?:image|image_pad|vision_start|audio)\|>"),
        _about("html xml tags? token template"),
        reads="unfenced",
    ),
    Sign(
        Defect.MEDIA,  # the bytes of a picture as base64, in one line or in several; base64 has letters of both cases
        "all",
        _pattern(
            r"data:\w+/[\w.+-]+;base64,[A-Za-z0-9+/]{100}"
            r"|(?<![\w+/])(?=\S{0,60}[a-z])(?=\S{0,60}[A-Z])(?=\S{0,60}\d)"
            r"(?:[A-Za-z0-9+/]{400}|(?:[A-Za-z0-9+/]{60,100}\r?\n){5})"
        ),
        _about("base64 encod decod data.ur[il] certificate"),
        reads="unfenced",
    ),
    Sign(Defect.LOST_INDENT, "said", _lost_indent, reads="all"),
    Sign(
        Defect.SERVER_ERROR,  # the beginning of a page that a server sends instead of an answer
        "said",
        _pattern(
            r"\A\s*(?:<!doctype html[^>]*>\s*)?<html\b.{0,2000}?<title>[^<]*"
            r"(?:\b[45]\d\d\b|error|denied|not found|unavailable)",
            re.IGNORECASE | re.DOTALL,
        ),
        reads="all",
    ),
    Sign(
        Defect.SERVER_ERROR,  # the text that a program stores as the answer if its request to a model server fails
        "said",
        _pattern(
            r"\A\s*(?:Error code: [45]\d\d\b.{0,4000}|\{\s*\"error\"\s*:\s*\{\s*\"message\".{0,4000}"
            r"|(?:[45]\d\d )?(?:Internal Server Error|Bad Gateway|Service Unavailable|Gateway Timeout"
            r"|Too Many Requests)\.?)\s*\Z",
            re.DOTALL,
        ),
        reads="all",
    ),
    Sign(
        Defect.SECRET,  # formats of keys, as documented by their issuers
        "said",
        _pattern(
            r"\b(?:sk-(?:\w+-)?[A-Za-z0-9_-]{24,}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{40,}|AKIA(?!.{9}EXAMPLE)"
            r"[A-Z0-9]{16}|AIza[\w-]{35}|xox[abprs]-[\w-]{20,}|glpat-[\w-]{20}|hf_[A-Za-z]{30,}|[sr]k_live_\w{20,})"
            r"|-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"
        ),
        reads="all",
    ),
    Sign(
        Defect.SECRET,  # a password with letters of both cases and digits; account and card numbers; mail addresses
        "said",
        _pattern(
            r"(?i:\bpass(?:word|wd|code)|\bpwd)\s?[:=]\s*(?=\S*[a-z])(?=\S*[A-Z])(?=\S*\d)\S{8,40}"
            r"|\b[A-Z]{2}\d{2}(?: ?\d{4}){3,6}(?: ?\d{1,3})?\b"
            r"|\b[3-6]\d{3}(?P<gap>[ -])\d{4}(?P=gap)\d{4}(?P=gap)\d{4}\b"
            r"|(?<![\w.+-])(?!(?i:your|user|name|example|test|jo?h?n|jane|info|contact|support|some|any|first|me\b))"
            r"[\w.+-]+@(?:gmail|outlook|hotmail|yahoo|icloud|gmx|web|proton(?:mail)?|aol|qq|163|mail)"
            r"\.(?:com|net|de|fr|me|ru|co\.uk)\b"
        ),
        _about("regex pattern example valid fake dummy invent test fictional random generat strong suggest"),
        reads="unfenced",
    ),
    Sign(Defect.WRONG_SUM, "said", _wrong_sum, _about("binary octal hex modul bits? wrong mistake error incorrect")),
    Sign(Defect.CODE_MARKS, "said", _code_marks, reads="all"),
    Sign(
        Defect.ESCAPED_NEWLINE,  # a backslash and the letter n, between sentences or list items
        "said",
        _pattern(r"(?s)\A(?!.*\n).*?(?P<at>[.!?:]\\n(?:\\n)?)(?=[A-Z0-9*#-]|\Z)", needs=("\\n",)),
        reads="all",
    ),
    Sign(
        Defect.ESCAPED_NEWLINE,
        "said",
        _pattern(r"\w\\u[0-9a-f]{4}|\\u[0-9a-f]{4}\w", needs=("\\u",)),
        _about("unicode escap code json java python regex encod"),
    ),
    Sign(
        Defect.HTML_LEFT,
        "all",
        _pattern(
            r"&(?:amp|lt|gt|quot|nbsp|apos|#x?[0-9a-f]{2,5});|</?(?:p|br|div|span|strong|em|ul|li)\b[^<>]{0,80}>",
            needs="&<",
        ),
        _about(
            r"html css xml web markup tags? code entit escap page svg react java php markdown component button forms?\b"
        ),
        reads="unfenced",
    ),
    Sign(
        Defect.PYTHON_TEXT,
        "said",
        _pattern(
            r"\A\s*[\[{(]\s*(?:'[^']*'|None|True|False)\s*[:,\]})]|\[object Object\]|<[\w.]+ object at 0x\w+>"
            r"|\A\s*#(?:NAME\?|REF!|VALUE!|DIV/0!|N/A|NULL!|NUM!)\s*\Z",
            needs="[{(<#",
        ),
        _about("python code list array dict json function tupl java program excel spreadsheet formula"),
        reads="all",
    ),
    Sign(
        Defect.PAGE_TEXT,
        "said",
        _pattern(
            r"^(?:Copy code|Regenerate response|Share Prompt|\d+ / \d+)$|:contentReference\[|【\d+†|\bturn\d+search\d+",
            re.MULTILINE,
        ),
        reads="all",
    ),
    Sign(
        Defect.OTHER_TEMPLATE,
        "all",
        _pattern(
            r"^### (?:Instruction|Response|Input|Human|Assistant|User):|\[/?INST\]|<</?SYS>>|<\|im_(?:start|end)\|>"
            r"|<\|eot_id\|>|<\|start_header_id\|>|<(?:start|end)_of_turn>|<\|(?:user|assistant|system)\|>|^ASSISTANT: "
            r"|\A(?:Assistant|Bot): "
            r"|(?:</s>|<\|endoftext\|>|<eos>|<pad>|<unk>|\[SEP\]|\[CLS\])(?=\s*\S)",
            re.MULTILINE,
            needs=(
                "### ",
                "INST]",
                "SYS>>",
                "<|",
                "_of_turn>",
                "ASSISTANT: ",
                "Assistant: ",
                "Bot: ",
                "s>",
                "<pad>",
                "<unk>",
                "[SEP]",
                "[CLS]",
            ),
        ),
        _about(r"templates? ChatML special.tokens? prompt.format tokeni[sz] markers? mark.?up delimit"),
    ),
    Sign(
        Defect.CONTINUED_DIALOGUE,
        "answer",
        _pattern(
            r"(?m)\A(?!\s*\**[A-Z][\w ]{0,20}\**:)(?s:.+?)\n\s*"
            r"(?P<at>\**(?:Human|User|HUMAN|USER|Question|Instruction)\**:)"
        ),
        _about("dialog conversation script transcript chat interview role-?play scene FAQ quiz question exam flash"),
    ),
    Sign(
        Defect.UNFILLED,
        "all",
        _pattern(
            r"[\[<](?i:insert|placeholder|todo|fill in)\b[^\]>\n]{0,60}[\]>]|\{\{ ?[A-Za-z_][\w .-]{0,40}\}\}"
            r"|(?<![\w\\$_^}{])\{[a-z_][a-z0-9_]{2,30}\}(?![\w}])|\$\{[A-Za-z_]\w+\}|%\(\w+\)s"
            r"|\A\s*(?:TODO|TBD|FIXME|XXX+|\.{3}|…)(?:\W*\Z|: )|(?i:lorem ipsum dolor)",
            needs=(*"{[<%…", "...", "TODO", "TBD", "FIXME", "XXX", "orem ipsum"),
        ),
        _about(
            r"templat placeholder f-?strings? jinja mustache handlebars python java code variable latex format react\b "
            "html css curly brac interpolat string function json yaml shell bash regex locali translat i18n math "
            "equation syntax to-?do"
        ),
    ),
    Sign(Defect.LOOP, "said", _loop, _about("repeat times copies echo loop chant song lyric")),
    Sign(
        Defect.REFUSAL,
        "answer",
        _pattern(REFUSAL, re.DOTALL),
        HARM,
        reads="all",
    ),
    Sign(Defect.MID_SENTENCE, "answer", _mid_sentence),
    Sign(Defect.MID_SENTENCE, "answer", _open_fence, reads="all"),
)
READS = tuple({sign.reads for sign in SIGNS})
OF_ANSWERS = Defect.LOOP | Defect.REFUSAL | Defect.MID_SENTENCE | Defect.CONTINUED_DIALOGUE
"""Signs of a bad answer. The rejected answer of a pair may have them."""


def signs_of(parts: Sequence[tuple[str, str]], answers: Sequence[str], *, has_turns: bool) -> Defect:
    """Return the faults whose signs are found in a record.

    Args:
        parts: Role and text of each part of the record.
        answers: The texts that carry loss.
        has_turns: True for a record of messages. The template adds the turn markers.
    """
    found = Defect(0)
    is_text = any(role == "text" for role, _ in parts)
    prompt = "\n".join(text for role, text in parts if role in ("system", "developer", "user"))
    context = "\n".join(text for role, text in parts if role not in ("assistant", "text"))
    everything = [text for _, text in parts]
    read = {(text, reads): prose_of(text, reads) for text in {*everything, *answers} for reads in READS}
    goes_on = not has_turns and _goes_on(prompt, "".join(answers))
    for sign in SIGNS:
        if goes_on and sign.defect == Defect.MID_SENTENCE:
            continue
        if is_text and (sign.where == "answer" or sign.defect == Defect.OTHER_TEMPLATE):
            continue  # a text may be a whole conversation
        own_marks = sign.defect == Defect.OTHER_TEMPLATE and not has_turns  # a plain prompt may have turn marks
        texts = everything if sign.where == "all" and not own_marks else answers
        spans = [(text, span) for text in texts if (span := sign.find(read[text, sign.reads]))]
        if sign.defect == Defect.SECRET:  # not if it is quoted from the prompt or a tool
            spans = [(text, span) for text, span in spans if text[slice(*span)] not in context]
        elif sign.defect == Defect.MOJIBAKE:
            spans = [
                (text, span)
                for text, span in spans
                if not _is_repaired(text, [text] if text in answers else [text, *answers])
            ]
        if spans and not (sign.unless and sign.unless.search(prompt)):
            found |= sign.defect
    return found


def _is_repaired(text: str, answers: Sequence[str]) -> bool:
    """Return True if ``answers`` repair a text with the wrong encoding: they contain most of its repaired words."""
    words = [each.strip(".,;:!?()\"'") for each in re.split(r"[ \n\t]+", text) if not each.isascii()]
    right = [repaired for each in words if (repaired := _decoded_again(each)) != each]
    said = " ".join(answers)
    return bool(right) and 2 * sum(each in said for each in right) > len(right)


def _decoded_again(word: str) -> str:
    try:
        return word.encode("cp1252").decode("utf-8")
    except UnicodeError:
        return word


def is_about(defect: Defect, text: SampleTexts) -> bool:
    """Return True if the prompt matches ``unless`` of a sign of ``defect``, and the answer is code or has this sign."""
    signs = [each for each in SIGNS if each.defect == defect and each.unless and each.unless.search(text.prompt)]
    return any(is_code(text.answer) or each.find(text.answer) is not None for each in signs)


def excerpt_of(text: str, defect: Defect, limit: int = 60) -> str:
    """Return an excerpt of a text around a sign; "" if the sign is not found."""
    for sign in SIGNS:
        if sign.defect == defect and (span := sign.find(prose_of(text, sign.reads))):
            return shortened(text[max(0, span[0] - 20) :], limit)
    return ""


def shortened(text: str, limit: int = 60) -> str:
    """Return a text on one line, cut to ``limit`` characters and an ellipsis."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[:limit]}..."


MIN_SAMPLES = 6
"""Minimum number of samples for statistics over a set."""
MIN_USUAL = 3
"""Minimum number of samples for a finding on a property that a single good sample may have."""


MAX_LABEL_WORDS, MAX_LABEL_CHARS = 3, 30
SENTENCES = re.compile(r"[.!?。！？]\s+\S+\s+\S")
MIN_WORDS_WITH_MARK, MIN_MARKED, MIN_USUALLY_MARKED = 8, 0.9, 0.6
"""Minimum words of a long answer, and the fractions of them that count as "nearly all" and as "most"."""
WORD_AT_END = re.compile(r"\w+\Z")
SHORT_FORMS = _about(
    "title headline name slogan list quer(?:y|ies) translat rewrit keyword caption tag paraphras summar poem poetry "
    "haiku verse lyric line"
)
"""Subjects of prompts whose answers need no final punctuation."""


def _unended(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find answers without final punctuation in a set in which nearly all others have it: they may be cut off.

    If only most of them have it, an answer counts only if it has several sentences, ends with a part of a word, or is
    the beginning of another answer.
    """
    prose = {at: prose_of(each.answer).rstrip() for at, each in enumerate(samples) if not _goes_on(*each[:2])}
    ends = {at: text for at, text in prose.items() if len(text.split()) >= MIN_WORDS_WITH_MARK}
    marked = sum(not text[-1].isalnum() or _is_verse_or_list(text) for text in ends.values()) / max(1, len(ends))
    inside = " ".join(f"{each.prompt} {re.sub(WORD_AT_END, '', each.answer.rstrip())}" for each in samples)
    words = sorted(set(re.findall(r"[^\W\d_]+", inside)))
    whole = sorted({_without_numbers(text) for text in prose.values() if text and not text[-1].isalnum()})
    found = list[int]()
    for at, text in prose.items():
        last = text.splitlines()[-1] if text[-1:].isalnum() else ""
        is_short_form = _is_verse_or_list(text) or LIST_OR_TITLE.match(last) or text.istitle()
        if not last or is_short_form or _mid_sentence(text) or SHORT_FORMS.search(samples[at].prompt):
            continue
        is_sentence = marked >= MIN_MARKED and not text[0].islower()
        is_long = at in ends and (is_sentence or SENTENCES.search(text))
        ends_in_word = len(text.split()) > 1 and _is_part(text.split()[-1], words)
        if is_long or ends_in_word or (len(text.split()) > 2 and _is_part(_without_numbers(text), whole)):
            found.append(at)
    if not found or len(ends) < MIN_SAMPLES or marked < MIN_USUALLY_MARKED:
        return None
    says = f"have no punctuation mark at their end, but {percent(marked)} of the longer ones do: they may be cut off"
    remedy = "read some; if they are cut off, generate them again with a higher token limit"
    return SetSign("no_final_mark", "answers", found, says, remedy, prose[found[0]][-40:])


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+", "0", text)


def _is_part(word: str, words: Sequence[str]) -> bool:
    """Return True if ``word`` is the beginning of one of the sorted ``words``, and not one of them itself."""
    at = bisect_left(words, word)
    is_word = at < len(words) and words[at] == word
    return not is_word and at < len(words) and words[at].startswith(word) and len(words[at]) >= len(word) + 2


def _goes_on(prompt: str, answer: str) -> bool:
    """Return True if an answer continues the sentence of its prompt. Such pieces of text may end anywhere."""
    return prompt[-1:].isalnum() and answer.lstrip()[:1].islower()


def _contradictions(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find prompts that occur again with another label, or with chosen and rejected answers swapped."""
    is_pair = any(each.rejected for each in samples)
    if not is_pair and any(len(each.answer.split()) > MAX_LABEL_WORDS for each in samples):
        return None
    first: dict[tuple[bytes, str], SampleTexts] = {}
    found, before = list[int](), ""
    for at, each in enumerate(samples):
        earlier = first.setdefault((each.before, each.prompt.strip()), each)
        other = (earlier.answer, earlier.rejected) == (each.rejected, each.answer)
        if (
            earlier is not each
            and each.prompt.strip()
            and (other if is_pair else _plain_label(earlier.answer) != _plain_label(each.answer))
        ):
            found.append(at)
            before = before or earlier.answer
    if not found:
        return None
    what = "swap the answers of an earlier pair" if is_pair else "have the prompt of an earlier one, but another label"
    excerpt = f"{shortened(samples[found[0]].prompt.strip())} -> {shortened(samples[found[0]].answer)}, before: "
    remedy = "decide which is right, and drop the other"
    return SetSign("contradictions", "samples", found, what, remedy, excerpt + shortened(before))


FIRST_PERSON = re.compile(r"\b(?:I|my|me|we|our)\b")
"""Words of a statement that may be answered with a question."""
MIN_ASKED = 0.8
"""If at least this fraction of the prompts are questions, single rows with swapped columns are searched."""


def _columns_swapped(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find answers that are questions in a set whose prompts are not, or single rows with prompt and answer swapped."""
    found = [at for at, each in enumerate(samples) if each.answer.rstrip()[-1:] in QUESTION_MARKS]
    asks = [each.prompt.rstrip()[-1:] in QUESTION_MARKS or bool(ASKS.search(each.prompt)) for each in samples]
    says = "are questions, but hardly any prompt is: prompts and answers may be swapped"
    if sum(asks) >= MIN_ASKED * len(samples):
        found = [
            at
            for at in found
            if not asks[at]
            and len(samples[at].prompt) > len(samples[at].answer)
            and not FIRST_PERSON.search(samples[at].prompt)
        ]
        says = "are questions, and their prompts are not, unlike nearly all others: they may be swapped"
        if not 2 <= len(found) <= (1 - MIN_ASKED) * len(samples):
            return None
    elif len(found) < 0.6 * len(samples) or sum(asks) > 0.1 * len(samples):
        return None
    remedy = "swap the columns, or the roles"
    return SetSign("swapped_columns", "answers", found, says, remedy, shortened(samples[found[0]].answer))


QUESTION_MARKS = ("?", "？", "؟")
ASKS = _about("questions? ask quiz interview riddle quer(?:y|ies) translat rewrit paraphras")


def _broken_json(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find answers that begin like JSON but are not, in a set in which most answers are JSON."""
    texts = {at: each.answer.strip() for at, each in enumerate(samples)}
    begun = [at for at, text in texts.items() if text.startswith(("{", "["))]
    found = [at for at in begun if not _is_json(texts[at])]
    if not found or len(begun) - len(found) < 0.5 * len(samples):
        return None
    says = "begin like JSON but cannot be parsed; most others are JSON"
    remedy = "generate them again, or drop them: they are cut off or have a wrong quote"
    return SetSign("broken_json", "answers", found, says, remedy, f"...{texts[found[0]][-40:]}")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


MIN_BEGINNING_CHARS = 60
MIN_SAME_BEGINNING_FRACTION = 0.5
"""If at least half of the answers begin with the same 60 characters, a program may have added this text."""


def _same_beginning(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find different answers, at least half of all, that begin with the same long text, such as the system prompt."""
    begins = [each.answer.strip()[:MIN_BEGINNING_CHARS] for each in samples]
    begin, most = Counter(begins).most_common(1)[0]
    found = [at for at, each in enumerate(begins) if each == begin]
    is_short = len(begin) < MIN_BEGINNING_CHARS or begin[0] in "{[<`#"
    is_one_answer = len({samples[at].answer for at in found}) < MIN_SAME_BEGINNING_FRACTION * most
    if (
        is_short
        or is_one_answer
        or most < MIN_SAME_BEGINNING_FRACTION * len(samples)
        or is_code(samples[found[0]].answer)
    ):
        return None
    says = "begin with the same text, which a program may have put there"
    remedy = "look for a system prompt or a header that was joined to the answers"
    return SetSign("same_beginning", "answers", found, says, remedy, begin)


MIN_EMPTY_CELLS, MIN_TYPICAL_WORDS = 3, 4
EMPTY_CELLS = frozenset(("nan", "none", "null", "<na>", "n/a", "undefined"))


def _empty_cells(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find answers such as "nan" in a set whose answers usually are sentences."""
    found = [at for at, each in enumerate(samples) if each.answer.strip().lower() in EMPTY_CELLS]
    words = sorted(len(each.answer.split()) for each in samples)
    if len(found) < MIN_EMPTY_CELLS or words[len(words) // 2] < MIN_TYPICAL_WORDS:
        return None
    says = 'are a word such as "nan" or "None", while the others are sentences: empty cells were written as text'
    return SetSign(
        "empty_cells", "answers", found, says, "drop these records, or fill the cells in", samples[found[0]].answer
    )


MAX_LABELS, MIN_LEAKED, MAX_OTHER_LABELS = 20, 0.95, 0.2
"""Maximum number of labels; minimum fraction of prompts with their own label, maximum fraction with another label."""


def _label_in_prompt(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find labels that nearly every prompt contains, while few prompts contain another label."""
    labels = [_plain_label(each.answer) for each in samples]
    known = set(labels)
    if not 2 <= len(known) <= min(MAX_LABELS, len(samples) // 4) or any(
        not each or len(each.split()) > MAX_LABEL_WORDS for each in known
    ):
        return None
    patterns = {each: re.compile(rf"(?<!\w){re.escape(each)}(?!\w)") for each in known}
    prompts = [_plain_label(each.prompt) for each in samples]
    found = [at for at, label in enumerate(labels) if patterns[label].search(prompts[at])]
    others = sum(
        any(pattern.search(prompt) for each, pattern in patterns.items() if each != label)
        for prompt, label in zip(prompts, labels, strict=True)
    )
    if len(found) < MIN_LEAKED * len(samples) or others > MAX_OTHER_LABELS * len(samples):
        return None
    says = "are in their own prompt, and hardly any other label is: the model learns to copy it"
    remedy = "look for a field, a file name or a tag in the prompt that was made from the label"
    return SetSign("label_in_prompt", "labels", found, says, remedy, shortened(samples[found[0]].prompt))


MIN_ANSWER_CHARS, MIN_ANSWERED = 12, 0.3


def _answer_in_prompt(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find prompts that already end with their answer."""
    texts = [(each.prompt.rstrip(), each.answer.strip()) for each in samples]
    found = [at for at, (prompt, answer) in enumerate(texts) if answer and prompt.endswith(answer)]
    found = [at for at in found if len(texts[at][1]) >= MIN_ANSWER_CHARS]
    if len(found) < max(MIN_SAMPLES, MIN_ANSWERED * len(samples)):
        return None
    says = "are at the end of their own prompt already: the model learns to copy them"
    remedy = "remove the answer from the prompt; look for a column with the full text that was read as the prompt"
    return SetSign("answer_in_prompt", "answers", found, says, remedy, shortened(texts[found[0]][0][-50:]))


def _one_prompt(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find a prompt that most samples have: the wrong column was read."""
    prompts = [(each.before, each.prompt.strip()) for each in samples]
    (before, prompt), most = Counter(prompts).most_common(1)[0]
    if not prompt or most < 0.5 * len(samples) or len({each.answer for each in samples}) < 0.5 * len(samples):
        return None
    found = [at for at, each in enumerate(prompts) if each == (before, prompt)]
    remedy = "check which column is read as the prompt: this prompt does not determine the answer"
    says = "have the same prompt but different answers"
    return SetSign("one_prompt", "samples", found, says, remedy, shortened(prompt))


REFERS = re.compile(
    r"[:：]\Z|\b(?:following|below|this|above|given|texts?|passage|article|sentences?|paragraph)\b", re.IGNORECASE
)
"""Prompts that are about a text."""


def _missing_input(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find prompts that are only the first line of many other prompts: the text below it is missing."""
    begun = Counter(each.prompt.strip().split("\n")[0].strip() for each in samples if "\n" in each.prompt.strip())
    found = [
        at
        for at, each in enumerate(samples)
        if begun[each.prompt.strip()] >= MIN_USUAL and REFERS.search(each.prompt.strip())
    ]
    if not found or len(found) > sum(begun[samples[at].prompt.strip()] for at in found[:1]):
        return None
    says = "have only the first line of other prompts: the text that it is about is missing"
    remedy = "fill in the input, or drop these records: a model learns to invent it"
    return SetSign("missing_input", "prompts", found, says, remedy, shortened(samples[found[0]].prompt.strip()))


def _cut_at_one_length(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find many different answers of the largest length that end in mid-text: a limit has cut them."""
    first = {each.answer.strip(): at for at, each in reversed([*enumerate(samples)])}
    largest = max(map(len, first))
    longest = [text for text in first if len(text) == largest and len(text.split()) >= MIN_PROSE_WORDS]
    in_mid_text = [text for text in longest if text[-1].isalnum() or text[-1] == ","]
    if len(longest) < max(4, 0.1 * len(samples)) or len(in_mid_text) < 0.8 * len(longest):
        return None
    says = f"have exactly {largest} characters, the largest length, and end in mid-text"
    remedy = f"look for a limit of {largest} characters in the generating program, and generate these answers again"
    return SetSign(
        "cut_answers", "answers", sorted(first[text] for text in longest), says, remedy, in_mid_text[-1][-30:]
    )


MAX_LABELS_FRACTION = 0.34
"""Maximum ratio of different answers to samples for which short answers are class labels."""


def _spellings(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find labels that differ only in case, white space or final punctuation, or are cut short or misspelt."""
    labels = [each.answer.strip("\n") for each in samples]
    if all(each.startswith(" ") for each in labels):
        labels = [each[1:] for each in labels]
    short = [len(each.split()) <= MAX_LABEL_WORDS and len(each) <= MAX_LABEL_CHARS for each in labels]
    forms: dict[str, Counter[str]] = defaultdict(Counter)
    for label, is_short in zip(labels, short, strict=True):
        if is_short and label.strip():
            forms[_plain_label(label)][label] += 1
    if sum(short) < 0.95 * len(labels) or len(forms) > max(3, MAX_LABELS_FRACTION * len(labels)):
        return None
    counts = {key: each.total() for key, each in forms.items()}
    groups = [[key] for key in forms if len(forms[key]) > 1]
    for key in sorted(counts, key=counts.__getitem__):
        full = next((other for other in counts if _is_variant(key, other, counts)), None)
        groups += [[full, key]] if full is not None else []
    if not groups:
        return None
    spelled = [Counter[str]() for _ in groups]
    for group, into in zip(groups, spelled, strict=True):
        for key in group:
            into.update(forms[key])
    usual = {into.most_common(1)[0][0] for into in spelled}
    other = {form for into in spelled for form in into} - usual
    shown = "; ".join(", ".join(f"{form!r} ({n:,})" for form, n in into.most_common(4)) for into in spelled[:3])
    found = [at for at, label in enumerate(labels) if label in other]
    says = f"are spelled differently from the same label elsewhere: {shown}"
    remedy = "spell each label in one way: a model learns all spellings, and a metric counts them as different"
    return SetSign("label_spellings", "labels", found, says, remedy, labels[found[0]])


def _plain_label(label: str) -> str:
    return re.sub(r"(?<=\w)[\s_-]+(?=\w)", " ", label.strip().strip(".,;:!\"'`* ").casefold())


def _is_variant(key: str, other: str, counts: dict[str, int]) -> bool:
    """Return True if ``key`` abbreviates the label ``other`` ("pos"), or is a rare misspelling of it ("postive")."""
    if key == other or not key.isalpha() or not other.isalpha() or len(other) < 6:
        return False
    if other.startswith(key):
        return 3 <= len(key) <= 4 and counts[key] <= counts[other]
    is_rare = counts[key] <= max(1, 0.1 * counts[other])
    return is_rare and not other.endswith(key) and not key.endswith(other) and _alike(key, other)


def _alike(one: str, other: str) -> bool:
    return len(one) >= 5 and SequenceMatcher(None, one, other).ratio() >= 0.88


MIN_WORD_CHARS = 4
MAX_OFFSET = 3
TRANSLATES = re.compile(
    r"\btranslat|\b(?:in|into|to|from|the following) (?:English|German|French|Spanish|Italian|Portuguese|Dutch|Polish"
    r"|Russian|Chinese|Japanese|Korean|Arabic|Hindi|Turkish)\b|翻译|übersetz|tradui",
    re.IGNORECASE,
)
MIN_OTHER_ROWS, MIN_RATIO = 5, 2.5
"""Minimum number of answers that fit another prompt better, and minimum ratio of the two scores."""


def _other_rows(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find answers whose rare words occur in the prompt of another row: a column was shifted or shuffled."""
    prompts = [_words(each.prompt) for each in samples]
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, words in enumerate(prompts):
        for word in words:
            rows_of[word].append(row)
    most = max(3, len(samples) // 20)
    better: dict[int, int] = {}
    right = list[int]()
    for row, each in enumerate(samples):
        if TRANSLATES.search(each.prompt):
            continue  # a translation shares words with unrelated prompts
        scores: Counter[int] = Counter()
        for word in _words(each.answer):
            rows = rows_of.get(word, ())
            if len(rows) <= most:
                for at in rows:
                    scores[at] += math.log(len(samples) / len(rows))  # type: ignore[assignment]
        if not scores:
            continue
        best, score = max(scores.items(), key=lambda item: (item[1], -abs(item[0] - row)))
        if scores[row] >= score:
            right.append(row)
        elif score >= max(MIN_RATIO * scores[row], math.log(MIN_SAMPLES / 2)) and (
            each.answer.strip() not in samples[best].prompt  # a later turn may repeat the answer
        ):
            better[row] = best
    offsets = Counter(best - row for row, best in better.items() if abs(best - row) <= MAX_OFFSET)
    offset, shifted = offsets.most_common(1)[0] if offsets else (0, 0)
    begin = min((row for row, best in better.items() if best - row == offset), default=0)
    rows = sorted(row for row in better if row >= begin)
    inside = sum(row >= begin for row in right)
    if shifted >= max(MIN_OTHER_ROWS, 0.6 * len(rows)) and shifted >= 3 * inside:
        says = f"fit the prompt {abs(offset)} row{'s' * (abs(offset) > 1)} {'later' if offset > 0 else 'earlier'}"
        says += ", not their own: a column was shifted"
    elif len(set(better.values())) >= max(MIN_OTHER_ROWS, 0.4 * len(samples)) and len(right) < 0.1 * len(better):
        says, rows = "fit the prompt of another row, not their own: a column was shuffled", sorted(better)
    else:
        return None
    row = rows[0]
    excerpt = f"{shortened(samples[row].prompt.strip())} -> {shortened(samples[row].answer)}"
    return SetSign(
        "other_rows", "answers", rows, says, "look for code that sorts, filters or joins one column only", excerpt
    )


def _words(text: str) -> set[str]:
    return {word for word in re.findall(r"[^\W_]+", text.casefold()) if len(word) >= MIN_WORD_CHARS or word.isdigit()}


MIN_WORSE_FRACTION, MIN_WORSE_RATIO = 0.3, 3


def _chosen_is_worse(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find pairs whose chosen answer refuses, loops or is cut off, in a set whose rejected answers seldom do."""
    sides = [(_is_bad(each.prompt, each.answer), _is_bad(each.prompt, each.rejected)) for each in samples]
    bad, good = [one and not other for one, other in sides], sum(other and not one for one, other in sides)
    found = [at for at, each in enumerate(bad) if each]
    if sum(bool(HARM.search(each.prompt)) for each in samples) > MAX_HARM_FRACTION * len(samples):
        return None  # a set that trains the model to refuse
    if len(found) < max(3, MIN_WORSE_FRACTION * len(samples)) or len(found) < MIN_WORSE_RATIO * good:
        return None
    says = "have a chosen answer that is empty, refuses, repeats itself or is cut off, and a good rejected one"
    remedy = "check whether chosen and rejected are swapped; keep them if you want to train refusals"
    return SetSign("chosen_is_worse", "pairs", found, says, remedy, shortened(samples[found[0]].answer))


KNOWS_NOTHING = re.compile(r"\W*(?:idk|(?:i )?dunno|no idea|not sure|whatever|who (?:cares|knows))\b", re.IGNORECASE)


def _is_bad(prompt: str, answer: str) -> bool:
    found = signs_of([("user", prompt), ("assistant", answer)], [answer], has_turns=False)
    return not answer.strip() or bool(KNOWS_NOTHING.match(answer)) or bool(OF_ANSWERS & found)


MAX_BEGUN_FRACTION = 0.9
"""If more than this fraction of the texts begin with a shared line, it belongs to a prompt template."""
MIN_SHARED_CHARS, MIN_SHARED_FRACTION, MIN_BOILERPLATE_FRACTION = 12, 0.08, 0.1
"""Minimum characters of a shared line, fraction of texts that have it, fraction of texts that begin or end with one."""


def _boilerplate(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find texts that begin or end with lines of other texts, such as the menu of a web page."""
    texts = [[line.strip() for line in each.answer.splitlines() if line.strip()] for each in samples]
    once = [[line for line, count in Counter(lines).items() if count == 1] for lines in texts]  # without refrains
    counts = Counter(line for lines in once for line in lines if len(line) >= MIN_SHARED_CHARS and " " in line)
    least = max(MIN_SAMPLES - 1, MIN_SHARED_FRACTION * len(samples))
    shared = {line for line, count in counts.items() if count >= least}
    paged = [at for at, each in enumerate(samples) if len(texts[at]) > 1 and not _is_verse_or_list(each.answer)]
    begun = [at for at in paged if texts[at][0] in shared]
    is_template = len(begun) > MAX_BEGUN_FRACTION * len(samples)
    found = [at for at in paged if texts[at][-1] in shared or (texts[at][0] in shared and not is_template)]
    if len(shared) < 2 or len(found) < MIN_BOILERPLATE_FRACTION * len(samples):
        return None
    lines = texts[found[0]]
    says = "begin or end with the same lines as many others: boilerplate such as the menu or the footer of a web page"
    remedy = "remove these lines: the model sees each of them once for every text that has it"
    shown = lines[0] if lines[0] in shared else lines[-1]
    return SetSign("boilerplate", "texts", found, says, remedy, shortened(shown))


MAX_FUNCTION_WORD_CHARS, MAX_FUNCTION_WORDS, MIN_WORD_TEXTS = 4, 80, 0.02
MIN_FUNCTION_WORDS, MAX_ROUNDS, MIN_MARGIN = 4, 3, 0.7
MIN_PURE, MIN_PURITY, MIN_MARKS_OF_LANGUAGE = 0.9, 0.8, 2
"""Minimum fraction of the texts that are in one language, minimum fraction of the frequent short words of such a text
that belong to its language, and minimum number of these words in a text."""
MIN_SAME_LANGUAGE = 0.6


def _other_language(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find answers in another language than their prompt, if most answers have the language of their prompt."""
    texts = [prose_of(text) for each in samples for text in each[:2]]
    for language in (_scripts(texts), _languages(texts)):
        both = [at for at in range(len(samples)) if 2 * at in language and 2 * at + 1 in language]
        found = [at for at in both if language[2 * at] != language[2 * at + 1]]
        same = [at for at in both if at not in set(found)]
        if len(same) < MIN_SAME_LANGUAGE * len(both) or len(both) < 0.5 * len(samples):
            continue
        asked = [
            Counter(word for at in each for word in set(samples[at].prompt.casefold().split()))
            for each in (found, same)
        ]
        is_asked = any(n > 0.4 * len(found) and asked[1][word] < 0.1 * len(same) for word, n in asked[0].items())
        found = [at for at in found if not TRANSLATES.search(samples[at].prompt)]
        if is_asked or len(found) < MIN_USUAL:
            continue
        says = "are in another language than their prompt, and most answers are in the same"
        prompt, answer = (shortened(text.strip(), 40) for text in samples[found[0]][:2])
        remedy = "look for a translation that failed or was left out; drop these records, or answer them again"
        return SetSign("other_language", "answers", found, says, remedy, f"{prompt} -> {answer}")
    return None


EAST_ASIAN = frozenset(("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "IDEOGRAPHIC"))
MIN_PROMPT_LETTERS, MIN_EAST_ASIAN_LETTERS, MIN_ALPHABET_LETTERS, MAX_SCRIPT_CHARS_READ = 6, 10, 20, 400
"""Minimum letters of a prompt, and of an answer, in one script. A shorter answer may be a name."""
MIN_SCRIPT_FRACTION, MIN_LATIN_FRACTION = 0.5, 0.95
"""Minimum fraction of letters in that script. Other scripts contain Latin names; the reverse is rare."""


def _scripts(texts: Sequence[str]) -> dict[int, str]:
    """Return the main script of texts by position, such as LATIN. Prompts (even positions) and answers alternate."""
    found = dict[int, str]()
    for at, text in enumerate(texts):
        read = unicodedata.normalize("NFKC", text[:MAX_SCRIPT_CHARS_READ])
        letters = [each for each in read if each.isalpha()]
        if read.isascii():
            counts = Counter({"LATIN": len(letters)})
        else:
            names = (unicodedata.name(each, "?").split()[0] for each in letters)
            counts = Counter("CJK" if name in EAST_ASIAN else name for name in names)
        script, count = counts.most_common(1)[0] if letters else ("", 0)
        fraction = MIN_LATIN_FRACTION if script == "LATIN" else MIN_SCRIPT_FRACTION
        least = MIN_EAST_ASIAN_LETTERS if script == "CJK" else MIN_ALPHABET_LETTERS
        least = MIN_PROMPT_LETTERS if at % 2 == 0 else least
        if count >= max(least, fraction * len(letters)):
            found[at] = script
    return found


def _languages(texts: Sequence[str]) -> dict[int, int]:
    """Return 0 or 1 for each text that is in one of two languages; nothing if two are not found.

    The frequent short words of two languages are hardly ever in one text. No list of words is needed.
    """
    short = [_short_words(text) for text in texts]
    counts = Counter(word for words in short for word in words)
    least = max(4, MIN_WORD_TEXTS * len(short))
    frequent = [word for word, count in counts.most_common(MAX_FUNCTION_WORDS) if count >= least]
    if len(frequent) < 10:
        return {}
    sets = {word: {at for at, words in enumerate(short) if word in words} for word in frequent}

    def affinity(one: str, two: str) -> float:
        """Return log(number of texts with both words / its expectation)."""
        expected = len(sets[one]) * len(sets[two]) / len(short)
        return math.log((len(sets[one] & sets[two]) + 0.5) / (expected + 0.5))

    seed = frequent[0]
    other = min(frequent, key=lambda word: affinity(seed, word) * math.sqrt(len(sets[word])))
    sides = [{seed}, {other}]
    for _ in range(MAX_ROUNDS):
        near = [{word: _mean(affinity(word, each) for each in side - {word}) for word in frequent} for side in sides]
        sides = [{word for word in frequent if near[at][word] > near[1 - at][word] + MIN_MARGIN} for at in (0, 1)]
        if any(len(side) < MIN_FUNCTION_WORDS for side in sides):
            return {}
    marks = [[len(words & side) for side in sides] for words in short]
    known = [at for at, each in enumerate(marks) if sum(each) >= MIN_MARKS_OF_LANGUAGE]
    language = {at: marks[at].index(max(marks[at])) for at in known if max(marks[at]) >= MIN_PURITY * sum(marks[at])}
    return language if len(language) >= MIN_PURE * len(known) else {}


def _mean(values: Iterable[float]) -> float:
    found = [*values]
    return sum(found) / max(1, len(found))


def _short_words(text: str) -> set[str]:
    return {word for word in re.findall(r"[^\W\d_]+", text.casefold()) if len(word) <= MAX_FUNCTION_WORD_CHARS}


MIN_CLEAR, MAX_SWAPPED = 0.85, 0.3
"""Minimum fraction of pairs with a clear score in either direction, and maximum fraction of pairs that look swapped."""
MIN_PAIRS = 12


def _swapped_pairs(samples: Sequence[SampleTexts]) -> SetSign | None:
    """Find pairs whose chosen answer is like the rejected answers of all other pairs, by a leave-one-out word model."""
    sides = [(_features(each.answer, each.rejected), _features(each.rejected, each.answer)) for each in samples]
    seen: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for pair in sides:
        for counts, features in zip(seen, pair, strict=True):
            counts.update(features)

    def odds(feature: str, side: int) -> float:
        """Return the log odds that a feature is in a chosen answer. Leaves out one pair that has it on ``side``."""
        counts = [max(0, each[feature] - (number == side)) for number, each in enumerate(seen)]
        return math.log((counts[0] + 0.5) / (counts[1] + 0.5))

    scores = [sum(odds(word, 0) for word in good) - sum(odds(word, 1) for word in bad) for good, bad in sides]
    clear = 0.5 * sorted(scores)[len(scores) // 2]
    swapped = [at for at, score in enumerate(scores) if score < -max(clear, math.log(len(samples)))]
    wanted = [at for at in swapped if not HARM.search(samples[at].prompt)]  # a refusal may be chosen on purpose
    consistent = sum(score > clear for score in scores)
    is_clear = len(samples) >= MIN_PAIRS and clear > 0 and consistent + len(swapped) >= MIN_CLEAR * len(samples)
    if not wanted or not is_clear or len(swapped) > MAX_SWAPPED * len(samples):
        return None
    says = "look swapped: the chosen answer is like the rejected answers of the other pairs"
    remedy = "swap chosen and rejected in these pairs, or keep them if this is intended"
    return SetSign("swapped_pairs", "pairs", wanted, says, remedy, shortened(samples[wanted[0]].answer))


def _features(answer: str, other: str) -> set[str]:
    """Return the words of an answer that the other lacks, and " longer" if it is more than twice as long."""
    longer = {" longer"} if len(answer) > 2 * len(other) else set[str]()
    return set(answer.casefold().split()) - set(other.casefold().split()) | longer


SET_SIGNS: tuple[tuple[Callable[[Sequence[SampleTexts]], SetSign | None], frozenset[str]], ...] = (
    (_cut_at_one_length, frozenset({"chat", "instruct", "completion", "preference"})),
    (_columns_swapped, frozenset({"chat", "instruct", "completion"})),
    (_broken_json, frozenset({"chat", "instruct", "completion"})),
    (_missing_input, frozenset({"chat", "instruct", "completion"})),
    (_one_prompt, frozenset({"chat", "instruct", "completion"})),
    (_unended, frozenset({"chat", "instruct", "completion", "preference"})),
    (_contradictions, frozenset({"chat", "instruct", "completion", "preference"})),
    (_spellings, frozenset({"chat", "instruct", "completion"})),
    (_same_beginning, frozenset({"chat", "instruct", "completion"})),
    (_empty_cells, frozenset({"chat", "instruct", "completion"})),
    (_label_in_prompt, frozenset({"chat", "instruct", "completion"})),
    (_answer_in_prompt, frozenset({"chat", "instruct", "completion"})),
    (_other_rows, frozenset({"chat", "instruct", "completion", "preference"})),
    (_other_language, frozenset({"chat", "instruct", "completion"})),
    (_boilerplate, frozenset({"text"})),
    (_chosen_is_worse, frozenset({"preference"})),
    (_swapped_pairs, frozenset({"preference"})),
)
"""Functions that find a sign in a set, each with the kinds of datasets that it applies to."""


def signs_of_set(samples: Sequence[SampleTexts], use: str) -> Iterator[SetSign]:
    """Yield the signs that are found across the samples of a set."""
    if len(samples) >= MIN_SAMPLES:
        yield from (found for find, uses in SET_SIGNS if use in uses and (found := find(samples)) is not None)
