"""Finds beans that nobody registers by themselves: classes that decorators, options and lists of tools name.

A host registers them with what names them. Not here: the references (`bean_references`), what a service lists
(`declared_sources`), registering (`hosts.registered_services`, `registered_program`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, get_args, get_origin

from ..bean_references import DEFAULT_SCOPE_MARK, BeanReference, all_named
from ..tools.single_methods import class_defining
from ..tools.sources import AiServiceTool
from .declaration import ServiceOptions, is_interface


def named_beans(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """Yield the classes that decorators name at services, tools and their members: beans to register."""
    for each in listed:
        if isinstance(each, Mapping):
            yield from named_beans(each.values())
            continue
        for target in _definitions_in(each):
            for reference in all_named(target):
                named = reference.type
                # An interface is bound to a bean. A class of a wrong kind is reported as such.
                if reference.bean is not None and hasattr(named, DEFAULT_SCOPE_MARK) and not inspect.isabstract(named):
                    yield named


def _definitions_in(listed: Any) -> tuple[Any, ...]:
    """Return the functions and classes with the marks of something that can be listed as a tool."""
    target = get_args(listed)[0] if get_origin(listed) is Annotated else listed
    if isinstance(target, AiServiceTool):
        target = target.executor
    if isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, type):
        return (target,)
    if inspect.ismethod(target):
        return target, type(target.__self__)
    if inspect.isroutine(target):
        cls = class_defining(target)
        return (target,) if cls is None else (cls,)
    return target, type(target)


def registrable(listed: Iterable[Any]) -> Iterator[type[Any]]:
    """Yield the listed classes to register as beans: all except interfaces, which are bound to a bean."""
    for cls in listed:
        if not isinstance(cls, type):
            continue
        if not is_interface(cls) or any(name.startswith("__toolbox_") for name in vars(cls)):
            yield cls


def strategies(options: ServiceOptions) -> Iterator[type[Any]]:
    """Yield the classes of the tool search and of the router of models: beans to register."""
    for named in (options.tool_search, options.model):
        bean = BeanReference.to(named).bean
        if isinstance(bean, type) and not inspect.isabstract(bean):
            yield bean
