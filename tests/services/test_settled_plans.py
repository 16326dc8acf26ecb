"""Plans of services: built once, and complete when the plans of other services are known."""

from typing import Protocol

from toolbox import Result, tool
from toolbox.capabilities import Capabilities
from toolbox.services.declaration import ServiceOptions
from toolbox.services.inner_plans import settled
from toolbox.services.planning import plan_service


@tool(requires_approval=True)
async def delete(name: str) -> None:
    """Delete a file."""


class Files(Protocol):
    async def clean(self, question: str) -> Result[str]: ...


def test_a_plan_that_waits_for_people_is_a_new_plan() -> None:
    plans, problems = plan_service(Files, ServiceOptions(tools=(delete,)), Capabilities())

    found = settled({Files: plans})[Files]["clean"]

    assert not problems
    assert not plans["clean"].may_suspend
    assert found.may_suspend
    assert found.checks_suspended


def test_settled_plans_are_settled() -> None:
    plans, _ = plan_service(Files, ServiceOptions(tools=(delete,)), Capabilities())
    once = settled({Files: plans})

    again = settled(once)

    assert again[Files]["clean"] is once[Files]["clean"]


def test_a_plan_has_one_form_for_runs() -> None:
    plans, _ = plan_service(Files, ServiceOptions(tools=(delete,)), Capabilities())
    plan = settled({Files: plans})[Files]["clean"]

    assert plan.in_run is plan.in_run
    assert plan.in_run.in_run is plan.in_run
    assert plan.in_run.may_suspend
