"""What writing a file does to links, modes, devices and pipes: what a shell's `>` would."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from stratagem.simulator.base.files import atomic_path, check_place, write_text

ROOT = Path(__file__).parents[2]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_file_has_what_the_umask_leaves(tmp_path: Path, umask: None) -> None:
    write_text(tmp_path / "new", "text")
    assert mode_of(tmp_path / "new") == 0o640


@pytest.mark.parametrize("mode", [0o600, 0o664, 0o755])
def test_a_file_keeps_its_mode(tmp_path: Path, umask: None, mode: int) -> None:
    path = tmp_path / "kept"
    path.write_text("old")
    path.chmod(mode)
    write_text(path, "new")
    assert (path.read_text(), mode_of(path)) == ("new", mode)


def test_links_are_followed(tmp_path: Path) -> None:
    """A link to a link, in another folder, and one to what is not there yet."""
    (tmp_path / "far").mkdir()
    target = tmp_path / "far" / "target"
    target.write_text("old")
    (tmp_path / "middle").symlink_to("far/target")
    (tmp_path / "link").symlink_to(tmp_path / "middle")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert target.read_text() == "new"
    (tmp_path / "ahead").symlink_to("far/to come")
    write_text(tmp_path / "ahead", "made")
    assert (tmp_path / "far" / "to come").read_text() == "made"
    (tmp_path / "self").symlink_to("self")
    with pytest.raises(OSError, match="symbolic links"):
        write_text(tmp_path / "self", "nothing")


def test_a_pipe_stays_one_and_is_written_to(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_place(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "through a pipe")
    reader.join(10)
    assert read == ["through a pipe"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_a_device_stays_one() -> None:
    before = os.stat(os.devnull)
    check_place(os.devnull)
    write_text(os.devnull, "nothing is kept")
    after = os.stat(os.devnull)
    assert (after.st_ino, after.st_rdev, after.st_mode) == (
        before.st_ino,
        before.st_rdev,
        before.st_mode,
    )


def test_open_output_is_written_to(tmp_path: Path) -> None:
    """/dev/stdout is a link to whatever a shell has put there: a file, open already."""
    script = (
        "from stratagem.simulator.base.files import write_text; write_text('/dev/stdout', 'told')"
    )
    with (tmp_path / "out").open("w") as out:
        subprocess.run(
            [sys.executable, "-c", script],
            stdout=out,
            env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
            check=True,
        )
        assert (tmp_path / "out").stat().st_ino == os.fstat(out.fileno()).st_ino
    assert (tmp_path / "out").read_text() == "told"


def test_what_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail_halfway() -> None:
        with atomic_path(path) as temporary:
            temporary.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail_halfway()
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_content_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that stops at any moment has the old file or the whole new one."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "content")
        sync(handle)

    def renamed(self: Path, target: Path) -> Path:
        done.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    write_text(tmp_path / "file", "text")
    assert done == ["content", "name", "folder"]


def test_a_long_name_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 127)
    write_text(path, "text")
    assert path.read_text() == "text"


def test_a_folder_is_refused_before_a_wait(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="is a folder"):
        check_place(tmp_path / "link")


@pytest.mark.parametrize("name", ["folder", "file/inside"])
def test_what_cannot_be_written_is_named_as_it_was_given(tmp_path: Path, name: str) -> None:
    """It was a temporary name beside it, which nobody had heard of."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"folder") as refused:
        write_text(tmp_path / name, "text")
    assert str(tmp_path / name) in str(refused.value)
    assert ".tmp" not in str(refused.value)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["file", "folder"]
