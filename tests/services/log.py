"""The list in which guardrails and interceptors of tests note what they saw."""

from typing import Any

LOG: list[Any] = []
