"""Two hosts and a store on a third, with Ray between them (`tests.support.hosts`).

- a result that takes longer than one poll to cross a slow link arrives
- the handshake accepts equal nodes; processes on other hosts get the settings of the stage and no secret
- steps of SFT with ZeRO-3 ranks on two hosts compute the bits of one host
- PPO with ZeRO-3 ranks and an engine on two hosts computes the bits of one host
- a node with other code, or without the store, is refused by name before anything is started
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator

import pytest

from tests.support.hosts import (
    ROOT,
    Host,
    missing_right,
    ray_cluster,
    s3_server,
    start_hosts,
    start_node,
    wait_until,
)
from tests.support.tiny_llama import save_tiny_llama

pytestmark = pytest.mark.skipif(missing_right() is not None, reason=str(missing_right()))

SLOW_RESULT = """
import time, ray
from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.rpc import Pending, receive
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

connect(1, "cpu")
here = ray.get_runtime_context().get_node_id()
(there,) = [node["NodeID"] for node in ray.nodes() if node["NodeID"] != here]
make = ray.remote(lambda: bytes(20 << 20))
strategy = NodeAffinitySchedulingStrategy(there, soft=False)
call = Pending(make.options(scheduling_strategy=strategy).remote())
ray.wait([call.reference], fetch_local=False, timeout=60)
received, polls, start = {}, 0, time.monotonic()
while not received and time.monotonic() < start + 60:
    receive([call], received, seconds=0.2)
    polls += 1
print("received", len(received[0]) >> 20, "MiB", "in several polls" if polls > 2 else "at once")
"""


CONNECT = """
import os, ray
from rlhf_core.cluster.connect import connect
from rlhf_core.cluster.handshake import check_nodes
from rlhf_core.config.load import config_from_tree
from rlhf_core.errors import ConfigError

tree = {
    "run": {"home": "/tmp/home/run", "device": "cpu", "env": {"NCCL_DEBUG": "WARN"}},
    "store": {"url": "s3://rlhf-test/handshake"},
}
config = config_from_tree(tree, "test")
connect(1, "cpu", config.run)
try:
    check_nodes(config, ())
except ConfigError as error:
    raise SystemExit(f"refused: {error.message}")
environment = ray.remote(lambda: (os.uname().nodename, dict(os.environ)))
names = set()
while len(names) < 2:
    for name, seen in ray.get([environment.remote() for _ in range(4)], timeout=60):
        names.add(name)
        assert seen["PYTHONHASHSEED"] == "0" and seen["DO_NOT_TRACK"] == "1" and seen["NCCL_DEBUG"] == "WARN"
        assert "SECRET_OF_THE_DRIVER" not in seen
print("accepted by", *sorted(names))
"""

SFT = """
import hashlib
from pathlib import Path

import ray

from rlhf_core.cluster.ranks import run_ranks


def train(rank, model, _context):
    import torch.distributed as dist
    from rlhf_core.config.training import DeepSpeedConfig, OptimizerConfig, SFTConfig
    from rlhf_core.engines.deepspeed import TrainingEngine
    from rlhf_core.models.batching import TokenSequence
    from rlhf_core.models.policy import load_policy
    from rlhf_core.stages.sft import train_step

    policy = load_policy(model, dtype="float32", attention="sdpa", device="cpu", pack=False)
    sizes = DeepSpeedConfig.model_validate({"ranks": 3, "zero_stage": 3})
    optimizer = OptimizerConfig(learning_rate=1e-2, warmup_ratio=0.0, schedule="constant")
    engine = TrainingEngine(policy, sizes, optimizer, rank)
    batch = [TokenSequence(tuple(range(3, 9 + i)), (0,) * 2 + (1,) * (4 + i)) for i in range(5)]
    config = SFTConfig().model_copy(update={"pack": False})
    for _ in range(3):
        train_step(engine, batch, config, 2, 0)
    digest = hashlib.sha256()
    for name, tensor in engine.weights():
        digest.update(name.encode() + tensor.numpy().tobytes())
    nodes = [None] * 3
    dist.all_gather_object(nodes, ray.get_runtime_context().get_node_id())
    return digest.hexdigest(), len(set(nodes))


digest, nodes = run_ranks(train, 3, "cpu", Path("/tmp/home/sft"), context=None)
print("trained on", nodes, "nodes:", digest)
"""

PPO = """
import sys
from pathlib import Path
from tests.support.small_ppo import save_small_model, small_config, small_ppo, small_prompts

model = Path("/tmp/home/model")
if not model.exists():
    save_small_model(model)
if "prepare" in sys.argv:
    raise SystemExit
ppo = {
    "algorithm": "grpo",
    "steps": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": 2,
    "minibatches": 2,
    "max_new_tokens": 8,
    "policy_deepspeed": {"ranks": 3, "zero_stage": 3},
}
config = small_config(model, ppo, home="/tmp/home/run")
if "bucket" in sys.argv:
    store = config.store.model_copy(update={"url": "s3://rlhf-test/ppo"})
    config = config.model_copy(update={"store": store})
with small_ppo(config, model, Path("/tmp/home/work"), small_prompts()) as controller:
    for _ in range(2):
        metrics = controller.iterate()
        kept = [name for name in sorted(metrics) if name.startswith(("objective", "policy"))]
        print("METRICS", *[f"{name}={metrics[name]!r}" for name in kept])
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Two hosts for Ray, and one for the store."""
    with start_hosts(3) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def store(hosts: list[Host]) -> Iterator[dict[str, str]]:
    """The environment of the store's clients."""
    with s3_server(hosts[2]) as environment:
        yield environment


@pytest.fixture(scope="module")
def cluster(hosts: list[Host], store: dict[str, str]) -> Iterator[dict[str, str]]:
    """The environment of processes that use the cluster of the first two hosts."""
    with ray_cluster(hosts[:2], cpus=2, head_cpus=None, **store) as address:
        yield {"RAY_ADDRESS": address, **store}


def test_a_result_arrives_that_takes_longer_than_one_poll(hosts: list[Host], cluster: dict[str, str]) -> None:
    hosts[1].limit("100mbit")
    code, output = hosts[0].run(sys.executable, "-c", SLOW_RESULT, seconds=120, **cluster)
    hosts[1].limit(None)
    assert code == 0, output
    assert "received 20 MiB in several polls" in output, output


def test_the_handshake_accepts_equal_nodes_and_configures_them(
    hosts: list[Host], cluster: dict[str, str]
) -> None:
    code, output = hosts[0].run(
        sys.executable, "-c", CONNECT, seconds=120, **cluster, SECRET_OF_THE_DRIVER="x"
    )
    assert code == 0, output
    assert "accepted by host-1 host-2" in output


def test_sft_on_two_hosts_computes_the_bits_of_one(hosts: list[Host], cluster: dict[str, str]) -> None:
    model = save_tiny_llama(hosts[0].home / "sft")
    shutil.copytree(model, hosts[1].home / "sft")
    digests = []
    for nodes, environment in ((2, cluster), (1, {})):
        code, output = hosts[0].run(sys.executable, "-c", SFT, seconds=200, **environment)
        assert code == 0, output
        [(found, digest)] = re.findall(r"trained on (\d) nodes: (\w{64})", output)
        assert int(found) == nodes, output
        digests.append(digest)
    assert digests[0] == digests[1]


@pytest.mark.slow
def test_ppo_on_two_hosts_computes_the_bits_of_one(hosts: list[Host], cluster: dict[str, str]) -> None:
    for host in hosts[:2]:  # the same file on every host, as an agent would fetch it
        code, output = host.run(sys.executable, "-c", PPO, "prepare", seconds=120)
        assert code == 0, output
    code, output = hosts[0].run(sys.executable, "-c", PPO, "bucket", seconds=300, **cluster)
    assert code == 0, output
    there = [line for line in output.splitlines() if line.startswith("METRICS")]
    assert len(there) == 2, output
    code, output = hosts[0].run(sys.executable, "-c", PPO, seconds=300)
    assert code == 0, output
    assert [line for line in output.splitlines() if line.startswith("METRICS")] == there


def test_a_node_with_other_code_and_without_the_store_is_refused(
    hosts: list[Host], cluster: dict[str, str]
) -> None:
    seeds = ROOT / "rlhf_core" / "seeds.py"
    hosts[2].replace_file(seeds, seeds.read_text() + "# yesterday's code\n")
    start_node(hosts[2], cluster["RAY_ADDRESS"], 1)  # without the credentials of the store
    wait_until(lambda: "Ray runtime started" in hosts[2].output("ray"), 60, lambda: hosts[2].output("ray"))
    code, output = hosts[0].run(sys.executable, "-c", CONNECT, seconds=120, **cluster)
    assert code == 1, output
    (line,) = [line for line in output.splitlines() if "host-3 (10.77.0.3): " in line]
    assert "code is" in line and "store.url=s3://rlhf-test/handshake" in line, output
    assert "3 nodes" in output and "host-2 (" not in output.partition("refused:")[2], output
