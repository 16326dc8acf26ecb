"""Stand-ins for the servers that the sample calls: the two Open-Meteo services and the language model.

Not here: the agents, which do not know about the stand-ins.
"""

from .model import StandInModel
from .server import StandIn

__all__ = ["StandIn", "StandInModel"]
