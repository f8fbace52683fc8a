"""What the model named `fake` is set to, a group of the settings."""

from pydantic import Field

from scheduler.sizes import Group, Size


class FakeSettings(Group):
    """The model named `fake`, which computes nothing.

    Its speeds: 0 is as fast as it goes. `turn_tokens`: it ends its turn with that output token; 0:
    it never does. Its sizes are those of the model that it stands for: with `state_bytes` it has
    layers that cannot be cut, and `kv_step_tokens` is the step in which a row's memory grows.
    """

    load_ms: int = Field(default=0, ge=0)
    prefill_tokens_per_s: int = Field(default=0, ge=0)
    step_ms: int = Field(default=0, ge=0)
    context_tokens: int = Field(default=131_072, ge=16)
    turn_tokens: int = Field(default=256, ge=0)
    weights_bytes: Size = Field(default=1_000_000, ge=0)
    kv_bytes_per_token: Size = Field(default=1024, ge=0)
    kv_step_tokens: int = Field(default=256, ge=1)
    state_bytes: Size = Field(default=0, ge=0)
    transient_bytes_per_token: Size = Field(default=256, ge=0)
