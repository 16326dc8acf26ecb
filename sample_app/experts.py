"""The router and its experts from the LangChain4j documentation: AI services that are tools of another AI service.

Not here: their endpoint (`support`), the choice of the model (`application`).
"""

from __future__ import annotations

from typing import Protocol

from toolbox import Result, register_ai_service, tool, user_message


@register_ai_service(chat_memory=None)
class MedicalExpert(Protocol):
    """Answers medical requests."""

    @user_message("""
        You are a medical expert.
        Analyze the following user request under a medical point of view and provide the best possible answer.
        The user request is: {request}
        """)
    @tool("A medical expert")
    async def medical_request(self, request: str) -> str:
        """The expert's answer."""
        ...


@register_ai_service(chat_memory=None)
class LegalExpert(Protocol):
    """Answers legal requests."""

    @user_message("""
        You are a legal expert.
        Analyze the following user request under a legal point of view and provide the best possible answer.
        The user request is: {request}
        """)
    @tool("A legal expert")
    async def legal_request(self, request: str) -> str:
        """The expert's answer."""
        ...


@register_ai_service(chat_memory=None)
class TechnicalExpert(Protocol):
    """Answers technical requests."""

    @user_message("""
        You are a technical expert.
        Analyze the following user request under a technical point of view and provide the best possible answer.
        The user request is: {request}
        """)
    @tool("A technical expert")
    async def technical_request(self, request: str) -> str:
        """The expert's answer."""
        ...


@register_ai_service(tools=(MedicalExpert, LegalExpert, TechnicalExpert), chat_memory=None)
class RouterAgent(Protocol):
    """Forwards a request to the right expert."""

    @user_message("""
        Analyze the following user request and categorize it as 'legal', 'medical' or 'technical',
        then forward the request as it is to the corresponding expert provided as a tool.
        Finally return the answer that you received from the expert without any modification.

        The user request is: {request}
        """)
    async def ask_expert(self, request: str) -> Result[str]:
        """The expert's answer."""
        ...
