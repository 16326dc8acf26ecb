"""The vocabulary: packages and pages contain no phrases that readers must puzzle out.

Not here: the style itself (`CONTRIBUTING.md`), and what a linter checks.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = [
    path for name in ("toolbox", "toolbox_fastapi", "sample_app") for path in sorted((ROOT / name).rglob("*.py"))
]
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
]

BANNED = {
    r"\b(?:must be|expected) a text\b": "'a string'",
    r"(?<![-`\"])\btold\b": "say who does what: 'receives', 'sees', 'is reported', 'is logged'",
    r"(?<!here\s)\b(?:is|are|was|were) (?:(?-i:none)|no)\b"
    r"(?! (?:longer|more|fewer|less|sooner|later|other|such|way|need|matter|different)\b)": "'is not a …'",
    r"\bwhoever\b": "'anyone who', or name the person: 'the caller'",
    r"\banew\b": "'again'",
    r"\bmend(?:s|ed|ing)?\b": "'fix', 'repair'",
    r"\bof (?:its|one's|their|his) own\b": "'its own …', 'a separate …', 'a new …'",
    r"\bone's own\b": "'your own'",
    r"\bstands? (?:in|at|on|beside|behind|below|above|under|beneath|there)\b": "'is in', 'is at'",
    r"\bmeanwhile\b": "'during the call', 'in the meantime'",
    r"\bas far as\b": "'if', 'up to'",
    r"\bby and by\b": "'over time'",
    r"\bfurther ado\b": "leave it out",
    r"\bhalf-way\b": "'in the middle of'",
    r"\bsays not\b": "'does not say', 'missing …'",
    r"\bhas not exactly\b": "'needs exactly'",
    r"\bcannot mean\b": "'cannot be'",
    r"\bnone of (?:which|what)\b": "'not …'",
    r"\bnobody's\b": "name the owner, or 'no one's'",
}
"""Patterns of banned phrases, with a suggestion. A space in a pattern is any white space."""

PHRASE = re.compile("|".join(f"(?:{each})" for each in BANNED).replace(" ", r"\s+"), re.IGNORECASE)
INVALID_VALUE = re.compile(
    r"""^.*\S(?: is |=)\{[^{}]+!r\}(?:; (?:use|pass) |", f?["'](?:use|pass) )|expected one of\b""",
    re.MULTILINE,
)
"""A message that shows an invalid value and says what to use instead."""
NOT_A_VERB = re.compile(r"(?:What|Whether|Who|Which|How|Those|Where) ")
"""First words of a docstring that is not a sentence."""


def advice_for(phrase: str) -> str:
    return next(
        advice for pattern, advice in BANNED.items() if re.match(pattern.replace(" ", r"\s+"), phrase, re.IGNORECASE)
    )


@pytest.mark.parametrize("paths", [MODULES, PAGES], ids=["modules", "pages"])
def test_texts_contain_no_banned_phrases(paths: list[Path]) -> None:
    found = []
    for path in paths:
        text = path.read_text("utf-8")
        for match in PHRASE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{path.relative_to(ROOT)}:{line}: {match[0]!r}; write {advice_for(match[0])}")

    assert found == []


def test_errors_of_invalid_values_have_one_form() -> None:
    found = []
    for path in MODULES:
        text = path.read_text("utf-8")
        for match in INVALID_VALUE.finditer(text):
            if "invalid " not in match[0]:
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(ROOT)}:{line}: {match[0].strip()}; write 'invalid NAME=VALUE; use …'")

    assert found == []


def test_docstrings_of_functions_start_with_a_verb() -> None:
    found = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                docstring = ast.get_docstring(node) or ""
                if NOT_A_VERB.match(docstring):
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {docstring[:60]!r}")

    assert found == []
