"""The bounds of HTTP that no operator needs to change, in one place, with their units.

What an operator sets (address, key, body limit, heartbeats) is in scheduler/settings.py.
"""

MAX_STOP_STRINGS = 16
"""Strings in `stop`. OpenAI takes four; agents with several turn markers send more."""

MAX_STOP_CHARACTERS = 256
"""Characters in one string of `stop`: each token is compared with every beginning of it."""

MAX_TOP_LOGPROBS = 20
"""Alternatives per token, as in OpenAI's chat API."""

MAX_LOGIT_BIASES = 1024
"""Entries in `logit_bias`."""

MAX_TOKENS_ASKED = 2**31 - 1
"""The largest `max_tokens` that is looked at. What is below it and never fits gets its numbers."""

MAX_MESSAGES = 10_000
"""Messages in one conversation."""

MAX_TOOLS_BYTES = 4 * 2**20
"""JSON of `tools`."""

MAX_CLIENT_REQUEST_ID = 128
"""Characters of a client's own X-Request-Id that are kept."""

MAX_KEY_CHARACTERS = 256
"""Characters of an Idempotency-Key."""

MAX_HEAD_BYTES = 64 * 2**10
"""The path and the headers of a request, names and values. What has more is refused."""

MAX_CANONICAL_VALUES = 500_000
"""Values in a body's JSON up to which its canonical form is made, of some hundred bytes each for
that moment, one body at a time.
"""

MAX_LISTED_FIELDS = 20
"""Unknown fields that are named in the log line of a request."""

MAX_QUOTED_CHARACTERS = 100
"""Characters of a client's text that an error message repeats."""

MAX_PREPARING = 64
"""Requests that are read and tokenized at a time. Others wait with their bodies unread."""

MAX_CONNECTIONS = 4096
"""Exchanges that are open at a time, streams included. One more is a 503."""

BODY_WAIT_S = 60.0
"""How long a client may take to send a body."""

MAX_EXPLAINED_BYTES = 2**20
"""Bodies up to this size are read a second time to name the field in which their JSON is broken."""

RENDER_TOKENS = 512
"""Tokens that a reader renders before it lets others have the event loop."""

MAX_LISTED_REQUESTS = 1000
"""Requests in one answer of `GET /v1/requests`."""

MAX_LISTED_EVENTS = 1000
"""Events in one answer of `GET /v1/requests/{id}/events`."""

CANCEL_WAIT_S = 3.0
"""How long a DELETE waits for the end that it caused."""

HOLD_WAIT_S = 3.0
"""How long a pause or a resume by hand waits until it has happened."""

HOLD_LOOK_S = 0.02
"""Between two looks at it."""

CLEAR_WAIT_S = 5.0
"""How long `POST /v1/cache/clear` waits until all that may go has gone."""

CLEAR_LOOK_S = 0.05
"""Between two looks at it."""

BACKLOG = 2048
"""Connections that wait to be accepted, above all while the server starts."""

KEEP_ALIVE_S = 30
"""How long an idle connection is kept."""

CLOSE_WAIT_S = 2
"""How long the server's end waits for clients to take what is left of their answers."""
