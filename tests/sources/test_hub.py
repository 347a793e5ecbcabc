"""The Hub: cache folders, ids in the local cache, downloads; with a made-up cache and no network."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from support import child
from support.checkpoints import random_checkpoint, random_row, write_safetensors
from tensorlift.errors import CheckpointError, CheckpointNotFoundError
from tensorlift.sources import find, hub, read_headers

huggingface_hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
errors = pytest.importorskip("huggingface_hub.errors", reason="huggingface_hub is not installed")
filter_repo_objects = pytest.importorskip("huggingface_hub.utils").filter_repo_objects
pytest.importorskip("huggingface_hub.constants")
COMMIT = "c0ffee" * 6 + "abcd"


def make_cache(
    root: Path, repo: str = "org/name", commit: str = COMMIT, shards: int = 2, ref: str | None = "main"
):
    """A cache folder as huggingface_hub lays it out: snapshots of links into blobs."""
    folder = root / ("models--" + repo.replace("/", "--"))
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (folder / "blobs").mkdir(exist_ok=True)
    written = random_checkpoint(root / "plain", shards=shards, seed=len(commit))
    for file in sorted(written.path.iterdir()):
        blob = (
            folder / "blobs" / f"{commit[:8]}{file.name.encode().hex()[:60]}{len(list(snapshot.iterdir()))}"
        )
        shutil.move(file, blob)
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return folder, written


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for huggingface_hub, offline."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"


@pytest.fixture
def online(cache, monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    return cache


def names_of(path) -> set[str]:
    return set(read_headers(find(path)).names)


def test_a_cache_folder(tmp_path):
    folder, written = make_cache(tmp_path)
    assert names_of(folder) == names_of(folder / "snapshots" / COMMIT) == set(written.tensors)
    link = tmp_path / "linked"
    link.symlink_to(folder / "snapshots" / COMMIT)
    assert names_of(link) == set(written.tensors)
    assert read_headers(find(link)).shards[0].path.startswith(str(link))


def test_the_only_snapshot_without_a_ref(tmp_path):
    folder, written = make_cache(tmp_path, ref=None)
    assert names_of(folder) == set(written.tensors)


def test_refs_main_chooses_the_snapshot(tmp_path):
    make_cache(tmp_path, commit="a" * 40)
    folder, written = make_cache(tmp_path, commit="b" * 39)
    assert names_of(folder) == set(written.tensors)
    (folder / "refs" / "main").unlink()
    with pytest.raises(CheckpointNotFoundError, match="not one snapshot but 2"):
        find(folder)


@pytest.mark.parametrize("commit", ["0" * 40, "../../../etc", "\xff"])
def test_a_ref_to_a_snapshot_that_is_not_there(tmp_path, commit):
    folder, _ = make_cache(tmp_path)
    (folder / "refs" / "main").write_text(commit, encoding="latin-1")
    with pytest.raises(CheckpointNotFoundError, match=f"which is not there \\(there: {COMMIT}"):
        find(folder)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("org/name", ("org/name", None)),
        ("Org-1/na.me_2", ("Org-1/na.me_2", None)),
        ("org/name@refs/pr/1", ("org/name", "refs/pr/1")),
        ("name", None),
        ("/org/name", None),
        ("org/name/x", None),
        ("./name", None),
        ("../name", None),
        ("org/model.safetensors", None),
        ("org/na me", None),
        ("org/name@", None),
    ],
)
def test_parse_id(text, parsed):
    assert hub.parse_id(text) == parsed


def test_an_id_in_the_local_cache(cache):
    _, written = make_cache(cache)
    assert names_of("org/name") == set(written.tensors)
    assert names_of(f"org/name@{COMMIT}") == set(written.tensors)
    assert find("org/name").where == "org/name"


def test_a_local_path_wins_over_an_id(cache, tmp_path):
    make_cache(cache)
    write_safetensors(tmp_path / "org" / "name" / "model.safetensors", {"local": random_row("U8", [1])})
    assert names_of("org/name") == {"local"}


def test_only_text_is_an_id(cache):
    make_cache(cache)
    for path in (Path("org/name"), b"org/name"):
        with pytest.raises(CheckpointNotFoundError, match="no such file or folder"):
            find(path)


def test_an_id_that_is_nowhere(cache):
    with pytest.raises(CheckpointNotFoundError, match=r"org/name: no such file.*HF_HUB_OFFLINE forbids"):
        find("org/name")
    with pytest.raises(CheckpointNotFoundError, match="org/name@v2"):
        find("org/name@v2")


def test_a_cache_that_lacks_a_shard_says_so_offline(cache):
    folder, written = make_cache(cache)
    (folder / "snapshots" / COMMIT / written.files[1].name).unlink()
    with pytest.raises(CheckpointError, match=written.files[1].name):
        find("org/name")


def test_without_the_library(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointNotFoundError, match=r"pip install 'tensorlift\[hub\]'"):
        find("org/name")


class Download:
    """In the place of snapshot_download: `local_files_only` looks, otherwise a call copies what is asked."""

    def __init__(self, source: Path, target: Path):
        self.source, self.target, self.calls = source, target, []

    def __call__(
        self, repo, revision=None, local_files_only=False, allow_patterns=None, ignore_patterns=None
    ):
        if local_files_only:
            if not self.target.exists():
                raise errors.LocalEntryNotFoundError("not in the cache")
            return str(self.target)
        self.calls.append((repo, revision, allow_patterns))
        self.target.mkdir(exist_ok=True)
        every = [str(file.relative_to(self.source)) for file in self.source.rglob("*") if file.is_file()]
        wanted = filter_repo_objects(every, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        for name in wanted:
            shutil.copyfile(self.source / name, self.target / name)
        return str(self.target)


def download_of(tmp_path, monkeypatch, shards: int):
    written = random_checkpoint(tmp_path / "remote", shards=shards)
    for extra in ("consolidated.safetensors", "original/model.safetensors"):
        write_safetensors(written.path / extra, {"other": random_row("U8", [1])})
    (written.path / "pytorch_model.bin").touch()
    download = Download(written.path, tmp_path / "downloaded")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return download, written


def test_a_download_takes_the_index_and_its_shards_only(online, tmp_path, monkeypatch):
    download, written = download_of(tmp_path, monkeypatch, 2)
    assert names_of("org/name@v1") == set(written.tensors)
    assert sorted(os.listdir(download.target)) == sorted(
        ["model.safetensors.index.json", *(file.name for file in written.files)]
    )
    assert {(repo, revision) for repo, revision, _ in download.calls} == {("org/name", "v1")}


def test_a_downloaded_index_that_is_too_large(online, tmp_path, monkeypatch):
    _, written = download_of(tmp_path, monkeypatch, 2)
    os.truncate(written.path / "model.safetensors.index.json", 101_000_000)
    with pytest.raises(CheckpointError, match="more than 100,000,000 bytes"):
        names_of("org/name")


def test_a_download_without_an_index(online, tmp_path, monkeypatch):
    download, written = download_of(tmp_path, monkeypatch, 1)
    assert names_of("org/name") == set(written.tensors)
    assert sorted(os.listdir(download.target)) == ["consolidated.safetensors", "model.safetensors"]


def test_nothing_is_downloaded_where_that_is_not_wanted(online, monkeypatch):
    asked = []

    def snapshot_download(repo, local_files_only=False, **_):
        asked.append(local_files_only)
        raise errors.LocalEntryNotFoundError("not there")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(CheckpointNotFoundError, match="only loading it downloads it"):
        find("org/name", download=False)
    assert asked == [True]


def test_a_cache_that_lacks_a_shard_is_completed(online, tmp_path, monkeypatch):
    download, written = download_of(tmp_path, monkeypatch, 2)
    download.target.mkdir()
    shutil.copyfile(
        written.path / "model.safetensors.index.json", download.target / "model.safetensors.index.json"
    )
    assert names_of("org/name") == set(written.tensors)
    assert download.calls


def test_what_the_cache_has_is_not_downloaded(online, tmp_path, monkeypatch):
    download, written = download_of(tmp_path, monkeypatch, 2)
    shutil.copytree(written.path, download.target)
    assert names_of("org/name") == set(written.tensors)
    assert download.calls == []


class GatedRepoError(Exception):
    """As the library's, which wants a response of the server."""


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (
            errors.LocalEntryNotFoundError("offline"),
            CheckpointNotFoundError,
            "check the network",
        ),
        (errors.HFValidationError("bad name"), CheckpointError, "check the name"),
        (OSError(28, "No space left on device"), CheckpointError, "No space left"),
        (RuntimeError("odd\n\n\x1b at last."), CheckpointError, "RuntimeError: odd \\x1b at last; check"),
        (GatedRepoError("403"), CheckpointError, "accept its licence"),
    ],
)
def test_a_download_that_fails(online, monkeypatch, error, kind, words):
    def fail(*args, local_files_only=False, **kwargs):
        if local_files_only:
            raise errors.LocalEntryNotFoundError("not in the cache")
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(kind) as caught:
        find("org/name")
    assert words in str(caught.value)
    assert str(caught.value).startswith("org/name: ")
    assert caught.value.__cause__ is error


def test_a_download_of_a_model_without_safetensors(online, tmp_path, monkeypatch):
    (tmp_path / "remote").mkdir()
    (tmp_path / "remote" / "pytorch_model.bin").touch()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", Download(tmp_path / "remote", tmp_path / "downloaded")
    )
    with pytest.raises(CheckpointNotFoundError, match=r"no \*\.safetensors file"):
        find("org/name")


def names_in(path: str) -> list[str]:
    return sorted(names_of(path))


def test_a_pipe_in_the_place_of_refs_main_is_not_waited_for(tmp_path):
    folder, written = make_cache(tmp_path, ref=None)
    (folder / "refs").mkdir()
    os.mkfifo(folder / "refs" / "main")
    assert child.call(names_in, str(folder), seconds=20) == sorted(written.tensors)
