"""The password of the Prefect server that `rlhf up` starts: made once per home, in a file for this user alone.

Prefect calls it an auth string. Its clients take it from PREFECT_API_AUTH_STRING, its pages ask for it once and keep it
in the browser. The commands of `rlhf` and the worker read the file.
"""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from flows.files import replace_private

_FORM = re.compile(r"rlhf:[\w-]{20,}")


def new_login() -> str:
    """A random one, of the form user:password so that `curl -u` takes it as well."""
    return f"rlhf:{secrets.token_urlsafe(24)}"


def login_file(home: Path) -> Path:
    """Where the one of `home` lies."""
    return home / "servers" / "login"


def read_login(home: Path) -> str | None:
    """The one of `home`, or None."""
    try:
        text = login_file(home).read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return None
    return text if _FORM.fullmatch(text) else None


def ensure_login(home: Path) -> str:
    """The one of `home`, made if there is none. Browsers that know it need not ask again after `down` and `up`."""
    file = login_file(home)
    login = read_login(home)
    if login is None or file.stat().st_uid != os.getuid() or file.stat().st_mode & 0o077:
        login = new_login()  # whoever could read or write the old one may know it
        replace_private(file, login + "\n")
    return login
