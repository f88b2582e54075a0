"""Learn a task from its reward alone: count on from a digit up to nine, then stop.

By itself the run samples each group of answers when its turn comes. Beside it any number of
processes can sample with the weights that it published; all may be killed and started again.

python rollout.py
redis-server --appendonly yes --appendfsync always
python rollout.py role=generate redis=redis://localhost
torchrun --nproc-per-node 2 rollout.py redis=redis://localhost
"""

import itertools
import secrets
from functools import partial
from pathlib import Path
from typing import Literal

import attrs

import forgekit as fk
from forgekit.config import key, load_config, to_dict

END = 10  # the token after the digits
TINY = fk.TransformerSpec(
    vocab_size=11, dim=32, layers=2, heads=4, kv_heads=2, ffn_dim=128, max_seq_len=64
)
answer = partial(fk.generate, max_new_tokens=10, eos_id=END, log_probs=True)


@attrs.frozen(kw_only=True)
class Config:
    """A policy that learns on a CPU in a minute."""

    out: Path = key(Path("runs/rollout"), "Run directory; an existing run is resumed.")
    role: Literal["train", "generate"] = key("train", "generate: sample until it is stopped.")
    redis: str | None = key(None, "URL of a Redis server; none: the run samples itself.")
    seed: int = key(0, "Seed of weights and samples.", at_least=0)
    steps: int = key(150, "Optimizer steps of the whole run.", at_least=0)
    global_batch_size: int = key(16, "Prompts of a step, over all ranks.", at_least=1)
    batch_size: int = key(4, "Prompts of a rank's micro-batch.", at_least=1)
    answers: int = key(16, "Answers per prompt: its group.", at_least=2)
    eager: bool = key(False, "Whether a step begins once all its rollouts are there.")
    ahead: int = key(16, "Groups that may wait for the trainer.", at_least=1)
    save_every: int = key(5, "Steps between checkpoints, and publications.", at_least=1)
    lr: float = key(3e-3, "Learning rate.", at_least=0)
    mesh: fk.MeshSpec = fk.MeshSpec()
    model: fk.TransformerSpec = TINY


@attrs.frozen(kw_only=True, slots=True, eq=False)
class Policy(fk.TrainState):
    """The state with its stream, whose position is part of checkpoints."""

    stream: fk.RolloutStream


def reward_of(digit, answer):
    """The share of the wanted tokens before the first wrong one."""
    wanted = [*range(digit + 1, 10), END]
    right = (a == b for a, b in zip(answer, wanted, strict=False))
    return sum(itertools.takewhile(bool, right)) / len(wanted)


def sample(model, config, number, version):
    """Answer prompt ``number`` several times: a message of the stream."""
    digit, count = number % 10, config.answers
    prompts, samples = [[digit]] * count, range(number * count, (number + 1) * count)
    ids, log_probs = answer(model, prompts, seed=config.seed, samples=samples)
    message = {"prompts": prompts, "ids": ids, "log_probs": log_probs, "versions": version}
    return message | {"rewards": [reward_of(digit, text[1:].tolist()) for text in ids]}


def sample_for_ever(config):
    """Sample with the latest published weights."""
    model, weights = fk.Transformer(config.model), None
    source = fk.RedisSource(config.redis, config.out.name)
    while True:
        source.wait_for_room(config.ahead)
        weights = fk.read_weights(model, config.out / "weights", have=weights)
        source.put(sample(model, config, secrets.randbits(40), weights.version))


def loss_fn(model, batch):
    """DAPO's loss, less a share of the entropy; neither ever holds all logits."""
    ids, positions, documents = batch["input_ids"], batch["position_ids"], batch["doc_ids"]
    head = partial(fk.linear_log_probs, labels=batch["labels"], entropy=True)
    log_probs, entropies = model(ids, position_ids=positions, doc_ids=documents, head=head)
    loss = fk.dapo_loss(log_probs, batch)
    loss += fk.Loss(-0.02 * entropies.sum(), loss.count)  # or it stops trying too early
    return loss.with_metrics(entropy=(entropies.detach().sum(), loss.count))


def setup(config):
    """Build the state, the step and the stream; nothing is sampled."""
    mesh = fk.build_mesh(config.mesh)
    model = fk.parallelize(fk.Transformer(config.model, seed=config.seed), mesh)
    stop = fk.StopSignal()

    def next_sample():
        return sample(model, config, next(numbers), loader.version)

    loader = fk.RolloutStream(
        next_sample if config.redis is None else fk.RedisSource(config.redis, config.out.name),
        config.batch_size,
        mesh=mesh,
        shared=config.redis is not None,  # who samples by itself does so on all ranks
        stop=stop,
    )
    optimizer = fk.adamw(model, weight_decay=0.0)
    state = Policy.create(model, optimizer, mesh=mesh, seed=config.seed, stream=loader)
    state = fk.checkpoint_load(state, config.out / "checkpoints")
    numbers = itertools.count(state.samples + loader.rank, loader.world)
    step = fk.make_step(loss_fn, schedule=fk.constant(config.lr), stop=stop, end=loader)
    return fk.Setup(state=state, step=step, loader=loader, loss_fn=loss_fn, stop=stop)


def train(config, run):
    """Save, publish, step; stop cleanly on request."""
    built = setup(config)
    state, step, loader, stop = built.state, built.step, built.loader, built.stop
    groups = fk.groups(loader, loader.micro_batches(config.global_batch_size), end=loader)
    log = run.start(built, every=10, total=config.steps)
    with log, stop:
        for batches in groups:
            if state.step % config.save_every == 0:
                run.save(state, blocking=True)  # first: no kill undoes a version that is out
                loader.commit(state)
                fk.publish_weights(state, config.out / "weights", state.step)
            if run.is_over(state):
                break
            loader.version = state.step
            if config.eager:
                batches, _ = fk.count_ahead(state, batches, {})
            state, metrics = step(state, batches)
            loader.commit(state, saved=False)
            log(state, metrics)
        run.end(state)


def main():
    """Sample, or hold the run directory while training and say in it how the run ended."""
    config = load_config(Config)
    if config.role == "generate":
        sample_for_ever(config)
    with fk.open_run(config.out, to_dict(config)) as run:
        train(config, run)


if __name__ == "__main__":
    main()
