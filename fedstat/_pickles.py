"""Pickles of plain values, read without running what they ask for, in time and memory that their length bounds."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

from fedstat import _guard

VALUE = 2**11
"""Bytes set aside for each reading of a pickle (2,097,152 of them): a value, and the reference to it."""

_REFUSED = {
    pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET,
    pickle.NEWOBJ, pickle.NEWOBJ_EX, pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.INST, pickle.OBJ,
}  # fmt: skip


_LARGEST = 2**31


class Counted(io.BytesIO):
    """Bytes of a pickle that are read a limited number of times: every value it makes takes a reading at least."""

    def __init__(self, where: object, content: bytes) -> None:
        super().__init__(content)
        self._where, self._readings = where, 0

    def read(self, n: int | None = -1, /) -> bytes:
        """Read as BytesIO does, and raise LimitError after too many readings."""
        self._readings += 1
        if self._readings % 4096 == 0:
            _guard.size(self._where, self._readings, "its pickle, counted so far,", share=VALUE, unit="readings")
        return super().read(n)


class ObjectError(ValueError):
    """A pickle asks for a class or function, ``name``, that is not known."""

    def __init__(self, module: str, name: str) -> None:
        self.name = ascii(f"{module}.{name}"[:200])[1:-1]
        super().__init__(f"the pickle asks for {self.name}, which no data file needs")


class Stateful:
    """Stand-in of a class whose instances take a state from the pickle, by ``__setstate__``."""


class Unpickler(pickle._Unpickler):
    """Makes numbers, strings, lists, tuples and dictionaries, and what the stand-ins in ``known`` make.

    A stand-in takes a fixed number of arguments and copies none, or a short pickle could fill the memory. NumPy's and
    torch's own constructors are not used, for they take the state in the file on trust. Nor is the unpickler in C: a
    few bytes make it fill gigabytes (its table of references) or crash (a deeply nested key).
    """

    known: ClassVar[dict[tuple[str, str], Any]] = {}
    stack: list[Any]
    read: Callable[[int], bytes]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]
    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {
        op: load for op, load in pickle._Unpickler.dispatch.items() if bytes([op]) not in _REFUSED
    }

    def load_frame(self) -> None:
        """Pass over a frame: it is a hint, and without it every reading is counted."""
        self.read(8)

    def load_setitem(self) -> None:
        """Set an entry of a dictionary."""
        key, value = self.stack[-2:]
        del self.stack[-2:]
        self.stack[-1][_name(key)] = value

    def load_setitems(self) -> None:
        """Set entries of a dictionary."""
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self.stack[-1][_name(key)] = value

    def load_dict(self) -> None:
        """Make a dictionary."""
        items = self.pop_mark()
        self.append({_name(key): value for key, value in zip(items[::2], items[1::2], strict=True)})

    def load_build(self) -> None:
        """Give its state to an instance of a stand-in."""
        state = self.stack.pop()
        instance = self.stack[-1]
        if not isinstance(instance, Stateful):
            raise ValueError(f"the pickle sets the state of a {type(instance).__name__}")
        instance.__setstate__(state)  # type: ignore[attr-defined]

    dispatch[pickle.FRAME[0]] = load_frame
    dispatch[pickle.SETITEM[0]] = load_setitem
    dispatch[pickle.SETITEMS[0]] = load_setitems
    dispatch[pickle.DICT[0]] = load_dict
    dispatch[pickle.BUILD[0]] = load_build

    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a class or function, or raise ObjectError."""
        if (module, name) not in self.known:
            raise ObjectError(module, name)
        return self.known[module, name]


def _name(key: object) -> bytes | str | int:
    if isinstance(key, int) and abs(key) > _LARGEST:  # larger ones can be chosen to have one hash
        raise ValueError(f"the pickle names an entry by a number beyond {_LARGEST}")
    if not isinstance(key, bytes | str | int):
        raise ValueError(f"the pickle names an entry by a {type(key).__name__}, which no data file needs")
    return key
