"""`fermata service`: what starts the server at boot, and again after its death.

It prints a systemd unit or a launchd property list. The service gets nothing from the environment
of whoever prints it, so all that it needs is in its command line and its configuration file.
"""

import os
import pwd
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from scheduler.engine import builtin
from scheduler.engine.model import ModelError
from scheduler.engine.models import resolve
from scheduler.settings import PREFIX, ConfigurationError, Settings, load_settings
from tools.launchd_plist import property_list
from tools.server_process import command
from tools.service_parts import MARGIN_S, Kind, Service
from tools.systemd_unit import unit

STATE_VARIABLE = "FERMATA_STATE"
"""The one variable that is taken over: it stands for `--state`."""

UNIT_NAME = "fermata.service"
LABEL = "fermata.serve"


class ServiceError(Exception):
    """No service can be described. One line that says what to do; exit status 2."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for. `overrides` are options of `fermata serve` by their settings' names, null
    where they were not given.
    """

    kind: Kind
    for_user: bool
    config: Path | None
    overrides: Mapping[str, object]


def run(wanted: Wanted) -> int:
    """Prints the description on stdout, and on stderr what to do with it. Returns 0, or 2 when
    `fermata serve` could not start with these options, or a value cannot be written down.
    """
    try:
        service = describe(wanted)
    except (ConfigurationError, ModelError, ServiceError) as error:
        print(f"fermata service: {error}", file=sys.stderr)
        return 2
    if wanted.kind is Kind.SYSTEMD:
        sys.stdout.write(unit(service))
        hints = systemd_hints(service)
    else:
        sys.stdout.buffer.write(property_list(service, LABEL))
        sys.stdout.flush()
        hints = launchd_hints(service)
    if service.user == "root":
        hints.append("it would run as root: better print it as another user, who is to run it")
    print("\n".join(hints), file=sys.stderr)
    return 0


def describe(wanted: Wanted) -> Service:
    """The service, from options that a server can start with. Raises ConfigurationError, ModelError
    and ServiceError.
    """
    refuse_environment(os.environ)
    settings = load_settings(wanted.config, wanted.overrides)
    resolve(settings)
    words = tuple(command("serve", *arguments(settings, wanted)))
    service = Service(
        command=words,
        paths=(settings.state.absolute(), *(Path(word) for word in words if word.startswith("/"))),
        home=Path.home(),
        user=None if wanted.for_user else user_name(os.getuid()),
        port=settings.server.port,
        stop_limit_s=stop_limit_s(settings),
    )
    refuse_unwritable(service)
    if wanted.kind is Kind.SYSTEMD and service.user is not None:
        refuse_unwritable_path(service.state)
    return service


def user_name(number: int) -> str:
    """Who prints it, and is to run it. Raises ServiceError."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        raise ServiceError(f"user {number} has no name: print it as the user to run it") from None


def refuse_environment(environment: Mapping[str, str]) -> None:
    """Raises ServiceError for a setting that would be lost."""
    for name in sorted(environment):
        if name.upper().startswith(PREFIX) and name.upper() != STATE_VARIABLE:
            raise ServiceError(
                f"variable {name} is set here, and the service would not have it: put the setting "
                "into a TOML file and name that with --config, or unset the variable"
            )


def arguments(settings: Settings, wanted: Wanted) -> Iterator[str]:
    """The options of `fermata serve`. Paths are absolute: a service starts in another folder.
    Model and state folder are always named, also where they come from the file.
    """
    yield from ("--model", absolute_model(settings.model))
    yield from ("--state", str(settings.state.absolute()))
    if wanted.config is not None:
        yield from ("--config", str(wanted.config.absolute()))
    for option, name in (
        ("--host", "server.host"),
        ("--port", "server.port"),
        ("--ceiling", "memory.ceiling"),
    ):
        value = wanted.overrides.get(name)
        if value is not None:
            yield from (option, str(value))


def absolute_model(model: str) -> str:
    """A built-in name as it is, a folder as an absolute path."""
    if model == "fake" or model in builtin.NAMES:
        return model
    return str(Path(model).absolute())


def stop_limit_s(settings: Settings) -> int:
    """How long a clean stop may take before it is a kill, in seconds."""
    limit_ms = settings.server.drain_limit_ms + settings.server.hold_limit_ms
    return -(-limit_ms // 1000) + MARGIN_S


def refuse_unwritable(service: Service) -> None:
    """Raises ServiceError for a value that has no safe place in the description. A newline would
    begin another line of it.
    """
    for value in (*service.command, str(service.home), service.user or ""):
        if not value.isprintable():
            raise ServiceError(f"{value!r} holds a character that no service file can: rename it")


def refuse_unwritable_path(state: Path) -> None:
    """Raises ServiceError for a state folder that a list of paths in a unit cannot hold: other
    rules of quoting are its own than those of commands.
    """
    for character in "\"'\\":
        if character in str(state):
            raise ServiceError(
                f"--state {state} holds {character}, which a unit of the system cannot write in a "
                "path: choose another folder, or --user"
            )


def systemd_hints(service: Service) -> list[str]:
    """What to do with a unit."""
    if service.user is None:
        folder, manager = service.home / ".config/systemd/user", "systemctl --user"
        last = ["and, so that it runs while nobody is logged in: loginctl enable-linger"]
    else:
        folder, manager, last = Path("/etc/systemd/system"), "systemctl", []
    file = shlex.quote(str(folder / UNIT_NAME))
    return [
        f"write this to {file}, then:",
        f"{manager} daemon-reload && {manager} enable --now {UNIT_NAME}",
        *last,
    ]


def launchd_hints(service: Service) -> list[str]:
    """What to do with a property list."""
    if service.user is None:
        folder, domain = service.home / "Library/LaunchAgents", f"gui/{os.getuid()}"
    else:
        folder, domain = Path("/Library/LaunchDaemons"), "system"
    file = shlex.quote(str(folder / f"{LABEL}.plist"))
    return [f"write this to {file}, then:", f"launchctl bootstrap {domain} {file}"]
