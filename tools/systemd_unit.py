"""A systemd unit for the server: see systemd.service(5), systemd.exec(5) and systemd.syntax(7)."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tools.service_parts import FILE_MASK, OPEN_FILES, Service

RESTART_S = 1
CANNOT_START = 2
"""The exit status of a server whose configuration cannot be used."""

PRIVILEGED_PORTS = 1024
PLAIN = re.compile(r"[\w%+,./:@=-]+")
"""A word that needs no quotes."""

NVIDIA_DEVICES = "nvidia-modprobe"

UNIT = """\
[Unit]
Description=Fermata serves a language model
{order}# It never gives up: requests wait in the journal, and clients come back.
StartLimitIntervalSec=0

[Service]
Type=exec
"""

# An address other than the machine's own is there only when the network is.
ORDER = """\
After=network-online.target
Wants=network-online.target
"""

LIFE = """\
ExecStart={command}
# After every end but a stop by systemctl and a configuration that cannot be used.
Restart=always
RestartSec={restart_s}
RestartPreventExitStatus={cannot_start}
# The first SIGTERM lets requests end or holds them. Time for both, and then some.
KillSignal=SIGTERM
KillMode=mixed
TimeoutStopSec={stop_limit_s}
UMask={mask:04o}
LimitNOFILE={open_files}
# A memory image would hold prompts.
LimitCORE=0
# Its death costs time and no request: when memory runs out, it goes before programs with work to
# lose, and is started again.
OOMScoreAdjust=200
OOMPolicy=continue
"""

# What would stop it is left out: ProtectClock and PrivateDevices close the devices of GPUs,
# MemoryDenyWriteExecute the code that mlx compiles while it runs.
SANDBOX = """\
# System folders are read-only; the state folder is not, wherever it lies.
ProtectSystem=full
ReadWritePaths={state}
PrivateTmp={private_tmp}
NoNewPrivileges=yes
CapabilityBoundingSet={capabilities}
AmbientCapabilities={capabilities}
ProtectKernelTunables=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
LockPersonality=yes
"""

INSTALL = """
[Install]
WantedBy={target}
"""


def unit(service: Service) -> str:
    """The unit: of the system where a user is named, else of the user's own manager."""
    return "".join(parts(service))


def parts(service: Service) -> Iterator[str]:
    """The parts of a unit. A user's manager knows neither other users nor the system's targets,
    and could make the sandbox only in a namespace of users, in which the groups that may open GPUs
    are lost.
    """
    is_system = service.user is not None
    yield UNIT.format(order=ORDER if is_system else "")
    if service.user is not None:
        yield f"User={escaped(service.user)}\n"
        yield from device_start()
    yield LIFE.format(
        command=" ".join(exec_words(service.command)),
        restart_s=RESTART_S,
        cannot_start=CANNOT_START,
        stop_limit_s=service.stop_limit_s,
        mask=FILE_MASK,
        open_files=OPEN_FILES,
    )
    if is_system:
        is_low = 0 < service.port < PRIVILEGED_PORTS
        yield SANDBOX.format(
            state=quoted(f"-{service.state}"),
            # A folder of its own would hide what it needs in the common one.
            private_tmp="no" if any(map(is_temporary, service.paths)) else "yes",
            capabilities="CAP_NET_BIND_SERVICE" if is_low else "",
        )
    yield INSTALL.format(target="multi-user.target" if is_system else "default.target")


def is_temporary(path: Path) -> bool:
    """Whether a path lies where PrivateTmp puts another folder."""
    return any(path.is_relative_to(folder) for folder in ("/tmp", "/var/tmp"))


def device_start() -> Iterator[str]:
    """NVIDIA's devices are made by a program that runs as root, which the service cannot start."""
    program = shutil.which(NVIDIA_DEVICES)
    if program is not None:
        yield "# The GPU's devices, where nobody has opened them since the machine was started.\n"
        yield f"ExecStartPre=-+{program} -c 0 -u\n"


def exec_words(command: tuple[str, ...]) -> Iterator[str]:
    """The words of ExecStart. The colon says that a dollar is only a dollar."""
    yield quoted(f":{command[0]}")
    for argument in command[1:]:
        yield quoted(argument)


def quoted(word: str) -> str:
    """A word as systemd reads it back: see "Quoting" in systemd.syntax(7)."""
    escaped_word = escaped(word)
    if PLAIN.fullmatch(word):
        return escaped_word
    return '"' + escaped_word.replace("\\", "\\\\").replace('"', '\\"') + '"'


def escaped(value: str) -> str:
    """A percent sign begins a specifier, such as %h for a home."""
    return value.replace("%", "%%")
