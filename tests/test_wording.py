"""The vocabulary: texts and test names contain no phrases that readers must puzzle out.

It reads string literals, docstrings and comments of the packages, the pages and the names of tests.
Not here: the style itself (`CONTRIBUTING.md`), and what a linter checks.
"""

import ast
import io
import re
import token
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("toolbox", "toolbox_fastapi", "sample_app")
PAGES = (
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING")),
)

IS_NO = r"\b(?:is|are|was|were) (?:(?-i:none)|no)\b"
BANNED = {
    r"\btold\b": "say who does what: 'receives', 'sees', 'is reported', 'is logged'",
    rf"(?<!here\s){IS_NO}"
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

NOT_A_VERB = re.compile(r"(?:What|Whether|Who|Which|How|Those|Where) ")
"""First words of a docstring that is not a sentence."""

ALLOWED: dict[tuple[str, str], str] = {}
"""Justified uses: (path, phrase in lower case) with the reason."""

_PATTERNS = {re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE): advice for pattern, advice in BANNED.items()}
_CANDIDATE = re.compile(
    "|".join(IS_NO if IS_NO in pattern else pattern for pattern in BANNED).replace(" ", r"\s+"), re.IGNORECASE
)
"""Occurs in each file with a banned phrase, and in some others. It is found faster than the phrases."""
_PHRASE = re.compile("|".join(BANNED).replace(" ", r"\s+"), re.IGNORECASE)
_TEXTS = {token.STRING, token.COMMENT, *(kind for name, kind in vars(token).items() if name == "FSTRING_MIDDLE")}


@dataclass(frozen=True)
class Text:
    """A piece of text in a file, and the line where it starts."""

    path: str
    line: int
    content: str


def texts_of(path: str, source: str) -> Iterator[Text]:
    """Yield the string literals, docstrings and comments of a Python module."""
    for each in tokenize.generate_tokens(io.StringIO(source).readline):
        if each.type in _TEXTS:
            yield Text(path, each.start[0], each.string)


def test_names_of(path: str, source: str) -> Iterator[Text]:
    """Yield the names of the tests in a module, as sentences."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
            yield Text(path, node.lineno, node.name.removeprefix("test_").replace("_", " "))


test_names_of.__test__ = False  # type: ignore[attr-defined]  # not a test, although its name begins like one


def docstrings_of(path: str, source: str) -> Iterator[Text]:
    """Yield the docstrings of the functions in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and (docstring := ast.get_docstring(node)):
            yield Text(path, node.body[0].lineno, docstring)


def banned_in(text: Text) -> Iterator[str]:
    """Yield a line with place, phrase and suggestion for each banned phrase."""
    for pattern, advice in _PATTERNS.items():
        for found in pattern.finditer(text.content):
            phrase = " ".join(found[0].split())
            if (text.path, phrase.lower()) not in ALLOWED:
                line = text.line + text.content.count("\n", 0, found.start())
                yield f"{text.path}:{line}: {phrase!r}; write {advice}"


def may_have_banned_phrases(source: str) -> bool:
    """Return False for nearly all files without banned phrases: to read the tokens or the tree of a file takes long."""
    return any(_PHRASE.search(source, found.start(), found.end() + 200) for found in _CANDIDATE.finditer(source))


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_contain_no_banned_phrases(package: str) -> None:
    files = [(relative(path), path.read_text("utf-8")) for path in sources(package)]
    texts = [text for path, source in files if may_have_banned_phrases(source) for text in texts_of(path, source)]

    assert files
    assert [line for text in texts for line in banned_in(text)] == []


def test_pages_contain_no_banned_phrases() -> None:
    texts = [Text(relative(path), 1, path.read_text("utf-8")) for path in PAGES]

    assert [line for text in texts if may_have_banned_phrases(text.content) for line in banned_in(text)] == []


def long_lines_of(page: Path) -> Iterator[str]:
    """Yield the place of each line with more than 120 characters, except in code blocks and tables."""
    in_code = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        in_code ^= line.lstrip().startswith("```")
        if len(line) > 120 and not in_code and not line.startswith("|"):
            yield f"{relative(page)}:{number}"


def test_lines_of_guides_are_short() -> None:
    assert [place for page in (ROOT / "docs").glob("*.md") for place in long_lines_of(page)] == []


def test_code_and_tables_may_have_long_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)  # paths in the result are relative to it
    page = tmp_path / "page.md"
    page.write_text(f"```text\n{'x' * 121}\n```\n| {'x' * 121} |\n{'x' * 121}\n", "utf-8")

    assert list(long_lines_of(page)) == ["page.md:5"]


def test_test_names_contain_no_banned_phrases() -> None:
    files = [(relative(path), path.read_text("utf-8")) for path in sources("tests")]
    names = {path: re.findall(r"\bdef\s+test_(\w+)", source) for path, source in files}  # also those in strings
    candidates = {path for path in names if may_have_banned_phrases("\n".join(names[path]).replace("_", " "))}
    texts = [text for path, source in files if path in candidates for text in test_names_of(path, source)]

    assert sum(map(len, names.values())) > 1000
    assert [line for text in texts for line in banned_in(text)] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_of_functions_start_with_a_verb(package: str) -> None:
    files = [(relative(path), path.read_text("utf-8")) for path in sources(package)]
    candidate = re.compile(r"[\"'][\s\\]*" + NOT_A_VERB.pattern)
    texts = [text for path, source in files if candidate.search(source) for text in docstrings_of(path, source)]

    assert files
    assert [f"{text.path}:{text.line}: {text.content[:60]!r}" for text in texts if NOT_A_VERB.match(text.content)] == []


def test_findings_have_place_phrase_and_suggestion() -> None:
    source = '# is told\n\n"""Return it.\n\nWhoever\nasks."""\nwhat = f"{1} is  no URL"\n'
    findings = [line for text in texts_of("a.py", source) for line in banned_in(text)]

    assert len(_CANDIDATE.findall(source)) == 3
    assert may_have_banned_phrases(source)
    assert all(map(may_have_banned_phrases, ("x told", "Whoever", "is\n    no URL", "here is none of which")))
    assert [finding.split("; write ")[0] for finding in findings] == [
        "a.py:1: 'told'",
        "a.py:5: 'Whoever'",
        "a.py:7: 'is no'",
    ]
    assert all(finding.split("; write ")[1] for finding in findings)


def test_ordinary_sentences_are_accepted() -> None:
    for sentence in (
        "there is no such tool",
        "it is no longer used",
        "the amendment stands for itself",
        "its own scope",
    ):
        assert list(banned_in(Text("a.py", 1, sentence))) == []


def test_every_allowed_phrase_still_occurs() -> None:
    for path, phrase in ALLOWED:
        assert phrase in " ".join((ROOT / path).read_text("utf-8").lower().split()), (path, phrase)
