"""Prefect's application with our access checks, and a command that uses it.

- a run whose server disappears still ends well
- a web page of another origin, opened in a real browser, can neither read nor change anything
- it listens on loopback
- concurrent writers wait for each other
"""

from __future__ import annotations

import http.server
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from rlhf_core.system.serving import basic_auth, post
from tests.chaos.harness import CONFIG, TRACE, read_passes
from tests.chaos.servers import wait
from tests.support.listening_sockets import beyond_loopback, listeners
from tests.support.prefect_server import PrefectServer, prefect_server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrefectServer]:
    """One server for all tests, because creating its database is slow."""
    with prefect_server(tmp_path_factory.mktemp("home")) as server:
        yield server


def test_server_listens_on_loopback(server: PrefectServer) -> None:
    listening = listeners(server.process.pid)
    assert listening and beyond_loopback(listening) == []


ATTACK = """
<script>
const api = "API", json = {"Content-Type": "application/json"}, plain = {"Content-Type": "text/plain"};
const body = JSON.stringify({name: "planted", value: "x"});
const known = {...json, "Authorization": "Basic " + btoa("LOGIN")};
const attempts = {
  "control: its own origin": () => fetch("/result", {method: "POST", body: "{}"}),
  "write": () => fetch(api + "/variables/", {method: "POST", headers: json, body}),
  "write with the password": () => fetch(api + "/variables/", {method: "POST", headers: known, body}),
  "write without a preflight": () => fetch(api + "/variables/", {method: "POST", mode: "no-cors", body}),
  "write as a form": () => fetch(api + "/variables/", {method: "POST", headers: plain, body}),
  "read": () => fetch(api + "/variables/filter", {method: "POST", headers: known, body: "{}"}),
  "read the version": () => fetch(api + "/version"),
  "socket": () => new Promise((good, bad) => {
    const socket = new WebSocket(api.replace("http", "ws") + "/events/in", "prefect");
    socket.onopen = () => good({ok: true, type: "socket"}); socket.onerror = () => bad("refused");
  }),
};
(async () => {
  const seen = {};
  for (const [name, attempt] of Object.entries(attempts)) {
    try {
      const answer = await attempt();
      seen[name] = answer.ok ? "done" : answer.type + " " + answer.status;
    } catch (error) { seen[name] = "refused"; }
  }
  await fetch("/result", {method: "POST", body: JSON.stringify(seen)});
})();
</script>
"""
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def opened(page: str, profile: Path) -> Iterator[queue.Queue[dict[str, str]]]:
    """Serve `page` on another port and open it in Chromium. Yield what the page sends to /result."""
    results: queue.Queue[dict[str, str]] = queue.Queue()

    class Site(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(page.encode())

        def do_POST(self) -> None:
            results.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self._answer(b"")

        def _answer(self, content: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    assert CHROMIUM is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
               "--disable-background-networking", "--disable-component-update", "--disable-sync"]  # fmt: skip
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Site) as site:
        threading.Thread(target=site.serve_forever, daemon=True).start()
        line = [CHROMIUM, *options, f"--user-data-dir={profile}", f"http://127.0.0.1:{site.server_port}/"]
        browser = subprocess.Popen(
            line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            yield results
        finally:
            os.killpg(browser.pid, signal.SIGKILL)
            browser.wait(timeout=10)
            site.shutdown()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_browser_page_of_another_origin_is_refused(server: PrefectServer, tmp_path: Path) -> None:
    page = ATTACK.replace("API", server.url).replace("LOGIN", server.auth)
    with opened(page, tmp_path / "profile") as results:
        assert results.get(timeout=90) == {}, "the control request, which proves that the page runs"
        seen = results.get(timeout=60)
    assert seen.pop("control: its own origin") == "done"
    assert seen.pop("write without a preflight") == "opaque 0", (
        "it is sent and then refused, as the variables below show"
    )
    assert set(seen.values()) == {"refused"} and len(seen) == 6, seen
    assert post(f"{server.url}/variables/filter", {}, auth=server.auth) == []


def test_each_rule_alone_refuses(server: PrefectServer) -> None:
    """Satisfy all rules except one and compare the status code. In a browser all refusals look the same."""
    origin, known = server.url.removesuffix("/api"), basic_auth(server.auth)
    rebound = {"Host": "evil.example"}
    cases = {
        "Origin, though the password is right": ({**known, "Origin": "http://127.0.0.1:1"}, 403),
        "Host, though the password is right": ({**known, **rebound}, 403),
        "the password, though Host and Origin are right": ({"Origin": origin}, 401),
        "nothing": ({**known, "Origin": origin}, 200),
    }
    codes = {
        title: (
            httpx.post(
                f"{server.url}/variables/filter", json={}, headers=headers, trust_env=False
            ).status_code
        )
        for title, (headers, _) in cases.items()
    }
    assert codes == {title: status for title, (_, status) in cases.items()}


def test_concurrent_writers_wait_for_each_other(server: PrefectServer) -> None:
    """With Prefect's own transactions, five of six writers get status 503 ("database is locked")."""

    def write(number: int) -> None:
        flow = post(f"{server.url}/flows/", {"name": f"flow {number}"}, 60, server.auth)["id"]
        for _ in range(3):
            run = {"flow_id": flow, "state": {"type": "RUNNING"}}
            post(f"{server.url}/flow_runs/", run, 60, server.auth)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(write, range(6)))
    assert "database is locked" not in server.log.read_text()


@pytest.mark.slow  # Prefect's client repeats its requests for some time
def test_run_ends_well_if_its_server_disappears(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    with prefect_server(tmp_path / "server") as server:
        environment = {
            **os.environ,
            **server.environment,
            "PREFECT_CLIENT_MAX_RETRIES": "1",
            TRACE: str(trace),
        }
        line = [
            sys.executable,
            "-m",
            "rlhf_cli.main",
            "run",
            str(CONFIG),
            f"run.home={tmp_path / 'home'}",
            "--until",
            "data",
        ]
        with subprocess.Popen(
            line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            # The process of the stage takes a moment to end, so its flow has not reported it yet.
            assert wait(lambda: any(p.point == "stage.published" for p in read_passes(trace)), 120)
            server.process.kill()
            out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "all stages are done, but Prefect's server did not take that (ConnectError)" in err
    assert out.splitlines()[-1].startswith("summary: ")
