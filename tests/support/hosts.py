"""Several hosts on this machine, made of Linux namespaces, with an S3 server and a Ray cluster on them.

A host has an address (10.77.0.1, ...) and a hostname of its own, and private folders /tmp (its home is
/tmp/home) and /dev/shm. The rest of the file system is shared, the checkout and its `.venv` included. A
switch connects the hosts. Tests run outside, and see the files of a host below `Host.folder`.

    with start_hosts(3) as hosts, s3_server(hosts[2]) as environment, ray_cluster(hosts[:2]):
        hosts[0].run(sys.executable, "-m", "rlhf_cli.main", "run", ..., **environment)

It needs root, iproute2 and util-linux (`missing_right` says what is missing).
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKEN = "7" * 64
"""Of the Ray clusters."""
S3_PORT = 9000
RAY_PORT = 6380
_STOP_SECONDS = 10.0

_ENTER = """
set -e
name=$1 folder=$2; shift 2
hostname "$name"
for pair in "$folder"/replaced/*; do
    [ -e "$pair/file" ] && mount --bind "$pair/file" "$(cat "$pair/path")"
done
mount --bind "$folder/hosts" /etc/hosts
mount --bind "$folder/shm" /dev/shm
if [ -n "$SHARED" ]; then mkdir -p "$folder/tmp/shared"; mount --bind "$SHARED" "$folder/tmp/shared"; fi
mount --rbind "$folder/tmp" /tmp
exec "$@"
"""
"""Runs inside the namespaces of a host, as root: gives the process its folders, then becomes the command."""


def missing_right() -> str | None:
    """Return why this process cannot make hosts, or None."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root, to make network namespaces"
    for program in ("ip", "tc", "unshare", "bash"):
        if shutil.which(program) is None:
            return f"needs the program {program} (packages iproute2 and util-linux)"
    if ROOT.is_relative_to("/tmp"):
        return "needs a checkout outside of /tmp, which every host replaces"
    name = f"rlhf-try-{os.getpid()}"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "p0", "type", "veth", "peer", "name", "eth0")
        _ip("netns", "exec", name, "unshare", "--mount", "--uts", "mount", "--bind", "/usr", "/mnt")
    except subprocess.CalledProcessError as error:
        return f"needs the right to make namespaces: {error.stderr.strip()[:200]}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return None


@dataclass
class Host:
    """One host."""

    number: int
    """From 1."""
    namespace: str
    state: Path
    """Its folders on this machine."""
    shared: Path | None
    """A folder of this machine that is /tmp/shared on every host."""

    @property
    def name(self) -> str:
        return f"host-{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number}"

    @property
    def folder(self) -> Path:
        """Its /tmp."""
        return self.state / "tmp"

    @property
    def home(self) -> Path:
        """Its home folder, which is /tmp/home there."""
        return self.folder / "home"

    def start(self, *command: object, log: str = "output", **environment: str) -> subprocess.Popen[bytes]:
        """Start a program on the host in its home folder. Its output is added to `{folder}/{log}.log`."""
        inside = ["bash", "-c", _ENTER, "bash", self.name, str(self.state), *map(str, command)]
        outside = ["ip", "netns", "exec", self.namespace]
        namespaces = ["unshare", "--mount", "--uts", "--propagation", "private"]
        with (self.folder / f"{log}.log").open("ab") as output:
            return subprocess.Popen(
                [*outside, *namespaces, *inside],
                env={**_environment(self), **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )

    def run(
        self, *command: object, seconds: float = 300.0, log: str = "output", **environment: str
    ) -> tuple[int, str]:
        """Run a program on the host; return its exit code and output."""
        before = len(self.output(log))
        process = self.start(*command, log=log, **environment)
        try:
            code = process.wait(seconds)
        except subprocess.TimeoutExpired:
            _kill_group(process)
            raise AssertionError(
                f"did not end in {seconds:g} s:\n{self.output(log)[before:][-3000:]}"
            ) from None
        return code, self.output(log)[before:]

    def output(self, log: str = "output") -> str:
        """Return the output so far of the programs with this `log`."""
        file = self.folder / f"{log}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def replace_file(self, path: Path, content: str) -> None:
        """Let programs that are started later on this host find another content in a file of this machine."""
        pair = self.state / "replaced" / str(len(list((self.state / "replaced").iterdir())))
        pair.mkdir()
        (pair / "path").write_text(str(path))
        (pair / "file").write_text(content)

    def limit(self, rate: str | None) -> None:
        """Limit what the host sends, for example to `200mbit`."""
        with suppress(subprocess.CalledProcessError):  # there was no limit
            self._tc("del", "dev", "eth0", "root")
        if rate is not None:
            self._tc(
                "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "256kbit", "latency", "100ms"
            )

    def cut_power(self) -> None:
        """Disconnect the host and end all of its processes. Nothing is sent to the other hosts."""
        _ip("-n", self.namespace, "link", "set", "eth0", "down")
        self.kill_processes()

    def kill_processes(self) -> None:
        """Send SIGKILL to all processes of the host, until there are none."""
        for _ in range(20):
            processes = _ip("netns", "pids", self.namespace).split()
            if not processes:
                return
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(int(process), signal.SIGKILL)
            time.sleep(0.1)

    def power_on(self) -> None:
        """Connect the host again. Nothing runs on it."""
        _ip("-n", self.namespace, "link", "set", "eth0", "up")

    def _tc(self, *arguments: str) -> None:
        _ip("netns", "exec", self.namespace, "tc", "qdisc", *arguments)


@contextmanager
def start_hosts(count: int, rate: str | None = None, shared: Path | None = None) -> Iterator[list[Host]]:
    """Yield hosts; at the end, all of their processes are killed.

    Args:
        count: Number of hosts.
        rate: Limit of what each host sends, for example `200mbit`.
        shared: A folder that all hosts see as /tmp/shared. None: nothing is shared but the checkout.
    """
    name = f"rlhf-{os.getpid()}"
    with ExitStack() as cleanup:
        # Not below /tmp, which hosts replace.
        state = Path(tempfile.mkdtemp(prefix="rlhf-hosts-", dir="/var/tmp"))
        cleanup.callback(shutil.rmtree, state, ignore_errors=True)
        switch = f"{name}-switch"
        _add_namespace(switch, cleanup)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        hosts = [
            Host(number, f"{name}-{number}", state / str(number), shared) for number in range(1, count + 1)
        ]
        names = "".join(f"{host.address} {host.name}\n" for host in hosts)
        for host in hosts:
            for folder in (host.home, host.state / "shm", host.state / "replaced"):
                folder.mkdir(parents=True)
            (host.state / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            _add_namespace(host.namespace, cleanup)
            cleanup.callback(host.kill_processes)
            _connect(host, switch)
            host.limit(rate)
        yield hosts


def _connect(host: Host, switch: str) -> None:
    port, namespace = f"p{host.number}", host.namespace
    _ip("link", "add", port, "netns", switch, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("-n", switch, "link", "set", port, "master", "br0", "up")
    _ip("-n", namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
    _ip("-n", namespace, "link", "set", "eth0", "up")
    _ip("-n", namespace, "link", "set", "lo", "up")


def _add_namespace(name: str, cleanup: ExitStack) -> None:
    _ip("netns", "add", name)
    cleanup.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True, check=False)


def _environment(host: Host) -> dict[str, str]:
    """Return the environment of a login on a host: nothing of the test's own."""
    environment = {
        "HOME": "/tmp/home",
        "LANG": "C.UTF-8",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": TOKEN,
        "RAY_USAGE_STATS_ENABLED": "0",
        "SHARED": str(host.shared or ""),
    }
    if "OMP_NUM_THREADS" in os.environ:
        environment["OMP_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"]
    return environment


# -- servers --


@contextmanager
def s3_server(host: Host) -> Iterator[dict[str, str]]:
    """Run an S3-compatible server with the bucket `rlhf-test`; yield the environment of its clients."""
    endpoint = f"http://{host.address}:{S3_PORT}"
    environment = {
        "AWS_ACCESS_KEY_ID": "test-key",
        "AWS_SECRET_ACCESS_KEY": "test-secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL_S3": endpoint,
    }
    server = host.start(
        sys.executable, "-m", "moto.server", "-H", host.address, "-p", S3_PORT, log="s3", **environment
    )
    try:
        create = (
            f"import boto3; boto3.client('s3', endpoint_url={endpoint!r}).create_bucket(Bucket='rlhf-test')"
        )
        wait_until(lambda: "Running on" in host.output("s3"), 60, lambda: host.output("s3"))
        code, output = host.run(sys.executable, "-c", create, seconds=300.0, log="bucket", **environment)
        assert code == 0, output
        yield environment
    finally:
        _kill_group(server)


@contextmanager
def ray_cluster(
    hosts: Sequence[Host], cpus: int = 4, head_cpus: int | None = None, **environment: str
) -> Iterator[str]:
    """Run Ray on the hosts, the first as the head, until all have joined; yield RAY_ADDRESS.

    Args:
        hosts: The nodes.
        cpus: CPUs that each node offers. Processes of small models need less than one.
        head_cpus: Those of the head, if they differ. With 0, no rank or engine runs there.
        environment: Environment of Ray's processes, and of all that they start.
    """
    address = f"{hosts[0].address}:{RAY_PORT}"
    nodes = []
    try:
        nodes.append(start_node(hosts[0], None, cpus if head_cpus is None else head_cpus, **environment))
        for host in hosts[1:]:
            nodes.append(start_node(host, address, cpus, **environment))
        count = f"import ray; ray.init(address={address!r}); print('nodes', len(ray.nodes()))"
        deadline = time.monotonic() + 120
        output = ""
        while f"nodes {len(hosts)}" not in output:
            assert time.monotonic() < deadline, output + "".join(host.output("ray") for host in hosts)
            _, output = hosts[0].run(sys.executable, "-c", count, seconds=100, log="nodes")
        yield address
    finally:
        for node in nodes:
            _kill_group(node)
        for host in hosts:
            host.kill_processes()


def start_node(host: Host, head: str | None, cpus: int, **environment: str) -> subprocess.Popen[bytes]:
    """Start Ray on a host: as the head (None), or as a node of the cluster of `head`."""
    if head is None:
        role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
    else:
        role = [f"--address={head}"]
    # Ray's own default for the object store is a share of the memory of the whole machine.
    size = ["--num-gpus=0", f"--num-cpus={cpus}", f"--object-store-memory={256 << 20}"]
    address = f"--node-ip-address={host.address}"
    ray = str(Path(sys.executable).parent / "ray")
    return host.start(ray, "start", *role, address, *size, "--block", log="ray", **environment)


_DIGESTS = """
import json, boto3
for item in boto3.resource("s3").Bucket("rlhf-test").objects.filter(Prefix="{store}/artifacts/"):
    if item.key.endswith("/manifest.json"):
        print("digest", item.key, json.loads(item.get()["Body"].read())["digest"])
"""


def artifact_digests(host: Host, store: str, **environment: str) -> dict[str, str]:
    """Return the digests of all artifacts in the folder `store` of the bucket, by `stage/key`."""
    script = _DIGESTS.format(store=store)
    code, output = host.run(sys.executable, "-c", script, seconds=300.0, log="digests", **environment)
    assert code == 0, output
    digests = {}
    for line in output.splitlines():
        if line.startswith("digest "):
            _, key, digest = line.split()
            stage, stage_key = key.split("/")[-3:-1]
            digests[f"{stage}/{stage_key}"] = digest
    return digests


# -- helpers --


def wait_until(
    condition: Callable[[], object], seconds: float, explain: Callable[[], str] = lambda: "did not happen"
) -> None:
    """Poll until `condition()` is true, or fail with `explain()`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, explain()[-3000:]
        time.sleep(0.2)


def rlhf(*arguments: str) -> Sequence[str]:
    """Return the command line of `rlhf` with these arguments."""
    return [sys.executable, "-P", "-m", "rlhf_cli.main", *arguments]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(_STOP_SECONDS)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=True, timeout=30)
    return done.stdout
