"""Models as beans: those that a container has by name, from all sources, and the one that a name means in a scope.

Sources are `models=`, settings and environment (`models.selection`), and what a program registers: producers, classes,
instances and providers of dependency-injector containers. Not here: what beans get (`services.injected_models`),
chains of models and their time to cool down (`models.fallbacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast, get_args

from ..chat import ChatModel
from ..context import InvocationContext
from ..di.beans import BeanDefinition, FactoryKind
from ..di.decorators import Scope
from ..di.graph import Binding
from ..di.injection_points import MISSING, InjectionPoint, point_of
from ..errors import IllegalConfigurationError, Problem
from ..introspection import forms_of, is_union, plain, type_name
from ..models import model_requests
from ..models.fallbacks import CoolingModels, FallbackModel, NamedModel, fallback_names
from ..models.selection import DEFAULT_NAME, NamedModels, key_function_of, no_model
from ..services.host_needs import ServiceHost
from ..services.injected_models import InjectedModel, tell_skipped
from ..tools.tool_calls import read_injected

PROVIDER_NAME = "chat_model"
"""The name of the default model among the providers; that of another model ends with it."""


class ModelBeans:
    """The models of one container: their beans, the rules for their names, and finding one in the active scope."""

    type = ChatModel
    are_checked = True
    """False if problems of models are left out, for machines without keys."""

    def __init__(self, sources: NamedModels, host: ServiceHost, overridden: Collection[str]) -> None:
        self.sources, self._host, self._overridden = sources, host, overridden
        self.cooling = CoolingModels(self.name_of)
        self._registered: dict[str, BeanDefinition] = {}

    # --- the beans

    def arrange(
        self, definitions: Iterable[BeanDefinition], bindings: Iterable[Binding]
    ) -> tuple[list[BeanDefinition], list[Binding]]:
        """Return the definitions with the beans of all models, and the bindings that are left."""
        others = [each for each in bindings if plain(each.interface) is not ChatModel]
        bound = [each for each in bindings if plain(each.interface) is ChatModel]
        self._registered = {}
        arranged: list[BeanDefinition] = []
        seeds: list[BeanDefinition] = []
        for each in definitions:
            if not is_model_type(each.provides) or self._is_passed(each):
                arranged.append(each)
            elif each.factory_kind is FactoryKind.SEED:
                seeds.append(each)
            elif plain(each.provides) is ChatModel:
                arranged.append(self._registering(self._model_bean(_name_of(each), each)))
            else:
                arranged.append(replace(each, not_as=(*each.not_as, ChatModel)))
                if not any(_is_bound(binding, each) for binding in bound):
                    arranged.append(self._registering(self._behind(_name_of(each), each)))
        arranged += [self._define_bound(binding, arranged) for binding in bound]
        configured = [name for name in (*self.sources.names(), *self._overridden) if name not in self._registered]
        arranged += [self._define_configured(name) for name in dict.fromkeys(configured)]
        # A seed replaces a model of its name in any case; without a model, it is the only one.
        for each in seeds:
            if (name := _name_of(each)) not in (*configured, *self._registered):
                arranged.append(self._registering(self._model_bean(name, each)))
        return arranged, others

    def _is_passed(self, definition: BeanDefinition) -> bool:
        """Return True for an instance that is a model of `models=` as well, and registered to be found by its class."""
        is_own_type = plain(definition.provides) is not ChatModel
        return is_own_type and any(definition.source is each for each in self.sources.given.values())

    def _model_bean(self, name: str, definition: BeanDefinition) -> BeanDefinition:
        """Return the bean of a model whose definition is that of a `ChatModel`."""
        return replace(
            definition,
            provides=ChatModel,
            name=name,
            adapt=partial(self._make_injected, name, _place_of(definition)),
            later=tuple(_points_of_requests(name, definition.source)),
            implicit=True,
            provider_name=PROVIDER_NAME if name == DEFAULT_NAME else f"{name}_{PROVIDER_NAME}",
        )

    def _behind(self, name: str, definition: BeanDefinition) -> BeanDefinition:
        """Return the bean of a model that another bean, found by its class, provides."""
        where = _place_of(definition)
        point = InjectionPoint(where, definition.provides, definition.provides, definition.name, parameter="model")
        holder = BeanDefinition(
            provides=ChatModel,
            factory=_same,
            scope=definition.scope,
            needs=(point,),
            caches=definition.caches,
            optional=definition.optional,
            source=definition.source,
        )
        return self._model_bean(name, holder)

    def _define_bound(self, binding: Binding, definitions: Iterable[BeanDefinition]) -> BeanDefinition:
        """Return the bean of `bind(ChatModel, …)`."""
        name = self.sources.spelled(binding.name)
        where = f"bind(ChatModel, {type_name(binding.implementation)})"
        found = next((each for each in definitions if _is_bound(binding, each)), None)
        if found is not None:
            return self._registering(self._behind(name, found))
        problem = Problem(where, f"no bean provides {type_name(binding.implementation)}", "register it")
        missing = BeanDefinition(provides=ChatModel, factory=_same, problems=(problem,))
        return self._registering(self._model_bean(name, missing))

    def _registering(self, bean: BeanDefinition) -> BeanDefinition:
        """Note the bean of a registered model; add the problem of a name that is taken."""
        assert bean.name is not None
        name, where = bean.name, _place_of(bean)
        if (other := self._registered.get(name)) is not None:
            taken: str | None = f"{_place_of(other)} is a model of this name too"
        elif name in self.sources.given:
            taken = f"Container(models={{{name!r}: …}}) has a model of this name too"
        elif self.sources.is_in_settings(name):
            taken = "the settings have a model of this name too"
        else:
            taken = None
        if taken is not None:
            what = f"two models are called {name!r}: {taken}"
            fix = 'remove one of them, or name it, such as @produces(name="small")'
            bean = replace(bean, problems=(*bean.problems, Problem(where, what, fix)))
        self._registered.setdefault(name, bean)
        return bean

    def _define_configured(self, name: str) -> BeanDefinition:
        """Return the bean of a model that is passed to the container, or configured. It is created on first use."""
        bean = BeanDefinition(
            provides=ChatModel,
            factory=partial(self._inject, name),
            scope=Scope.APPLICATION,
            source=self.sources.given.get(name),
        )
        return self._model_bean(name, bean)

    def _make_injected(self, name: str, where: str, model: Any) -> InjectedModel:
        """Return what beans get for a model, a seed or an override. Raises `IllegalConfigurationError`."""
        if isinstance(model, InjectedModel) and model.is_called(name, self._host):
            return model
        if (problem := no_model(model, where, where)) is not None:
            raise IllegalConfigurationError([problem])
        return self._inject(name, model.own_model if isinstance(model, InjectedModel) else model)

    def _inject(self, name: str, made: ChatModel | None = None) -> InjectedModel:
        own, chain = partial(self.own_model, name, made), partial(self._with_fallbacks, name, made)
        return InjectedModel(name, self._host, own, chain)

    # --- the rules for names: see `di.graph.NamedType`

    def name_of(self, name: str | None) -> str:
        """Return the name of the model that a point with this name gets."""
        return name if name in self._registered else self.sources.spelled(name)

    def problem(self, name: str | None, where: str) -> Problem | None:
        """Return the problem with a model or its fallbacks, or None."""
        wanted = self.name_of(name)
        if not self.are_checked:
            return None
        if (fault := self._fault(wanted, name, where)) is not None:
            return fault
        for each in self._known_fallbacks(wanted):
            place = f"{where}, fallback of model {wanted!r}"
            if (fault := self._fault(self.name_of(each), each, place)) is not None:
                return fault
        return None

    def _fault(self, name: str, asked: str | None, where: str) -> Problem | None:
        if name in self._registered or name in self._overridden:
            return None
        if model_requests.stand_in is not None and name not in self.sources.given:
            return None
        return self.sources.problem(asked if asked is not None else name, where, self._registered)

    def _known_fallbacks(self, name: str) -> tuple[str, ...]:
        """Return the fallbacks of a model, if they are known before it is made."""
        if (bean := self._registered.get(name)) is None:
            return self.sources.fallbacks_of(name)
        is_instance = callable(getattr(bean.source, "chat", None)) and not isinstance(bean.source, type)
        return fallback_names(bean.source) if is_instance else ()

    def missing(self, name: str | None) -> BeanDefinition | None:
        """Return the bean of a name that no model has, in tests whose model replaces all others."""
        return self._define_configured(self.name_of(name)) if model_requests.stand_in is not None else None

    def not_registered(self, names: Iterable[str | None]) -> set[str]:
        """Return these names and those of all models, without those of models that the program registers."""
        known = {self.name_of(each) for each in (None, *names, *self.sources.names())}
        return known - {*self._registered}

    def problems(self, known: Collection[Problem]) -> Iterator[Problem]:
        """Yield problems of models in the settings that no service uses; `known` ones are not repeated."""
        if self.are_checked:
            yield from self.sources.section_problems(known)

    def key_functions(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Yield the functions that return the keys of known models, with their places."""
        instances = {name: each.source for name, each in self._registered.items()}
        for name, model in {**self.sources.given, **instances}.items() if self.are_checked else ():
            if (function := key_function_of(model)) is not None:
                yield f"the api_key function of model {name!r}", function

    # --- while the container is started

    def own_model(self, name: str, made: ChatModel | None) -> ChatModel:
        """Return the model with this name; `made` is the one that a producer has made."""
        if model_requests.stand_in is not None:
            given = made if made is not None else self.sources.given.get(name)
            if (replacement := model_requests.stand_in(given)) is not None:
                return replacement
        return made if made is not None else self.sources.find(name)

    async def find(self, name: str | None, context: InvocationContext | None = None) -> ChatModel:
        """Return the model that a name means in the active scope, with its fallbacks.

        It is asked for as a bean, because an override or a seed can replace each of them.
        """
        return await (await self._bean(name)).with_fallbacks(context)

    async def choose(self, name: str, where: str, context: InvocationContext) -> ChatModel:
        """Return the model that a call chose. Raises `IllegalConfigurationError` for an unknown name."""
        if (problem := self.problem(name, where)) is not None:
            raise IllegalConfigurationError([problem])
        return await self.find(name, context)

    async def _bean(self, name: str | None) -> InjectedModel:
        return cast("InjectedModel", await self._host.scope.aget(ChatModel, name))  # all of them: see `_make_injected`

    async def _with_fallbacks(self, name: str, made: ChatModel | None, context: InvocationContext | None) -> ChatModel:
        """Return the own model, or a chain of it and its fallbacks.

        Raises `IllegalConfigurationError` for unknown ones.
        """
        model = self.own_model(name, made)
        names = fallback_names(model)
        if not names:
            return model
        chain = [NamedModel(name, model)]
        for each in names:
            wanted = self.name_of(each)
            if (problem := self._fault(wanted, each, f"fallback of model {name!r}")) is not None:
                raise IllegalConfigurationError([problem])
            chain.append(NamedModel(wanted, (await self._bean(wanted)).own_model))
        return FallbackModel(chain, self.cooling, tell_skipped(self._host, context))

    def describe(self, name: str | None) -> str:
        """Return a model's name and class for people; not its address, which may contain a secret."""
        wanted = self.name_of(name)
        if (bean := self._registered.get(wanted)) is not None:
            return f"made by {_place_of(bean)} ({bean.scope})"
        model = self.own_model(wanted, None)
        kind, known_as = type(model).__name__, getattr(model, "model", None)
        return f"{kind}, {known_as}" if isinstance(known_as, str) else kind


def _points_of_requests(name: str, model: object) -> Iterator[InjectionPoint]:
    """Yield what requests to a model look up: its fallbacks, and what its `api_key=` function takes."""
    if isinstance(model, type) or not callable(getattr(model, "chat", None)):
        return  # of a class or a producer it is not known before it has made the model
    for each in fallback_names(model):
        yield replace(point_of(ChatModel, f"fallback of model {name!r}"), name=each)
    if (function := key_function_of(model)) is not None:
        where = f"the api_key function of model {name!r}"
        for parameter in read_injected(function, where)[0]:
            yield point_of(parameter.wanted, where, default=None if parameter.optional else MISSING)


def _same(model: Any = None) -> Any:
    return model


def is_model_type(form: Any) -> bool:
    """Return True for `ChatModel`, a class that inherits from it, and a union of such classes."""
    if is_union(form):
        return all(is_model_type(each) for each in get_args(form))
    return ChatModel in forms_of(plain(form))


def _is_bound(binding: Binding, definition: BeanDefinition) -> bool:
    """Return True if a binding names what a definition provides, or the function that makes it."""
    implementation = plain(binding.implementation)
    return implementation in (definition.source, plain(definition.provides))


def _name_of(definition: BeanDefinition) -> str:
    """Return the name of a registered model. Providers of dependency-injector containers may be called as ours."""
    name = definition.name
    if name is None or name == PROVIDER_NAME:
        return DEFAULT_NAME
    return name.removesuffix(f"_{PROVIDER_NAME}") if definition.included is not None else name


def _place_of(definition: BeanDefinition) -> str:
    """Return the place of a model for messages: the producer or the class."""
    source = definition.source
    if callable(source) and hasattr(source, "__qualname__"):
        return type_name(source)
    return f"the model {definition.name or DEFAULT_NAME!r}"
