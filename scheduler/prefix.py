"""The index of saved blocks: what a prompt finds, what is in use, and what goes first.

A block is a fixed run of tokens; its hash covers all tokens up to its end, so a chain of hashes
names a prefix, and two requests that share a prefix share its blocks. The index knows every block
on disk, of this model and of others.

A block is in use while a request holds a lease on it, a paused one a pin, or while a longer chain
on disk goes through it. All others may go, and `order` is the order in which they do: blocks of
another domain first, since nothing here can use them, then those that were not used for longest,
and of one chain the deepest.
"""

from bisect import bisect_left, insort

import msgspec

from journal.events import KvLimits, ModelFacts

MAX_GONE = 10_000
"""Blocks that are remembered after they went, to say why a prompt misses them."""

STATE_SUFFIX = ".state"
"""Behind a block's hash: the name of the state at its end, where blocks and states share a table.
"""

Key = tuple[int, int, int, str]


class Block(msgspec.Struct, kw_only=True):
    """One block on disk. `end_tokens` is the position behind its last token, `children` the blocks
    that follow it.

    `state_bytes` is 0 when no state of the layers that cannot be cut is kept at its end.
    """

    domain: str
    parent: str
    end_tokens: int
    block_bytes: int
    state_bytes: int = 0
    last_use_ns: int = 0
    children: int = 0
    leases: int = 0
    pins: int = 0

    @property
    def in_use(self) -> bool:
        """Whether it must stay on disk."""
        return self.leases > 0 or self.pins > 0 or self.children > 0


class Writing(msgspec.Struct, frozen=True):
    """A file that is planned and not known to be saved. `number` is the request whose row holds
    it.
    """

    number: int
    domain: str
    parent: str
    end_tokens: int
    num_bytes: int


class KeptTail(msgspec.Struct, frozen=True):
    """The file with what a held request has behind its last whole block."""

    domain: str
    num_bytes: int


class BlockIndex(msgspec.Struct, kw_only=True):
    """All blocks by hash. `hot` holds those in memory, the least recently used first, with their
    bytes.

    `writing` and `writing_states` (the state at a block's end) are on their way to disk;
    `early_states` are states, by their bytes, that came there before their block. `coming`
    maps the hash of a block that an admitted request will compute to that request's number. `gone`
    says of blocks that went why, `orphans` how many blocks follow one that is not there.
    `tails` are the files of held requests by their names, `writing_tails` what may come to be of
    the ones being written, by their requests' numbers.
    `unwanted` and `bad` are files that `decide` is to send away, with their domains: blocks that
    nothing can match again, and files (by their names) that cannot be read. `stopped` is why
    nothing is saved at present.
    """

    domain: str = ""
    blocks: dict[str, Block] = {}
    order: list[Key] = []
    writing: dict[str, Writing] = {}
    writing_states: dict[str, Writing] = {}
    early_states: dict[str, int] = {}
    tails: dict[str, KeptTail] = {}
    writing_tails: dict[int, int] = {}
    coming: dict[str, int] = {}
    hot: dict[str, int] = {}
    gone: dict[str, str] = {}
    orphans: dict[str, int] = {}
    unwanted: dict[str, str] = {}
    bad: dict[str, str] = {}
    num_ours: int = 0
    disk_bytes: int = 0
    hot_bytes: int = 0
    writing_bytes: int = 0
    free_bytes: int | None = None
    stopped: str | None = None


def key_of(index: BlockIndex, name: str, block: Block) -> Key:
    """Its place in the order of going."""
    return (int(block.domain == index.domain), block.last_use_ns, -block.end_tokens, name)


def take_out(index: BlockIndex, name: str, block: Block) -> None:
    """Out of the order, before something changes that its place depends on."""
    if not block.in_use:
        key = key_of(index, name, block)
        at = bisect_left(index.order, key)
        assert index.order[at] == key, f"block {name[:8]} may go and is not in the order"
        del index.order[at]


def put_back(index: BlockIndex, name: str, block: Block) -> None:
    """Into the order, if it may go now."""
    if not block.in_use:
        insort(index.order, key_of(index, name, block))


def change(
    index: BlockIndex, name: str, *, leases: int = 0, pins: int = 0, children: int = 0
) -> None:
    """Adds to a block's counts, and keeps its place in the order."""
    block = index.blocks[name]
    take_out(index, name, block)
    block.leases += leases
    block.pins += pins
    block.children += children
    assert min(block.leases, block.pins, block.children) >= 0, f"block {name[:8]} counts below 0"
    put_back(index, name, block)


def use(index: BlockIndex, name: str, now_ns: int) -> None:
    """Notes that the block was used now."""
    block = index.blocks[name]
    take_out(index, name, block)
    block.last_use_ns = now_ns
    put_back(index, name, block)
    if name in index.hot:
        index.hot[name] = index.hot.pop(name)


def heat(index: BlockIndex, name: str, num_bytes: int) -> None:
    """Notes that memory holds the block, as the one used last."""
    index.hot_bytes += num_bytes - index.hot.pop(name, 0)
    index.hot[name] = num_bytes


def cool(index: BlockIndex, name: str) -> None:
    """Notes that memory does not hold the block."""
    index.hot_bytes -= index.hot.pop(name, 0)


def add_block(index: BlockIndex, name: str, saved: Writing, num_bytes: int, now_ns: int) -> None:
    """A block is on disk. One that was there already is only measured anew."""
    block = index.blocks.get(name)
    if block is not None:
        index.disk_bytes += num_bytes - block.block_bytes
        block.block_bytes = num_bytes
        return
    block = Block(
        domain=saved.domain,
        parent=saved.parent,
        end_tokens=saved.end_tokens,
        block_bytes=num_bytes,
        last_use_ns=now_ns,
    )
    block.children = index.orphans.pop(name, 0)
    block.state_bytes = index.early_states.pop(name, 0)  # counted in disk_bytes already
    index.blocks[name] = block
    index.disk_bytes += num_bytes
    index.num_ours += block.domain == index.domain
    index.gone.pop(name, None)
    put_back(index, name, block)
    follow(index, block.parent, 1)


def follow(index: BlockIndex, parent: str, change_by: int) -> None:
    """One block more or less follows this one, which need not be there."""
    if parent in index.blocks:
        change(index, parent, children=change_by)
    elif parent:
        index.orphans[parent] = index.orphans.get(parent, 0) + change_by
        if index.orphans[parent] == 0:
            del index.orphans[parent]


def add_state(index: BlockIndex, name: str, num_bytes: int) -> None:
    """The state at a block's end is on disk. Writers work side by side, so that its block may come
    after it.
    """
    block = index.blocks.get(name)
    if block is None:
        index.disk_bytes += num_bytes - index.early_states.get(name, 0)
        index.early_states[name] = num_bytes
    else:
        index.disk_bytes += num_bytes - block.state_bytes
        block.state_bytes = num_bytes


def drop_early_state(index: BlockIndex, name: str) -> None:
    """The block of this state will not come: its file is of no use."""
    index.disk_bytes -= index.early_states.pop(name)
    index.bad[name + STATE_SUFFIX] = index.domain


def tail_name(request_id: str, num_tokens: int) -> str:
    """The name of the file: `<request id>-<position>`, as `kvcache.naming.TailFile` has it."""
    return f"{request_id}-{num_tokens}"


def is_tail(name: str) -> bool:
    """Whether a file's name is a tail's: the hexadecimal digits of a block have no dash."""
    return "-" in name


def add_tail(index: BlockIndex, name: str, num_bytes: int) -> None:
    """A tail is on disk."""
    assert name not in index.tails, f"tail {name} is saved twice"
    index.tails[name] = KeptTail(index.domain, num_bytes)
    index.disk_bytes += num_bytes


def remove_tail(index: BlockIndex, name: str) -> None:
    """The tail is gone, or nobody wants it any more."""
    index.disk_bytes -= index.tails.pop(name).num_bytes


def remove_state(index: BlockIndex, name: str) -> None:
    """The state at a block's end is gone; the block stays."""
    cool(index, name + STATE_SUFFIX)
    block = index.blocks.get(name)
    if block is not None:
        index.disk_bytes -= block.state_bytes
        block.state_bytes = 0


def remove_block(index: BlockIndex, name: str, reason: str) -> None:
    """The block is gone, wanted or not. Blocks that follow it stay in the index until they go
    themselves.
    """
    block = index.blocks.get(name)
    if block is None:
        return
    take_out(index, name, block)
    del index.blocks[name]
    index.disk_bytes -= block.block_bytes + block.state_bytes
    index.num_ours -= block.domain == index.domain
    cool(index, name)
    cool(index, name + STATE_SUFFIX)
    index.unwanted.pop(name, None)
    if block.children:
        index.orphans[name] = block.children
    follow(index, block.parent, -1)
    index.gone[name] = reason
    if len(index.gone) > MAX_GONE:
        del index.gone[next(iter(index.gone))]


def set_domain(index: BlockIndex, domain: str) -> None:
    """From here on blocks of this domain are ours; the order of going follows."""
    index.domain = domain
    index.num_ours = sum(block.domain == domain for block in index.blocks.values())
    free = [(name, block) for name, block in index.blocks.items() if not block.in_use]
    index.order = sorted(key_of(index, name, block) for name, block in free)


def forget_engine_life(index: BlockIndex) -> None:
    """Leases, writers and memory belonged to a process that is gone. Pins stay."""
    for name, block in index.blocks.items():
        if block.leases:
            change(index, name, leases=-block.leases)
    for name in list(index.unwanted):
        if name not in index.blocks:
            del index.unwanted[name]  # was being written; the sweep has what is left of it
    index.disk_bytes -= sum(index.early_states.values())
    index.early_states = {}
    index.writing = {}
    index.writing_states = {}
    index.writing_tails = {}
    index.coming = {}
    index.hot = {}
    index.hot_bytes = 0
    index.writing_bytes = 0
    index.stopped = None
    index.free_bytes = None


class Match(msgspec.Struct, frozen=True, kw_only=True):
    """What a chain finds: its first `num_blocks` blocks, of whose tokens `num_tokens` are used.

    `parted_at` is the first hash that was not found, `parted_at_tokens` where its block begins, and
    `because` says why the match ends where it does.
    """

    num_blocks: int
    num_tokens: int
    num_memory_tokens: int
    parted_at: str
    because: str
    parted_at_tokens: int = 0


def match(
    index: BlockIndex, hashes: list[str], num_known_tokens: int, block_tokens: int, stateful: bool
) -> Match:
    """The longest saved prefix that a row can start from: at most all known tokens but the last.

    Where every layer can be cut, whole blocks are restored and the last one is trimmed. With
    layers that cannot, the prefix ends at the deepest boundary whose state was kept.
    """
    found = 0
    while found < len(hashes) and hashes[found] in index.blocks:
        found += 1
    parted_at = hashes[found] if found < len(hashes) else ""
    because = why_parted(index, parted_at)
    most = num_known_tokens - 1
    used = min(found, -(-most // block_tokens))
    if stateful:
        used = min(found, most // block_tokens)
        deepest = used
        while used > 0 and index.blocks[hashes[used - 1]].state_bytes == 0:
            used -= 1
        if used < deepest and because != "being_computed":
            because = "no_state"
    num_tokens = min(used * block_tokens, most)
    hot = [i for i in range(used) if hashes[i] in index.hot]
    num_memory_tokens = sum(min(block_tokens, num_tokens - i * block_tokens) for i in hot)
    return Match(
        num_blocks=used,
        num_tokens=num_tokens,
        num_memory_tokens=num_memory_tokens,
        parted_at=parted_at,
        because=because,
        parted_at_tokens=found * block_tokens,
    )


def why_parted(index: BlockIndex, parted_at: str) -> str:
    """Why a chain is not found beyond some block."""
    if not parted_at:
        return "whole"
    if parted_at in index.writing or parted_at in index.coming:
        return "being_computed"
    if parted_at in index.gone:
        return index.gone[parted_at]
    if index.blocks and index.num_ours == 0:
        return "other_domain"
    return "unknown"


def block_bytes(model: ModelFacts, limits: KvLimits) -> int:
    """What one block's layers that can be cut take."""
    return model.kv_bytes_per_token * limits.block_tokens


def state_bytes(model: ModelFacts) -> int:
    """What the layers that cannot be cut take at a boundary. 0: the model has none."""
    windows = sum(layers.bytes_per_token * layers.window_tokens for layers in model.window_layers)
    return model.state_bytes + windows


def state_every_tokens(model: ModelFacts, limits: KvLimits) -> int:
    """The tokens between two boundaries whose state is kept.

    Unless it is set, so many blocks that the states take at most the bytes of the keys and values
    between them.
    """
    if limits.state_every_blocks:
        return limits.state_every_blocks * limits.block_tokens
    each = max(1, block_bytes(model, limits))
    return max(1, -(-state_bytes(model) // each)) * limits.block_tokens
