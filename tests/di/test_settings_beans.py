"""Settings as beans: built once, from the environment, with errors that contain no values."""

import pytest
from pydantic_settings import BaseSettings, SettingsConfigDict

from toolbox import Container, IllegalConfigurationError, Instance, request_scoped

pytestmark = pytest.mark.anyio


class DbSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="TEST_DB_")
    url: str
    size: int = 3


async def test_settings_need_no_registration_and_are_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_URL", "sqlite://")

    @request_scoped
    class Uses:
        def __init__(self, settings: DbSettings, later: Instance[DbSettings]) -> None:
            self.settings, self.later = settings, later

    async with Container().register(Uses) as c:
        async with c.request_scope():
            first = c.get(Uses).settings
            assert first.url == "sqlite://"
            assert c.get(Uses).later.get() is first
        async with c.request_scope():
            assert c.get(Uses).settings is first
            assert c.get(DbSettings) is first


async def test_settings_that_are_not_injected_anywhere_can_be_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_URL", "sqlite://")
    async with Container() as c:
        assert c.get(DbSettings) is c.get(DbSettings)
        assert (await c.aget(DbSettings)).url == "sqlite://"
        assert c.call(lambda settings: settings, settings=1) == 1


async def test_problems_of_settings_contain_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_SIZE", "secret-value")

    class Uses:
        def __init__(self, settings: DbSettings) -> None: ...

    c = Container().register(Uses)
    [problem] = c.check()
    assert problem.where == "DbSettings"
    assert "url" in problem.what
    assert "size" in problem.what
    assert "TEST_DB_URL" in problem.fix
    assert "secret-value" not in str(problem)
    with pytest.raises(IllegalConfigurationError) as raised:
        async with c:
            pass
    assert "secret-value" not in str(raised.value)


async def test_errors_of_settings_after_start_contain_no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_DB_SIZE", "secret-value")
    async with Container() as c:
        with pytest.raises(IllegalConfigurationError) as raised:
            c.get(DbSettings)
        assert "secret-value" not in str(raised.value)
        assert raised.value.__cause__ is None


async def test_registered_settings_are_not_built_again() -> None:
    async with Container().register_instance(DbSettings(url="given")) as c:
        assert c.get(DbSettings).url == "given"
