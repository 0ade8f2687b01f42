"""What keeps the many small runs of this room from waiting."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest


async def _here(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    return function(*arguments, **options)


@pytest.fixture(scope="session", autouse=True)
def no_thread_for_every_file() -> Iterator[None]:
    """Zarr reads each of a run's hundreds of small files in a thread of its own, which takes longer than to read it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "to_thread", _here)
        yield
