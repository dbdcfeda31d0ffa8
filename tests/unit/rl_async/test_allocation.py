"""Python does not look for cycles while a batch is decoded, and goes on to afterwards."""

import gc

import pytest

from rl_async.process.allocation import importing, no_collection


@pytest.fixture
def looks():
    """How often Python looked for cycles, one entry each time; it looks after ten new objects."""
    found, thresholds = [], gc.get_threshold()

    def look(phase, info):
        found.append(phase)

    gc.callbacks.append(look)
    gc.set_threshold(10)
    yield found
    gc.callbacks.remove(look)
    gc.set_threshold(*thresholds)


def test_inside_the_block_python_does_not_look_for_cycles(looks):
    with no_collection():
        looks.clear()
        kept = [[number] for number in range(1000)]
        assert not looks
    assert [[number] for number in range(1000)] == kept and looks


def test_an_error_in_the_block_ends_it(looks):
    with pytest.raises(ValueError), no_collection():
        raise ValueError
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_blocks_of_threads_may_overlap_in_any_order():
    first, second = no_collection(), no_collection()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not gc.isenabled()
    second.__exit__(None, None, None)
    assert gc.isenabled()


def test_nothing_is_looked_for_among_what_is_imported() -> None:
    before = gc.get_freeze_count()
    try:
        with importing():
            assert not gc.isenabled()
            made = [[number] for number in range(10_000)]
        assert gc.isenabled() and gc.get_freeze_count() > before + len(made)
    finally:
        gc.unfreeze()
