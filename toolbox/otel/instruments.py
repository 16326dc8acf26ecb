"""The metrics: what is measured, in which unit, with the bounds of buckets that the conventions advise.

Not here: what is recorded when (`listener`).
"""

from __future__ import annotations

from opentelemetry.metrics import Histogram, Meter

_SECONDS = [0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92]
_SECONDS_OF_AGENTS = [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6]
_TOKENS: list[float] = [4**exponent for exponent in range(14)]


class Instruments:
    """One histogram for each thing that is measured."""

    def __init__(self, meter: Meter) -> None:
        def seconds(name: str, description: str, bounds: list[float] = _SECONDS) -> Histogram:
            return meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=bounds
            )

        self.model_duration = seconds("gen_ai.client.operation.duration", "How long a model took to answer")
        self.time_to_first_chunk = seconds(
            "gen_ai.client.operation.time_to_first_chunk", "How long a streaming model took to begin"
        )
        self.tool_duration = seconds("gen_ai.execute_tool.duration", "How long a tool took")
        self.service_duration = seconds(
            "gen_ai.invoke_agent.duration", "How long a call of a service took", _SECONDS_OF_AGENTS
        )
        self.tokens = meter.create_histogram(
            "gen_ai.client.token.usage",
            unit="{token}",
            description="Tokens that one request to a model used",
            explicit_bucket_boundaries_advisory=_TOKENS,
        )
