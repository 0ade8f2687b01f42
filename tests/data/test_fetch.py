"""Downloads from a server on this machine that serves files rightly, slowly, in pieces, wrongly, or not at all."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import re
import tarfile
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from filelock import FileLock
from real_data import require_real_data

from fedstat import __main__ as entrance
from fedstat import data
from fedstat.data import _fetch
from fedstat.data._files import Remote, Source, folder

BYTES = np.random.default_rng(0).bytes(3_500_000)
CUT = 23 * 2**16  # bytes of a connection that is cut


def sha256(content):
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Serves the files of the server, in the way that the first part of the path says."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        way, _, name = self.path[1:].partition("/")
        content, asked = self.server.files[name], self.headers.get("Range")
        self.server.calls.append((way, asked))
        if way == "missing" or (way == "once" and len(self.server.calls) > 1):
            self.send_error(404)
            return
        if way == "elsewhere":
            self.send_response(302)
            self.send_header("Location", f"/right/{name}")
            self.end_headers()
            return
        first = (
            int(asked.removeprefix("bytes=").removesuffix("-")) if asked and way not in ("whole", "cut-whole") else 0
        )
        if first >= len(content):
            self.send_error(416)
            return
        self.send_response(206 if first else 200)
        if first:
            self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
        if way != "endless":
            self.send_header("Content-Length", str(len(content) - first))
        self.end_headers()
        self.send(way, content[first:])

    def send(self, way, part):
        if way == "slow":
            for i in range(0, len(part), len(part) // 5):
                self.wfile.write(part[i : i + len(part) // 5])
                time.sleep(0.05)
        elif way in ("cut", "cut-whole"):
            self.wfile.write(part[:CUT])
        elif way == "stalls":
            self.wfile.write(part[:CUT])
            self.wfile.flush()
            time.sleep(2)
        elif way == "endless":
            self.wfile.write(part + bytes(10 * _fetch.CHUNK))
        else:
            self.wfile.write(part)


@pytest.fixture
def server(monkeypatch):
    """A server with its files, the calls that it had, and the address of a way to serve."""
    monkeypatch.setattr(_fetch, "WAIT", 0.0)
    monkeypatch.setattr(_fetch, "PATIENCE", 5.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.files, http.calls = {"a.bin": BYTES}, []
        http.daemon_threads = True
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        address = f"http://127.0.0.1:{http.server_port}"
        yield SimpleNamespace(
            files=http.files, calls=http.calls, at=lambda way, name="a.bin": f"{address}/{way}/{name}"
        )
        http.shutdown()
        thread.join()


SIZE, DIGEST = len(BYTES), sha256(BYTES)


def one_file(*urls, size=SIZE, digest=DIGEST):
    return Source(
        "Numbers", "https://home.org", {}, ("set",), (("a.bin",),), remote=(Remote("set/a.bin", size, digest, urls),)
    )


def left(root):
    return sorted(p.relative_to(root).as_posix() for p in root.rglob("*") if p.is_file())


@pytest.mark.parametrize("way", ["right", "slow", "cut", "whole", "elsewhere"])
@pytest.mark.parametrize("size", [len(BYTES), 0], ids=["size known", "size unknown"])
def test_a_file_is_whole_however_it_is_served(server, tmp_path, way, size):
    assert _fetch.fetch(one_file(server.at(way), size=size), tmp_path) == [tmp_path / "set/a.bin"]
    assert (tmp_path / "set/a.bin").read_bytes() == BYTES
    assert left(tmp_path) == ["set/a.bin"]
    if way == "cut":  # each connection continues where the one before ended
        assert server.calls == [("cut", None), ("cut", f"bytes={CUT}-"), ("cut", f"bytes={2 * CUT}-")]


def test_an_md5_is_compared_too(server, tmp_path):
    digest = f"md5:{hashlib.md5(BYTES, usedforsecurity=False).hexdigest()}"
    _fetch.fetch(one_file(server.at("right"), digest=digest), tmp_path)
    with pytest.raises(ValueError, match=r"must have the published digest md5:0{32}, but has md5:"):
        _fetch.fetch(one_file(server.at("right"), digest=f"md5:{'0' * 32}"), tmp_path / "other")


@pytest.mark.parametrize("way", ["right", "whole"])
def test_another_process_continues_what_one_left(server, tmp_path, way):
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.bin.part").write_bytes(BYTES[:1_000_000])
    _fetch.fetch(one_file(server.at(way)), tmp_path)
    assert server.calls == [(way, "bytes=1000000-")]
    assert (tmp_path / "set/a.bin").read_bytes() == BYTES


def test_a_part_that_is_complete_or_too_long_is_not_asked_for(server, tmp_path):
    (tmp_path / "set").mkdir()
    (part := tmp_path / "set/a.bin.part").write_bytes(BYTES)
    _fetch.fetch(one_file(server.at("missing")), tmp_path)
    assert server.calls == []
    (tmp_path / "set/a.bin").unlink()
    part.write_bytes(BYTES + b"more")
    _fetch.fetch(one_file(server.at("right"), size=0), tmp_path)  # 416: it begins again
    assert [asked for _, asked in server.calls] == [f"bytes={len(BYTES) + 4}-", None]
    assert (tmp_path / "set/a.bin").read_bytes() == BYTES


def test_a_download_that_stalls_keeps_its_bytes_and_continues(server, tmp_path, monkeypatch):
    monkeypatch.setattr(_fetch, "PATIENCE", 0.3)
    monkeypatch.setattr(_fetch, "TRIES", 1)
    says = r"in 1 attempts: no bytes arrived for 0\.3 seconds; 1,507,328 bytes are kept in .*a\.bin\.part: the same"
    with pytest.raises(ConnectionError, match=says):
        _fetch.fetch(one_file(server.at("stalls")), tmp_path)
    assert (tmp_path / "set/a.bin.part").read_bytes() == BYTES[:CUT]
    _fetch.fetch(one_file(server.at("right")), tmp_path)
    assert server.calls[-1] == ("right", f"bytes={CUT}-")


def test_connections_without_new_bytes_end_the_download(server, tmp_path):
    with pytest.raises(ConnectionError, match=r"could not be downloaded in 5 attempts: .*1,507,328 bytes are kept"):
        _fetch.fetch(one_file(server.at("cut-whole")), tmp_path)  # no range, and never more than CUT bytes
    assert len(server.calls) == 5


def test_a_wrong_file_is_deleted_and_both_digests_are_said(server, tmp_path):
    server.files["a.bin"] = wrong = BYTES[::-1]
    says = f"digest {sha256(BYTES)}, but has {sha256(wrong)}. The download was deleted. Try again"
    with pytest.raises(ValueError, match=re.escape(says)):
        _fetch.fetch(one_file(server.at("right")), tmp_path)
    assert left(tmp_path) == []


def test_a_file_of_another_size_is_refused_before_it_is_downloaded(server, tmp_path):
    with pytest.raises(ValueError, match=r"must have 999 bytes, as published, but the server offers 3,500,000\."):
        _fetch.fetch(one_file(server.at("right"), size=999), tmp_path)
    with pytest.raises(ValueError, match="must have the published digest"):  # of unsaid size, at most a block more
        _fetch.fetch(one_file(server.at("endless")), tmp_path)
    assert left(tmp_path) == []


def test_addresses_are_tried_in_turn_and_all_errors_said(server, tmp_path):
    closed = "http://127.0.0.1:9/a.bin"
    _fetch.fetch(one_file(server.at("missing"), closed, server.at("right")), tmp_path)
    assert (tmp_path / "set/a.bin").read_bytes() == BYTES
    says = r"missing/a\.bin answers with HTTP status 404 \(.*http://127\.0\.0\.1:9.* refused.*by hand from https://home\.org"
    with pytest.raises(ConnectionError, match=says):
        _fetch.fetch(one_file(server.at("missing"), closed), tmp_path / "other")


@pytest.mark.parametrize("url", ["ftp://home.org/a.bin", "file:///etc/passwd"])
def test_other_protocols_are_refused(tmp_path, url):
    with pytest.raises(ValueError, match="must start with https:// or http://, but got"):
        _fetch.fetch(one_file(url), tmp_path)


def test_files_that_exist_are_left_alone(server, tmp_path):
    (tmp_path / "set").mkdir()
    (file := tmp_path / "set/a.bin").write_bytes(b"mine")
    source = one_file(server.at("right"))
    assert _fetch.fetch(source, tmp_path) == []
    needs_more = source._replace(files=(("a.bin",), ("b.bin",)))
    assert _fetch.fetch(needs_more, tmp_path) == []
    assert (file.read_bytes(), server.calls) == (b"mine", [])
    _fetch.fetch(source, tmp_path, overwrite=True)
    assert file.read_bytes() == BYTES
    _fetch.fetch(source, tmp_path, overwrite=True)  # it has the digest already
    assert len(server.calls) == 1


def test_another_file_that_is_read_first_is_named(server, tmp_path):
    source = one_file(server.at("right"))._replace(places=("", "set"))
    (tmp_path / "a.bin").write_bytes(b"mine")
    with pytest.warns(UserWarning, match=r"/a\.bin is read instead of the downloaded file\. Remove it\."):
        assert _fetch.fetch(source, tmp_path, overwrite=True) == [tmp_path / "set/a.bin"]


def test_an_interrupted_download_leaves_its_part_alone(server, tmp_path, monkeypatch):
    write = _fetch._Receiver._show

    def interrupt(receiver, done):
        write(receiver, done)
        if done >= CUT:
            raise KeyboardInterrupt

    monkeypatch.setattr(_fetch._Receiver, "_show", interrupt)
    with pytest.raises(KeyboardInterrupt):
        _fetch.fetch(one_file(server.at("right")), tmp_path)
    assert left(tmp_path) == ["set/a.bin.part"]
    assert (tmp_path / "set/a.bin.part").read_bytes() == BYTES[:CUT]


def test_two_processes_do_not_write_one_file(server, tmp_path):
    (tmp_path / "set").mkdir()
    with FileLock(tmp_path / "set/a.bin.lock"), pytest.raises(BlockingIOError, match="is being downloaded by another"):
        _fetch.fetch(one_file(server.at("right")), tmp_path)


def test_a_full_disk_is_said_before_the_download(server, tmp_path):
    with pytest.raises(ValueError, match=r"must have 9,000,000,000,000 MB of free disk space, but has"):
        _fetch.fetch(one_file(server.at("right"), size=9 * 10**18), tmp_path)
    assert server.calls == []


def zipped(members):
    with zipfile.ZipFile(out := io.BytesIO(), "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return out.getvalue()


def tarred(members):
    with tarfile.open(fileobj=(out := io.BytesIO()), mode="w:gz") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
        link = tarfile.TarInfo("in/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        file.addfile(link)
    return out.getvalue()


def archive(server, content):
    server.files["a.zip"] = content
    remote = Remote("a.zip", len(content), sha256(content), (server.at("right", "a.zip"),), {"in/": "set/"})
    return Source("Packed", "https://home.org", {}, ("set",), (("a",), ("b/c",)), remote=(remote,))


@pytest.mark.parametrize("pack", [zipped, tarred])
def test_archives_are_unpacked_and_deleted(server, tmp_path, pack):
    source = archive(server, pack({"in/a": b"1", "in/b/c": b"2", "out/d": b"3"}))
    (tmp_path / "set/b").mkdir(parents=True)
    (tmp_path / "set/b/c").write_bytes(b"mine")
    assert _fetch.fetch(source, tmp_path) == [tmp_path / "set/"]
    assert left(tmp_path) == ["set/a", "set/b/c"]
    assert ((tmp_path / "set/a").read_bytes(), (tmp_path / "set/b/c").read_bytes()) == (b"1", b"mine")
    assert _fetch.fetch(source, tmp_path) == []
    _fetch.fetch(source, tmp_path, overwrite=True)
    assert (tmp_path / "set/b/c").read_bytes() == b"2"


def test_a_killed_unpacking_begins_again_from_the_archive(server, tmp_path):
    source = archive(server, zipped({"in/a": b"1", "in/b/c": b"2"}))
    (tmp_path / "a.zip").write_bytes(server.files["a.zip"])
    (tmp_path / ".a.zip.draft").mkdir()
    (tmp_path / ".a.zip.draft/half").write_bytes(b"1")
    _fetch.fetch(source, tmp_path)
    assert server.calls == []
    assert left(tmp_path) == ["set/a", "set/b/c"]
    (tmp_path / "set/a").unlink()
    (tmp_path / "a.zip").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"a\.zip must have the published digest .* Remove it to download it again"):
        _fetch.fetch(source, tmp_path)


def test_members_outside_of_the_folder_are_refused(server, tmp_path):
    source = archive(server, zipped({"in/../../../evil": b"1"}))
    with pytest.raises(ValueError, match=r"'set/\.\./\.\./\.\./evil', which lies outside"):
        _fetch.fetch(source, tmp_path / "root")
    assert not (tmp_path / "evil").exists()


@pytest.fixture
def mnist(server, monkeypatch):
    """MNIST's published files, from this machine's server."""
    place = require_real_data() / "mnist"
    source = data.SOURCES["mnist"]
    server.files |= {path.name: path.read_bytes() for path in place.iterdir()}
    remote = tuple(one._replace(urls=(server.at("cut", Path(one.path).name),)) for one in source.remote)
    monkeypatch.setitem(data.SOURCES, "mnist", source._replace(remote=remote))
    return place


def test_published_mnist_has_its_digests_and_is_read(server, mnist, tmp_path):
    with pytest.raises(FileNotFoundError, match="python -m fedstat data fetch mnist"):
        data.load("mnist", tmp_path)
    assert server.calls == []
    found = data.load("mnist", tmp_path, split="test", fetch=True)
    assert found.identical(data.load("mnist", mnist, split="test"))
    n_calls = len(server.calls)
    data.load("mnist", tmp_path, split="test", fetch=True)
    assert len(server.calls) == n_calls


def test_the_command_downloads_and_says_so(server, mnist, tmp_path, capsys):  # noqa: ARG001
    assert entrance.main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "mnist: downloaded, digest as published: " in said.out
    assert "train-images-idx3-ubyte.gz: 9/9 megabytes" in said.err
    assert entrance.main(["data", "fetch", "mnist", "digits", "--data-dir", str(tmp_path), "--quiet"]) == 0
    said = capsys.readouterr()
    assert said.out == f"mnist: already in {tmp_path}\ndigits: comes with scikit-learn, nothing to download\n"
    assert said.err == ""


def test_a_failed_command_ends_in_one_line(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(data.SOURCES, "mnist", one_file(server.at("missing")))
    assert entrance.main(["data", "fetch", "mnist", "--data-dir", str(tmp_path)]) == 1
    assert re.fullmatch(r"\S.* data: error: .*HTTP status 404.*by hand.*\. The same command continues\.\n",
                        capsys.readouterr().err)  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["get"], "ACTION must be one of 'list', 'fetch', but got 'get'"),
        (["fetch"], "fetch needs the NAME of at least one data set"),
        (["fetch", "mnits"], "NAME must be one of .*Did you mean 'mnist'"),
        (["list", "--overwrite"], "--overwrite has no effect with list"),
    ],
)
def test_wrong_command_lines_are_refused(argv, says, capsys):
    with pytest.raises(SystemExit) as ended:
        entrance.main(["data", *argv])
    assert ended.value.code == 2
    assert re.search(says, capsys.readouterr().err)


def test_raw_files_are_followed_by_what_the_user_runs(server, monkeypatch, tmp_path, capsys):
    for name, urls in (("femnist", ("by_class.zip", "by_write.zip")), ("shakespeare-leaf", ("text.zip",))):
        source = data.SOURCES[name]
        contents = [zipped({"100.txt": b"words"}) for _ in urls]
        server.files |= dict(zip(urls, contents, strict=True))
        remote = tuple(
            one._replace(urls=(server.at("right", url),), size=len(content), digest=sha256(content))
            for one, url, content in zip(source.remote, urls, contents, strict=True)
        )
        monkeypatch.setitem(data.SOURCES, name, source._replace(remote=remote))
        for _ in range(2):
            assert entrance.main(["data", "fetch", name, "--data-dir", str(tmp_path), "--quiet"]) == 0
            assert "preprocess.sh -s niid" in " ".join(capsys.readouterr().out.split())
        assert len(server.calls) == len(urls)
        server.calls.clear()
        with pytest.raises(FileNotFoundError, match=rf"fetch {name}\. Th.*preprocess\.sh"):
            data.load(name, tmp_path, fetch=True)
    assert left(tmp_path) == [
        "femnist/data/raw_data/by_class.zip",
        "femnist/data/raw_data/by_write.zip",
        "shakespeare/data/raw_data/raw_data.txt",  # where LEAF looks for them
    ]
    entrance.main(["data", "list", "femnist", "shakespeare-leaf", "--data-dir", str(tmp_path)])
    assert capsys.readouterr().out.count("raw files\n") == 2


def test_the_table_says_what_there_is(tmp_path, capsys):
    (tmp_path / "svhn").mkdir()
    (tmp_path / "svhn/test_32x32.mat").touch()
    assert entrance.main(["data", "list", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert all(len(line) <= 80 for line in said.splitlines() if str(tmp_path) not in line)
    rows = {line.split()[0]: line.split()[1:] for line in said.splitlines() if line.split()[:1]}
    assert data.SOURCES.keys() <= rows.keys()
    assert rows["mnist"] == ["4", "12", "70,000", "10", "SHA-256", "no"]
    assert rows["svhn"] == ["2", "246", "99,289", "10", "SHA-256", "1", "of", "2", "files"]
    assert rows["digits"] == ["1,797", "10", "yes"]


def test_digests_in_the_table_are_those_of_published_files_at_hand():
    place = require_real_data()
    remote = {one.path: one for source in data.SOURCES.values() for one in source.remote}
    files = {path: place / path for path in remote if (place / path).is_file() and path != "ag_news_csv/train.csv"}
    assert len(files) == 5  # MNIST's and the test file of AG News; of its training file there is a part only
    for path, file in files.items():
        assert (sha256(file.read_bytes()), file.stat().st_size) == (remote[path].digest, remote[path].size)
    text = gzip.decompress((place / "shakespeare/t8.shakespeare.txt.gz").read_bytes())
    one = remote["shakespeare/t8.shakespeare.txt"]
    assert (sha256(text), len(text)) == (one.digest, one.size)


def test_every_data_set_has_addresses_digests_and_a_place_that_its_loader_reads():
    lengths = {"sha256": 64, "md5": 32}
    for name, source in data.SOURCES.items():
        assert source.classes > 1
        assert bool(source.remote) == bool(source.files) == (name != "digits")
        for remote in source.remote:
            kind, _, digest = remote.digest.partition(":")
            assert re.fullmatch(f"[0-9a-f]{{{lengths[kind]}}}", digest)
            assert all(re.match(r"https?://[\w.-]+/", url) for url in remote.urls)
            place = next(iter(remote.unpack.values()), remote.path)
            folders = [os.path.normpath(one) for one in source.places]
            assert os.path.normpath(place if place.endswith("/") else Path(place).parent) in folders or source.after


def test_pooch_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "pooch", None)
    with pytest.raises(ValueError, match=r"need Pooch, which is not installed .*pip install 'fedstat\[data\]'"):
        _fetch.fetch(one_file("https://home.org/a.bin"), tmp_path)
    assert folder(tmp_path) == tmp_path
