"""Garbage collection is put off, and is as it was afterwards."""

import gc
import threading

import pytest

from jaxmem._garbage import seldom_collected


@pytest.fixture(autouse=True)
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_as_before():
    gc.set_threshold(700, 10, 10)
    with seldom_collected():
        assert gc.get_threshold()[0] > 700
        with seldom_collected():
            pass
        assert gc.get_threshold()[0] > 700
    assert gc.get_threshold()[0] == 700
    with pytest.raises(KeyError), seldom_collected():
        raise KeyError
    assert gc.get_threshold()[0] == 700


@pytest.mark.parametrize("first", [0, 10_000_000])
def test_who_collects_even_less_is_left_alone(first):
    gc.set_threshold(first, 10, 10)
    with seldom_collected():
        assert gc.get_threshold()[0] == first


def test_the_last_of_several_threads_ends_it():
    gc.set_threshold(700, 10, 10)
    inside, leave = threading.Event(), threading.Event()

    def other():
        with seldom_collected():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with seldom_collected():
        thread.start()
        assert inside.wait(10)
    assert gc.get_threshold()[0] > 700
    leave.set()
    thread.join()
    assert gc.get_threshold()[0] == 700
