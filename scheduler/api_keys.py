"""Keys to the HTTP interface. They are secrets: neither the journal nor a message repeats them."""

from pydantic import Field, model_validator

from scheduler.sizes import Group

MAX_CLIENT_KEYS = 1000

SECRETS = ("api_key", "client_keys")


class ApiKeys(Group):
    """Who may use the server. Without keys: whoever reaches its address.

    `api_key`: the operator's, who sees and touches every request. `client_keys`: further ones, each
    for the requests that were sent with it, and for no others.
    """

    api_key: str | None = None
    client_keys: tuple[str, ...] = Field(default=(), max_length=MAX_CLIENT_KEYS)

    @model_validator(mode="after")
    def check_client_keys(self) -> "ApiKeys":
        """Each is somebody's, and there is an operator."""
        keys = (*self.client_keys, *([] if self.api_key is None else [self.api_key]))
        if self.client_keys and self.api_key is None:
            raise ValueError("client_keys need an api_key beside them, which is the operator's")
        if self.client_keys and (not all(keys) or len(set(keys)) < len(keys)):
            raise ValueError("client_keys and api_key must differ, and none may be empty")
        return self

    def recorded(self) -> dict[str, str | int | None]:
        """What the journal may say of them."""
        return {
            "server.api_key": None if self.api_key is None else "set",
            "server.client_keys": len(self.client_keys),
        }
