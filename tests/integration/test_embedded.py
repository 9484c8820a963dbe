"""The Prefect server behind `rlhf run`.

- one that is killed is started again at the same address, with what it knew
- it is gone when the command is, however that ended
- one of the user's that only asks for a key is taken to be there; one that is gone for good in the middle costs nothing
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flows.embedded import reachable
from flows.local_http import answers, post
from rlhf_core.processes import ProcessId
from tests.chaos.harness import CONFIG, TRACE, read_passes
from tests.chaos.servers import wait

COMMAND = """
import sys, time
from pathlib import Path
from flows.embedded import EmbeddedPrefect

server = EmbeddedPrefect(Path(sys.argv[1]))
server.wait()
print(server._process.pid, server.url, flush=True)
time.sleep(600)
"""


def listener(port: int) -> int | None:
    """The pid of the server with this port on its command line."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"uvicorn" in words and str(port).encode() in words:
            return int(folder.name)
    return None


def test_it_is_started_again_where_it_dies_and_ends_with_the_command(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path)], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout is not None
        pid, url = command.stdout.readline().split()
        post(f"{url}/variables/", {"name": "known", "value": "x"})
        os.kill(int(pid), signal.SIGKILL)
        assert wait(lambda: not answers(f"{url}/health"), 10)
        assert wait(lambda: answers(f"{url}/health"), 60)
        assert [found["name"] for found in post(f"{url}/variables/filter", {})] == ["known"]
        new = listener(int(url.split(":")[2].partition("/")[0]))
        assert new not in (None, int(pid))
        server = ProcessId.of(new or 0)
        command.kill()
    assert server is not None and wait(lambda: not server.alive(), 10)


def test_a_server_that_asks_for_a_key_is_there_and_a_closed_port_is_not(tmp_path: Path) -> None:
    assert not reachable("http://127.0.0.1:9/api", tries=1)
    server = """
import http.server
class Closed(http.server.BaseHTTPRequestHandler):
    def do_GET(self): self.send_error(401)
with http.server.HTTPServer(("127.0.0.1", 0), Closed) as server:
    print(server.server_port, flush=True)
    server.serve_forever()
"""
    with subprocess.Popen([sys.executable, "-c", server], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        assert reachable(f"http://127.0.0.1:{port}/api", tries=1)
        process.kill()


@pytest.mark.slow  # Prefect's client asks for a while
def test_a_run_whose_server_is_gone_for_good_ends_well(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    trace.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, str(tmp_path / "server")], stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout is not None
        url = server.stdout.readline().split()[1]
        environment = {**os.environ, "PREFECT_API_URL": url, "PREFECT_CLIENT_MAX_RETRIES": "1", TRACE: str(trace)}
        line = [
            sys.executable,
            "-m",
            "flows.cli",
            "run",
            str(CONFIG),
            f"run.home={tmp_path / 'home'}",
            "--until",
            "data",
        ]
        with subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
            # The stage's process takes a moment to end: the flow is not told yet.
            assert wait(lambda: any(p.point == "stage.published" for p in read_passes(trace)), 120)
            server.kill()
            out, err = run.communicate(timeout=300)
    assert run.returncode == 0, err
    assert "all stages are done, but Prefect's server did not take that (ConnectError)" in err
    assert out.splitlines()[-1].startswith("summary: ")
