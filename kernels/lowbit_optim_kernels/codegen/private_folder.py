"""Folders and files that nobody but this user and root can change.

What is kept in such a folder is loaded as machine code, so whoever could write there could run code
as this user. A folder is *private* if that holds for every folder on the way to it from the root,
as OpenSSH asks of its files and as the XDG specification asks of its folders:

- it belongs to this user or to root, and so does a symbolic link on the way;
- its mode lets nobody else write, or it is a sticky folder on the way, such as `/tmp`, where nobody
  can rename what belongs to somebody else.

A group counts as nobody else if it is the user's own, as Linux distributions with a umask of 002
make one for each user. Where there are no user numbers (Windows) nothing of this is checked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

ROOT = 0


class NotPrivateError(OSError):
    """Another user could put something there; the text says where and why."""


def private_folder(folder: Path) -> Path:
    """The folder with its symbolic links resolved; what is missing of it is made with mode 700.

    Raises:
        NotPrivateError: somebody else could write to it, or to a folder above it.
        OSError: it is no folder, or cannot be made.
    """
    named = Path(os.path.abspath(folder))
    for link in filter(Path.is_symlink, _from_root(named)):
        _check_owner(link, link.lstat())
    real = Path(os.path.realpath(named))
    # From the root down: below a folder that passed, nobody else can exchange what comes next.
    for path in _from_root(real):
        try:
            info = path.lstat()
        except FileNotFoundError:
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            info = path.lstat()
        if not stat.S_ISDIR(info.st_mode):
            raise NotADirectoryError(f"{path} is not a folder")
        _check_owner(path, info)
        on_the_way = path != real and bool(info.st_mode & stat.S_ISVTX)
        if _others_can_write(info) and not on_the_way:
            mode = stat.S_IMODE(info.st_mode)
            raise NotPrivateError(f"other users can write to {path} (mode {mode:o})")
    return real


def read_private(path: Path) -> bytes | None:
    """A file's content; None if it is missing, unreadable, or no plain file that is private."""
    try:
        with open(path, "rb", opener=_open_without_following) as file:
            info = os.fstat(file.fileno())  # of what is read, whatever the name has come to mean
            plain = stat.S_ISREG(info.st_mode) and _is_ours(info) and not _others_can_write(info)
            return file.read() if plain else None
    except OSError:
        return None


def write_private(path: Path, data: bytes) -> None:
    """Write a file of mode 600, so that other processes see all of it or nothing.

    Raises:
        OSError: it could not be written.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _from_root(path: Path) -> list[Path]:
    return [*reversed(path.parents), path]


def _open_without_following(path: str, flags: int) -> int:
    # Without blocking, so that a FIFO of that name is opened, and then found out, at once.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def _is_ours(info: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or info.st_uid in (ROOT, os.getuid())


def _check_owner(path: Path, info: os.stat_result) -> None:
    if not _is_ours(info):
        what = "the link " if stat.S_ISLNK(info.st_mode) else ""
        raise NotPrivateError(f"{what}{path} belongs to another user (number {info.st_uid})")


def _others_can_write(info: os.stat_result) -> bool:
    if not hasattr(os, "getuid"):
        return False
    if info.st_mode & stat.S_IWOTH:
        return True
    return bool(info.st_mode & stat.S_IWGRP) and not _is_own_group(info.st_gid)


def _is_own_group(number: int) -> bool:
    """Whether a group is this user's primary one, has the user's name and no other members."""
    import grp  # these two exist where users have numbers
    import pwd

    try:
        user, group = pwd.getpwuid(os.getuid()), grp.getgrgid(number)
    except KeyError:  # a container may have a user without a name
        return False
    # Not root's: containers that run as any user number put it into root's group.
    if ROOT in (user.pw_uid, number) or (user.pw_gid, user.pw_name) != (number, group.gr_name):
        return False
    return set(group.gr_mem) <= {user.pw_name}
