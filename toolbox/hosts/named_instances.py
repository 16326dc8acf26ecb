"""The beans of a program without a container: instances of the classes that decorators name, and the library's own.

Not here: the executors (`executors`) and services (`standalone`) that use them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from typing_extensions import TypeForm

from ..bean_references import BeanReference
from ..context import ToolCallScope
from ..errors import MissingBeanError, Problem
from ..introspection import type_name

T = TypeVar("T")


class _EmptyScope:
    """The scope, and the call scope, of a program without a container. It has no beans."""

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        raise MissingBeanError(f"{getattr(wanted, '__name__', wanted)} (this service was made without a container)")

    async def aget(self, wanted: TypeForm[T], name: str | None = None) -> T:
        return self.get(wanted, name)

    async def find(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        return self.find_now(wanted, name)

    def find_now(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        return None

    async def prepare(self, wanted: TypeForm[Any], name: str | None = None) -> None: ...

    def open_call_scope(self) -> ToolCallScope:
        return self

    def leave(self) -> None: ...

    def close_if_empty(self) -> bool:
        return True

    def close_here(self, error: BaseException | None) -> None: ...

    async def aclose(self, error: BaseException | None) -> None: ...


class NamedInstances(_EmptyScope):
    """The scope of a program without a container: instances of the classes that decorators name, and other beans."""

    def __init__(self) -> None:
        self._instances: dict[Any, Any] = {}
        self._found: dict[Any, Callable[[], Any]] = {}

    def get(self, wanted: TypeForm[T], name: str | None = None) -> T:
        found = self.find_now(wanted, name)
        return super().get(wanted, name) if found is None else found

    def find_now(self, wanted: TypeForm[T], name: str | None = None) -> T | None:
        owner, seeds = _seeds.get()
        if owner is self and wanted in seeds:
            return seeds[wanted]  # type: ignore[no-any-return]  # the caller of `seeded` gives instances of the types
        if (find := self._found.get(wanted)) is not None:
            return find()  # type: ignore[no-any-return]  # `provide` takes a function of this type
        return self._instances.get(wanted)

    @contextmanager
    def seeded(self, seeds: Mapping[Any, Any]) -> Iterator[None]:
        """Let these instances replace the beans of their types inside the block."""
        token = _seeds.set((self, seeds))
        try:
            yield
        finally:
            _seeds.reset(token)

    def provide(self, wanted: TypeForm[T], find: Callable[[], T]) -> None:
        """Provide a bean; `find()` is called for each lookup."""
        self._found[wanted] = find

    def provides(self, wanted: Any) -> bool:
        """Return True if `provide` was called for this type."""
        return wanted in self._found

    def add(self, reference: BeanReference, where: str) -> Iterator[Problem]:
        """Create the instance of a named class. Yield a problem if its constructor needs arguments."""
        if reference.bean is None or reference.bean in self._instances:
            return
        if inspect.isabstract(reference.type):
            yield Problem(where, f"{type_name(reference.type)} is abstract", "name a subclass or an instance")
            return
        try:
            inspect.signature(reference.type).bind()
        except TypeError:
            fact = f"{type_name(reference.type)} needs arguments, so it needs a container"
            yield Problem(where, fact, "name an instance, or register the class with a Container")
        except ValueError:  # a class without a readable signature
            self._instances[reference.bean] = reference.type()
        else:
            self._instances[reference.bean] = reference.type()


_seeds: ContextVar[tuple[NamedInstances | None, Mapping[Any, Any]]] = ContextVar("toolbox.seeds", default=(None, {}))
