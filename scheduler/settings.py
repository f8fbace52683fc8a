"""Every limit of the server that is not HTTP's own, in one place, with its default and its unit.

Sources, the first that names a value wins: the command line, the environment (`FERMATA_` and the
name, groups parted by two underscores: `FERMATA_SCHEDULER__MAX_ROWS=4`), a TOML file (`--config`,
groups are its tables), the default here.

Units are in the names (`_ms`, `_s`, `_days`, `_bytes`, `_tokens`). A size may be written as a
whole number of bytes or with a unit: GB is 10^9 bytes, GiB 2^30.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, cast

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    TomlConfigSettingsSource,
)

from journal.events import KvLimits, Limits, MemoryLimits, ModelFacts, OrphanLimits
from scheduler.api_keys import ApiKeys
from scheduler.engine.fake_settings import FakeSettings
from scheduler.machine import default_reserve_bytes, total_bytes
from scheduler.overrides import explain, nested
from scheduler.sizes import Ceiling, Group, Size

NS_PER_MS = 10**6
NS_PER_S = 10**9

PREFIX = "FERMATA_"
"""Of the variables that are settings."""

Scalar = str | int | float | bool | None


class ConfigurationError(Exception):
    """A setting that cannot be used. The message names it and says what is allowed: one line."""


Permille = Annotated[int, Field(ge=1, le=1000)]


class ServerSettings(ApiKeys):
    """The server as its clients meet it. Its keys are explained in scheduler/api_keys.py.

    `drain_limit_ms`: how long a clean stop lets rows in the engine go on. `hold_limit_ms`: how long
    it then waits until what is left of them is held, and saved.
    `heartbeat_form`: what keeps a silent stream alive (native: an event of the protocol, comment:
    an SSE comment, off).
    `ready_limit_ms`: the age of the last step beyond which /ready says 503 while work waits.
    `prepare_limit_ms`: how long a request's headers wait for the tokenizer at a start.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8321, ge=0, le=65535)
    drain_limit_ms: int = Field(default=10_000, ge=0)
    hold_limit_ms: int = Field(default=60_000, ge=0)
    heartbeat_ms: int = Field(default=10_000, ge=100)
    heartbeat_form: Literal["native", "comment", "off"] = "native"
    body_limit_bytes: Size = Field(default=16 * 2**20, ge=1024)
    ready_limit_ms: int = Field(default=60_000, ge=100)
    prepare_limit_ms: int = Field(default=30_000, ge=0)


class SchedulerSettings(Group):
    """How much runs at once.

    `max_rows`: requests in the engine. `max_waiting`: the queue; one more is a 503.
    `token_budget`: prompt + max_tokens of all admitted requests, in tokens.
    `chunk_tokens_beside_rows`: the chunk while other rows decode, until it is known how fast they
    are. `gap_ms`: the time between two tokens of a row while others prefill, at most, and at least
    twice its own step; 0: no such bound. `max_inbox`: arrivals that the loop has not looked at
    yet; one more is a 503.
    """

    max_rows: int = Field(default=8, ge=1, le=256)
    max_waiting: int = Field(default=1000, ge=1)
    token_budget: int = Field(default=2_000_000, ge=1)
    chunk_tokens: int = Field(default=2048, ge=1)
    chunk_tokens_beside_rows: int = Field(default=64, ge=1)
    gap_ms: int = Field(default=250, ge=0)
    default_max_tokens: int = Field(default=16_384, ge=1)
    max_inbox: int = Field(default=1024, ge=1)


class MemorySettings(Group):
    """How much memory is used, and what is done when it runs out.

    `ceiling`: bytes that weights, rows and one chunk may take together. `auto` is what the device
    recommends or the machine's memory less the reserve, whichever is less, and follows what other
    programs leave; `none` is no ceiling, and nothing is measured.
    `machine_reserve_bytes`: left to others with `auto`; null takes a tenth of the memory, at least
    2 GB for a system with a few programs, at most a quarter where memory is small.

    The marks are permille of the ceiling. `low_permille`: nobody is admitted or resumed beyond it.
    `high_permille`: beyond it something is given back. `emergency_permille`: beyond it at once.
    `hysteresis_permille`: a mark is left so far below it.
    `act_limit_ms`: how long an action counts as done before its effect is measured.
    `sample_ms`: between two readings while there is work; without, 5 s.
    `pause`: whether a request may be held to give memory back.
    `reserve`: what an admission reserves: all that the request may ever need (bound), its tokens
    and `growth_tokens` of output (expected), or what it has and one chunk (chunk).
    `min_progress_tokens`: a request that went on is not held again before so much output.
    `wait_limit_s`: how long a request waits for memory that other programs hold.
    """

    ceiling: Ceiling = "auto"
    machine_reserve_bytes: Size | None = Field(default=None, ge=0)
    low_permille: Permille = 800
    high_permille: Permille = 920
    emergency_permille: Permille = 1000
    hysteresis_permille: int = Field(default=40, ge=0, le=500)
    act_limit_ms: int = Field(default=2000, ge=1)
    sample_ms: int = Field(default=100, ge=10, le=10_000)
    pause: bool = True
    reserve: Literal["bound", "expected", "chunk"] = "expected"
    growth_tokens: int = Field(default=1024, ge=1)
    min_progress_tokens: int = Field(default=64, ge=0)
    wait_limit_s: int = Field(default=600, ge=1)

    @model_validator(mode="after")
    def check_marks(self) -> "MemorySettings":
        """The marks must be in their order, and each be left above 0."""
        marks = self.low_permille, self.high_permille, self.emergency_permille
        if not self.hysteresis_permille < marks[0] < marks[1] <= marks[2]:
            raise ValueError(
                "hysteresis_permille < low_permille < high_permille <= emergency_permille"
                f" does not hold for {self.hysteresis_permille}, {marks[0]}, {marks[1]}, {marks[2]}"
            )
        return self

    def reserve_bytes(self) -> int:
        """What `auto` leaves to others."""
        if self.machine_reserve_bytes is not None:
            return self.machine_reserve_bytes
        return default_reserve_bytes()

    def ceiling_bytes(self, device_bytes: int | None) -> int | None:
        """The ceiling at the start, null for none. Of `auto` it is a promise: readings make it
        less, never more. `device_bytes` is what the device recommends as the most.
        """
        if self.ceiling != "auto":
            return self.ceiling
        ours_bytes = total_bytes() - self.reserve_bytes()
        return max(1, ours_bytes if device_bytes is None else min(device_bytes, ours_bytes))

    def limits(self) -> MemoryLimits | None:
        """What the core reads of them; null without a ceiling."""
        if self.ceiling is None:
            return None
        is_auto = self.ceiling == "auto"
        return MemoryLimits(
            low_permille=self.low_permille,
            high_permille=self.high_permille,
            emergency_permille=self.emergency_permille,
            hysteresis_permille=self.hysteresis_permille,
            act_limit_ns=self.act_limit_ms * NS_PER_MS,
            reserve=self.reserve,
            growth_tokens=self.growth_tokens,
            min_progress_tokens=self.min_progress_tokens,
            pause=self.pause,
            is_auto=is_auto,
            machine_reserve_bytes=self.reserve_bytes() if is_auto else 0,
            wait_limit_ns=self.wait_limit_s * NS_PER_S,
        )


class RequestSettings(Group):
    """`retention_s`: how long tokens and parameters of an ended request are kept.

    `orphan_grace_s`: how long a request is held whose client was lost; then it is cancelled, unless
    somebody has taken it up; 0: it is cancelled at once. One with an Idempotency-Key runs on.
    `on_restart`: what becomes at a start of requests that are not finished: they go on (resume),
    wait until somebody attaches or releases them (hold), or end (cancel). `restart_grace_s`: how
    long without anybody attaching. `adopt`: a request that is sent again, without a key, takes the
    place of an equal one that has lost its client.

    `max_age_s`: a request that is older is cancelled, whatever it does; 0: it may take as long as
    it needs.
    `max_retries`: how often a row that failed is run again. `max_deaths`: a request that was in
    the engine at so many deaths of the server comes back alone, and after one more is given up.
    `max_lingering`: streams of ended requests that stay in memory for late readers.
    """

    retention_s: int = Field(default=86_400, ge=0)
    orphan_grace_s: int = Field(default=60, ge=0)
    on_restart: Literal["resume", "hold", "cancel"] = "resume"
    restart_grace_s: int = Field(default=1800, ge=1)
    adopt: bool = True
    max_age_s: int = Field(default=0, ge=0)
    max_retries: int = Field(default=2, ge=0, le=100)
    max_deaths: int = Field(default=2, ge=1, le=100)
    max_lingering: int = Field(default=256, ge=0)

    def orphan_limits(self) -> OrphanLimits:
        """What the core reads of them."""
        return OrphanLimits(
            grace_ns=self.orphan_grace_s * NS_PER_S,
            restart_grace_ns=self.restart_grace_s * NS_PER_S,
            on_restart=self.on_restart,
            adopt=self.adopt,
            retention_ns=self.retention_s * NS_PER_S,
        )


class JournalSettings(Group):
    """`durability`: what every commit survives; an end always survives the machine's death.

    `keep_days`, `keep_bytes`: beyond either the journal is shortened. `snapshot_events`: events
    between snapshots. `gather_steps`: decode steps whose tokens lie in rows of their own.
    `full_wait_ms`: between two tries while the disk is full. `upkeep_s`: between two looks at what
    can be purged and shortened.
    """

    durability: Literal["process", "power"] = "process"
    keep_days: int = Field(default=14, ge=1)
    keep_bytes: Size = Field(default=5 * 10**9, ge=2**20)
    snapshot_events: int = Field(default=50_000, ge=100)
    gather_steps: int = Field(default=512, ge=1)
    full_wait_ms: int = Field(default=1000, ge=1)
    upkeep_s: int = Field(default=60, ge=1)


class EngineSettings(Group):
    """`blas`: the matrix library on a CPU (auto takes OpenBLAS for models over 50 million
    parameters).
    """

    blas: Literal["auto", "stock", "openblas"] = "auto"


class KvSettings(Group):
    """KV that is saved on SSD and kept in memory for later requests.

    `enabled`: without it nothing is saved, and every prompt is computed from its start.
    `block_tokens`: tokens in a block; null takes 256, and 64 for models under a gigabyte.
    `max_bytes`: all files, those in use included. `reserve_bytes`: stay free on the file system;
    with 0 they can fill it, and if it is small and the journal's own, nothing is committed then:
    requests stand still until there is space.
    `memory_bytes`: recently used blocks in memory; 0 keeps none. `writing_bytes`: blocks in the
    writers' hands. `max_age_days`: a block that was not used for so long goes; 0 keeps it.
    `state_every_blocks`: between two states of layers that cannot be cut; 0 is as many as take the
    bytes of one state. `await_ms`: how long a request waits for blocks that another is computing.
    `num_writers`: threads. `probe_s`: between two tries while the disk is full or fails.
    `measure_s`: between two looks at the free space.
    """

    enabled: bool = True
    block_tokens: int | None = Field(default=None, ge=1, le=65_536)
    max_bytes: Size = Field(default=100 * 10**9, ge=0)
    reserve_bytes: Size = Field(default=5 * 10**9, ge=0)
    memory_bytes: Size = Field(default=2**30, ge=0)
    writing_bytes: Size = Field(default=2**30, ge=1)
    max_age_days: int = Field(default=30, ge=0)
    state_every_blocks: int = Field(default=0, ge=0)
    await_ms: int = Field(default=60_000, ge=0)
    num_writers: int = Field(default=2, ge=1, le=16)
    probe_s: int = Field(default=10, ge=1)
    measure_s: int = Field(default=10, ge=1)

    def limits(self, model: ModelFacts) -> KvLimits | None:
        """What the core reads of them, for this model."""
        if not self.enabled:
            return None
        return KvLimits(
            block_tokens=self.block_tokens or default_block_tokens(model),
            max_bytes=self.max_bytes,
            memory_bytes=self.memory_bytes,
            writing_bytes=self.writing_bytes,
            reserve_bytes=self.reserve_bytes,
            max_age_ns=self.max_age_days * 86_400 * 10**9,
            state_every_blocks=self.state_every_blocks,
            await_ns=self.await_ms * 10**6,
        )


def default_block_tokens(model: ModelFacts) -> int:
    """Blocks of a few megabytes: small models have few bytes a token and short prompts."""
    return 256 if model.weights_bytes >= 10**9 else 64


class ModelSettings(Group):
    """`accept_any`: any model name in a request means the served model; else it is a 404."""

    accept_any: bool = False


class Settings(BaseSettings):
    """All of them. `model` is a built-in name or a folder; `state` holds the journal."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True
    )

    model: str = "smollm2"
    state: Path = Path("fermata-state")
    server: ServerSettings = ServerSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    memory: MemorySettings = MemorySettings()
    requests: RequestSettings = RequestSettings()
    journal: JournalSettings = JournalSettings()
    engine: EngineSettings = EngineSettings()
    models: ModelSettings = ModelSettings()
    kv: KvSettings = KvSettings()
    fake: FakeSettings = FakeSettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Command line, then environment, then the file that `load_settings` was given."""
        del dotenv_settings, file_secret_settings  # neither is a source here
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls))

    def limits(self, model: ModelFacts | None = None, *, device_bytes: int | None = None) -> Limits:
        """What `decide` reads, in the form that the journal records; `kv` needs the model, and an
        automatic ceiling what the model's device recommends as the most, where it does.
        """
        return Limits(
            max_rows=self.scheduler.max_rows,
            max_waiting=self.scheduler.max_waiting,
            token_budget=self.scheduler.token_budget,
            chunk_tokens=self.scheduler.chunk_tokens,
            chunk_tokens_beside_rows=self.scheduler.chunk_tokens_beside_rows,
            default_max_tokens=self.scheduler.default_max_tokens,
            ceiling_bytes=self.memory.ceiling_bytes(device_bytes),
            max_retries=self.requests.max_retries,
            max_deaths=self.requests.max_deaths,
            kv=None if model is None else self.kv.limits(model),
            memory=self.memory.limits(),
            gap_ns=self.scheduler.gap_ms * NS_PER_MS,
            max_age_ns=self.requests.max_age_s * NS_PER_S,
            orphans=self.requests.orphan_limits(),
        )

    def configuration(self) -> dict[str, Scalar]:
        """All settings as `group.name`, for the journal. Keys are secrets and left out."""
        flat: dict[str, Scalar] = {}
        for name, value in self.model_dump(mode="json").items():
            if isinstance(value, dict):
                group = cast("dict[str, Scalar]", value)
                flat |= {f"{name}.{inner}": scalar for inner, scalar in group.items()}
            else:
                flat[name] = value
        return flat | self.server.recorded()


def load_settings(
    config_file: Path | None = None, overrides: Mapping[str, object] | None = None
) -> Settings:
    """The settings of a server. `overrides` is what the command line gave, keyed by `group.name`.

    Raises ConfigurationError, in one line, for a file that cannot be read and for a value, a name
    or a unit that is wrong.
    """
    if config_file is not None and not config_file.is_file():
        raise ConfigurationError(f"{config_file} is no file: --config takes a TOML file")
    refuse_unknown_variables(os.environ)

    made: type[Settings] = Settings if config_file is None else settings_of_file(config_file)
    try:
        return made(**nested(overrides or {}))  # pyright: ignore[reportArgumentType]
    except ValidationError as error:
        raise ConfigurationError(explain(error)) from error
    except (SettingsError, ValueError) as error:
        where = "the environment" if config_file is None else f"{config_file} or the environment"
        raise ConfigurationError(f"{where} cannot be read: {error}") from error


def settings_of_file(config_file: Path) -> type[Settings]:
    """Settings that are also read from a TOML file."""

    class FileSettings(Settings):
        model_config = SettingsConfigDict(toml_file=config_file)

    return FileSettings


def refuse_unknown_variables(environment: Mapping[str, str]) -> None:
    """pydantic-settings reads the variables that it knows and looks at no others. Raises
    ConfigurationError for the first that names no setting and no group of them.
    """
    for variable in sorted(environment):
        prefix, name = variable[: len(PREFIX)], variable[len(PREFIX) :].lower()
        if prefix.upper() == PREFIX and name.partition("__")[0] not in Settings.model_fields:
            raise ConfigurationError(
                f"variable {variable} names no setting: write {PREFIX}GROUP__NAME, "
                f"as in {PREFIX}SCHEDULER__MAX_ROWS, or unset it"
            )
