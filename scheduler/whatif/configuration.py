"""The settings of a recorded run, and what is changed of them."""

from collections.abc import Mapping, Sequence

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource

from scheduler.overrides import explain, nested
from scheduler.settings import ConfigurationError, Settings
from scheduler.whatif.recorded import Incident


class RecordedSettings(Settings):
    """Settings that come from a journal: no environment and no file has a say."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)


CEILING, SAVING = "memory.ceiling", "kv.enabled"

IDLE_GROUPS = ("engine", "fake", "journal", "models", "server")
"""Groups of settings that a simulated server has no use for, but for `USED`: its engine is the cost
model, its journal is in memory, and it has no sockets.
"""

USED = ("server.drain_limit_ms", "server.hold_limit_ms")

IDLE = (
    "kv.measure_s",
    "kv.num_writers",
    "kv.probe_s",
    "memory.machine_reserve_bytes",
    "model",
    "requests.max_lingering",
    "state",
)
"""Others that it has no use for: its disk is the cost model, and nobody else takes its memory."""


def parse_changes(given: Sequence[str]) -> dict[str, object]:
    """`group.name=value`, each. Raises ConfigurationError for anything else, for a name that no
    setting has or that comes twice, and for what cannot be known of a machine.
    """
    changes: dict[str, object] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"--set {text}: write NAME=VALUE, as in memory.ceiling=52GB")
        if name not in known_names():
            raise ConfigurationError(f"--set {name}: there is no such setting")
        if not is_of_a_decision(name):
            raise ConfigurationError(f"--set {name}: it changes nothing in a what-if")
        if name in changes:
            raise ConfigurationError(f"--set {name}: is there twice: give it once")
        changes[name] = value
    return changes


def is_of_a_decision(name: str) -> bool:
    """Whether what happens in a simulation may depend on this setting."""
    is_idle = name in IDLE or name.partition(".")[0] in IDLE_GROUPS
    return name in USED or not is_idle


def known_names() -> frozenset[str]:
    """All settings as `group.name`."""
    return frozenset(Settings.model_construct().configuration())


def settings_of(incident: Incident, changes: Mapping[str, object]) -> Settings:
    """The recorded settings with these changes. A ceiling that followed the machine is what it was
    at the start; settings of another release that this one does not have are left out. Raises
    ConfigurationError for a value that cannot be used.
    """
    known = known_names()
    recorded = {
        name: value
        for name, value in incident.configuration.items()
        if name in known and is_of_a_decision(name) and value is not None
    }
    if recorded.get(CEILING) == "auto":
        ceiling = incident.limits.ceiling_bytes
        recorded[CEILING] = "none" if ceiling is None else ceiling
    return plain_settings({**recorded, **changes})


def plain_settings(values: Mapping[str, object]) -> Settings:
    """Settings by these values alone, by `group.name`. Raises ConfigurationError for a value that
    cannot be used.
    """
    if values.get(CEILING) == "auto":
        raise ConfigurationError(
            f"{CEILING}=auto follows a machine, and there is none here: write bytes, or none"
        )
    try:
        settings = RecordedSettings(**nested({**values, "model": "fake"}))  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error
    if settings.kv.enabled:
        return settings
    nothing = settings.kv.model_copy(update={"enabled": True, "max_bytes": 0, "memory_bytes": 0})
    return settings.model_copy(update={"kv": nothing})  # a store that has room for nothing
