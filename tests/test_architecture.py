"""The architecture: layers of imports, one home for each third-party library, no name with two meanings.

Imports are read from the source, those inside functions and `import_module("…")` too. Those under `TYPE_CHECKING`, and
in the `.pyi` files of packages that load their names on first use, may look sideways, never up.
"""

import ast
import functools
import gc
import importlib
import keyword
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path

import pytest

from toolbox.capabilities import Late, load

ROOT = Path(__file__).parent.parent
OURS = ("toolbox", "toolbox_fastapi", "sample_app")
FUNCTIONS = [each.value for each in Late]

# A module may import lower numbers, and earlier modules of the same package. Modules that are not listed have the
# number of their package.
LAYERS: dict[str, int] = {
    "toolbox.chat": 0,
    "toolbox.first_use": 0,
    "toolbox.contents": 0,
    "toolbox.passages": 0,
    "toolbox.frozen_copies": 0,
    "toolbox.safe_text": 0,
    "toolbox.store_clock": 0,
    "toolbox.introspection": 0,
    "toolbox.json_text": 0,
    "toolbox.schemas": 0,
    "toolbox.chat_streams": 1,
    "toolbox.environment_variables": 0,
    "toolbox.errors": 1,
    "toolbox.callers": 2,
    "toolbox.context": 2,
    "toolbox.deferred_answers": 2,
    "toolbox.parameters": 2,
    "toolbox.service_names": 2,
    "toolbox.transaction_recorder": 2,
    "toolbox.settings": 2,
    "toolbox.events": 2,
    "toolbox.service_events": 2,
    "toolbox.limits": 2,
    "toolbox.retrieval": 2,
    "toolbox.handover": 2,
    "toolbox.logs": 2,
    "toolbox.library_logs": 1,
    "toolbox.tls": 2,
    "toolbox.http_replies": 2,
    "toolbox.demo": 3,
    "toolbox.bean_references": 3,
    "toolbox.request_hooks": 3,
    "toolbox.execution": 3,
    "toolbox.security": 3,
    "toolbox.di": 4,
    "toolbox.tools": 4,
    "toolbox.models": 4,
    "toolbox.search": 5,
    "toolbox.transcripts": 4,
    "toolbox.oauth": 5,
    "toolbox.conversations": 4,
    "toolbox.rest": 5,
    "toolbox.services": 5,
    "toolbox.runs": 5,
    "toolbox.guardrails": 5,
    "toolbox.interceptors": 5,
    "toolbox.capabilities": 6,
    "toolbox.hosts": 6,
    "toolbox.overview": 6,
    "toolbox.called_functions": 6,
    "toolbox.injected_functions": 6,
    "toolbox.observers": 6,
    "toolbox.startup": 6,
    "toolbox.registered_program": 6,
    "toolbox.container": 6,
    "toolbox.testing": 7,
    "toolbox.store_checks": 7,
    "toolbox.recordings": 7,
    "toolbox.pytest_plugin": 8,
    "toolbox.cli": 7,
    "toolbox.__main__": 8,
    "toolbox.openapi": 7,
    "toolbox.mcp": 7,
    "toolbox.sql": 7,
    "toolbox.redis": 7,
    "toolbox.otel": 7,
    "toolbox.dbos": 7,
    "toolbox_fastapi": 8,
    "sample_app": 9,
}
# Rooms of one floor that do not know each other, and so may not import each other.
SEPARATE = ("toolbox.di", "toolbox.tools", "toolbox.models", "toolbox.rest", "toolbox.services")
# Where a third-party library may be imported; what is not listed may be imported nowhere.
HOMES: dict[str, tuple[str, ...]] = {
    "pydantic": ("toolbox", "toolbox_fastapi", "sample_app"),
    "pydantic_core": ("toolbox", "toolbox_fastapi"),
    "typing_extensions": ("toolbox", "toolbox_fastapi", "sample_app"),
    "annotated_types": ("toolbox.tools",),
    "dependency_injector": ("toolbox.di",),
    "docstring_parser": ("toolbox.tools",),
    "bm25s": ("toolbox.search",),
    "openai": ("toolbox.models",),
    "anthropic": ("toolbox.models",),
    "pydantic_ai": ("toolbox.models",),
    "ag_ui": ("toolbox_fastapi.ag_ui",),
    "aiohttp": ("toolbox.models",),
    "jiter": ("toolbox.models",),
    "pydantic_settings": ("toolbox.settings",),
    "httpx2": (
        "toolbox.rest",
        "toolbox.mcp",
        "toolbox.recordings",
        "toolbox.models",
        "toolbox.tls",
        "toolbox.http_replies",
    ),
    "stamina": ("toolbox.interceptors", "toolbox.rest"),
    "jsonschema": ("toolbox.openapi.arguments", "toolbox.mcp"),
    "openapi_pydantic": ("toolbox.openapi.document_reading",),
    "referencing": ("toolbox.openapi.arguments", "toolbox.mcp.screening"),
    "typer": ("toolbox.cli", "sample_app"),
    "rich": ("toolbox.cli", "sample_app"),
    "anyio": ("toolbox_fastapi", "toolbox.mcp"),
    "fastapi": ("toolbox_fastapi", "sample_app"),
    "starlette": ("toolbox_fastapi", "sample_app"),
    "uvicorn": ("sample_app",),
    "mcp": ("toolbox.mcp", "toolbox_fastapi"),
    "mcp_types": ("toolbox.mcp",),
    "sqlalchemy": ("toolbox.sql", "sample_app"),
    "aiosqlite": ("toolbox.sql",),
    "redis": ("toolbox.redis",),
    "opentelemetry": ("toolbox.otel", "toolbox.context"),  # `context` adds the headers of a trace, if there is one
    "genai_prices": ("toolbox.limits",),
    "dbos": ("toolbox.dbos",),
    "pytest": ("toolbox.pytest_plugin",),
}
# Layer 7 is what a user asks for by its module; the root offers nothing of it.
NEVER_BY_THE_ROOT = tuple(module for module, layer in LAYERS.items() if layer == 7)


@dataclass(frozen=True)
class Import:
    """An import of `imported` by `importer` in `line`; `typing` if only a type checker imports it."""

    importer: str
    imported: str
    line: int
    typing: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.imported}"


def modules() -> dict[str, Path]:
    """Return all modules by full name."""
    found = {}
    for package in OURS:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
LIBRARY = {name: path for name, path in MODULES.items() if not name.startswith("sample_app")}


@pytest.fixture(scope="module", autouse=True)
def without_garbage_collector() -> Iterator[None]:
    """Keep the garbage collector from visiting all trees again and again; free them at the end."""
    gc.disable()
    yield
    tree_of.cache_clear()
    gc.enable()


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def is_type_checking(node: ast.If) -> bool:
    is_name = isinstance(node.test, (ast.Name, ast.Attribute))  # of the many others, no text is needed
    return is_name and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node: ast.AST, typing: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            continue  # contains no statements
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child, typing
        elif isinstance(child, ast.If) and is_type_checking(child):
            for each in child.body:
                yield from statements(ast.Module([each], []), True)
            for each in child.orelse:
                yield from statements(ast.Module([each], []), typing)
        else:
            yield from statements(child, typing)


def classes_in(node: ast.AST) -> Iterator[ast.ClassDef]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield child
        if not isinstance(child, ast.expr):  # contains no statements
            yield from classes_in(child)


def calls_of_import_module(path: Path) -> Iterator[ast.Call]:
    """Yield the calls that import what a text names, also under another name: `from importlib import … as load`."""
    nodes = list(ast.walk(tree_of(path)))
    importing = {"import_module", "__import__", "resolve_name"}
    for node in nodes:
        if isinstance(node, ast.ImportFrom):
            importing |= {each.asname for each in node.names if each.name in importing and each.asname}
    for node in nodes:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in importing:
            yield node


def modules_taken_by_name(path: Path) -> Iterator[tuple[str, int]]:
    """Yield the names and lines of modules that code takes out of `sys.modules`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "sys.modules":
            asked = node.slice
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.modules.get":
            asked = node.args[0]
        else:
            continue
        if isinstance(asked, ast.Constant):
            yield str(asked.value), node.lineno


def imports_of(name: str, path: Path) -> Iterator[Import]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for call in calls_of_import_module(path):
        if isinstance(call.args[0], ast.Constant):
            imported = resolve_name(str(call.args[0].value).partition(":")[0], package)
            yield Import(name, imported, call.lineno, typing=False)
    for taken, line in modules_taken_by_name(path):
        if taken in MODULES:
            yield Import(name, taken, line, typing=False)
    stub = path.with_suffix(".pyi")
    stubbed = ((node, True) for node, _ in statements(tree_of(stub))) if stub.exists() else ()
    for node, typing in (*statements(tree_of(path)), *stubbed):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(name, alias.name, node.lineno, typing)
            continue
        above = package.rsplit(".", node.level - 1)[0] if node.level else ""
        base = ".".join(part for part in (above, node.module or "") if part)
        for alias in node.names:
            # `from .di import beans` imports a module, `from .di.beans import Named` a name of one.
            module = f"{base}.{alias.name}"
            yield Import(name, module if module in MODULES else base, node.lineno, typing)


@functools.cache
def all_imports() -> list[Import]:
    return [each for name, path in MODULES.items() for each in imports_of(name, path)]


def room_of(module: str) -> str:
    """Return the longest name in LAYERS that contains `module`, or `module` itself."""
    while module and module not in LAYERS:
        module = module.rpartition(".")[0]
    return module


def lies_in(module: str, homes: tuple[str, ...]) -> bool:
    return any(module == home or module.startswith(home + ".") for home in homes)


def within_packages(imports: list[Import]) -> list[Import]:
    return [each for each in imports if each.imported.partition(".")[0] in OURS]


def test_every_module_is_in_a_layer() -> None:
    rootless = [name for name in MODULES if not room_of(name) and name != "toolbox"]

    assert rootless == []


def test_imports_point_to_lower_layers() -> None:
    """Imports for type checking too."""
    wrong = [
        str(each)
        for each in within_packages(all_imports())
        if room_of(each.importer)
        and room_of(each.imported)
        and LAYERS[room_of(each.imported)] > LAYERS[room_of(each.importer)]
    ]

    assert wrong == []


def test_packages_of_one_layer_do_not_import_each_other() -> None:
    wrong = [
        str(each)
        for each in within_packages(all_imports())
        if not each.typing
        and (here := room_of(each.importer)) != (there := room_of(each.imported))
        and here in SEPARATE
        and there in SEPARATE
        and LAYERS[here] == LAYERS[there]
    ]

    assert wrong == []


def package_of(module: str) -> str:
    """Return the package or module directly below a root package, such as `toolbox.services`."""
    return ".".join(module.split(".")[:2]) if module.startswith("toolbox.") else module.partition(".")[0]


def test_packages_do_not_import_each_other() -> None:
    """Also not inside functions, and not for type checking: one of the two says what it needs as a Protocol."""
    edges: dict[tuple[str, str], str] = {}
    for each in within_packages(all_imports()):
        if (here := package_of(each.importer)) != (there := package_of(each.imported)):
            edges[here, there] = str(each)
    edges = {pair: where for pair, where in edges.items() if "toolbox" not in pair}  # the root loads names lazily

    assert [where for (here, there), where in edges.items() if (there, here) in edges] == []


def test_capabilities_that_are_imported_late_exist_in_lower_layers() -> None:
    homes = [function.partition(":")[0] for function in FUNCTIONS]

    assert [each for each in Late if not callable(load(each))] == []
    assert [each for each in homes if LAYERS[room_of(each)] >= LAYERS["toolbox.capabilities"]] == []


def test_the_diagram_of_the_architecture_page_has_the_layers_of_this_test() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    drawn = {
        (f"toolbox.{name}" if name != "toolbox_fastapi" else name): int(number)
        for number, names in re.findall(r'f\d\["(\d) &nbsp; (.*)"\]', page)
        for name in names.split(" · ")
    }

    assert drawn == {name: layer for name, layer in LAYERS.items() if name not in ("toolbox.__main__", "sample_app")}


def test_services_and_their_hosts_load_other_capabilities_from_the_table_only() -> None:
    """Imports inside functions would hide the order of the capabilities, and what a program loads."""
    behind = {package_of(function.partition(":")[0]) for function in FUNCTIONS} - {"toolbox.services"}
    wrong = [
        str(each)
        for each in within_packages(all_imports())
        if lies_in(each.importer, ("toolbox.services", "toolbox.hosts", "toolbox.capabilities"))
        and package_of(each.imported) in behind
        and not (each.typing and lies_in(each.importer, ("toolbox.hosts",)))
        and not (each.importer == "toolbox.services.offering" and each.imported == "toolbox.search")
    ]

    assert wrong == []


# What runs may know of services outside of `runs.service_calls`: plain values that they store or return.
PLAIN_PARTS_OF_SERVICES = {
    "toolbox.services.outputs": {"Result"},
    "toolbox.services.recording_needs": {
        "FindApprovals",
        "RecordedFailureError",
        "RecordedToolError",
        "ToldMessage",
        "TurnWrite",
        "type_name_of",
    },
    "toolbox.services.state": {"State"},
    "toolbox.services.stored_forms": {
        "adapter_of",
        "execution_from_dict",
        "execution_to_dict",
        "fields_from_dict",
        "fields_to_dict",
        "response_from_dict",
        "response_to_dict",
    },
}
# The host has the plans of services, which these two pass on. `Runs` puts together what runs execute.
WITH_PLANS = {
    "toolbox.runs.runs_host": {"toolbox.services.host_needs", "toolbox.services.plans"},
    "toolbox.runs.runs_bean": {"toolbox.services.plans", "toolbox.runs.service_calls"},
}
PLAN_ATTRIBUTES = {"plan", "plans", "plan_of", "plans_of"}


def test_runs_know_what_they_execute_only_through_their_body() -> None:
    """`RunBody` is the seam: behind it, in `runs.service_calls`, lies all that knows services."""
    wrong = []
    for name, path in LIBRARY.items():
        if not name.startswith("toolbox.runs.") or lies_in(name, ("toolbox.runs.service_calls",)):
            continue
        for node, _ in statements(tree_of(path)):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            module = resolve_name("." * node.level + (node.module or ""), "toolbox.runs")
            if lies_in(module, tuple(WITH_PLANS.get(name, ()))):
                continue
            names = {each.name for each in node.names}
            is_behind = lies_in(module, ("toolbox.services", "toolbox.runs.service_calls"))
            if is_behind and not names <= PLAIN_PARTS_OF_SERVICES.get(module, set()):
                wrong.append(f"{name}, line {node.lineno}, imports {', '.join(sorted(names))} of {module}")
        if name not in WITH_PLANS:
            nodes = ast.walk(tree_of(path))
            reads = [each for each in nodes if isinstance(each, ast.Attribute) and each.attr in PLAN_ATTRIBUTES]
            wrong += [f"{name}, line {each.lineno}, reads .{each.attr}" for each in reads]

    assert wrong == []


# Modules that import a module whose name is not in the call, and where it comes from.
COMPUTED_IMPORTS = {
    "toolbox.first_use": "the tables of packages, which their .pyi files and TYPE_CHECKING blocks repeat",
    "toolbox.capabilities": "Late",
    "toolbox.models.model_providers": "the table of providers, modules of the same package",
    "toolbox.di.registry": "the program's own package, to scan",
    "toolbox.cli.targets": "the program that a command names",
    "toolbox.pytest_plugin": "the program that the settings of pytest name",
}


def test_imports_by_name_say_what_they_import() -> None:
    """A name that is not in the call hides an arrow from the tests above."""
    computed = {
        module
        for module, path in LIBRARY.items()
        for call in calls_of_import_module(path)
        if not isinstance(call.args[0], ast.Constant)
    }

    assert computed == set(COMPUTED_IMPORTS)


# Uses of private parts of others. Each file says why nothing public does the same.
PRIVATE_PARTS = {
    "toolbox.rest.deadlines: __class__": "a network stream of the HTTP library, whose reads get a deadline",
    "toolbox.dbos: _dbos_": "how the names of DBOS's own queues begin",
    "toolbox.sql.open_sessions: _sa_": "what SQLAlchemy adds to the attributes of an object",
}
# Functions of Python that are documented in spite of their names.
DOCUMENTED_PARTS = ("_exit", "_getframe")


def is_private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[^\W_]\w*", name) is not None and name not in DOCUMENTED_PARTS


def is_own(node: ast.expr) -> bool:
    return ast.unparse(node) in ("self", "cls", "super()")


@functools.cache
def private_names_in(path: Path) -> frozenset[str]:
    """Return the private names that a file defines: functions, classes, variables, fields and attributes of `self`."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return frozenset(filter(is_private, names))


def texts_compared_in(node: ast.AST) -> Iterator[object]:
    """Yield the texts that code can look up or recognize attributes with: `getattr`, `name == "…"`, `startswith`."""
    looked_up: list[ast.expr] = []
    if isinstance(node, ast.Compare):
        looked_up = [node.left, *node.comparators]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2].endswith(
        ("attr", "get", "startswith", "attrgetter", "methodcaller")
    ):
        looked_up = node.args
    elif isinstance(node, ast.Subscript):
        looked_up = [node.slice]
    for each in looked_up:
        for constant in each.elts if isinstance(each, (ast.Tuple, ast.Set, ast.List)) else [each]:
            if isinstance(constant, ast.Constant):
                yield constant.value


def private_parts_in(path: Path) -> Iterator[object]:
    """Yield private names that a file uses and that are not its own: imported, of any object, or looked up by text."""
    here = private_names_in(path)
    inherited = frozenset().union(*map(private_names_in, LIBRARY.values()))
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").partition(".")[0] not in OURS:
            yield from (name for name in (*(node.module or "").split("."), *(each.name for each in node.names)))
        elif isinstance(node, ast.Import):
            yield from (part for each in node.names for part in each.name.split("."))
        elif isinstance(node, ast.Attribute):
            if node.attr not in (inherited if is_own(node.value) else here):
                yield node.attr
            if node.attr == "__class__" and isinstance(node.ctx, ast.Store):
                yield node.attr
        elif isinstance(node, ast.MatchClass):
            yield from (name for name in node.kwd_attrs if name not in here)
        else:
            yield from (text for text in texts_compared_in(node) if text not in inherited)


def test_no_private_parts_of_others_are_used() -> None:
    """An attribute with one underscore belongs to the file that defines it, and to subclasses."""
    found = {
        f"{module}: {name}"
        for module, path in LIBRARY.items()
        for name in private_parts_in(path)
        if is_private(name) or name == "__class__"
    }

    assert found == set(PRIVATE_PARTS)


def test_there_are_no_circular_imports() -> None:
    """The modules of each package can be ordered so that each imports earlier ones only, also for type checking."""
    edges: dict[str, set[str]] = {name: set() for name in MODULES}
    for each in within_packages(all_imports()):
        # The root's names are loaded when asked for, so it stands outside; a package's own __init__ likewise.
        if each.imported in MODULES and each.imported != each.importer:
            edges[each.importer].add(each.imported)
    edges["toolbox"].clear()

    def cycle_from(start: str) -> list[str]:
        trail, seen = [(start, [start])], {start}
        while trail:
            module, path = trail.pop()
            for following in edges[module]:
                if following == start:
                    return [*path, start]
                if following not in seen:
                    seen.add(following)
                    trail.append((following, [*path, following]))
        return []

    assert [path for name in MODULES if (path := cycle_from(name))] == []


def test_modules_do_not_import_from_the_package_root() -> None:
    """An import of the root would load modules that the root loads lazily."""
    wrong = [str(each) for each in all_imports() if each.importer.startswith("toolbox.") and each.imported == "toolbox"]

    assert wrong == []


def test_the_root_exports_nothing_of_the_top_layer() -> None:
    wrong = [
        str(each) for each in all_imports() if each.importer == "toolbox" and lies_in(each.imported, NEVER_BY_THE_ROOT)
    ]

    assert wrong == []


def test_the_sample_is_written_with_the_public_packages_only() -> None:
    """Users can write everything that the sample contains."""
    public = (
        "toolbox",
        "toolbox.conversations",
        "toolbox.guardrails",
        "toolbox.rest",
        "toolbox.runs",
        "toolbox.security",
        "toolbox.sql",
        "toolbox.testing",
        "toolbox_fastapi",
    )
    wrong = [
        str(each)
        for each in within_packages(all_imports())
        if each.importer.startswith("sample_app")
        and not each.imported.startswith("sample_app")
        and each.imported not in public
    ]

    assert wrong == []


def test_each_third_party_library_has_one_home() -> None:
    wrong = [
        str(each)
        for each in all_imports()
        if (library := each.imported.partition(".")[0]) not in OURS
        and library not in sys.stdlib_module_names
        and not each.typing
        and not lies_in(each.importer, HOMES.get(library, ()))
    ]

    assert wrong == []


@pytest.mark.parametrize("package", ["toolbox", "toolbox.runs", "toolbox.models", "toolbox_fastapi"])
def test_no_public_name_is_also_a_module(package: str) -> None:
    """`from toolbox import toolbox` must always be the decorator."""
    names = {
        path.stem for path in (ROOT / package.replace(".", "/")).iterdir() if path.suffix == ".py" or path.is_dir()
    }

    assert names.intersection(importlib.import_module(package).__all__) == set()


def test_module_stems_are_unique() -> None:
    stems = Counter(
        name.rpartition(".")[2] for name, path in LIBRARY.items() if path.stem not in ("__init__", "__main__")
    )

    assert [stem for stem, count in stems.items() if count > 1] == []


def test_class_names_are_unique() -> None:
    """A leading underscore does not count: `_Run` and `Run` confuse readers as much."""
    homes: dict[str, list[str]] = {}
    for module, path in LIBRARY.items():
        for node in classes_in(tree_of(path)):
            homes.setdefault(node.name.lstrip("_"), []).append(f"{module}, line {node.lineno}")

    both = {"Query"}  # of a retriever, and of an address: public names, which users import from two modules
    assert {name: places for name, places in homes.items() if len(places) > 1 and name not in both} == {}


NAMES_OF_OTHERS = {"Singleton", "pyright", "site/"}


def identifiers_in(node: ast.AST) -> set[str]:
    """Return the names that code defines or uses."""
    found = (getattr(each, field, None) for each in ast.walk(node) for field in ("name", "module", "id", "attr", "arg"))
    return {word for each in found if isinstance(each, str) for word in each.split(".")}


@pytest.mark.parametrize("page_name", ["architecture.md", "layers-and-runs.md"])
def test_the_architecture_pages_name_what_exists(page_name: str) -> None:
    """Checks what is in backquotes: paths, with the name before or after one; `Class.member`; other names."""
    page = (ROOT / "docs" / page_name).read_text(encoding="utf-8")
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`@?([a-zA-Z_][\w./]*)(?:=|\(\))?`(?:, `(\w+)`)?", prose)
    before = re.findall(r"`(?:\w+\.)*(\w+)`,?\s(?:in\s|\()`([\w/]+\.py)`", prose)
    named += [(path, name) for name, path in before]
    trees = [tree_of(path) for path in MODULES.values()]
    classes = {node.name: node for tree in trees for node in classes_in(tree)}
    words = set(keyword.kwlist).union(*map(identifiers_in, trees), *(each.split(".") for each in MODULES))
    wrong = []
    for name, after in named:
        first, _, member = name.partition(".")
        if "/" in name or name.endswith((".py", ".md")):
            paths = [root / name for root in (ROOT, *(ROOT / each for each in OURS)) if (root / name).exists()]
            is_right = bool(paths) and (not after or after in identifiers_in(tree_of(paths[0])))
        elif member and first in classes:
            is_right = member in identifiers_in(classes[first])
        else:
            is_right = words.issuperset(name.split("."))
        wrong += [] if is_right or name in NAMES_OF_OTHERS else [(name, after)]

    assert named
    assert wrong == []


def test_module_names_are_specific() -> None:
    empty_words = {"utils", "util", "helpers", "helper", "manager", "base", "common", "misc"}

    assert [name for name in MODULES if name.rpartition(".")[2] in empty_words] == []


def test_every_file_starts_with_a_docstring() -> None:
    silent = [name for name, path in MODULES.items() if path.stat().st_size and not ast.get_docstring(tree_of(path))]

    assert silent == []


# --- closed sets

CONTENTS = {"TextContent", "ImageContent", "PdfContent", "AudioContent"}


def _names_in(node: ast.AST | None) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)} if node is not None else set()


def _ends_with_assert_never(match: ast.Match) -> bool:
    last = match.cases[-1]
    is_wildcard = isinstance(last.pattern, ast.MatchAs) and last.pattern.pattern is None and last.guard is None
    return is_wildcard and "assert_never" in _names_in(last.body[-1])


def test_code_that_handles_message_contents_matches_all_kinds() -> None:
    """A new kind of content must fail type checking wherever contents are handled."""
    places = 0
    naming = {name: path for name, path in MODULES.items() if any(each in path.read_text("utf-8") for each in CONTENTS)}
    for module, path in naming.items():
        for node in ast.walk(tree_of(path)):
            where = f"{module}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                assert not CONTENTS & _names_in(node.args[1]), f"{where}: match the kinds of contents instead"
            if isinstance(node, ast.Match):
                patterns = [each for case in node.cases for each in ast.walk(case.pattern)]
                classes = set().union(*(_names_in(each.cls) for each in patterns if isinstance(each, ast.MatchClass)))
                if CONTENTS & classes:
                    places += 1
                    assert _ends_with_assert_never(node), f"{where}: end with `case _: assert_never(…)`"
    assert places >= 10
