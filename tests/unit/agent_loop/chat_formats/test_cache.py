"""The cache of tokens is bounded by bytes."""

from rl_async.agent_loop.chat_formats.render import TOKEN_BYTES, TokenCache


def test_the_least_recently_used_are_forgotten() -> None:
    cache = TokenCache(2 * (1 + TOKEN_BYTES))
    cache.put(b"a", (1,))
    cache.put(b"b", (2,))
    assert cache.get(b"a") == (1,)
    cache.put(b"c", (3,))
    assert (cache.get(b"a"), cache.get(b"b"), cache.get(b"c")) == ((1,), None, (3,))
    assert cache.bytes == 2 * (1 + TOKEN_BYTES)


def test_what_would_fill_the_cache_is_not_kept() -> None:
    cache = TokenCache(1000)
    cache.put(b"a", (1,))
    cache.put(b"k" * 1000, (1,))
    cache.put(b"b", (2,) * 100)
    assert cache.get(b"k" * 1000) is None and cache.get(b"b") is None and cache.get(b"a") == (1,)


def test_putting_again_counts_once() -> None:
    cache = TokenCache(1000)
    cache.put(b"a", (1,))
    cache.put(b"a", (1,))
    assert cache.bytes == 1 + TOKEN_BYTES
