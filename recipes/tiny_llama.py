"""Make a base to try fine-tuning on: a tiny Llama with random weights, and a tokenizer for it.

The tokenizer is trained on the texts that the model will be fine-tuned on, and gets a chat template
whose turns end with a special token. Nothing is downloaded.

python tiny_llama.py out=runs/tiny_llama
"""

import json
from pathlib import Path

import attrs

import forgekit as fk
from forgekit.config import key, load_config

try:
    import transformers
except ImportError:
    raise SystemExit('Needs transformers: pip install "forgekit[hf,text]"') from None

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}\n{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant\n{% endif %}"
)


@attrs.frozen(kw_only=True)
class Config:
    """A model of 0.2 M parameters."""

    out: Path = key(Path("runs/tiny_llama"), "The new directory.")
    texts: Path = key(Path("recipes/examples/chats.jsonl"), "What the tokenizer is trained on.")
    seed: int = key(0, "Seed of the weights.", at_least=0)
    model: fk.TransformerSpec = fk.TransformerSpec(
        vocab_size=512, dim=64, layers=2, heads=4, kv_heads=2, ffn_dim=192, max_seq_len=256
    )


def main():
    """Train the tokenizer, draw the weights, and write both."""
    config = load_config(Config)
    texts = [
        message["content"]
        for line in config.texts.read_text().splitlines()
        for message in json.loads(line)["messages"]
    ]
    trained = fk.data.train_tokenizer(texts, config.model.vocab_size)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=trained, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    model = fk.Transformer(config.model, seed=config.seed)
    fk.save_huggingface(model, config.out, tokenizer)
    print(f"{config.out}: a Llama of {sum(p.numel() for p in model.parameters()):,} parameters")


if __name__ == "__main__":
    main()
