"""Random graphs of beans with planted faults: `check()` against a plain oracle, and sound ones made for real."""

import inspect
import re
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, product
from typing import Any

from hypothesis import HealthCheck, given, settings

from tests.generated import Choices, made
from toolbox import Container, Instance, application_scoped, call_scoped, dependent, request_scoped

SCOPES = {"application": application_scoped, "request": request_scoped, "call": call_scoped, "dependent": dependent}
SPAN = {"application": 3, "request": 2, "call": 1, "dependent": 0}
FORMS = ("one", "list", "optional", "instance", "default")
FAULTS = ("missing", "ambiguous", "unannotated", "missing instance")


@dataclass(frozen=True)
class Plan:
    """A random graph: the scope of each bean, its dependencies and their forms, and the planted faults."""

    scopes: tuple[str, ...]
    edges: tuple[tuple[int, int, str], ...]
    faults: tuple[tuple[int, str], ...]

    @property
    def held(self) -> dict[int, set[int]]:
        """Return the beans that each bean holds."""
        found: dict[int, set[int]] = {number: set() for number in range(len(self.scopes))}
        for here, there, form in self.edges:
            if form != "instance":
                found[here].add(there)
        return found


def plan_from(choices: Choices, *, sound: bool = False) -> Plan:
    count = 1 + choices.below(8)
    scopes = tuple(choices.one_of(list(SCOPES)) for _ in range(count))
    edges = [(choices.below(count), choices.below(count), choices.one_of(FORMS)) for _ in range(choices.below(15))]
    faults = [] if sound else [(choices.below(count), choices.one_of(FAULTS)) for _ in range(choices.below(4))]
    if sound:
        # Only to earlier beans, and those that live as long; a dependent one lives as long as what it holds.
        edges = [(here, there, form) for here, there, form in edges if there < here or form == "instance"]
        lives = [SPAN[scope] for scope in scopes]
        kept = []
        for here, there, form in sorted(edges):
            if form == "instance":
                kept.append((here, there, form))
            elif scopes[here] == "dependent":
                bound = [lives[t] for h, t, f in kept if h == here and f != "instance" and lives[t]]
                kept.append((here, there, form))
                lives[here] = min([*bound, *([lives[there]] if lives[there] else [])], default=0)
            elif not lives[there] or lives[there] >= lives[here]:
                kept.append((here, there, form))
        edges = kept
    return Plan(scopes, tuple(edges), tuple(faults))


class Twin:
    """The base class of two beans: asking for it is ambiguous."""


class First(Twin):
    pass


class Second(Twin):
    pass


class Absent:
    """A class that is not registered."""


def build(plan: Plan) -> list[type]:
    classes: list[type] = [SCOPES[scope](type(f"K{number}", (), {})) for number, scope in enumerate(plan.scopes)]
    for number, cls in enumerate(classes):
        parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
        for index, (here, there, form) in enumerate(plan.edges):
            if here == number:
                parameters.append(parameter(f"p{index}", annotation_of(classes[there], form), form == "default"))
        for index, (here, fault) in enumerate(plan.faults):
            if here == number:
                parameters.append(parameter(f"f{index}", annotation_of_fault(fault), False))

        def init(self: Any, **values: Any) -> None:
            self.values = values

        init.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # read by inspect
        cls.__init__ = init  # type: ignore[misc]  # a class made here
    return classes


def parameter(name: str, annotation: Any, has_default: bool) -> inspect.Parameter:
    default = None if has_default else inspect.Parameter.empty
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def annotation_of(cls: Any, form: str) -> Any:
    forms = {"one": cls, "list": list[cls], "optional": cls | None, "instance": Instance[cls], "default": cls}
    return forms[form]


def annotation_of_fault(fault: str) -> Any:
    faults = {"missing": Absent, "ambiguous": Twin, "missing instance": Instance[Absent]}
    return faults.get(fault, inspect.Parameter.empty)


# --- the oracle


def reachable(held: dict[int, set[int]]) -> set[tuple[int, int]]:
    """Return all pairs of connected beans, by repeated extension."""
    found = {(here, there) for here, theirs in held.items() for there in theirs}
    while True:
        more = {(a, d) for (a, b), (c, d) in product(found, found) if b == c} - found
        if not more:
            return found
        found |= more


def captives(plan: Plan) -> set[tuple[int, int]]:
    """Return the pairs of a bean and a shorter-lived bean that it would hold, through dependent beans only."""
    found = set()
    for start, scope in enumerate(plan.scopes):
        if scope == "dependent":
            continue
        through, seen = list(plan.held[start]), set()
        while through:
            here = through.pop()
            if plan.scopes[here] != "dependent":
                if SPAN[plan.scopes[here]] < SPAN[scope]:
                    found.add((start, here))
            elif here not in seen:
                seen.add(here)
                through += plan.held[here]
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made(plan_from, size=64))
def test_check_finds_exactly_the_planted_faults(drawn: tuple[Plan]) -> None:
    [plan] = drawn
    problems = Container().register(*build(plan), First, Second).check()
    texts = [f"{problem.where}: {problem.what}" for problem in problems]
    assert len(set(texts)) == len(texts)
    assert all(problem.fix for problem in problems)

    reported = {"missing": set(), "ambiguous": set(), "unannotated": set(), "captive": set(), "cycle": set()}
    cycles: list[list[int]] = []
    for problem in problems:
        if "no bean provides Absent" in problem.what:
            reported["missing"].add(problem.where)
        elif "multiple beans provide" in problem.what and problem.what.endswith(": First, Second"):
            reported["ambiguous"].add(problem.where)
        elif "no annotation" in problem.what:
            reported["unannotated"].add(problem.where)
        elif match := re.match(r"K(\d+) is \w+_scoped but holds K(\d+)", problem.what):
            reported["captive"].add((int(match[1]), int(match[2])))
        else:
            path = re.search(r"dependency cycle: ([K\d >-]+)$", problem.what)
            assert path, problem
            cycles.append([int(number) for number in re.findall(r"\d+", path[1])])

    def planted(*faults: str) -> set[str]:
        return {f"K{here}.f{index}" for index, (here, fault) in enumerate(plan.faults) if fault in faults}

    assert reported["missing"] == planted("missing", "missing instance")
    assert reported["ambiguous"] == planted("ambiguous")
    assert reported["unannotated"] == planted("unannotated")
    assert reported["captive"] == captives(plan)
    ways = reachable(plan.held)
    steps = [step for cycle in cycles for step in pairwise(cycle)]
    for cycle in cycles:
        assert cycle[0] == cycle[-1]
        assert len(set(cycle)) == len(cycle) - 1
    assert all(there in plan.held[here] for here, there in steps)
    on_a_cycle = {
        (here, there)
        for here, theirs in plan.held.items()
        for there in theirs
        if (there, here) in ways or here == there
    }
    assert set(steps) == on_a_cycle


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made(partial(plan_from, sound=True), size=64))
def test_valid_graphs_are_created_as_declared(drawn: tuple[Plan]) -> None:
    [plan] = drawn
    classes = build(plan)
    container = Container().register(*classes)
    assert container.check() == []
    with container, container.request_scope():
        shared = {
            cls: container.get(cls) for cls, scope in zip(classes, plan.scopes, strict=True) if scope != "dependent"
        }
        for number, cls in enumerate(classes):
            bean: Any = container.get(cls)
            for index, (here, there, form) in enumerate(plan.edges):
                if here != number:
                    continue
                value = bean.values[f"p{index}"]
                value = value[0] if form == "list" else value.get() if form == "instance" else value
                assert type(value) is classes[there]
                if classes[there] in shared:
                    assert value is shared[classes[there]]
