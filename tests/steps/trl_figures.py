"""What trl's ``DPOTrainer._compute_loss`` makes of pairs: ``python trl_figures.py FOLDER``.

A process of its own, because trl changes what transformers imports. In the folder are ``policy``
and ``reference``, directories of Llama models, and ``inputs.json``; it writes ``figures.json``.
Inputs and figures of the pinned version are kept in ``trl_figures.json``, beside this file.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

BETA = 0.7
STORED = Path(__file__).with_suffix(".json")


class Trainer(SimpleNamespace):
    """As much of a trainer as the loss reads; what it asks for besides is None."""

    def __getattr__(self, name):
        return None


def figures(folder: Path) -> dict[str, dict[str, float]]:
    """The loss of each kind, and the metrics, means over pairs."""
    import torch
    from transformers import AutoModelForCausalLM
    from trl import DPOTrainer
    from trl.trainer.utils import add_fused_lm_head

    models = [AutoModelForCausalLM.from_pretrained(folder / n) for n in ("policy", "reference")]
    fields = ("log_probs", "entropy", "mean_logits", "is_top1")
    for model in models:
        add_fused_lm_head(model, outputs=fields)
    inputs = json.loads((folder / "inputs.json").read_text())
    inputs = {name: torch.tensor(values) for name, values in inputs.items()}
    found = {}
    for kind in ("sigmoid", "hinge", "ipo"):
        metrics = defaultdict(list)
        trainer = Trainer(
            model=models[0],
            ref_model=models[1],
            args=SimpleNamespace(gradient_checkpointing_kwargs=None),
            accelerator=SimpleNamespace(
                device=torch.device("cpu"), gather=same, gather_for_metrics=same
            ),
            _metrics=defaultdict(lambda metrics=metrics: metrics),
            _total_train_tokens=0,
            _tp_size=1,
            f_divergence_type="reverse_kl",
            loss_types=[kind],
            loss_weights=[1.0],
            beta=BETA,
        )
        loss = DPOTrainer._compute_loss(trainer, models[0], inputs, False)
        found[kind] = {"loss": loss.item()}
        found[kind] |= {k: v[-1] for k, v in metrics.items() if k.startswith("rewards/")}
    return found


def same(values):
    return values


def write_inputs(folder: Path) -> dict:
    """Save both models, and the pairs as trl takes them: chosen answers, then rejected ones."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import attrs
    from steps.preferences import SPEC, rows

    import forgekit as fk

    spec = attrs.evolve(SPEC, qk_norm=False)
    for name, seed in (("policy", 1), ("reference", 2)):
        fk.save_huggingface(fk.Transformer(spec, seed=seed), folder / name)
    found = {"input_ids": [], "attention_mask": [], "completion_mask": []}
    documents = [(row, document) for row in rows() for document in range(4)]
    for row, document in documents[::2] + documents[1::2]:
        is_in = row["doc_ids"] == document
        if is_in.any():
            ids, labels = row["input_ids"][is_in].tolist(), row["labels"][is_in].tolist()
            padding = [0] * (24 - len(ids))
            found["input_ids"].append(ids + padding)
            found["attention_mask"].append([1] * len(ids) + padding)
            # A token is trained if it is the label before it; the first one of an answer without a
            # prompt is not, and then trl's divisor of ipo counts what ours does.
            trained = [0, *(int(label >= 0) for label in labels[:-1])]
            found["completion_mask"].append(trained + padding)
    (folder / "inputs.json").write_text(json.dumps(found))
    return found


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / "figures.json").write_text(json.dumps(figures(folder)))
