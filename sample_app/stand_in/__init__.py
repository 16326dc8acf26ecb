"""A stand-in for the two Open-Meteo services, so that the sample runs without the internet.

Not here: anything of the agent. It knows the services by HTTP only, and cannot tell the difference.
"""

from .server import StandIn

__all__ = ["StandIn"]
