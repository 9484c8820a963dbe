"""The password of the Prefect server that `rlhf up` starts.

It is created once for each home folder and stored in a file that only this user can read. Prefect calls it an
auth string. Prefect's clients read it from PREFECT_API_AUTH_STRING. Prefect's UI asks for it once and stores
it in the browser. The commands of `rlhf` and the worker read the file.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from rlhf_core.system.files import write_atomic

_FORM = re.compile(r"rlhf:[\w-]{20,}")


def new_login() -> str:
    """Return a random password of the form user:password, which `curl -u` accepts as well."""
    return f"rlhf:{secrets.token_urlsafe(24)}"


def login_file(home: Path) -> Path:
    """Return the path of the password file of `home`."""
    return home / "servers" / "login"


def read_login(home: Path) -> str | None:
    """Return the password of `home`, or None if there is no valid one."""
    try:
        text = login_file(home).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _FORM.fullmatch(text) else None


def ensure_login(home: Path) -> str:
    """Return the password of `home`, and create it if necessary.

    An existing password is kept, so that browsers do not ask again after `rlhf down` and `rlhf up`.
    """
    file = login_file(home)
    login = read_login(home)
    if login is None or file.stat().st_uid != os.getuid() or file.stat().st_mode & 0o077:
        login = new_login()  # another user may have read or written the old password
        write_atomic(file, login + "\n", private=True)
    return login
