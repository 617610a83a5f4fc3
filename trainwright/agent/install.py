"""``trainwright agent install``: writes instructions for coding agents into a project."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainwright.errors import StorageError, UsageError
from trainwright.runs.json_values import JsonValue

SKILL_PATH = Path(".claude/skills/trainwright/SKILL.md")
"""Claude Code reads skills from this folder. Other agents read AGENTS.md."""
AGENTS_PATH = Path("AGENTS.md")
BEGIN, END = "<!-- trainwright: begin -->", "<!-- trainwright: end -->"
_SECTION = re.compile(rf"{re.escape(BEGIN)}.*?{re.escape(END)}\n?", re.DOTALL)
MCP_COMMAND = "trainwright mcp"


@dataclass(frozen=True)
class Installed:
    """Paths of the files that were written, and of those that already had the same text."""

    folder: Path
    written: tuple[str, ...]
    unchanged: tuple[str, ...]
    exit_code = 0

    def lines(self) -> list[str]:
        lines = [f"written: {self.folder / each}" for each in self.written]
        lines += [f"unchanged: {self.folder / each}" for each in self.unchanged]
        return [
            *lines,
            f"tools for an agent: let it start `{MCP_COMMAND}` (pip install 'mcp>=2.3'), for example",
            f"  claude mcp add trainwright -- {MCP_COMMAND}",
        ]

    def to_json(self) -> dict[str, JsonValue]:
        return {"folder": str(self.folder), "written": list(self.written), "unchanged": list(self.unchanged)}


def skill() -> str:
    """Return the text of the skill."""
    return (Path(__file__).parent / "SKILL.md").read_text("utf-8")


def section() -> str:
    """Return the section for AGENTS.md: the skill without front matter, its headings one level deeper."""
    body = skill().split("---\n", 2)[2].strip()
    return f"{BEGIN}\n{re.sub('^#', '##', body, flags=re.MULTILINE)}\n{END}\n"


def install(folder: Path, *, replace: bool = False) -> Installed:
    """Write the skill, and a section of AGENTS.md, into the project in ``folder``.

    ``replace`` replaces an older or edited version of these texts. The rest of AGENTS.md is never changed. Raises
    UsageError if another version of the texts exists and is not to be replaced, and StorageError if a file cannot be
    written or is a symbolic link.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder", remedy="give the root of your project")
    texts = {SKILL_PATH: skill(), AGENTS_PATH: _with_section(_read(folder, AGENTS_PATH), replace=replace)}
    before = {path: _read(folder, path) for path in texts}
    if before[SKILL_PATH] not in ("", texts[SKILL_PATH]) and not replace:
        raise _refusal(SKILL_PATH)
    written = [path for path, text in texts.items() if text != before[path]]
    for path in written:
        try:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(texts[path], "utf-8")
        except OSError as error:
            raise StorageError(f"cannot write {folder / path}: {error.strerror}", remedy="check its folder") from None
    return Installed(folder, tuple(map(str, written)), tuple(str(path) for path in texts if path not in written))


def _with_section(text: str, *, replace: bool) -> str:
    """Return ``text`` with the section. Raises UsageError if it has another version and ``replace`` is False."""
    found = _SECTION.search(text)
    if found is None:
        return f"{text.rstrip()}\n\n{section()}".lstrip()
    if found[0].strip() != section().strip() and not replace:
        raise _refusal(AGENTS_PATH)
    return f"{text[: found.start()]}{section()}{text[found.end() :]}"


def _refusal(path: Path) -> UsageError:
    return UsageError(
        f"{path} has another version of the instructions",
        remedy="save your changes elsewhere, then: trainwright agent install --replace",
    )


def _read(folder: Path, inside: Path) -> str:
    path = folder / inside
    linked = next((each for each in (path, *list(path.parents)[: len(inside.parts) - 1]) if each.is_symlink()), None)
    if linked is not None:
        raise StorageError(f"{linked} is a symbolic link", remedy="replace it by a file or folder, or install by hand")
    try:
        return path.read_text("utf-8") if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise StorageError(f"cannot read {path}: {error}", remedy="check the file") from None
