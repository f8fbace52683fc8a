"""Settings: where they come from, which wins, and what a wrong one says."""

from pathlib import Path

import pytest

from scheduler.run import Exit
from scheduler.service import Service
from scheduler.settings import ConfigurationError, load_settings
from tests.loop_driver import arrival_of
from tests.run_driver import ready, serve, whole

GB = 10**9


def test_the_command_line_wins_over_the_environment_over_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "fermata.toml"
    file.write_text("[scheduler]\nmax_rows = 2\nmax_waiting = 20\nmax_inbox = 200\n")
    monkeypatch.setenv("FERMATA_SCHEDULER__MAX_ROWS", "3")
    monkeypatch.setenv("FERMATA_SCHEDULER__MAX_WAITING", "30")
    settings = load_settings(file, {"scheduler.max_rows": 4, "scheduler.max_waiting": None})
    group = settings.scheduler
    assert (group.max_rows, group.max_waiting, group.max_inbox) == (4, 30, 200)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("48GB", 48 * 10**9), ("8GiB", 8 * 2**30), ("1.5 MiB", 3 * 2**19), ("4096", 4096)],
)
def test_a_ceiling_is_a_size(text: str, size_bytes: int) -> None:
    settings = load_settings(overrides={"memory.ceiling": text})
    assert settings.memory.ceiling == size_bytes
    assert settings.limits().ceiling_bytes == size_bytes


def test_without_a_ceiling_nothing_of_memory_is_limited() -> None:
    limits = load_settings(overrides={"memory.ceiling": "none"}).limits()
    assert (limits.ceiling_bytes, limits.memory) == (None, None)


@pytest.mark.parametrize(
    ("ram_bytes", "device_bytes", "ceiling_bytes"),
    [
        (64 * GB, None, 576 * GB // 10),  # a tenth stays free
        (64 * GB, 48 * GB, 48 * GB),  # the device recommends less
        (64 * GB, 80 * GB, 576 * GB // 10),
        (16 * GB, None, 14 * GB),  # at least 2 GB stay free
        (4 * GB, None, 3 * GB),  # and at most a quarter
    ],
)
def test_an_automatic_ceiling_is_the_machines(
    monkeypatch: pytest.MonkeyPatch, ram_bytes: int, device_bytes: int | None, ceiling_bytes: int
) -> None:
    monkeypatch.setattr("scheduler.settings.total_bytes", lambda: ram_bytes)
    monkeypatch.setattr("scheduler.machine.total_bytes", lambda: ram_bytes)
    limits = load_settings().limits(device_bytes=device_bytes)
    assert limits.ceiling_bytes == ceiling_bytes
    assert limits.memory is not None
    assert limits.memory.is_auto
    assert limits.memory.machine_reserve_bytes == min(max(ram_bytes // 10, 2 * GB), ram_bytes // 4)


def test_a_reserve_that_leaves_nothing_is_a_ceiling_of_nothing() -> None:
    settings = load_settings(overrides={"memory.machine_reserve_bytes": "1000TB"})
    assert settings.limits().ceiling_bytes == 1


def test_limits_of_memory_are_in_the_units_of_the_core() -> None:
    settings = load_settings(
        overrides={
            "memory.ceiling": "48GB",
            "memory.act_limit_ms": 3,
            "memory.wait_limit_s": 4,
            "scheduler.gap_ms": 5,
            "requests.max_age_s": 6,
        }
    )
    limits = settings.limits()
    assert limits.memory is not None
    assert not limits.memory.is_auto
    assert (limits.memory.act_limit_ns, limits.memory.wait_limit_ns) == (3_000_000, 4_000_000_000)
    assert (limits.gap_ns, limits.max_age_ns) == (5_000_000, 6_000_000_000)


def test_the_largest_settings_can_be_recorded(tmp_path: Path) -> None:
    largest = {
        "memory.ceiling": 2**62,
        "kv.max_bytes": 2**62,
        "kv.writing_bytes": 2**62,
        "kv.await_ms": 2**61 // 10**6,
        "kv.max_age_days": 2**61 // (86_400 * 10**9),
        "kv.state_every_blocks": 2**40,
        "memory.wait_limit_s": 2**61 // 10**9,
        "scheduler.gap_ms": 2**61 // 10**6,
        "scheduler.token_budget": 2**40,
        "scheduler.chunk_tokens": 2**40,
    }
    settings = load_settings(overrides={"model": "fake", "state": tmp_path, **largest})

    async def talk(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello " * 40, 8))
        assert (await whole(stream)).end is not None

    assert serve(settings, talk) == Exit(0)
    assert serve(settings, talk) == Exit(0)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("memory.ceiling", "48 apples"),
        ("memory.ceiling", "0"),
        ("memory.ceiling", True),
        ("memory.ceiling", "9999999TB"),
        ("kv.max_bytes", 2**62 + 1),
        ("kv.reserve_bytes", "99999999TB"),
        ("kv.await_ms", 2**61 // 10**6 + 1),
        ("kv.measure_s", 2**61 // 10**9 + 1),
        ("kv.max_age_days", 2**61 // (86_400 * 10**9) + 1),
        ("kv.state_every_blocks", 2**40 + 1),
        ("requests.max_age_s", 10**15),
        ("scheduler.token_budget", 10**30),
        ("memory.ceiling", 1.5),
        ("memory", {"low_permille": 920}),
        ("memory", {"high_permille": 1000, "emergency_permille": 999}),
        ("memory", {"hysteresis_permille": 300, "low_permille": 300}),
        ("memory.sample_ms", 0),
        ("server.port", 70_000),
        ("scheduler.max_rows", 0),
        ("scheduler.max_rws", 1),
        ("journal.durability", "none"),
        ("server.heartbeat_form", "loud"),
    ],
)
def test_a_wrong_setting_is_named_in_one_line(name: str, value: object) -> None:
    with pytest.raises(ConfigurationError) as raised:
        load_settings(overrides={name: value})
    assert name in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "fermata.toml"
    file.write_text("[scheduler\n")
    for path in (file, tmp_path / "missing.toml"):
        with pytest.raises(ConfigurationError) as raised:
            load_settings(path)
        assert str(path) in str(raised.value)


def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMATA_SCHEDULER__MAX_ROWS", "many")
    with pytest.raises(ConfigurationError, match=r"scheduler\.max_rows"):
        load_settings()


@pytest.mark.parametrize("name", ["FERMATA_NOPE", "FERMATA_NOPE__PORT", "fermata_server_port"])
def test_an_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigurationError, match=f"variable {name} names no setting") as raised:
        load_settings()
    assert "\n" not in str(raised.value)


def test_variables_of_settings_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMATA_STATE", "elsewhere")
    monkeypatch.setenv("FERMATA_SERVER", '{"port": 1}')
    settings = load_settings()
    assert (settings.state, settings.server.port) == (Path("elsewhere"), 1)


def test_the_journal_gets_all_settings_but_no_secret() -> None:
    settings = load_settings(overrides={"server.api_key": "open sesame", "server.port": 0})
    configuration = settings.configuration()
    assert configuration["server.port"] == 0
    assert configuration["scheduler.max_rows"] == settings.scheduler.max_rows
    assert "open sesame" not in str(configuration)
    assert configuration["server.api_key"] == "set"
    assert configuration["server.client_keys"] == 0


def test_keys_of_clients_come_as_a_list_and_stay_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERMATA_SERVER__CLIENT_KEYS", '["one sesame", "two sesames"]')
    settings = load_settings(overrides={"server.api_key": "open sesame"})
    assert settings.server.client_keys == ("one sesame", "two sesames")
    assert settings.configuration()["server.client_keys"] == 2
    assert "sesame" not in str(settings.configuration())


@pytest.mark.parametrize(
    ("keys", "api_key", "what"),
    [
        (["sesame"], None, "need an api_key"),
        (["sesame", "sesame"], "open", "must differ"),
        (["sesame"], "sesame", "must differ"),
        (["sesame", ""], "open", "none may be empty"),
        (["sesame"] * 1001, "open", "at most 1000"),
        ("sesame", "open", "tuple"),
    ],
)
def test_keys_that_tell_nobody_apart_are_refused_and_not_repeated(
    keys: object, api_key: str | None, what: str
) -> None:
    with pytest.raises(ConfigurationError, match=what) as raised:
        load_settings(overrides={"server.client_keys": keys, "server.api_key": api_key})
    assert "setting server" in str(raised.value)
    assert "sesame" not in str(raised.value)
