"""The three cores together: what a request finds cached depends on its salt."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from coppice.namespaces import digest_salt
from coppice_sim.hosts.kv_honest import reference
from tests.fakes.tools.offline import BLOCK_SIZE, DOMAIN, HonestEngine, Silent

PROMPT = np.arange(6 * BLOCK_SIZE + 1, dtype="<u4").tobytes()


def test_prefixes_are_reused_within_a_salt_and_not_across_salts() -> None:
    honest = HonestEngine(num_blocks=64)

    def num_cached(user: str) -> int:
        stream = honest.stream(PROMPT, 5, 3)
        stream.request = replace(stream.request, salt=digest_salt(DOMAIN, user) if user else b"")
        honest.runner.run([stream], Silent())
        done = stream.completion()
        assert done.token_ids == reference(PROMPT, 3, seed=5, salt=0), "the answer is the same"
        return done.usage.cached_tokens

    found = [(user, num_cached(user)) for user in ("ada", "bob", "", "ada", "", "bob", "eve")]
    whole = 6 * BLOCK_SIZE
    assert found == [("ada", 0), ("bob", 0), ("", 0), ("ada", whole), ("", whole), ("bob", whole), ("eve", 0)]
