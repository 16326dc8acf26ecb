"""Stand-ins for what the sample asks over the network: the two Open-Meteo services, and the language model.

Not here: anything of the agents. They cannot tell the difference.
"""

from .model import StandInModel
from .server import StandIn

__all__ = ["StandIn", "StandInModel"]
