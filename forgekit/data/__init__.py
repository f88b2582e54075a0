"""Tokens on disk become one rank's micro-batches."""

from forgekit.data.documents import huggingface_documents, random_documents
from forgekit.data.text_files import stdlib_documents, text_documents
from forgekit.data.tokenizer import load_tokenizer, train_tokenizer
from forgekit.data.token_files import open_tokens, token_documents
from forgekit.data.prepare_corpus import prepare
from forgekit.data.packing import Bins, LongDocuments, PackingMethod, cached_bins
from forgekit.data.chat import chat_dataset, preference_dataset
from forgekit.hashing import permute
from forgekit.data.order import Order, sample_rows
from forgekit.data.batch import collate, mask_batch, pad_positions
from forgekit.data.stream import DocumentStream, stream_documents

__all__ = [
    "stdlib_documents",
    "text_documents",
    "huggingface_documents",
    "random_documents",
    "token_documents",
    "load_tokenizer",
    "train_tokenizer",
    "prepare",
    "open_tokens",
    "Bins",
    "LongDocuments",
    "PackingMethod",
    "cached_bins",
    "chat_dataset",
    "preference_dataset",
    "permute",
    "sample_rows",
    "Order",
    "mask_batch",
    "collate",
    "pad_positions",
    "DocumentStream",
    "stream_documents",
]
