"""Lists the problems of a service that cannot be created."""

from typing import Any

import pytest

from toolbox import IllegalConfigurationError, Problem, create_ai_service
from toolbox.testing import ScriptedChatModel


def problems_of(cls: Any, **options: Any) -> list[Problem]:
    """Return the problems of a service class with these options; it must have some."""
    with pytest.raises(IllegalConfigurationError) as raised:
        create_ai_service(cls, chat_model=ScriptedChatModel([]), **options)
    return list(raised.value.problems)
