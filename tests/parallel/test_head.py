"""What models return: a loss in chunks in place of logits, or whole logits; against plain torch.

People who train with tensor parallelism write distillation and entropy terms on logits as they
would on one device; each gradient is held to one process in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from covering import first_of
from lab import Watch, lay_out, mean_gradients, reference_gradients, relative_error
from parallel.test_transformers_models import LAYOUTS, build
from pool import run_again
from tensordict import TensorDict
from torch import Tensor, nn

import forgekit as fk
from forgekit.steps import cross_entropy as cross_entropy_file

ROWS, POSITIONS, VOCAB = 2, 7, 32
KINDS = dict.fromkeys(("plain", "frozen", "adapter", "an odd vocabulary"), "Llama")
KINDS |= {"tied": "Llama tied", "experts": "Qwen3Moe"}
TOLERANCE = {"experts": 1e-6}  # their routers compute in float32
CHOSEN = [("fsdp2", ("frozen",)), ("pp2", ("plain",))]
CHOSEN += [("tp2", ("tied", "adapter", "an odd vocabulary"))]
EVERY = [(layout, (*KINDS,)) for layout in ("fsdp2", "tp2", "fsdp2-tp2")]


def build_kind(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    changes |= {"vocab_size": 31} if kind == "an odd vocabulary" else {}
    model: Any = build(KINDS[kind], "cpu", **changes)
    model.lm_head.requires_grad_(kind != "frozen")
    if kind == "adapter":
        fk.add_lora(model, rank=2, targets=("*.q_proj", "lm_head"))
        torch.nn.init.normal_(model.lm_head.lora_B)  # zero, its gradient alone would be seen
    return model


def draw_batch(seed: int, positions: int = POSITIONS) -> TensorDict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 31, (ROWS, positions + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.randint(0, 10, labels.shape, generator=generator) < 3 + seed] = -100
    return TensorDict({"input_ids": ids[:, :-1], "labels": labels}, [ROWS])


def head_loss(model: Any, batch: Any) -> fk.Loss:
    head = partial(fk.linear_cross_entropy, labels=batch["labels"], z_loss=0.1)
    return model(batch["input_ids"], head=head)


def count_of(batch: Any) -> int:
    return int((batch["labels"] != -100).sum())


def plus(terms: Callable[..., Tensor], model: Any, batch: Any) -> fk.Loss:
    """Torch's cross-entropy and other terms of the same logits."""
    logits, labels = model(batch["input_ids"]).logits, batch["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return fk.Loss(loss + terms(logits, labels).sum(), count_of(batch))


def squares(logits: Tensor, labels: Tensor) -> Tensor:
    return 0.1 * logits.logsumexp(-1).square() * (labels != -100)


def mixed(logits: Tensor, labels: Tensor) -> Tensor:
    """With an entropy, and two terms that torch computes wrongly, or not at all, on shards."""
    log_p = logits.log_softmax(-1)
    each = 0.1 * logits.norm(dim=-1) - 0.1 * (log_p.exp() * log_p).sum(-1)
    return each + F.huber_loss(logits, logits.detach().flip(1), reduction="none").mean(-1)


def their_loss(model: Any, batch: Any) -> fk.Loss:
    """The mean that the model itself computes, in float32."""
    labels, count = batch["labels"], count_of(batch)
    output = model(batch["input_ids"], labels=labels, shift_labels=labels)
    return fk.Loss(output.loss * count, count)


BATCHES = [draw_batch(seed) for seed in range(4)]


def gradients_of(
    model: nn.Module, layout: str, loss: Callable[..., fk.Loss], head: str | None = None
) -> tuple[dict[str, Tensor], Tensor]:
    state = lay_out(model, LAYOUTS[layout], head=head)
    rank, world = fk.data_ranks(state.mesh)
    gradients = mean_gradients(state, BATCHES[rank::world], loss)
    return gradients, fk.evaluate(state, BATCHES[rank::world], loss)["loss"]


def check(everyone: list[Any], reference: Any, tolerance: float) -> None:
    names, (expected, expected_loss) = set(), reference
    for gradients, loss in everyone:
        names |= gradients.keys()
        torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0)
        assert relative_error(gradients, {n: expected[n] for n in gradients}) < tolerance
    assert names == expected.keys()


def _with_head(rank: int, world: int, kinds: Sequence[str], layout: str) -> dict[str, Any]:
    return {kind: gradients_of(build_kind(kind), layout, head_loss, "lm_head") for kind in kinds}


@pytest.mark.parametrize(("layout", "kinds"), first_of(CHOSEN, EVERY))
def test_a_foreign_model_with_a_head_has_the_gradients_of_one_process(layout, kinds):
    everyone = run_again(_with_head, math.prod(LAYOUTS[layout].values()), kinds, layout)
    for kind in kinds:
        reference = reference_gradients(build_kind(kind), [BATCHES], partial(plus, squares))
        check([found[kind] for found in everyone], reference, TOLERANCE.get(kind, 1e-10))


# Whole logits under tensor parallelism


WHOLE = {"more terms": (partial(plus, mixed), 1e-10), "the model's own": (their_loss, 1e-6)}


def _whole(rank: int, world: int, layout: str) -> dict[str, Any]:
    jobs = {name: loss for name, (loss, _) in WHOLE.items()}
    return {name: gradients_of(build_kind("plain"), layout, loss) for name, loss in jobs.items()}


@pytest.mark.parametrize("layout", ["tp2", pytest.param("fsdp2-tp2", marks=pytest.mark.oracle)])
def test_losses_of_logits_that_ranks_share_have_the_gradient_of_one_process(layout):
    everyone = run_again(_whole, math.prod(LAYOUTS[layout].values()), layout)
    for name, (loss, tolerance) in WHOLE.items():
        reference = reference_gradients(build_kind("plain"), [BATCHES], loss)
        check([found[name] for found in everyone], reference, tolerance)


def _largest(rank: int, world: int) -> None:
    model = lay_out(build_kind("plain", vocab_size=256), {"tp": world}, head="lm_head").model
    batch, whole = draw_batch(0, positions=64), ROWS * 64 * 256
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy_file, "LOGITS_ON_CPU", 16 * 256)
        with Watch() as seen:
            head_loss(model, batch).sum.backward()
    assert seen.largest < whole / 3  # a weight is larger than a chunk


def test_logits_are_never_whole_with_a_head():
    run_again(_largest, 2)


# What cannot be left out


class Scaled(nn.Linear):
    """A product with more in it."""

    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * super().forward(input)


class Changed(nn.Module):
    """Logits that are changed after the projection, or made by something else."""

    def __init__(self, change: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change
        self.embed = nn.Embedding(VOCAB, 4)
        self.biased, self.lm_head = nn.Linear(4, VOCAB), nn.Linear(4, VOCAB, bias=False)
        self.scaled = Scaled(4, VOCAB, bias=False)
        self.dropping = nn.Linear(4, VOCAB, bias=False)
        fk.add_lora(self, targets="dropping", dropout=0.1).requires_grad_()

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        return {"logits": self.change(self.lm_head(x), lambda: self.lm_head(x))}


CHANGED = {
    "in place": lambda logits, again: logits.mul_(2.0),
    "twice": lambda logits, again: again(),
    "a part": lambda logits, again: logits[..., : VOCAB - 1],
}


@pytest.mark.parametrize("name", CHANGED)
def test_a_head_whose_logits_are_changed_is_refused(name, mesh):
    model = fk.parallelize(Changed(CHANGED[name]), mesh, head="lm_head")
    with pytest.raises(ValueError, match=r"^head= replaces one projection, .* Compute"):
        head_loss(model, BATCHES[0])
    assert model(BATCHES[0]["input_ids"])["logits"].isfinite().all()  # and works on without it


def test_models_that_scale_or_cap_their_logits_are_refused(mesh):
    changes = {"final_logit_softcapping": 5.0, "head_dim": 8}
    model = build("Gemma2", "cpu", tie_word_embeddings=True, **changes)
    with pytest.raises(ValueError, match=r"^head= replaces one projection, .* a soft cap"):
        head_loss(fk.parallelize(model, mesh, head="lm_head"), draw_batch(0))


@pytest.mark.parametrize("name", ["biased", "scaled", "dropping", "embed", "nowhere"])
def test_a_head_that_is_no_plain_product_is_refused(name, mesh):
    message = rf"^head='{name}' is .* it must name the nn\.Linear that"
    with pytest.raises(ValueError, match=message):
        fk.parallelize(Changed(CHANGED["twice"]), mesh, head=name)
