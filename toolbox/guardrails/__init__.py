"""Guardrails: beans that accept, change or refuse messages, answers, and the arguments and results of tools.

Input and output guardrails belong to services and their methods, tool guardrails to tools. `MaxLength`, `MaskSecrets`
and `Moderated` are ready to use.
"""

from ..errors import InputGuardrailError, OutputGuardrailError, ToolGuardrailError
from ..events import GuardrailExecutedEvent
from .kinds import (
    GuardrailResult,
    InputGuardrail,
    InputGuardrailRequest,
    OutputGuardrail,
    OutputGuardrailRequest,
    ToolInputGuardrail,
    ToolInputGuardrailRequest,
    ToolOutputGuardrail,
    ToolOutputGuardrailRequest,
    input_guardrails,
    output_guardrails,
    tool_input_guardrails,
    tool_output_guardrails,
)
from .masking import MaskSecrets
from .masking import masked as masked
from .ready_made import MaxLength, Moderated

__all__ = [
    "GuardrailExecutedEvent",
    "GuardrailResult",
    "InputGuardrail",
    "InputGuardrailError",
    "InputGuardrailRequest",
    "MaskSecrets",
    "MaxLength",
    "Moderated",
    "OutputGuardrail",
    "OutputGuardrailError",
    "OutputGuardrailRequest",
    "ToolGuardrailError",
    "ToolInputGuardrail",
    "ToolInputGuardrailRequest",
    "ToolOutputGuardrail",
    "ToolOutputGuardrailRequest",
    "input_guardrails",
    "output_guardrails",
    "tool_input_guardrails",
    "tool_output_guardrails",
]
