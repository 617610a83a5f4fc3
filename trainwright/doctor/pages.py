"""The pages of ``trainwright explain CODE``: the docstrings of the checks."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from trainwright.doctor.diagnose import FAILED_CODE, USER_CHECK_PREFIX
from trainwright.doctor.discovery import all_checks, check_of
from trainwright.doctor.docstring import Page, parse_page
from trainwright.errors import UsageError, suggest

_FAILED_PAGE = parse_page(
    """A check of the doctor itself raised an error. All other checks ran; the training is not affected.

    Why it matters: what this check looks for may be there and is not reported.

    Fix: report it with the run folder's `log.jsonl`. A check reads nothing but its records, so `trainwright diagnose
    RUN` shows the error again.
    """
)


def codes() -> tuple[str, ...]:
    """Returns every code with a page, sorted."""
    return tuple(sorted({FAILED_CODE, *(each.code for each in all_checks())}))


def page(code: str, translate: Callable[[str], str] | None = None) -> str:
    """Returns the page of a code; for a topic such as ``loss``, its codes with titles; for "", all codes.

    For other words, returns the codes whose pages contain all of them. ``translate`` translates the texts of a page.

    Raises:
        UsageError: There is no page for ``code``. The error suggests the nearest codes.
    """
    if code.startswith(USER_CHECK_PREFIX):
        raise UsageError(
            f"{code} has no page: it is one of your own checks", remedy="see the docstring of its function"
        )
    if (found := _page_of(code)) is not None:
        return found.markdown(code) if translate is None else found.translated(code, translate)
    topic = code.removesuffix("*").removesuffix(".")
    group = [each for each in codes() if not topic or each.startswith(f"{topic}.")] or _containing(code)
    if not group:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    width = max(map(len, group))
    return "\n".join(f"{each:{width}}  {title(each)}" for each in group)


def _containing(words: str) -> list[str]:
    """Returns the codes whose pages contain all words. Codes with all words in code or title come first."""
    wanted = words.lower().replace("_", " ").split()
    texts = {each: f"{each} {title(each)}".lower().replace("_", " ") for each in codes()}
    heads = [each for each in texts if all(word in texts[each] for word in wanted)]
    pages = [(each, _page_of(each)) for each in texts if each not in heads]
    return heads + [each for each, found in pages if found and all(w in found.markdown(each).lower() for w in wanted)]


def title(code: str) -> str:
    """Returns the title of a code: the first sentence of its page."""
    found = _page_of(code)
    if found is None:
        raise UsageError(f"there is no page for {code!r}", remedy=_nearest(code))
    return found.title


def _page_of(code: str) -> Page | None:
    check = check_of(code)
    return check.page if check is not None else _FAILED_PAGE if code == FAILED_CODE else None


def _nearest(code: str) -> str:
    """Returns codes of the same topic, else similar codes, else the topics."""
    same = [each for each in codes() if each.startswith(f"{code.partition('.')[0]}.")]
    if same:
        return suggest(code, same)
    topics = sorted({f"{each.partition('.')[0]}." for each in codes()})
    return suggest(code, codes() if get_close_matches(code, codes()) else topics)
