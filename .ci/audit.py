"""`make audit`: are the locks whole, and is anything in them known to be vulnerable?

    every requirement pinned and hashed  ->  pip-audit asks osv.dev about each  ->  0: all asked, nothing known

Anything else ends with 1 and says why: an entry without a hash, a known vulnerability, a package that could
not be looked up, a service that could not be reached. A check that looked at nothing must not pass.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "requirements"
LOCKS = ("cpu.txt", "bootstrap.txt", "audit.txt")
_PINNED = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?==[\w.!+-]+( ; .+)?")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(lock: str) -> list[str]:
    """The requirements of a lock, each with its options on one line."""
    lines = lock.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def lock_problems(lock: str) -> list[str]:
    """What keeps an installation from being exactly the one that was tried."""
    found = []
    for entry in entries(lock):
        requirement = entry.split(" --hash=")[0].strip()
        if not _PINNED.fullmatch(requirement):
            found.append(f"{entry[:80]}: is no `name==version`; run `make lock`")
        elif not _HASH.search(entry):
            found.append(f"{requirement}: has no sha256; run `make lock`")
    return found if entries(lock) else ["the lock is empty; run `make lock`"]


def advisories(report: dict[str, Any]) -> list[str]:
    """What pip-audit's report says against the locks: vulnerabilities, and packages it could not look up."""
    found = []
    for package in report.get("dependencies", []):
        name = f"{package['name']} {package.get('version', '')}".strip()
        if reason := package.get("skip_reason"):
            found.append(f"{name}: was not looked up ({' '.join(reason.split())[:120]})")
        for known in package.get("vulns", []):
            fixed = ", ".join(known.get("fix_versions") or []) or "no version yet"
            aliases = ", ".join(known.get("aliases") or [])
            found.append(f"{name}: {known['id']}{f' ({aliases})' if aliases else ''}; fixed in {fixed}")
    return found


def ask(options: list[str]) -> tuple[dict[str, Any] | None, str]:
    """pip-audit's report over all locks, or None and its last words."""
    with TemporaryDirectory() as folder:
        arguments = []
        for name in LOCKS:
            # Advisories know the release, not a build of it such as `+cpu`.
            plain = re.sub(r"(==[\w.!]+)\+\w+", r"\1", (FOLDER / name).read_text(encoding="utf-8"))
            (Path(folder) / name).write_text(plain, encoding="utf-8")
            arguments += ["--requirement", str(Path(folder) / name)]
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--format", "json"]
        command += ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--timeout", "20"]
        done = subprocess.run(
            [*command, *arguments, *options], capture_output=True, text=True, timeout=1800, check=False
        )
    try:
        report = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, lines[-1][:120]
    return report, ""


def main(options: list[str]) -> int:
    """`options` go to pip-audit, such as `--ignore-vuln ID`."""
    problems = [
        f"requirements/{name}: {problem}"
        for name in LOCKS
        for problem in lock_problems((FOLDER / name).read_text(encoding="utf-8"))
    ]
    number = sum(len(entries((FOLDER / name).read_text(encoding="utf-8"))) for name in LOCKS)
    if problems:
        return _end("\n".join([*problems, f"{len(problems)} of {number} entries are not locked"]), 1)
    sys.stdout.write(f"{number} entries, all pinned with their sha256\n")
    report, words = ask(options)
    if report is None:
        return _end(f"nothing was audited: the advisories at osv.dev could not be asked ({words})", 1)
    found = advisories(report)
    asked = len(report.get("dependencies", []))
    if found or not asked:
        return _end("\n".join([*found, f"{len(found)} findings in {asked} packages"]), 1)
    return _end(f"{asked} packages looked up, none of them known to be vulnerable", 0)


def _end(text: str, code: int) -> int:
    (sys.stderr if code else sys.stdout).write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
