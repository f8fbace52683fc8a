"""Blocks get the names of the tokens that fill them, whenever those become known."""

from array import array

from journal import events
from scheduler.engine.base import RowTokens
from scheduler.known import KnownRequest, KnownRequests
from scheduler.kvcache.naming import BlockNamer, Chain
from scheduler.names import BlockNames
from scheduler.parameters import RequestParameters, SamplingParameters
from tests.unit.core_driver import CoreDriver

NAMER = BlockNamer(bytes(32), "d" * 64)
BLOCK = 4
PARAMETERS = RequestParameters(
    route="completions", model="fake", created=1, stream=True, sampling=SamplingParameters(seed=5)
)


def hashes_of(tokens: list[int]) -> tuple[str, ...]:
    chain = Chain(NAMER, BLOCK)
    chain.extend(tokens)
    return tuple(chain.hashes)


def known_to(core: CoreDriver, *sizes: int) -> BlockNames:
    """The names of requests with prompts of these sizes, which are open."""
    known = KnownRequests()
    for number, size in enumerate(sizes, 1):
        core.step(core.receive(size, name=f"r{number}"))
        known.add(
            KnownRequest(
                number=number,
                request_id=f"r{number}",
                num_prompt_tokens=size,
                tokens=array("I", range(size)),
                parameters=PARAMETERS,
            )
        )
    return BlockNames(known)


def running() -> CoreDriver:
    core = CoreDriver()
    core.begin_run()
    return core


def test_a_prompt_is_named_once_the_domain_is_known() -> None:
    core = running()
    names = known_to(core, 9, 3)
    assert not names.has_pending()
    names.begin(NAMER, BLOCK, core.state)
    [named] = names.pending(core.state, (), 96)
    assert named == events.BlocksNamed(request_id="r1", first=0, hashes=hashes_of([*range(9)]))
    assert not names.has_pending()


def test_output_is_named_block_by_block() -> None:
    core = running()
    names = known_to(core, 6)
    names.begin(NAMER, BLOCK, core.state)
    list(names.pending(core.state, (), 96))
    assert list(names.of_rows([RowTokens(1, (70,), None), RowTokens(2, (9,), None)])) == []
    [named] = names.of_rows([RowTokens(1, (71,), None)])
    whole = hashes_of([*range(6), 70, 71])
    assert named == events.BlocksNamed(request_id="r1", first=1, hashes=whole[1:])
    names.forget(1)
    assert list(names.of_rows([RowTokens(1, (1, 2, 3, 4), None)])) == []


def test_tokens_of_the_step_in_hand_are_part_of_a_chain_that_is_named_in_it() -> None:
    core = running()
    names = known_to(core, 7)
    names.begin(NAMER, BLOCK, core.state)
    [named] = names.pending(core.state, (RowTokens(1, (70,), None),), 96)
    assert named.hashes == hashes_of([*range(7), 70])


def test_a_step_names_so_many_prompts_and_the_next_one_goes_on() -> None:
    core = running()
    names = known_to(core, 5, 5, 5)
    names.begin(NAMER, BLOCK, core.state)
    assert [named.request_id for named in names.pending(core.state, (), 2)] == ["r1", "r2"]
    assert names.has_pending()
    assert [named.request_id for named in names.pending(core.state, (), 2)] == ["r3"]
