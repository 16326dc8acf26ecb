"""What a type checker knows of the hosts of services. Checked by mypy and pyright, never run.

Hosts are loaded late where runs start, so no assignment in the package shows that a method is missing.
"""

from toolbox.conversations.conversations_bean import ConversationsHost
from toolbox.conversations.memories import MemoryHost
from toolbox.hosts.hosting import ContainerHost
from toolbox.hosts.standalone import StandaloneHost
from toolbox.runs.runs_host import RunsHost
from toolbox.services.host_needs import ServiceHost


def each_host_has_services_runs_and_conversations(container: ContainerHost, alone: StandaloneHost) -> None:
    _services: list[ServiceHost] = [container, alone]
    _runs: list[RunsHost] = [container, alone]
    _memories: list[MemoryHost] = [container, alone]
    _conversations: list[ConversationsHost] = [container]
