"""Talks to a running server, for the commands that do. Only what Python brings, so that they start
at once.
"""

import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from tools.server_file import ServerFileError, read_server_file

ANSWER_LIMIT_S = 10
"""Seconds that a command waits for an answer."""

MAX_ANSWER_BYTES = 64 * 2**20
"""The most that is read of one answer."""


class ClientError(Exception):
    """The server was not found, did not answer or refused. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class Client:
    """One server. `origin` says in messages how it was found."""

    address: str
    origin: str
    api_key: str | None = None

    def get(self, path: str, kind: str) -> dict[str, object]:
        """The JSON object at this path, whose `object` is `kind`. Raises ClientError."""
        return self.ask("GET", path, kind)

    def post(self, path: str, kind: str) -> dict[str, object]:
        """What comes of doing this, as a JSON object of this kind. Raises ClientError."""
        return self.ask("POST", path, kind)

    def ask(self, method: str, path: str, kind: str) -> dict[str, object]:
        """One exchange, without a body. Raises ClientError."""
        headers = {"Accept": "application/json"}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        # A proxy of the environment has nothing to do with a server of one's own.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            request = urllib.request.Request(self.address + path, headers=headers, method=method)
            with opener.open(request, timeout=ANSWER_LIMIT_S) as answer:
                return self.parse(answer.read(MAX_ANSWER_BYTES), kind)
        except urllib.error.HTTPError as error:
            raise ClientError(self.refusal(error)) from error
        except OSError as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            raise ClientError(
                f"no server answers at {self.address} ({self.origin}): {reason}; "
                "start it with `fermata serve`"
            ) from error
        except (HTTPException, ValueError) as error:
            # No request can be made of such an address or key, or the answer is not HTTP. What
            # they say may hold the key.
            raise ClientError(
                f"{self.address} ({self.origin}) cannot be asked: check the address and the API key"
            ) from error

    def parse(self, body: bytes, kind: str) -> dict[str, object]:
        """The answer as an object of this kind. Raises ClientError for anything else."""
        try:
            answer = json.loads(body)
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or answer.get("object") != kind:
            raise ClientError(f"what answers at {self.address} ({self.origin}) is no Fermata")
        return answer

    def refusal(self, error: urllib.error.HTTPError) -> str:
        """An error status in words."""
        if error.code in (401, 403):
            return f"{self.address} wants its API key: set FERMATA_SERVER__API_KEY"
        reason = f"{self.address} answered {error.code} {error.reason}"
        try:
            words = json.loads(error.read(MAX_ANSWER_BYTES))["error"]["message"]
        except (ValueError, KeyError, TypeError, OSError):
            return reason
        return f"{reason}: {words}"


def client_for(state: Path, url: str | None, api_key: str | None) -> Client:
    """The server at `url`, or else the one that runs on the state folder. Raises ClientError."""
    if url is not None:
        if not url.startswith(("http://", "https://")):
            raise ClientError(f"--url {url}: write http://HOST:PORT")
        return Client(url.rstrip("/"), "--url", api_key)
    try:
        server = read_server_file(state)
    except ServerFileError as error:
        raise ClientError(str(error)) from error
    return Client(server.address, f"from {state}, process {server.pid}", api_key)
