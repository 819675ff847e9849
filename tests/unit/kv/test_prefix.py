"""What can be found again, and what must not be."""

from __future__ import annotations

import pytest

from ferrum_mlx.capacity import KvSlotRequest
from ferrum_mlx.errors import ContractError
from ferrum_mlx.kv import prefix
from ferrum_mlx.kv.manager import KVManager
from ferrum_mlx.kv.sequence import KVGroup

FULL = KVGroup(layers=(0,), window=None, bytes_per_token=4)
WINDOW = KVGroup(layers=(1,), window=5, bytes_per_token=4)


def manager(*groups: KVGroup, blocks: int = 20, **fields: object) -> KVManager:
    groups = groups or (FULL,)
    return KVManager(groups, [blocks] * len(groups), 4, 32, **fields)  # type: ignore[arg-type]


def admit(kv: KVManager, prompt: list[int]) -> int:
    keys = kv.prefix.keys(prompt)
    return kv.create(len(prompt), keys, kv.prefix.find(keys, len(prompt)))


def fill(kv: KVManager, tokens: list[int]) -> int:
    """A sequence with these tokens computed."""
    cache = admit(kv, tokens)
    extend(kv, cache, tokens[kv.length(cache) :])
    return cache


def extend(kv: KVManager, cache: int, tokens: list[int], drafts: int = 0) -> None:
    kv.reserve([KvSlotRequest(cache, kv.length(cache) + len(tokens))])
    kv.commit(cache, tokens, drafts=drafts)


def hit(kv: KVManager, prompt: list[int]) -> int:
    return 4 * kv.prefix.find(kv.prefix.keys(prompt), len(prompt))


TEXT = list(range(100, 120))


def test_a_hit_is_whole_blocks_and_leaves_a_token_to_compute() -> None:
    kv = manager()
    kv.release(fill(kv, TEXT[:13]))
    assert [hit(kv, TEXT[:n]) for n in (3, 4, 5, 8, 9, 12, 13, 20)] == [0, 0, 4, 4, 8, 8, 12, 12]


def test_a_block_behind_other_tokens_is_another_block() -> None:
    kv = manager()
    kv.release(fill(kv, TEXT[:13]))
    assert hit(kv, [1, *TEXT[1:]]) == 0
    assert hit(kv, [*TEXT[:5], 1, *TEXT[6:]]) == 4
    assert hit(kv, TEXT[4:]) == 0


def test_ids_that_agree_in_eight_bits_do_not_share() -> None:
    kv = manager()
    kv.release(fill(kv, [65] * 9))
    assert hit(kv, [65] * 9) == 8
    assert hit(kv, [321] * 9) == 0


def test_an_equal_digest_is_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "_hash", lambda content: b"the same for all")
    kv = manager()
    kv.release(fill(kv, TEXT[:5]))
    assert hit(kv, TEXT[:5]) == 4
    assert hit(kv, [7] * 5) == 0


def test_another_model_revision_or_adapter_never_matches() -> None:
    salts = [("m", "1", "float32"), ("m", "2", "float32"), ("m", "1", "float16"), ("m1", "float32"), ()]
    keys = [manager(salt=salt).prefix.keys(TEXT)[0].digest for salt in salts]
    assert len(set(keys)) == len(keys)
    assert manager(salt=salts[0]).prefix.keys(TEXT)[0].digest == keys[0]


def test_drafts_are_found_only_once_they_are_verified() -> None:
    kv = manager()
    cache = fill(kv, TEXT[:7])
    extend(kv, cache, TEXT[7:12], drafts=4)
    assert hit(kv, TEXT) == 8
    kv.truncate(cache, 9)  # three of four drafts were wrong
    extend(kv, cache, [1, 2, 3])
    assert hit(kv, TEXT) == 8
    assert hit(kv, [*TEXT[:9], 1, 2, 3, 4]) == 12


def test_accepted_drafts_are_verified_by_the_next_commit() -> None:
    kv = manager()
    cache = fill(kv, TEXT[:7])
    extend(kv, cache, TEXT[7:12], drafts=4)
    extend(kv, cache, TEXT[12:13])
    assert hit(kv, TEXT) == 12


def test_a_truncated_block_is_written_again_and_no_longer_found() -> None:
    kv = manager()
    cache = fill(kv, TEXT[:12])
    kv.truncate(cache, 6)
    assert hit(kv, TEXT) == 4
    extend(kv, cache, [1, 2])
    assert hit(kv, [*TEXT[:6], 1, 2, 3]) == 8


def test_truncating_into_a_shared_block_is_an_error_and_at_its_border_is_not() -> None:
    kv = manager()
    first = fill(kv, TEXT[:13])
    second = fill(kv, TEXT[:13])
    assert kv.num_cached(second) == 12
    for cache in (first, second):
        with pytest.raises(ContractError, match="share"):
            kv.truncate(cache, 11)
    kv.truncate(second, 8)
    extend(kv, second, [1, 2, 3, 4])
    assert kv.block_table(first, 0)[:2] == kv.block_table(second, 0)[:2]
    assert kv.block_table(first, 0)[2] != kv.block_table(second, 0)[2]


def test_the_least_recently_used_block_goes_first_and_a_chain_from_its_end() -> None:
    kv = manager(blocks=8)
    kv.release(fill(kv, [1] * 13))  # 3 keys and a blank block
    kv.release(fill(kv, [2] * 13))
    assert hit(kv, [1] * 13) == hit(kv, [2] * 13) == 12
    cache = admit(kv, [1] * 9)  # now used more recently than the others
    assert kv.num_cached(cache) == 8
    kv.release(cache)
    kv.release(fill(kv, [3] * 17))  # five blocks: two blank ones, then three that nobody has used for long
    assert (hit(kv, [1] * 13), hit(kv, [2] * 13)) == (8, 4)
    assert kv.evictions == 3


def test_a_block_in_use_is_never_evicted() -> None:
    kv = manager(blocks=4)
    held = fill(kv, [1] * 8)
    assert kv.shortfall(13) == 2
    kv.release(fill(kv, [2] * 8))
    assert hit(kv, [1] * 9) == 8
    kv.release(held)


def test_a_window_group_needs_its_last_window_only() -> None:
    kv = manager(FULL, WINDOW)
    cache = fill(kv, TEXT)
    kv.reserve([KvSlotRequest(cache, 20)])  # frees what the window of 5 has left: blocks 0 … 2
    window_blocks = kv.block_table(cache, 1)[3:]
    kv.release(cache)
    for block in set(range(1, 21)) - set(window_blocks):
        kv._pools[1].forget(block)
    assert hit(kv, [*TEXT, 1]) == 20
    assert hit(kv, TEXT[:14]) == 0  # its window would reach back to blocks that are gone
    found = admit(kv, [*TEXT, 1])
    assert kv.block_table(found, 1) == [0, 0, 0, 0, *window_blocks[1:]]
    assert len(kv.block_table(found, 0)) == 5


def test_a_window_pool_that_has_lost_the_window_is_a_miss() -> None:
    kv = manager(FULL, WINDOW)
    kv.release(fill(kv, TEXT[:9]))
    kv._pools[1].forget_all()
    assert hit(kv, TEXT) == 0


def test_off_means_off() -> None:
    kv = manager(prefix_cache=False)
    kv.release(fill(kv, TEXT))
    assert hit(kv, TEXT) == 0
    assert kv.usage().cached_blocks == 0


def test_who_announces_a_block_makes_others_wait_until_it_comes() -> None:
    kv = manager()
    keys = kv.prefix.keys(TEXT)
    assert not kv.prefix.is_coming(keys, len(TEXT), 0)
    cache = admit(kv, TEXT)
    assert kv.prefix.is_coming(keys, len(TEXT), 0)
    assert not kv.prefix.is_coming(kv.prefix.keys([1] * 9), 9, 0)
    version = kv.capacity.value
    extend(kv, cache, TEXT[:10])
    assert kv.capacity.value > version
    assert kv.prefix.find(keys, len(TEXT)) == 2
    assert kv.prefix.is_coming(keys, len(TEXT), 2)
    kv.release(cache)  # it is preempted, or its user is gone
    assert not kv.prefix.is_coming(keys, len(TEXT), 2)
    assert not kv.prefix._coming


def test_hits_and_misses_are_of_prompts_that_could_have_one() -> None:
    kv = manager()
    counts = [(0, 0, 0), (0, 1, 0), (1, 1, 4), (1, 1, 4)]  # one block alone is never shared whole
    for prompt, expected in zip(([1] * 4, TEXT[:5], TEXT[:6], TEXT[:4]), counts, strict=True):
        kv.release(fill(kv, prompt))
        assert (kv.prefix.hits, kv.prefix.misses, kv.prefix.saved_tokens) == expected


def test_a_discarded_prefill_is_not_found_and_what_it_shared_still_is() -> None:
    kv = manager()
    kv.release(fill(kv, TEXT[:9]))
    cache = fill(kv, TEXT)
    kv.release(cache, forget=True)
    assert hit(kv, TEXT) == 8


def test_500_short_requests_keep_the_cache_within_its_pool() -> None:
    kv = manager(blocks=10)
    for i in range(500):
        kv.release(fill(kv, [i, i + 1, i + 2, i + 3, i + 4]))
    usage = kv.usage()
    assert (usage.used_blocks, usage.cached_blocks) == (0, 9)  # each had a block that was not full
    assert len(kv._pools[0]._keys) == len(kv._pools[0]._by_digest) == 9
    assert kv.evictions == 491
