"""Ids are unique, also across threads and forks."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from retinue.core.runs import unique


def test_an_id_is_twenty_hexadecimal_digits() -> None:
    assert len(unique()) == 20
    int(unique(), 16)


def test_threads_get_different_ids() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: unique(), range(5_000)))
    assert len(set(made)) == len(made)


_FORKING = """
import os
from retinue.core.runs import unique
unique()
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, unique().encode())
    os._exit(0)
os.wait()
assert os.read(reader, 20).decode() not in {unique() for _ in range(200)}
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_forked_process_gets_ids_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", _FORKING], check=True)
