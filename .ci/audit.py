"""`make audit`: check that the locks are complete, and that no locked package has a known vulnerability.

    every requirement is pinned and hashed  ->  pip-audit looks up each one at osv.dev  ->  exit code

The exit code is 0 only if every package was looked up and none has a known vulnerability. It is 1 for an
entry without a hash, a vulnerability, a package that could not be looked up, and a service that does not
answer. An audit that checked nothing must not pass.
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
LOCKS = ("cpu.txt", "gpu.txt", "rocm.txt", "bootstrap.txt", "audit.txt")
_PINNED = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?==[\w.!+-]+( ; .+)?")
_HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def entries(lock: str) -> list[str]:
    """Return the requirements of a lock, each with its options on one line."""
    lines = lock.replace("\\\n", " ").splitlines()
    return [" ".join(line.split()) for line in lines if line.strip() and not line.lstrip().startswith("#")]


def lock_problems(lock: str) -> list[str]:
    """Return the entries of a lock that are not pinned or have no hash, with the reason."""
    problems = []
    for entry in entries(lock):
        requirement = entry.split(" --hash=")[0].strip()
        if not _PINNED.fullmatch(requirement):
            problems.append(f"{entry[:80]}: is no `name==version`; run `make lock`")
        elif not _HASH.search(entry):
            problems.append(f"{requirement}: has no sha256; run `make lock`")
    if not entries(lock):
        problems.append("the lock is empty; run `make lock`")
    return problems


def advisories(report: dict[str, Any]) -> list[str]:
    """Return the vulnerabilities in pip-audit's report, and the packages that it could not look up."""
    findings = []
    for package in report.get("dependencies", []):
        name = f"{package['name']} {package.get('version', '')}".strip()
        reason = package.get("skip_reason")
        if reason:
            findings.append(f"{name}: was not looked up ({' '.join(reason.split())[:120]})")
        for vulnerability in package.get("vulns", []):
            fixed = ", ".join(vulnerability.get("fix_versions") or []) or "no version yet"
            aliases = ", ".join(vulnerability.get("aliases") or [])
            identity = f"{vulnerability['id']} ({aliases})" if aliases else vulnerability["id"]
            findings.append(f"{name}: {identity}; fixed in {fixed}")
    return findings


def run_pip_audit(options: list[str]) -> tuple[dict[str, Any] | None, str]:
    """Return pip-audit's report over all locks, or None and the last line of its error output."""
    with TemporaryDirectory() as folder:
        arguments = []
        for name in LOCKS:
            # osv.dev lists releases. It does not know local builds such as `+cpu`, and would report nothing.
            plain = re.sub(r"(==[\w.!]+)\+\w+", r"\1", (FOLDER / name).read_text(encoding="utf-8"))
            (Path(folder) / name).write_text(plain, encoding="utf-8")
            arguments += ["--requirement", str(Path(folder) / name)]
        command = [sys.executable, "-m", "pip_audit", "--vulnerability-service", "osv", "--format", "json"]
        command += ["--require-hashes", "--disable-pip", "--progress-spinner", "off", "--timeout", "20"]
        done = subprocess.run(
            [*command, *arguments, *options], capture_output=True, text=True, timeout=1800, check=False
        )
    try:
        # pip-audit also exits with 1 if it finds a vulnerability, so the exit code does not tell a failure.
        report = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return None, lines[-1][:120]
    return report, ""


def main(options: list[str]) -> int:
    """Run the audit with these options of pip-audit (such as `--ignore-vuln ID`); return the exit code."""
    number = 0
    problems = []
    for name in LOCKS:
        lock = (FOLDER / name).read_text(encoding="utf-8")
        number += len(entries(lock))
        problems += [f"requirements/{name}: {problem}" for problem in lock_problems(lock)]
    if problems:
        return _end("\n".join([*problems, f"{len(problems)} of {number} entries are not locked"]), 1)
    sys.stdout.write(f"{number} entries, all pinned with their sha256\n")
    report, reason = run_pip_audit(options)
    if report is None:
        return _end(f"nothing was audited: the advisories at osv.dev could not be asked ({reason})", 1)
    findings = advisories(report)
    checked = len(report.get("dependencies", []))
    if findings or not checked:
        return _end("\n".join([*findings, f"{len(findings)} findings in {checked} packages"]), 1)
    return _end(f"{checked} packages looked up, none of them known to be vulnerable", 0)


def _end(text: str, code: int) -> int:
    (sys.stderr if code else sys.stdout).write(text + "\n")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
