"""Tokens on disk become one rank's micro-batches."""

from forgekit.data.documents.text_files import stdlib_documents, text_documents
from forgekit.data.documents.huggingface_datasets import huggingface_documents
from forgekit.data.corpus.id_documents import random_documents, token_documents
from forgekit.data.corpus.tokenizer import load_tokenizer, train_tokenizer
from forgekit.data.corpus.prepare import prepare
from forgekit.data.corpus.token_files import open_tokens
from forgekit.data.packing.bins import Bins
from forgekit.data.packing.pack import LongDocuments, PackingMethod
from forgekit.data.packing.cached_bins import cached_bins
from forgekit.data.packing.chat_dataset import chat_dataset, preference_dataset
from forgekit.data.mixture.permutation import permute, sample_rows
from forgekit.data.mixture.order import Order
from forgekit.data.batches.batch import mask_batch
from forgekit.data.samples import collate
from forgekit.data.batches.transforms import mask_prompts, pad_places, pad_positions
from forgekit.data.loading.document_stream import DocumentStream, stream_documents

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
    "mask_prompts",
    "pad_places",
    "pad_positions",
    "DocumentStream",
    "stream_documents",
]
