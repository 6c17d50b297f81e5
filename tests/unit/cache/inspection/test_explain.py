"""Why a prompt matches so far and no further, on each worker."""

from __future__ import annotations

import pytest

from coppice.ids import DomainId, Namespace, WorkerId
from coppice_cache.core.base.errors import MessageRefused
from coppice_cache.core.base.results import Explanation, StoppedBy
from coppice_cache.core.base.settings import DomainConfig, Mode
from tests.unit.cache.world import ALICE, NAMESPACE, World, lease_id, registration, settings, tokens

BLOCK = 4


@pytest.fixture
def here() -> World:
    world = World(num_blocks=64, block_size=BLOCK)
    world.fill(1, tokens(4 * BLOCK))
    return world


def explain(world: World, data: bytes, domain: DomainId = ALICE) -> Explanation:
    (found,) = world.core.explain(domain, NAMESPACE, data)
    return found


@pytest.mark.parametrize(
    ("prompt", "cached", "stopped_by", "partial", "words"),
    [
        (tokens(16), 12, StoppedBy.LAST_TOKEN, 4, "the last token is always computed"),
        (tokens(18), 16, StoppedBy.END_OF_PROMPT, 0, "the last 2 fill no block of 4."),
        (
            tokens(10) + tokens(1, 500),
            8,
            StoppedBy.END_OF_PROMPT,
            2,
            "of 4: 2 of them begin a cached one, 2 are copied",
        ),
        (tokens(14), 12, StoppedBy.PARTIAL_BLOCK, 2, "the beginning of a cached block, 1 are copied"),
        (tokens(10) + tokens(9, 500), 8, StoppedBy.OTHER_TOKENS, 2, "2 of its 4 tokens agree, 2 are copied"),
        (tokens(8) + tokens(9, 500), 8, StoppedBy.OTHER_TOKENS, 0, "not one of its tokens agrees"),
        (tokens(1) + tokens(9, 500), 0, StoppedBy.OTHER_TOKENS, 1, "0 of 10 tokens are cached; in block 0"),
        (tokens(16) + tokens(9, 500), 16, StoppedBy.NOTHING_CACHED, 0, "nothing is cached behind them"),
    ],
)
def test_why_not_more(here: World, prompt: bytes, cached: int, stopped_by: StoppedBy, partial: int, words: str) -> None:
    found = explain(here, prompt)
    assert (found.num_cached_tokens, found.stopped_by, found.partial_tokens) == (cached, stopped_by, partial)
    assert found.sentence.startswith(f"{cached} of {len(prompt) // 4} tokens are cached; ")
    assert words in found.sentence
    assert found.num_cached_tokens == here.core.match(ALICE, NAMESPACE, prompt, WorkerId("w")).num_cached_tokens


def test_no_tree_and_disabled_domains() -> None:
    world = World(settings(DomainConfig(DomainId("off"), mode=Mode.DISABLED)), num_blocks=16, block_size=BLOCK)
    assert explain(world, tokens(9)).stopped_by is StoppedBy.NO_TREE
    found = explain(world, tokens(9), DomainId("off"))
    assert (found.stopped_by, "disabled" in found.sentence) == (StoppedBy.NO_TREE, True)


def test_a_worker_that_has_not_opened(here: World) -> None:
    here.core.state.workers[WorkerId("w")].phase = type(here.core.state.workers[WorkerId("w")].phase)("window")
    assert explain(here, tokens(18)).stopped_by is StoppedBy.NOT_OPEN


def test_what_a_live_lease_computes_is_pending(here: World) -> None:
    here.granted(2, tokens(16) + tokens(12, 700))
    found = explain(here, tokens(16) + tokens(8, 700) + tokens(5, 900))
    assert (found.stopped_by, found.pending_tokens, found.num_cached_tokens) == (StoppedBy.PENDING, 8, 16)
    assert "a live lease is computing the next 8" in found.sentence


def test_who_holds_it(here: World) -> None:
    here.granted(2, tokens(8) + tokens(3, 600))
    here.granted(3, tokens(16) + tokens(1, 600))
    here.granted(4, tokens(4) + tokens(3, 800))
    assert set(explain(here, tokens(8) + tokens(2, 900)).lease_ids) == {lease_id(2), lease_id(3)}
    assert set(explain(here, tokens(16) + tokens(2, 900)).lease_ids) == {lease_id(3)}
    assert explain(here, tokens(8, 900)).lease_ids == (), "a match of nothing is held by nobody"


def test_the_path_names_its_nodes(here: World) -> None:
    here.fill(2, tokens(8) + tokens(4, 600))
    dumped = [node.node for node in here.core.tree(ALICE, max_depth=9, limit=9).trees[0].nodes]
    path = explain(here, tokens(17)).path
    assert len(path) == 2
    assert set(path) <= set(dumped)


def test_every_worker_and_namespace(here: World) -> None:
    here.register(registration(WorkerId("v"), num_blocks=16, block_size=BLOCK))
    here.fill(3, tokens(8), namespace=Namespace(b"model-b"))
    found = here.core.explain(ALICE, None, tokens(9))
    assert [(entry.worker_id, entry.namespace, entry.stopped_by) for entry in found] == [
        ("w", NAMESPACE, StoppedBy.PARTIAL_BLOCK),
        ("w", Namespace(b"model-b"), StoppedBy.END_OF_PROMPT),
        ("v", NAMESPACE, StoppedBy.NO_TREE),
    ]


@pytest.mark.parametrize("data", [b"", b"123", bytes(4 * ((1 << 20) + 1))])
def test_tokens_that_are_none_are_refused(here: World, data: bytes) -> None:
    with pytest.raises(MessageRefused, match="packed u32"):
        here.core.explain(ALICE, None, data)


def test_it_changes_nothing(here: World) -> None:
    before = here.core.tree(ALICE, max_depth=9, limit=99)
    explain(here, tokens(10) + tokens(5, 600))
    here.core.check()
    assert here.core.tree(ALICE, max_depth=9, limit=99) == before
