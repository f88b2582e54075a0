"""Asks lm-eval's own model of transformers and ours the same local tasks, in lm-eval's interpreter.

One tokenizer adds a BOS token by itself and one has none; texts are longer than the model takes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import lm_eval
import torch
import transformers
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import forgekit as fk

TEXT = "to be or not to be, that is the question: whether tis nobler in the mind to suffer "
TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": name} for name in ("word_perplexity", "bits_per_byte")],
    },
    "new": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["e"], "max_gen_toks": 6, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def write_tasks(folder: Path) -> None:
    """Write the tasks, as YAML is JSON, and eight documents."""
    words = TEXT.split()
    rows = [
        {
            "question": " ".join(words[: 2 + number]),
            "choices": [f" {words[number]}", f" {words[-number - 1]} tis", " x"],
            "answer": number % 3,
            "text": TEXT * (1 + number % 3) + words[number],
        }
        for number in range(8)
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
        "test_split": "test",
    }
    for name, task in TASKS.items():
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **shared, **task}))


def make_tokenizer(*, bos: bool) -> transformers.PreTrainedTokenizerFast:
    """A byte-pair tokenizer of transformers."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["</s>", "<s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    names = {"eos_token": "</s>", "pad_token": "</s>"}
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            "<s> $A", special_tokens=[("<s>", 1)]
        )
        names["bos_token"] = "<s>"
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def results_of(lm: object, folder: Path, tasks: list[str]) -> dict[str, object]:
    """Metrics, and what each document was answered, by task."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = lm_eval.simple_evaluate(model=lm, tasks=tasks, task_manager=manager, bootstrap_iters=0)
    answers = {name: [sample["resps"] for sample in found["samples"][name]] for name in tasks}
    return {"results": found["results"], "answers": answers}


def difference(one: object, other: object) -> float:
    """The largest relative difference of two results; infinite where they are not alike."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((difference(one[key], other[key]) for key in one), default=0.0)
    if isinstance(one, list | tuple):
        assert len(one) == len(other)
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    if isinstance(one, float):
        return abs(one - other) / max(abs(one), 1e-9)
    return 0.0 if one == other else float("inf")


class Logits(torch.nn.Module):
    """A model of transformers whose output is its logits."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).logits


def compare(folder: Path, *, bos: bool) -> None:
    """Both models of the same weights give the same answers."""
    tokenizer = make_tokenizer(bos=bos)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        initializer_range=0.2,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config).double()
    theirs.save_pretrained(folder / "model")
    ours = fk.Transformer(fk.huggingface_spec(folder / "model")).double()
    fk.load_huggingface(ours, folder / "model")
    # Theirs counts BOS after BOS as the first token of a text.
    tasks = [name for name in TASKS if not (bos and name == "texts")]
    model = HFLM(theirs, tokenizer=tokenizer, batch_size=3, device="cpu")
    expected = results_of(model, folder, tasks)
    for model, bound in (
        (Logits(theirs), 1e-12),
        (ours, 1e-6),
    ):  # their rotary angles are in float32
        lm = fk.run.lm_eval_model(model, tokenizer, batch_size=3, max_length=32)
        found = results_of(lm, folder, tasks)
        assert isinstance(lm, lm_eval.api.model.LM)
        worst = difference(expected, found)
        assert worst < bound, f"bos {bos}: {worst:.1e}"


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    write_tasks(folder)
    compare(folder, bos=False)
    compare(folder, bos=True)
    sys.stdout.write("equal\n")
