"""Settings come from the environment, and secrets stay hidden."""

from pathlib import Path

import pytest
from pydantic import Field, ValidationError

from toolbox.settings import ToolboxSettings


def test_the_default_settings_match_the_documentation() -> None:
    settings = ToolboxSettings()

    assert (settings.pool_size, settings.thread_limit, settings.stop_timeout) == (32, 256, 10.0)
    assert (settings.max_result_chars, settings.max_concurrent_tools, settings.slow_call_warning) == (None, 16, 0.1)
    assert settings.demo is False
    assert settings.models == {}


def test_a_named_model_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__MODEL", "qwen")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__BASE_URL", "http://127.0.0.1:1/v1")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__API_KEY", "sk-secret")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__TIMEOUT", "2.5")
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__FALLBACK", '["other", "third"]')
    monkeypatch.setenv("TOOLBOX_MODELS__TOOL_USE__HEADERS", '{"X-Team": "a"}')
    monkeypatch.setenv("TOOLBOX_POOL_SIZE", "3")

    settings = ToolboxSettings()

    model = settings.models["tool_use"]
    assert (model.model, model.base_url, model.timeout) == ("qwen", "http://127.0.0.1:1/v1", 2.5)
    assert model.fallback == ("other", "third")
    assert settings.pool_size == 3
    assert "sk-secret" not in repr(settings)
    assert "sk-secret" not in str(settings.model_dump())


def test_settings_are_read_from_each_place_that_has_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Renamed(ToolboxSettings):
        pool_size: int = Field(32, validation_alias="THREADS")

    file = tmp_path / "names.env"
    file.write_text("TOOLBOX_THREAD_LIMIT=7\nTOOLBOX_POOL_SIZE=5\nOTHER=3\n")
    monkeypatch.setenv("THREADS", "9")
    monkeypatch.setenv("SHOP_THREAD_LIMIT", "8")

    assert ToolboxSettings(_env_file=file).thread_limit == 7
    assert ToolboxSettings(_env_prefix="SHOP_").thread_limit == 8
    assert Renamed().pool_size == 9
    assert ToolboxSettings(_env_file=file, pool_size=4).pool_size == 4

    monkeypatch.setenv("toolbox_pool_size", "6")
    assert ToolboxSettings(_env_file=file).pool_size == 6
    assert ToolboxSettings(_env_file=file).thread_limit == 7


def test_a_container_reads_the_same_settings_with_and_without_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first, second = ToolboxSettings(), ToolboxSettings()
    assert first == second == ToolboxSettings()
    assert first.model_dump() == ToolboxSettings().model_dump()
    assert first.model_fields_set == ToolboxSettings().model_fields_set == set()
    assert first.models is not second.models
    with pytest.raises(ValidationError, match="frozen"):
        first.pool_size = 3  # type: ignore[misc]  # the test of this error

    monkeypatch.setenv("toolbox_pool_size", "6")
    assert ToolboxSettings().pool_size == 6
    monkeypatch.setenv("TOOLBOX_POOL_SIZE", "many")
    with pytest.raises(ValidationError, match="pool_size"):
        ToolboxSettings()
    monkeypatch.delenv("TOOLBOX_POOL_SIZE")
    monkeypatch.delenv("toolbox_pool_size")

    file = tmp_path / "names.env"
    file.write_text("TOOLBOX_THREAD_LIMIT=7\n")
    monkeypatch.setitem(ToolboxSettings.model_config, "env_file", file)
    assert ToolboxSettings().thread_limit == 7


def test_several_fallbacks_can_be_set_in_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_MODELS", '{"Tool-Use.2": {"model": "m", "fallback": "other, third"}}')

    assert ToolboxSettings().models["tool_use_2"].fallback == ("other", "third")


def test_a_rest_client_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLBOX_REST__OPENMETEO__URL", "http://127.0.0.1:1")
    monkeypatch.setenv("TOOLBOX_REST__OPENMETEO__HEADERS", '{"Authorization": "Bearer s3cret"}')
    monkeypatch.setenv("TOOLBOX_REST__OPENMETEO__RETRIES", "2")

    rest = ToolboxSettings().rest["openmeteo"]

    assert (rest.url, rest.retries) == ("http://127.0.0.1:1", 2)
    assert "s3cret" not in repr(rest)


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("TOOLBOX_MODELS__X__API_KEYS", "sk-secret"),
        ("TOOLBOX_MODELS__X__TIMEOUT", "sk-secret"),
        ("TOOLBOX_MODELS", '{"x": {"api_key": {"value": "sk-secret"}}}'),
        ("TOOLBOX_POOL_SIZE", "sk-secret"),
    ],
)
def test_errors_in_settings_contain_no_values(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)

    with pytest.raises(ValidationError) as caught:
        ToolboxSettings()

    assert "sk-secret" not in str(caught.value)
    assert "sk-secret" not in repr(caught.value)
