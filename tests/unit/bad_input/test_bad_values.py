"""Every bad value of a configuration gives one clear message, before anything heavy starts.

Rules: those of `test_bad_configuration`. The message names the field, the value if it may be shown, the rule
and a fix. All problems of a file are listed at once.
"""

from __future__ import annotations

import json

import pytest

from tests.unit.bad_input.bad_inputs import Bad, Command

FIELDS = (
    Bad(
        "an unknown key",
        "sft:\n  optimizer:\n    learing_rate: 1e-5\n",
        (
            "c.yaml:3",
            "sft.optimizer.learing_rate",
            "unknown key",
            "did you mean sft.optimizer.learning_rate?",
        ),
    ),
    Bad("an unknown section", "pppo:\n  steps: 3\n", ("c.yaml:1", "pppo: unknown key", "did you mean ppo?")),
    Bad(
        "a short name", "ppo:\n  lr: 1e-5\n", ("c.yaml:2", "ppo.lr", "did you mean ppo.policy.learning_rate")
    ),
    Bad("a key one level too high", "ppo:\n  coef: 0.1\n", ("c.yaml:2", "did you mean ppo.kl.coef")),
    Bad("an unlike key", "store:\n  zzz: 1\n", ("store.zzz: unknown key", "known keys: url, endpoint")),
    Bad("top_p, which does not exist", "ppo:\n  top_p: 0\n", ("c.yaml:2", "ppo.top_p: unknown key")),
    Bad(
        "text for a number", 'ppo:\n  steps: "ten"\n', ("c.yaml:2", "ppo.steps", "an integer from 1", "'ten'")
    ),
    Bad("null for a number", "ppo:\n  steps:\n", ("c.yaml:2", "ppo.steps", "an integer", "null")),
    Bad("null for a section", "sft:\n", ("c.yaml:1", "sft: must be a section", "null", "leave the key out")),
    Bad("text for a section", "ppo: fast\n", ("c.yaml:1", "ppo: must be a section", "'fast'")),
    Bad("zero", "ppo: {steps: 0}\n", ("ppo.steps", "got 0", "use 1 or more")),
    Bad("negative", "ppo: {steps: -1}\n", ("ppo.steps", "got -1", "use 1 or more")),
    Bad("1e9 is no integer", "ppo: {steps: 1e9}\n", ("ppo.steps", "an integer", "write 1000000000")),
    Bad("huge", "ppo: {steps: 99999999999}\n", ("ppo.steps", "got 99999999999", "at most 1000000000")),
    Bad("astronomic", "ppo: {steps: " + "9" * 5000 + "}\n", ("ppo.steps", "an integer", "(5000 characters)")),
    Bad("a fraction for an integer", "ppo:\n  steps: 2.5\n", ("c.yaml:2", "got 2.5", "use 2 or 3")),
    Bad("not a number", "sft: {optimizer: {learning_rate: .nan}}\n", ("learning_rate", "finite", "got .nan")),
    Bad("infinite", "sft: {optimizer: {learning_rate: .inf}}\n", ("learning_rate", "finite", "got .inf")),
    Bad("overflowing", "sft: {optimizer: {learning_rate: 1e999}}\n", ("learning_rate", "finite", "got .inf")),
    Bad(
        "zero learning rate", "sft: {optimizer: {learning_rate: 0}}\n", ("learning_rate", "above 0", "got 0")
    ),
    Bad(
        "no is text",
        "data: {deduplicate: no}\n",
        ("data.deduplicate", "true or false", "got 'no'", "write false"),
    ),
    Bad("off is text", "sft: {pack: off}\n", ("sft.pack", "true or false", "got 'off'", "write false")),
    Bad("1 is no boolean", "sft: {pack: 1}\n", ("sft.pack", "true or false", "got 1")),
    Bad("012 is text", "ppo: {steps: 012}\n", ("ppo.steps", "got '012'", "write 12")),
    Bad("0x10 is text", "ppo: {steps: 0x10}\n", ("ppo.steps", "got '0x10'")),
    Bad("22:30 is text", "ppo: {steps: 22:30}\n", ("ppo.steps", "an integer", "got '22:30'")),
    Bad("1_000 is text", "ppo: {steps: 1_000}\n", ("ppo.steps", "got '1_000'", "write 1000")),
    Bad(
        "a number for text",
        "model: {revision: 123}\n",
        ("model.revision", "must be text", "got 123", "in quotes"),
    ),
    Bad(
        "an unknown choice",
        "data: {template: chta}\n",
        ("data.template", "chat, plain", "'chta'", "did you mean chat?"),
    ),
    Bad("an empty list", "data: {prompts: []}\n", ("data.prompts", "at least 1", "a list of 0")),
    Bad("text for a list", "ppo: {rewards: model}\n", ("ppo.rewards", "must be a list", "'model'", "[...]")),
    Bad("no demonstrations", "data: {sft: []}\n", ("data.sft must have a source", "sft.enabled=false")),
    Bad(
        "a source without path",
        "data:\n  sft:\n    - {split: test}\n",
        ("c.yaml:3", "data.sft.0.path", "is required"),
    ),
    Bad(
        "one beta",
        "sft: {optimizer: {betas: [0.9]}}\n",
        ("sft.optimizer.betas.1", "is required", "from 0 to below 1"),
    ),
    Bad("a negative temperature", "ppo: {temperature: -1}\n", ("ppo.temperature", "above 0", "got -1")),
    Bad(
        "a run name that climbs",
        "run: {name: ../x}\n",
        ("run.name", "1 to 64 of a-z", "'../x'", "use, for example, x"),
    ),
    Bad("a run name with a space", 'run: {name: "a b"}\n', ("run.name", "1 to 64", "'a b'", "a_b")),
    Bad("a blank run name", 'run: {name: " "}\n', ("run.name", "1 to 64", "' '")),
    Bad(
        "300 characters of name",
        "run: {name: " + "x" * 300 + "}\n",
        ("run.name", "1 to 64", "(300 characters)"),
    ),
    Bad(
        "600 characters of experiment",
        "tracking: {experiment: " + "x" * 600 + "}\n",
        ("tracking.experiment", "1 to 250 characters on one line", "(600 characters)"),
    ),
    Bad(
        "an experiment of two lines",
        'tracking: {experiment: "a\\nb"}\n',
        ("tracking.experiment", "on one line"),
    ),
    Bad("an empty experiment", 'tracking: {experiment: ""}\n', ("tracking.experiment", "1 to 250")),
    Bad("a name with an escape", 'run: {name: "a\\e[31m"}\n', ("run.name", r"\x1b[31m")),
    Bad(
        "minibatches that do not divide",
        "ppo:\n  prompts_per_step: 12\n  minibatches: 5\n",
        ("c.yaml:3", "ppo.minibatches must divide", "12 x 1 = 12", "got 5", "use 3, 4, 6"),
    ),
    Bad(
        "a horizon that turns the coefficient negative",
        "ppo: {prompts_per_step: 128, kl: {target: 6, horizon: 20}}\n",
        ("c.yaml:1", "ppo.kl.horizon must be above a fifth of the 128 responses", "got 20", "use 2560"),
    ),
    Bad(
        "a coefficient that stays 0",
        "ppo: {kl: {coef: 0, target: 6}}\n",
        ("c.yaml:1", "ppo.kl.target=6 with ppo.kl.coef=0 has no effect", "use a coef above 0"),
    ),
    Bad(
        "an estimator without a gradient",
        "ppo: {kl: {place: loss, estimator: k1}}\n",
        ("c.yaml:1", "ppo.kl.estimator=k1 with ppo.kl.place=loss", "its gradient is 0", "use k2"),
    ),
    Bad(
        "a target above the limit that stops the run",
        "ppo: {max_kl: 6, kl: {target: 6}}\n",
        ("c.yaml:1", "ppo.max_kl must be above ppo.kl.target (6)", "got 6", "leave it out (30)"),
    ),
    Bad(
        "an entropy that explodes without a change",
        "ppo: {guard_limits: {entropy_explosion: 1.0}}\n",
        ("c.yaml:1", "ppo.guard_limits.entropy_explosion must be above 1", "got 1", "leave it out (3)"),
    ),
    Bad(
        "a length that drifts without a change",
        "ppo: {guard_limits: {length_drift: 0.5}}\n",
        ("c.yaml:1", "ppo.guard_limits.length_drift must be above 1", "got 0.5", "leave it out (2)"),
    ),
    Bad(
        "a warm-up of the whole run",
        "ppo: {steps: 10, critic_warmup_steps: 10}\n",
        ("c.yaml:1", "ppo.critic_warmup_steps must be below ppo.steps (10)", "got 10", "lower it"),
    ),
    Bad(
        "a warm-up that may last the whole run",
        "ppo: {steps: 10, critic_warmup_max_steps: 10}\n",
        ("c.yaml:1", "ppo.critic_warmup_max_steps must be below ppo.steps (10)", "got 10", "lower it"),
    ),
    Bad(
        "a warm-up whose limit is below its length",
        "ppo: {steps: 10, critic_warmup_steps: 4, critic_warmup_max_steps: 3}\n",
        ("ppo.critic_warmup_max_steps must be at least ppo.critic_warmup_steps (4)", "got 3"),
    ),
    Bad(
        "a warm-up without a critic",
        "ppo: {algorithm: grpo, samples_per_prompt: 4, critic_warmup_max_steps: 3}\n",
        ("ppo.algorithm=grpo has no critic", "ppo.critic_warmup_max_steps=3", "use 0 and null"),
    ),
    Bad(
        "an average that is not kept",
        "ppo: {publish: average}\n",
        ("ppo.publish=average", "got no ppo.ema_decay"),
    ),
    Bad(
        "weights that are all below 1",
        "ppo: {importance_bounds: [0.0, 0.5]}\n",
        (
            "c.yaml:1",
            "ppo.importance_bounds must be increasing and include 1 (no gap)",
            "got 0, 0.5",
            "leave it out",
        ),
    ),
    Bad(
        "weights that are all above 1",
        "ppo: {importance_bounds: [1.5, 2.0]}\n",
        ("c.yaml:1", "ppo.importance_bounds must be increasing and include 1 (no gap)", "got 1.5, 2"),
    ),
    Bad(
        "bounds of one weight",
        "ppo: {importance_bounds: [1.0, 1.0]}\n",
        ("c.yaml:1", "ppo.importance_bounds must be increasing", "got 1, 1", "leave it out"),
    ),
    Bad(
        "a guard that does what no guard does",
        "ppo: {guards: {loops: no}}\n",
        ("ppo.guards.loops", "warn, stop, off"),
    ),
    Bad(
        "IPC to engines elsewhere",
        "ppo: {weight_sync: {backend: ipc}}\n",
        ("ppo.weight_sync.backend=ipc needs engines that share GPUs", "colocate=pairs", "use auto"),
    ),
    Bad(
        "NCCL to engines on the same GPU",
        "ppo: {weight_sync: {backend: nccl}, colocate: all}\n",
        ("ppo.weight_sync.backend=nccl needs engines that do not share GPUs", "colocate=all", "use auto"),
    ),
    Bad(
        "more ranks than responses",
        "ppo: {minibatches: 64, policy_deepspeed: {ranks: 2}}\n",
        ("ppo.policy_deepspeed.ranks", "at most the minibatch of 1", "got 2"),
    ),
    Bad(
        "more ranks than pairs",
        "reward: {batch_size: 2, deepspeed: {ranks: 4}}\n",
        ("reward.deepspeed.ranks", "got 4"),
    ),
    Bad(
        "unequal ranks that share processes",
        "ppo: {colocate: all, policy_deepspeed: {ranks: 2}}\n",
        ("ppo.colocate=all", "got 2 and 1"),
    ),
    Bad(
        "a prompt longer than the context",
        "data: {max_prompt_tokens: 500}\n",
        ("c.yaml:1", "564 tokens", "model.tiny.max_positions", "(256)"),
    ),
    Bad(
        "heads that do not fit",
        "model: {tiny: {heads: 3}}\n",
        ("model.tiny.hidden_size / heads", "128 / 3", "heads=4"),
    ),
    Bad(
        "an adapter for a model from scratch",
        "sft: {lora: {r: 8}}\n",
        ("c.yaml:1", "sft.lora adapts a pretrained model", "model.path", "leave sft.lora out"),
    ),
    Bad(
        "an adapter to send without one",
        "ppo: {weight_sync: {lora: adapter}}\n",
        ("ppo.weight_sync.lora=adapter needs ppo.lora", "got no ppo.lora"),
    ),
    Bad(
        "an adapter too large for the engines",
        "ppo: {lora: {r: 600}, weight_sync: {lora: adapter}}\n",
        ("at most 512", "got r=600", "ppo.weight_sync.lora=merged"),
    ),
    Bad(
        "nccl on the CPU",
        "run: {device: cpu}\nppo: {weight_sync: {backend: nccl}}\n",
        ("backend=nccl", "gloo"),
    ),
    Bad(
        "a reward model that is not trained",
        "reward: {enabled: false}\n",
        ("ppo.rewards", "reward.enabled=true"),
    ),
    Bad(
        "two rewards of one name",
        "ppo: {rewards: [{type: model}, {type: model}]}\n",
        ("distinct names", "`name`"),
    ),
    Bad(
        "an unknown reward",
        "ppo:\n  rewards:\n    - {type: lenght}\n",
        ("c.yaml:3", "0.type", "'lenght'", "length?"),
    ),
    Bad(
        "a reward without type",
        "ppo:\n  rewards: [{weight: 1}]\n",
        ("ppo.rewards.0.type", "is required", "keywords"),
    ),
    Bad("no rewards", "ppo: {rewards: []}\n", ("ppo.rewards must have a source", "ppo.teacher")),
    Bad(
        "a reward that is text",
        "ppo: {rewards: [model]}\n",
        ("ppo.rewards.0", "a section with `type`", "'model'"),
    ),
    Bad(
        "a wrong field of a reward",
        "ppo:\n  rewards:\n    - type: length\n      target: 20\n      tolerance: 5\n      targt: 3\n",
        ("c.yaml:6", "ppo.rewards.0.targt", "reward of type length", "did you mean ppo.rewards.0.target?"),
    ),
    Bad(
        "a pattern that does not compile",
        "ppo:\n  rewards:\n    - type: format\n      pattern: (a\n",
        ("c.yaml:4: ppo.rewards.0.pattern: must be", "regular expression", "got '(a'"),
    ),
    Bad(
        "a service whose url is a file",
        "ppo: {rewards: [{type: remote, urls: [file:///etc/passwd]}]}\n",
        ("ppo.rewards.0", "http(s)://host[:port]/path"),
    ),
    Bad(
        "a list of hosts, as earlier versions had",
        "ppo: {rewards: [{type: remote, urls: [http://a/x], allowed_hosts: [a]}]}\n",
        ("ppo.rewards.0.allowed_hosts", "is no field of this version", "leave it out"),
    ),
    Bad(
        "a limit that follows from another one",
        "ppo: {logprob_gap_limit: 0.1}\n",
        ("ppo.logprob_gap_limit", "is no field of this version", "half of ppo.weight_sync.canary_tolerance"),
    ),
    Bad(
        "a permission that is not needed any more",
        "sft: {deepspeed: {allow_other_ranks: true}}\n",
        ("sft.deepspeed.allow_other_ranks", "is no field of this version", "is converted without it"),
    ),
    Bad(
        "the eps of an optimizer, as earlier versions had",
        "ppo: {policy: {eps: 1.0e-6}}\n",
        ("ppo.policy.eps", "is no field of this version", "it is 1e-8; leave it out"),
    ),
    Bad(
        "pauses and restarts that are fixed now",
        "run: {retry_delay: 1}\nppo: {engine: {max_restarts: 1}}\n",
        (
            "run.retry_delay: is no field of this version",
            "it is 5 s; leave it out",
            "ppo.engine.max_restarts",
        ),
    ),
    Bad(
        "an eps that no version had",
        "ppo: {loss: {type: cispo, eps: 0.2}}\n",
        ("ppo.loss.eps", "unknown key"),
    ),
    Bad(
        "a queue of prompts, as earlier versions had",
        "ppo: {engine: {dispatch: queue}}\n",
        ("ppo.engine.dispatch", "is no field of this version", "leave it out"),
    ),
    Bad(
        "os:system is not a path",
        "ppo: {rewards: [{type: python, function: os.system}]}\n",
        ("0.function", "module:function"),
    ),
)


@pytest.mark.parametrize("bad", FIELDS, ids=lambda bad: bad.title)
def test_bad_value_is_reported_with_line_rule_value_and_fix(command: Command, bad: Bad) -> None:
    assert command.complaint(bad).startswith("c.yaml")


def test_all_problems_are_listed_at_once(command: Command) -> None:
    text = "run:\n  name: ../x\n  nmae: 1\nppo:\n  steps: 0\n  gamma: 2\n"
    lines = command.complaint(Bad("six at once", text, (), ("sft.epochs=0", "x.y=1"))).splitlines()
    assert len(lines) == 6
    for place in (
        "c.yaml:2: ",
        "c.yaml:3: ",
        "c.yaml:5: ",
        "c.yaml:6: ",
        "override sft.epochs=0: ",
        "override x.y=1: ",
    ):
        assert len([line for line in lines if line.startswith(place)]) == 1


def test_wrong_items_do_not_make_a_list_too_short(command: Command) -> None:
    bad = Bad(
        "an item", "ppo: {rewards: [{type: length, target: 0, tolerance: 3}]}\n", ("ppo.rewards.0.target",)
    )
    assert len(command.complaint(bad).splitlines()) == 1


PATTERNS = {
    "a{99999999999999999999}": "does not compile: repeat count too big",
    "(" * 3000: "is nested too deeply",
    "(": "does not compile: missing )",
    "Step {i}": "has a brace that begins no repetition; write \\{",
}


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda pattern: pattern[:10])
def test_invalid_pattern_is_refused(command: Command, pattern: str) -> None:
    text = json.dumps({"ppo": {"rewards": [{"type": "format", "pattern": pattern}]}})
    command.complaint(
        Bad("a pattern", text, ("c.yaml:1: ppo.rewards.0", "regular expression", PATTERNS[pattern]))
    )


RANGES = (
    ("ppo", "{prompts_per_step: 1000000000, minibatches: 7}", "ppo.minibatches must divide", "got 7"),
    ("ppo", "{prompts_per_step: 1000000000, minibatches: 7}",
        "ppo.prompts_per_step: must be from 1 to 1000000", "use at"),
    ("ppo", "{samples_per_prompt: 1000000000, prompts_per_step: 999999937, minibatches: 1000000}",
        "use at most 65536", "held in memory"),
    ("ppo", "{temperature: 1.0e-9}", "ppo.temperature: must be from 0.01 to 100", "use 0.01 or more"),
    ("evaluate", "{temperature: 1.0e-9}", "evaluate.temperature: must be from 0.01", "got 1e-09"),
    ("sft", "{optimizer: {betas: [1, 1]}}", "sft.optimizer.betas.0", "to below 1"),
    ("ppo", "{policy: {betas: [0.9, 1.0]}}", "ppo.policy.betas.1", "use a number below 1"),
    ("ppo", "{ema_decay: 1}", "ppo.ema_decay", "to below 1"),
    ("data", "{synthetic: {sft_examples: 1000000000}}", "data.synthetic.sft_examples: must be from 1",
        "2 KiB each"),
    ("evaluate", "{confidence: 0}", "evaluate.confidence: must be", "above 0"),
    ("evaluate", "{confidence: 1}", "evaluate.confidence: must be from 0.5 to 0.999", "use at most 0.999"),
    ("register", "{alpha: 0}", "register.alpha: must be", "above 0"),
    ("ppo", "{guard_limits: {entropy_collapse: 1}}", "ppo.guard_limits.entropy_collapse must be below 1",
        "(0.1)"),
    ("ppo", "{guard_limits: {score_length: 0}}", "ppo.guard_limits.score_length must be", "above 0"),
    ("ppo", "{guards: {loops_share: 0.1}}", "ppo.guards.loops_share: has another name",
        "write ppo.guard_limits.loops"),
    ("data", "{synthetic: {prompts: 1441}}", "data.synthetic.prompts: must be from 1 to 1440",
        "different prompts"),
    ("data", "{eval_fraction: 1}", "data.eval_fraction: must be from 0.001 to 0.9", "use at most 0.9"),
    ("data", "{min_rows: 1000000000}", "data.min_rows", "use at most 100000000"),
    ("run", "{resources: {nodes: 1}}", "run.resources.nodes: unknown key",
        "did you mean run.resources.default.nodes or "),
    ("ppo", "{engine: {count: 10000}}", "ppo.engine.count: must be from 1 to 1024", "a copy of the policy"),
    ("ppo", "{weight_sync: {bucket_mib: 1000000000}}", "ppo.weight_sync.bucket_mib", "use at most 16384"),
    ("ppo", "{lora: {r: 1000000000}}", "ppo.lora.r", "use at most 8192"),
    ("evaluate", "{bootstrap: 1000000000}", "evaluate.bootstrap", "use at most 200000"),
    ("run", "{threads: 1000000}", "run.threads", "use at most 4096"),
    ("sft", "{epochs: 1000000000}", "sft.epochs", "use at most 10000"),
    ("ppo", "{epochs: 1000000000}", "ppo.epochs", "use at most 10000"),
    ("sft", "{optimizer: {weight_decay: 1000000000}}", "sft.optimizer.weight_decay", "use at most 10"),
    ("ppo", "{policy: {weight_decay: 1000000000}}", "ppo.policy.weight_decay", "use at most 10"),
    ("reward", "{optimizer: {max_grad_norm: 1.0e-9}}", "reward.optimizer.max_grad_norm", "use 1e-06 or more"),
    ("ppo", "{kl: {coef: 1000000000}}", "ppo.kl.coef", "use at most 1000"),
    ("ppo", "{score_clip: 1.0e-9}", "ppo.score_clip", "use 0.1 or more"),
    ("ppo", "{value_clip: 1.0e-9}", "ppo.value_clip", "use 0.001 or more"),
    ("ppo", "{gamma: 0}", "ppo.gamma", "use 0.1 or more"),
    ("ppo", "{entropy_coef: 1000000000}", "ppo.entropy_coef", "use at most 1000"),
    ("ppo", "{missing_eos_penalty: 1000000000}", "ppo.missing_eos_penalty", "use at most 1000"),
    ("ppo", "{ptx: {coef: 1000000000}}", "ppo.ptx.coef", "use at most 1000"),
    ("reward", "{center: 1000000000}", "reward.center", "use at most 1000"),
    ("reward", "{margin: constant, margin_value: 1000000000}", "reward.margin_value", "use at most 1000"),
    ("data", "{synthetic: {label_temperature: 1000000000}}", "label_temperature", "use at most 1000"),
    ("ppo", "{engine: {kv_cache_gib: 1000000000}}", "ppo.engine.kv_cache_gib", "use at most 4096"),
    ("ppo", "{published_loss_limit: 1000000000}", "ppo.published_loss_limit", "use at most 1"),
    ("ppo", "{weight_sync: {canary_tolerance: 1000000000}}", "canary_tolerance", "use at most 10"),
    ("run", "{timeouts: {start: 1.0e-9}}", "run.timeouts.start", "use 0.1 or more"),
    ("run", "{stage_timeout: 1.0e-9}", "run.stage_timeout", "use 1 or more"),
    ("ppo", "{algorithm: grpo, samples_per_prompt: 4, dynamic_filtering: {max_rounds: 1000000000}}",
        "max_rounds", "100"),
    ("ppo", "{rewards: [{type: python, function: 'a:b', timeout: 1.0e-9}]}", "ppo.rewards.0.timeout",
        "use 0.01 or more"),
    ("ppo", "{lora: {targets: [nonsense]}}", "ppo.lora.targets: the model from scratch has no nonsense",
        "q_proj"),
    ("ppo", "{lora: {targets: ['.*']}}", "ppo.lora.targets", "not patterns or paths; got '.*'"),
    (
        "model",
        "{tiny: {hidden_size: 65536, heads: 512, layers: 1000, intermediate_size: 262144}}",
        "GiB; this machine has",
        "use a smaller model",
    ),
)  # fmt: skip


@pytest.mark.parametrize("row", RANGES, ids=lambda row: f"{row[0]}{row[1]}")
def test_number_out_of_range_is_refused_with_reason(command: Command, row: tuple[str, str, str, str]) -> None:
    section, value, *words = row
    command.complaint(Bad("a range", f"{section}: {value}\n", tuple(words)))
