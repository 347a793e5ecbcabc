"""What went wrong at a path, in words: errors of the operating system as errors of this package."""

from __future__ import annotations

import errno
import os
import stat

from tensorlift.errors import CheckpointError, CheckpointNotFoundError, FileError, MachineError, ReadError
from tensorlift.format.listing import OTHER_WEIGHTS, SUFFIX
from tensorlift.format.nearest import nearest
from tensorlift.format.quoting import clean, plural, quote, some_of, without_secrets

__all__ = ["not_a_file", "nothing_at", "nothing_in", "open_regular", "refused"]

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def refused(error: OSError, path: str, doing: str) -> FileError | MachineError:
    """The package's error for one of the system's; `doing` says what was tried ("opened", "listed")."""
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return nothing_at(path)
    reason = error.strerror or str(error)
    hint = {
        errno.EACCES: "; check its permissions and those of its folders",
        errno.EPERM: "; check its permissions and those of its folders",
        errno.ELOOP: "; its symbolic links lead in a circle",
        errno.EMFILE: "; raise the limit of open files (ulimit -n)",
        errno.ENAMETOOLONG: "; change to a folder nearer to it, or give a shorter path",
    }.get(error.errno or 0, "")
    failure = ReadError(f"{clean(path)}: could not be {doing}: {reason}{hint}")
    failure.errno = error.errno  # not filename too: with it, str() leaves out the message
    return failure


def open_regular(path: str, flags: int) -> int:
    """For open()'s ``opener``: only regular files, without waiting; CheckpointError for anything else."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode):
        os.close(fd)
        raise not_a_file(path, mode)
    return fd


def not_a_file(path: str, mode: int, folder_hint: str = "") -> CheckpointError:
    """For a path that leads to something that is no regular file."""
    kind = next((name for test, name in _KINDS if test(mode)), "no regular file")
    hint = folder_hint if stat.S_ISDIR(mode) else "; only regular files can be loaded"
    return CheckpointError(f"{clean(path)}: wanted a safetensors file, found {kind}{hint}")


def nothing_at(path: str, more: str = "") -> CheckpointNotFoundError:
    """For a path where nothing is, with what may have been meant."""
    shown = without_secrets(path) if "://" in path else path
    return _not_found(f"{clean(shown) or quote(shown)}: {_why_nothing(path)}{more}")


def nothing_in(path: str, names: list[str], folders: list[str]) -> CheckpointNotFoundError:
    """For a folder without a safetensors file; `folders` are those inside it that have some."""
    if folders:
        shown = ", ".join(quote(name) for name in folders[:5])
        instead = f"there are some in the folders {shown} inside it: give the path of one of these"
    elif not names:
        instead = "it is empty"
    else:
        found = sorted({s for n in names for s in [os.path.splitext(n)[1].lower()] if s in OTHER_WEIGHTS})
        instead = f"it has {some_of(sorted(names), 5, quote)}"
        if found:
            instead += f"; weights in {', '.join(found)} have to be converted to safetensors first"
    return _not_found(f"{clean(path)}: no *{SUFFIX} file in this folder: {instead}")


def _not_found(text: str) -> CheckpointNotFoundError:
    error = CheckpointNotFoundError(text)
    error.errno = errno.ENOENT
    return error


def _why_nothing(path: str) -> str:
    if not path:
        return "the path is empty"
    if path.startswith("~"):
        return "no such file or folder ('~' is not expanded here: use os.path.expanduser)"
    if "://" in path:
        return (
            "this is an address; what can be loaded are local paths, Hub ids ('organisation/name') and "
            "running seeds (tensorlift://host:port)"
        )
    if any(c in path for c in "*?["):
        return (
            "no such file or folder ('*', '?' and '[' are not expanded here: give the folder, or glob.glob)"
        )
    if os.path.islink(path):
        target = os.readlink(path)
        return (
            f"a symbolic link to {quote(target)}, which is not there (a download that was not finished, or "
            "a cache that was pruned)"
        )
    parent = path
    while parent and not os.path.isdir(parent):
        parent, child = os.path.dirname(parent.rstrip("/")), os.path.basename(parent.rstrip("/"))
        if os.path.isfile(parent):
            return f"no such file or folder: {quote(parent)} is a file"
        if not parent or os.path.isdir(parent):
            return f"no such file or folder{_similar(parent or '.', child)}"
    return "no such file or folder"


def _similar(folder: str, name: str) -> str:
    try:
        names = os.listdir(folder)
    except OSError:
        return ""
    # '.' tells nothing to who is in the wrong folder.
    said = quote(folder) if folder != "." else f"the working folder {quote(_working_folder())}"
    close = nearest(name, names)
    if close:
        return f"; in {said} there is {' and '.join(map(quote, close))}"
    return f"; {said} has {plural(len(names), 'other entry').replace('entrys', 'entries')}"


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return "."
