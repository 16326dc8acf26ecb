"""The application: its model and weather services, its container, and the endpoints `/` and `/weather`.

Not here: the agent (`weather`), other agents (`support`), the command line (`__main__`), local servers (`stand_in`).
"""

from __future__ import annotations

import html
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from pydantic import BaseModel, Field

from toolbox import Container, Inject, rest
from toolbox_fastapi import install

from .answers import Answer
from .stand_in import StandIn, StandInModel
from .support import router, with_support
from .weather import CityExtractorAgent, GeoCodingService, WeatherForecastAgent, WeatherForecastService

DEFAULT_MODEL = "gpt-5-mini"
OPEN_METEO = {"geocoding": "https://geocoding-api.open-meteo.com", "openmeteo": "https://api.open-meteo.com"}


def uses_real_model() -> bool:
    """Return True if the environment names a model server; otherwise the embedded demo model answers."""
    return bool(os.environ.get("OPENAI_API_KEY") or os.environ.get("OPENAI_BASE_URL"))


def uses_real_weather() -> bool:
    """Return True if the program calls Open-Meteo, and False if it uses the stand-in on this machine."""
    return os.environ.get("OPEN_METEO") == "1"


def model_name() -> str:
    """Return the name of the model for display."""
    return os.environ.get("OPENAI_MODEL") or DEFAULT_MODEL if uses_real_model() else "the embedded demo model"


def weather_container(stand_in: StandIn | None = None) -> Container:
    """Return a container with the agent and its tools; the weather comes from `stand_in`, else Open-Meteo."""
    if uses_real_model():
        os.environ.setdefault("OPENAI_MODEL", DEFAULT_MODEL)
    container = Container(models={} if uses_real_model() else {"default": StandInModel()})
    container.register(WeatherForecastAgent, CityExtractorAgent, GeoCodingService, WeatherForecastService)
    for key, url in OPEN_METEO.items():
        # A URL in the environment takes precedence, as everywhere in toolbox.
        if f"TOOLBOX_REST__{key.upper()}__URL" not in os.environ:
            container.register(rest.rest_settings(key, url=stand_in.url if stand_in else url))
    return container


class Question(BaseModel):
    """A question to the weather agent."""

    question: str = Field(min_length=1, max_length=2000)


def create_app() -> FastAPI:
    """Create the web application; the stand-in, if it needs one, runs during its lifespan."""
    stand_in = None if uses_real_weather() else StandIn()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        with stand_in or nullcontext():
            yield

    app = FastAPI(title="Weather agent", lifespan=lifespan)
    install(app, with_support(weather_container(stand_in)), dev_ui=True)
    app.include_router(router)
    app.mount("/static", StaticFiles(directory=Path(__file__).with_name("static")))
    page = _page()

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def index() -> str:
        return page

    @app.post("/weather")
    async def weather(question: Question, agent: Inject[WeatherForecastAgent]) -> Answer:
        return Answer.of(await agent.chat(question.question))

    return app


def _page() -> str:
    weather = "Open-Meteo" if uses_real_weather() else "a stand-in for Open-Meteo on this machine"
    text = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return text.replace("{{model}}", html.escape(model_name())).replace("{{weather}}", html.escape(weather))
