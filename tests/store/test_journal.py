"""The log of a store: what an interrupted commit leaves is undone or finished, and damage is named."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from fedstat.store.journal import DamageError, Journal, read_log, start


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A store with one file, in its second version."""
    (tmp_path / "journal").mkdir()
    (tmp_path / "a").write_bytes(b"first")
    start(tmp_path)
    stage(tmp_path, b"second").commit()
    return tmp_path


def stage(root: Path, content: bytes) -> Journal:
    journal = Journal(root)
    with journal.stage("a") as file:
        file.write(content)
    journal.close()
    return journal


def log(root: Path) -> Path:
    return root / "journal" / "log"


def test_a_last_line_cut_at_any_byte_is_a_commit_that_never_was(store: Path) -> None:
    first, second = log(store).read_bytes().splitlines(keepends=True)
    for n in range(1, len(second) - 1):
        log(store).write_bytes(first + second[:n])
        assert read_log(store)["a"].size == len("first"), second[:n]
    Journal(store).close()
    assert log(store).read_bytes() == first


def test_a_last_line_without_its_end_is_complete_and_gets_its_end(store: Path) -> None:
    content = log(store).read_bytes()
    log(store).write_bytes(content[:-1])
    Journal(store).close()
    assert read_log(store)["a"].size == len("second")
    assert log(store).read_bytes().endswith(b"\n")


def test_a_last_line_with_blocks_of_zeros_is_a_commit_that_never_was(store: Path) -> None:
    first, second = log(store).read_bytes().splitlines(keepends=True)
    for line in (bytes(len(second)), second[:-9] + bytes(9), second[:20] + bytes(5) + second[25:]):
        log(store).write_bytes(first + line)
        assert read_log(store)["a"].size == len("first")


@pytest.mark.parametrize("ended", [True, False])
@pytest.mark.parametrize("number", [1, 2])
def test_a_byte_that_no_power_cut_explains_is_damage(store: Path, number: int, ended: bool) -> None:
    lines = log(store).read_bytes().splitlines(keepends=True)
    lines[number - 1] = lines[number - 1].replace(b"files", b"filed")
    content = b"".join(lines)
    log(store).write_bytes(content if ended else content[:-1])
    with pytest.raises(DamageError, match=f"line {number} of journal/log is not valid"):
        read_log(store)


@pytest.mark.parametrize("text", [b"{", b"[]", b'{"files": {"a": [1]}, "without": []}', b'{"files": {}}'])
def test_a_line_whose_checksum_fits_must_still_be_a_commit(store: Path, text: bytes) -> None:
    with log(store).open("ab") as file:
        file.write(b"%08x %d %s\n" % (zlib.crc32(text), len(text), text))
    with pytest.raises(DamageError, match="line 3 of journal/log is not valid"):
        read_log(store)


def test_a_first_line_that_is_cut_is_damage_and_so_is_no_line(store: Path) -> None:
    log(store).write_bytes(log(store).read_bytes()[:30])
    with pytest.raises(DamageError, match="line 1 of journal/log is not valid"):
        read_log(store)
    log(store).write_bytes(b"")
    with pytest.raises(DamageError, match="journal/log is empty"):
        read_log(store)


@pytest.mark.parametrize(("draft", "expected"), [(b"third", b"third"), (b"thirs", b"second"), (b"thir", b"second")])
def test_a_commit_interrupted_after_its_line_is_finished_with_files_that_have_their_checksum(
    store: Path, monkeypatch: pytest.MonkeyPatch, draft: bytes, expected: bytes
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "_place", lambda *_: None)
        journal = stage(store, b"third")
        journal.commit()
    assert (store / "a").read_bytes() == b"second"
    (store / "journal" / journal.files["a"].staged).write_bytes(draft)
    Journal(store).close()
    assert (store / "a").read_bytes() == expected
    assert [path.name for path in (store / "journal").iterdir()] == ["log"]
