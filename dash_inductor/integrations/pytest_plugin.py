"""A pytest plugin, loaded where this package is installed: the fixture `bits` compares bits with those of earlier runs.

    def test_training(bits):
        for step in range(3):
            loss = train(model, step)
            bits.step(loss=loss, model=model)

``pytest --update-bits`` writes the file, ``bits/test_name.json`` beside the test; without it, a difference fails the
test.  This module imports torch only for a test that uses the fixture.
"""

from __future__ import annotations

import unittest
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .bits import Bits


_BITS = pytest.StashKey["Bits"]()
"""What the fixture has given to a test, whichever way the test has come to it."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option ``--update-bits`` and the setting ``bits_missing``."""
    words = "write the hashes of the fixture `bits` to their files, instead of comparing them"
    parser.getgroup("dash_inductor").addoption("--update-bits", action="store_true", help=words)
    words = "what becomes of a test whose file has no bits for this environment: fail (the default) or pass"
    parser.addini("bits_missing", words, default="fail")


@pytest.fixture
def bits(request: pytest.FixtureRequest) -> Iterator[Bits]:
    """Hashes values step by step (`Bits.step`); after the test they are compared with its file, or written to it.

    During the test, deterministic algorithms are on.  Functions are compiled anew, so that bits do not depend on the
    sizes that other tests have used.

    Raises:
        UsageError: the test is no function or method that pytest calls itself: a doctest, or a `unittest.TestCase`.
    """
    import torch

    from ..upstream.fresh import forget_compiled
    from .bits import Bits

    item = request.node
    if not isinstance(item, pytest.Function) or issubclass(item.cls or object, unittest.TestCase):
        words = "the fixture `bits` is for tests that pytest calls itself, no doctests or unittest.TestCase"
        raise pytest.UsageError(f"{item.nodeid}: {words}")
    forget_compiled()
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    item.stash[_BITS] = Bits()
    yield item.stash[_BITS]
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Compares or writes the bits of a test that has passed."""
    result = yield
    found = pyfuncitem.stash.get(_BITS, None)
    if found is not None:
        found.end()
        _finish(pyfuncitem, found)
    return result


def _finish(item: pytest.Function, found: Bits) -> None:
    from ..errors import DashError
    from .bits import BitsFile

    if not found.values:
        pytest.fail("the test has the fixture `bits` and never calls bits.step(...)", pytrace=False)
    missing = item.config.getini("bits_missing")
    if missing not in ("fail", "pass"):
        raise pytest.UsageError(f"bits_missing={missing!r} is not allowed: expected fail or pass")
    file = BitsFile(item.path.parent / "bits" / f"{Path(item.path).stem}.json")
    name = item.nodeid.partition("::")[2]
    why = ""
    try:
        if item.config.getoption("update_bits"):
            file.write(name, found)
        else:
            file.compare(name, found, missing)
    except DashError as error:
        why = str(error)
    except OSError as error:
        why = f"{error.filename} cannot be read or written: {error.strerror}"
    if why:  # not above, where pytest would show the error that it comes from, too
        pytest.fail(why, pytrace=False)
