"""Properties of single samples that the audit counts, found while they are tokenized."""

from __future__ import annotations

from enum import IntFlag
from typing import Literal, NamedTuple, TypeAlias

Severity: TypeAlias = Literal["error", "warning", "note"]


class Defect(IntFlag):
    """One bit for each property of a sample."""

    UNSUPERVISED = 1 << 0
    TRUNCATED = 1 << 1
    CUT_ANSWER = 1 << 2
    EMPTY_ANSWER = 1 << 3
    NO_ANSWER = 1 << 4
    ENDS_WITHOUT_ANSWER = 1 << 5
    SAME_ROLE = 1 << 6
    REPEATED_TURN = 1 << 7
    LATE_SYSTEM = 1 << 8
    NO_END = 1 << 9
    DOUBLED_BOS = 1 << 10
    DOUBLED_EOS = 1 << 11
    UNKNOWN_TOKEN = 1 << 12
    SPLIT_CONTROL = 1 << 13
    CONTROL_IN_CONTENT = 1 << 14
    REWRITTEN_TURN = 1 << 15
    OTHER_PROMPT = 1 << 16
    MERGED_BOUNDARY = 1 << 17
    CONTENT_LEFT_OUT = 1 << 18
    TOOLS_LEFT_OUT = 1 << 19
    PROMPT_SUPERVISED = 1 << 20
    MOJIBAKE = 1 << 21
    PLACEHOLDER = 1 << 22
    SAME_PAIR = 1 << 23
    SCORES_SWAPPED = 1 << 24
    DATED = 1 << 25
    BAD_RECORD = 1 << 26
    SYSTEM_LEFT_OUT = 1 << 27
    TOO_LONG = 1 << 28
    EMPTY_PROMPT = 1 << 29
    OTHER_TEMPLATE = 1 << 30
    ANSWER_FIRST = 1 << 31
    CUT_PAIR = 1 << 32
    SERVER_ERROR = 1 << 33
    PARSED_ARGUMENTS = 1 << 34
    FIELD_LEFT_OUT = 1 << 35
    ESCAPED_NEWLINE = 1 << 36
    REPEATS_PROMPT = 1 << 37
    OPEN_THINKING = 1 << 38
    BROKEN_ARGUMENTS = 1 << 39
    UNKNOWN_CALL = 1 << 40
    CONTINUED_DIALOGUE = 1 << 41
    UNFILLED = 1 << 42
    LOOP = 1 << 43
    REFUSAL = 1 << 44
    MID_SENTENCE = 1 << 45
    PLAIN_TEXT = 1 << 46
    HTML_LEFT = 1 << 47
    PYTHON_TEXT = 1 << 48
    PAGE_TEXT = 1 << 49
    UNDECLARED_TOOL = 1 << 50
    SECRET = 1 << 51
    WRONG_SUM = 1 << 52
    CODE_MARKS = 1 << 53
    REJECTED_ANSWER = 1 << 54
    SWITCHED_OFF = 1 << 55
    AGAINST_SCHEMA = 1 << 56
    TIED_SCORES = 1 << 57
    LATEX_LOST = 1 << 58
    CONTROL_CHARACTERS = 1 << 59
    LOST_INDENT = 1 << 60
    OTHER_ASSISTANT = 1 << 61
    MEDIA = 1 << 62


class Meaning(NamedTuple):
    """The severity of a defect, what the affected samples "have" in the message, and the remedy.

    It is reported if at least the fraction ``least`` of the samples has it.
    """

    severity: Severity
    says: str
    remedy: str
    least: float = 0.0


MEANINGS: dict[Defect, Meaning] = {
    Defect.BAD_RECORD: Meaning(
        "warning", "no usable record; they are left out", "leave out on_bad_record to see what is wrong with each"
    ),
    Defect.TOO_LONG: Meaning("note", "more tokens than max_length; they are left out", "raise max_length to keep them"),
    Defect.NO_ANSWER: Meaning(
        "warning", "no assistant turn, so nothing to learn", "drop these records, or set train_on: all"
    ),
    Defect.UNSUPERVISED: Meaning(
        "warning",
        "no token that carries loss; such samples are left out",
        "raise max_length if the answer was cut off; else check the template and train_on",
    ),
    Defect.EMPTY_ANSWER: Meaning(
        "warning", "an empty answer, which trains the model to stop at once", "fill in the answer, or drop the record"
    ),
    Defect.PLACEHOLDER: Meaning(
        "note",
        "a word such as null or nan as the answer",
        "keep it if that is the answer; fill it in if an empty cell was written as text",
    ),
    Defect.SERVER_ERROR: Meaning(
        "warning",
        "the error message of a server as the answer: a request failed when the data was made",
        "drop these records, or generate their answers again",
    ),
    Defect.ESCAPED_NEWLINE: Meaning(
        "warning",
        r"an answer with a backslash and the letter n, or \u00e9, instead of the character: it was escaped twice",
        r"write line breaks when the file is made: text.replace(r'\n', chr(10))",
    ),
    Defect.HTML_LEFT: Meaning(
        "warning",
        "HTML in the text, such as &amp; or <br>, left over from a web page or an export",
        "remove the tags, and decode the rest with html.unescape",
    ),
    Defect.PYTHON_TEXT: Meaning(
        "warning",
        "the text of a Python list, a JavaScript object or a failed formula of a spreadsheet as the answer",
        "write the value itself, or JSON with json.dumps",
    ),
    Defect.PAGE_TEXT: Meaning(
        "warning",
        "the text of a button, or another mark of a chat page, in an answer",
        "remove it: it was copied from a web page",
    ),
    Defect.REPEATS_PROMPT: Meaning(
        "warning",
        "an answer that begins with its whole prompt",
        "check which columns are read; remove the prompt from the answer if a program has put it there",
    ),
    Defect.OPEN_THINKING: Meaning(
        "warning",
        "an answer with <think> and no </think> after it, or nothing after the thinking",
        "generate these answers again, or drop them: they were probably cut off",
    ),
    Defect.BROKEN_ARGUMENTS: Meaning(
        "warning",
        "calls of tools whose arguments are text that is not a JSON object",
        "write arguments as an object; drop calls that were cut off",
    ),
    Defect.UNKNOWN_CALL: Meaning(
        "warning",
        "the result of a tool for a call that no earlier turn makes",
        "correct tool_call_id, or look for a turn that is missing",
    ),
    Defect.UNDECLARED_TOOL: Meaning(
        "warning",
        "a call of a tool that the record does not declare",
        "correct the name in the call, or add the tool to `tools`",
    ),
    Defect.AGAINST_SCHEMA: Meaning(
        "warning",
        "a call of a tool whose arguments do not fit its schema: a required one is missing, one has another type, "
        "or most are null, as if all tools had one schema",
        "correct the call or the schema, remove null arguments, or drop these records",
    ),
    Defect.CONTINUED_DIALOGUE: Meaning(
        "warning",
        "an answer that continues with a user turn, such as Human: ...",
        "end the answer before that turn, or write the record as a conversation: use: chat",
    ),
    Defect.UNFILLED: Meaning(
        "warning",
        "a placeholder that was not filled in",
        "fill it in where the file is made, or drop these records",
    ),
    Defect.LOOP: Meaning(
        "warning", "an answer that repeats one passage four times or more", "drop these records, or generate them again"
    ),
    Defect.REFUSAL: Meaning(
        "warning",
        "a refusal as the answer: the model learns to refuse",
        "drop refusals that come from a filter or a failed request; keep those that you want",
        least=0.2,
    ),
    Defect.MID_SENTENCE: Meaning(
        "warning",
        "an answer that ends in the middle of a sentence or of a block of code",
        "generate these answers again with a higher token limit, or drop them",
    ),
    Defect.SECRET: Meaning(
        "warning",
        "a secret or personal data in an answer, such as an API key, a password, a card number or a private e-mail",
        "remove it, and revoke keys and passwords: a model repeats what it was trained on",
    ),
    Defect.WRONG_SUM: Meaning(
        "warning",
        "wrong maths: an equation of two numbers whose sides differ",
        "correct these answers, or drop them",
        least=0.02,
    ),
    Defect.CODE_MARKS: Meaning(
        "warning",
        "code that is not valid syntax: full-width or curly punctuation outside of strings, as a translator writes it",
        "take the code from the original, or drop these records",
    ),
    Defect.LOST_INDENT: Meaning(
        "warning",
        "Python code that lost its indentation",
        "take the code from the original: a program stripped each line",
    ),
    Defect.LATEX_LOST: Meaning(
        "warning",
        r"a control character instead of the first letters of a LaTeX command: \f of \frac, \b of \beta, \t of \theta",
        "write a backslash twice in JSON, as json.dumps does, and make the file again",
    ),
    Defect.CONTROL_CHARACTERS: Meaning(
        "warning", "control characters in the text, such as the colours of a terminal", "remove them from the text"
    ),
    Defect.OTHER_ASSISTANT: Meaning(
        "warning",
        "an answer that says it is ChatGPT or another assistant",
        "write the name of your model, or drop these records: a model repeats who it is",
    ),
    Defect.MEDIA: Meaning(
        "warning",
        "a placeholder of a picture or a sound, such as <image>, which the model does not get, or its bytes in base64",
        "drop these records, or write what is on the picture; remove base64 from texts",
    ),
    Defect.REJECTED_ANSWER: Meaning(
        "warning",
        "an answer that the record marks as bad, such as label: false, and that would be trained",
        "drop these records, or make pairs of good and bad answers: use: preference",
    ),
    Defect.EMPTY_PROMPT: Meaning("warning", "an empty user turn", "fill it in, or drop the record"),
    Defect.OTHER_TEMPLATE: Meaning(
        "warning",
        "marks of a prompt template inside a message or an answer, so it is in two templates",
        "remove marks such as ### Response: or [/INST] from the text: a chat template adds its own",
    ),
    Defect.CUT_ANSWER: Meaning(
        "warning",
        "an answer cut off at max_length: its end is not trained",
        "raise max_length, or set truncate: drop",
    ),
    Defect.TRUNCATED: Meaning("note", "tokens cut off at max_length", "raise max_length to keep them"),
    Defect.NO_END: Meaning(
        "warning",
        "a last answer without an end token that carries loss: the model does not learn to stop",
        "let the template end an assistant turn with a special token inside of it, or use a tokenizer that has one",
    ),
    Defect.DOUBLED_BOS: Meaning(
        "warning",
        "two begin tokens in a row",
        "remove the begin token from the text or from the template: the tokenizer adds it",
    ),
    Defect.DOUBLED_EOS: Meaning(
        "warning", "two end tokens in a row", "remove the end token from the text: it is added once"
    ),
    Defect.ENDS_WITHOUT_ANSWER: Meaning(
        "warning", "turns after the last answer, which carry no loss", "drop the turns after the last answer"
    ),
    Defect.ANSWER_FIRST: Meaning(
        "warning",
        "an assistant turn first and no answer last: its roles are swapped, or its first user turn is missing",
        "swap the roles, or put a user turn in front of the first answer",
    ),
    Defect.SAME_ROLE: Meaning(
        "warning", "two turns of one role in a row", "join them into one turn, or look for a turn that is missing"
    ),
    Defect.REPEATED_TURN: Meaning(
        "warning",
        "the same turn twice in a row, or a user turn that contains the turns before it",
        "remove the repeated text: the template writes the earlier turns",
    ),
    Defect.LATE_SYSTEM: Meaning(
        "warning", "a system message after the first turn", "move it to the front, or make it a user turn"
    ),
    Defect.UNKNOWN_TOKEN: Meaning(
        "warning",
        "the unknown token inside of what is trained",
        "use a tokenizer that has these characters, or remove them from the text",
    ),
    Defect.SPLIT_CONTROL: Meaning(
        "warning",
        "control words, such as <|im_start|>, that are not single tokens of this tokenizer",
        "add them as special tokens and resize the embedding, or use the template that belongs to the tokenizer",
    ),
    Defect.CONTROL_IN_CONTENT: Meaning(
        "warning",
        "special tokens written inside of a message, which end or begin turns there",
        "remove them from the text: the template adds them",
    ),
    Defect.CONTENT_LEFT_OUT: Meaning(
        "warning",
        "the text of a turn or a call of a tool that the template leaves out or changes",
        "use a template that writes it",
    ),
    Defect.FIELD_LEFT_OUT: Meaning(
        "warning",
        "fields of a message, such as reasoning_content, thinking or name, that the template leaves out",
        "use a template that writes them, move their text into content, or remove them from the records",
    ),
    Defect.PARSED_ARGUMENTS: Meaning(
        "note",
        "calls of tools with arguments as JSON text; they are parsed, since the template writes objects as JSON",
        "write arguments as an object to have the same tokens elsewhere",
    ),
    Defect.SYSTEM_LEFT_OUT: Meaning(
        "warning",
        "a system message that the template leaves out",
        "use a template that writes it, or put it into the first user turn",
    ),
    Defect.TOOLS_LEFT_OUT: Meaning(
        "warning", "tools that the template leaves out", "use a template that writes tools, or leave them out"
    ),
    Defect.PROMPT_SUPERVISED: Meaning(
        "warning",
        "tokens of user, system or tool turns that carry loss",
        "correct {% generation %} in the template: it must enclose assistant turns only",
    ),
    Defect.REWRITTEN_TURN: Meaning(
        "warning",
        "earlier answers that the template rewrites when a turn follows (it drops the thinking, for example); "
        "they are context and carry no loss",
        "split each conversation so that every answer is the last one, or use a template with {% generation %}",
    ),
    Defect.OTHER_PROMPT: Meaning(
        "note",
        "an answer that begins otherwise than after the generation prompt of the template",
        "begin the answer as the template prompts for it (with <think>, for example)",
    ),
    Defect.MERGED_BOUNDARY: Meaning(
        "warning",
        "a token across the end of the prompt: alone, the prompt is split into other tokens",
        "move the space: end the prompt without it, and begin the completion with it",
    ),
    Defect.MOJIBAKE: Meaning(
        "warning",
        "text that was decoded with the wrong encoding",
        "read the original as UTF-8 and write it again",
    ),
    Defect.SAME_PAIR: Meaning(
        "warning", "equal chosen and rejected answers, which carry no preference", "drop these records"
    ),
    Defect.CUT_PAIR: Meaning(
        "warning",
        "chosen and rejected answers that are equal only because max_length cut them",
        "raise max_length, or set truncate: drop to leave out what is too long",
    ),
    Defect.SCORES_SWAPPED: Meaning(
        "warning", "a chosen answer with a lower score than the rejected one", "swap them, or drop the record"
    ),
    Defect.TIED_SCORES: Meaning(
        "warning", "equal scores of the chosen and the rejected answer", "drop these pairs: they hold no preference"
    ),
    Defect.PLAIN_TEXT: Meaning(
        "note",
        "a prompt and answers as text: they are trained without the chat template, as in TRL",
        "to apply the chat template of the tokenizer, write each as a list of messages",
    ),
    Defect.DATED: Meaning(
        "note",
        "the date of today, which the template writes",
        "fix it, so that the tokens are the same tomorrow: template_args: {date_string: 26 Jul 2024}",
    ),
}
"""All defects that are reported. The report lists them by severity, and those of one severity in this order."""
