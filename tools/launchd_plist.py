"""A launchd property list for the server: see `man launchd.plist`."""

import plistlib

from tools.service_parts import FILE_MASK, OPEN_FILES, Service

THROTTLE_S = 5
"""Between two starts at least, so that one that cannot succeed takes no whole processor. A server
that has run for longer starts again at once, and clients come back for ten seconds and more."""


def property_list(service: Service, label: str) -> bytes:
    """The list as XML. Without a user it is an agent, else a daemon."""
    log = str(service.home / "Library/Logs/fermata.log")
    limits = {"NumberOfFiles": OPEN_FILES}
    described: dict[str, object] = {
        "Label": label,
        "ProgramArguments": list(service.command),
        "RunAtLoad": True,
        # A clean stop was asked for; everything else is a death, after which it goes on.
        "KeepAlive": {"SuccessfulExit": False},
        "ThrottleInterval": THROTTLE_S,
        # From SIGTERM to SIGKILL.
        "ExitTimeOut": service.stop_limit_s,
        # Programs of the other types get less of the processor and of the disk when others want it.
        "ProcessType": "Interactive",
        # A memory image would hold prompts.
        "SoftResourceLimits": limits | {"Core": 0},
        "HardResourceLimits": limits | {"Core": 0},
        "Umask": FILE_MASK,
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    if service.user is not None:
        described["UserName"] = service.user
    return plistlib.dumps(described, sort_keys=False)
