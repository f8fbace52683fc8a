"""How many bytes a request needs, and what can never fit. Whole bytes, no floats, no readings yet.

The sum is analytic: weights, plus each row's upper bound, plus what one chunk needs while it is
computed. A row's keys and values grow in steps of `kv_step_tokens` (the cache classes allocate
so), layers with a window stop growing at its length, and recurrent state has a fixed size.
"""

from journal.events import CapacityNumbers, Limits, ModelFacts


def round_up(count: int, step: int) -> int:
    """The least multiple of `step` that is not below `count`."""
    return -(-count // step) * step


def row_bytes(model: ModelFacts, num_tokens: int) -> int:
    """Upper bound of one row's caches when they hold `num_tokens` positions."""
    assert num_tokens >= 0
    positions = round_up(num_tokens, model.kv_step_tokens)
    if not model.window_layers:
        return model.state_bytes + model.kv_bytes_per_token * positions
    windows = sum(
        layers.bytes_per_token
        * min(positions, round_up(layers.window_tokens, model.kv_step_tokens))
        for layers in model.window_layers
    )
    return model.state_bytes + model.kv_bytes_per_token * positions + windows


def chunk_bytes(model: ModelFacts, limits: Limits) -> int:
    """What the largest chunk needs while it is computed, beside the rows."""
    num_tokens = max(limits.chunk_tokens, limits.chunk_tokens_beside_rows)
    return model.transient_bytes_per_token * num_tokens


def rows_capacity_bytes(model: ModelFacts, limits: Limits) -> int | None:
    """What all rows together may take; null when there is no ceiling. Below zero: not even the
    weights fit.
    """
    if limits.ceiling_bytes is None:
        return None
    return limits.ceiling_bytes - model.weights_bytes - chunk_bytes(model, limits)


def max_context_tokens(model: ModelFacts, limits: Limits) -> int:
    """The most tokens (prompt and output) that one request can have: the model's context, or what
    fits in memory.
    """
    capacity = rows_capacity_bytes(model, limits)
    if capacity is None or row_bytes(model, model.context_tokens) <= capacity:
        return model.context_tokens
    fits, too_many = 0, model.context_tokens
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if row_bytes(model, middle) <= capacity:
            fits = middle
        else:
            too_many = middle
    return fits


def capacity_numbers(
    model: ModelFacts, limits: Limits, num_prompt_tokens: int, max_tokens: int
) -> CapacityNumbers:
    """The seven numbers that a refusal for capacity carries."""
    rows = row_bytes(model, num_prompt_tokens + max_tokens)
    return CapacityNumbers(
        prompt_tokens=num_prompt_tokens,
        max_tokens=max_tokens,
        required_bytes=model.weights_bytes + rows + chunk_bytes(model, limits),
        capacity_bytes=limits.ceiling_bytes,
        weights_bytes=model.weights_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token,
        max_context_tokens=max_context_tokens(model, limits),
    )


def why_nothing_fits(model: ModelFacts, limits: Limits) -> str | None:
    """One line with the numbers when no request at all can be served below the ceiling: the
    smallest is one prompt token and one of output. Else null.
    """
    if limits.ceiling_bytes is None or max_context_tokens(model, limits) >= 2:
        return None
    chunk, row = chunk_bytes(model, limits), row_bytes(model, 2)
    return (
        f"the ceiling is {size_text(limits.ceiling_bytes)}, but model {model.name} needs "
        f"{size_text(model.weights_bytes + chunk + row)} (weights {size_text(model.weights_bytes)},"
        f" one chunk {size_text(chunk)}, the smallest request {size_text(row)}): raise --ceiling"
    )


def size_text(num_bytes: int) -> str:
    """A size for people, in the units that settings take."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes // size}.{num_bytes % size * 10 // size}{unit}"
    return f"{num_bytes}B"
