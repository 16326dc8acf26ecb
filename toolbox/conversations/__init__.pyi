# Written by `make stubs` from the tables of names in the __init__.py beside this file.
from .views import (
    FullHistory,
)

__all__ = [
    "FullHistory",
]
