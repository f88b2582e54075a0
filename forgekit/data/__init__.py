"""Tokens on disk become one rank's micro-batches: sources, token files, rows, order, loading."""

from forgekit.data.documents import (
    huggingface_documents as huggingface_documents,
    random_documents as random_documents,
)
from forgekit.data.text_files import (
    stdlib_documents as stdlib_documents,
    text_documents as text_documents,
)
from forgekit.data.tokenizer import (
    load_tokenizer as load_tokenizer,
    train_tokenizer as train_tokenizer,
)
from forgekit.data.token_files import (
    open_tokens as open_tokens,
)
from forgekit.data.prepare_corpus import prepare as prepare
from forgekit.data.packing import (
    Bins as Bins,
    LongDocuments as LongDocuments,
    PackingMethod as PackingMethod,
    cached_bins as cached_bins,
    pack as pack,
)
from forgekit.data.rows import (
    check_vocabulary as check_vocabulary,
    packed_dataset as packed_dataset,
)
from forgekit.data.chat import (
    chat_dataset as chat_dataset,
    preference_dataset as preference_dataset,
)
from forgekit.hashing import permute as permute
from forgekit.data.order import (
    Order as Order,
    Phase as Phase,
    SizePhase as SizePhase,
    Sizes as Sizes,
    make_order as make_order,
    make_sizes as make_sizes,
    mixture_dataset as mixture_dataset,
    sample_rows as sample_rows,
    vary_length as vary_length,
)
from forgekit.data.batch import (
    check_batch as check_batch,
    collate as collate,
    mask_batch as mask_batch,
    pad_positions as pad_positions,
    shard_sequence as shard_sequence,
    unshard_sequence as unshard_sequence,
)
from forgekit.data.stream import (
    DocumentStream as DocumentStream,
    stream_documents as stream_documents,
)
