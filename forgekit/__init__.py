"""A functional, composable step toolkit for training language models on PyTorch.

The names that recipes use, in the order in which a run meets them.
"""

from importlib.metadata import version as _version

from forgekit.mesh import (
    MeshSpec,
    build_mesh,
    data_ranks,
    expert_ranks,
    process_rank,
    shutdown,
)
from forgekit.data.sources import stdlib_documents, text_documents
from forgekit.data.huggingface import huggingface_documents
from forgekit.data.id_documents import random_documents, token_documents
from forgekit.data.tokenizer import load_tokenizer, train_tokenizer
from forgekit.data.prepare import prepare
from forgekit.data.tokens import open_tokens, write_tokens
from forgekit.data.windows import check_vocabulary, token_dataset
from forgekit.data.bins import Bins
from forgekit.data.packing import LongDocuments, PackingMethod, pack
from forgekit.data.bins_cache import cached_bins
from forgekit.data.packed import packed_dataset
from forgekit.data.order import permute, sample_rows
from forgekit.data.phases import Phase
from forgekit.data.mixture import Order, make_order
from forgekit.data.mixed import mixture_dataset
from forgekit.data.batch import check_batch, collate, mask_batch, shift_labels
from forgekit.data.transforms import mask_prompts, pad_places
from forgekit.data.slices import shard_sequence, unshard_sequence
from forgekit.data.loader import make_loader
from forgekit.data.document_stream import DocumentStream, stream_documents
from forgekit.data.groups import groups
from forgekit.model.attention import attend_causal, document_mask
from forgekit.model.dispatch import dispatch_local
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.model.initial import init_weights
from forgekit.optim.groups import decay_groups
from forgekit.optim.adamw import adamw
from forgekit.optim.chain import chain_optimizers
from forgekit.optim.schedules import (
    Schedule,
    constant,
    cosine,
    linear,
    warmup,
    warmup_cosine,
    warmup_linear,
    with_phases,
    wsd,
)
from forgekit.parallel.fsdp import Precision
from forgekit.parallel.recompute import ActivationCheckpoint
from forgekit.parallel.schedules import PipelineSchedule
from forgekit.parallel.context import ContextParallel
from forgekit.parallel.parallelize import parallelize
from forgekit.state import DonatedStateError, TrainState, donate
from forgekit.steps.losses import Loss, cross_entropy
from forgekit.steps.chunked import linear_cross_entropy
from forgekit.steps.sources import losses_by_source
from forgekit.steps.accumulate import accumulate, count_ahead
from forgekit.steps.totals import Totals, reduce_totals
from forgekit.steps.agreement import UnreducedError
from forgekit.steps.gradients import grad_norms, gradients
from forgekit.steps.clip import Correction, clip
from forgekit.steps.spikes import SpikeLimit, limit_spikes
from forgekit.steps.update import update
from forgekit.steps.make_step import make_step, step_metrics
from forgekit.run.directory import Run, every, open_run
from forgekit.run.checkpoint import (
    PendingSave,
    checkpoint_load,
    checkpoint_save,
    wait_for_saves,
)
from forgekit.run.checkpoints.commit import CheckpointError, latest_checkpoint
from forgekit.run.checkpoints.migrate import SavedState, SavedValue
from forgekit.run.checkpoints.retention import Keep
from forgekit.run.bad_steps import BadStepError, BadSteps, bad_step_policy, roll_back
from forgekit.run.bad_records import read_bad_steps
from forgekit.run.resilience import (
    RunLockedError,
    StopSignal,
    lock_run,
    write_status,
)
from forgekit.run.data_end import DataEnd
from forgekit.run.meeting import HangError, barrier
from forgekit.run.health import Health
from forgekit.run.memory import live_tensors, periodic_collection, report_out_of_memory
from forgekit.run.metrics import MetricsLog, read_metrics
from forgekit.run.evaluate import evaluate
from forgekit.run.generate import generate, write_sample
from forgekit.run.report import plot_losses, wrap_up
from forgekit.run.verify import VerifyReport, verify

__version__ = _version("forgekit")

__all__ = [
    "MeshSpec",
    "build_mesh",
    "data_ranks",
    "expert_ranks",
    "process_rank",
    "shutdown",
    "stdlib_documents",
    "text_documents",
    "huggingface_documents",
    "random_documents",
    "token_documents",
    "load_tokenizer",
    "train_tokenizer",
    "prepare",
    "open_tokens",
    "write_tokens",
    "check_vocabulary",
    "token_dataset",
    "Bins",
    "LongDocuments",
    "PackingMethod",
    "pack",
    "cached_bins",
    "packed_dataset",
    "permute",
    "sample_rows",
    "Phase",
    "Order",
    "make_order",
    "mixture_dataset",
    "check_batch",
    "collate",
    "mask_batch",
    "shift_labels",
    "mask_prompts",
    "pad_places",
    "shard_sequence",
    "unshard_sequence",
    "make_loader",
    "DocumentStream",
    "stream_documents",
    "groups",
    "attend_causal",
    "document_mask",
    "dispatch_local",
    "Transformer",
    "TransformerSpec",
    "init_weights",
    "decay_groups",
    "adamw",
    "chain_optimizers",
    "Schedule",
    "constant",
    "cosine",
    "linear",
    "warmup",
    "warmup_cosine",
    "warmup_linear",
    "with_phases",
    "wsd",
    "Precision",
    "ActivationCheckpoint",
    "PipelineSchedule",
    "ContextParallel",
    "parallelize",
    "DonatedStateError",
    "TrainState",
    "donate",
    "Loss",
    "cross_entropy",
    "linear_cross_entropy",
    "losses_by_source",
    "accumulate",
    "count_ahead",
    "Totals",
    "reduce_totals",
    "UnreducedError",
    "grad_norms",
    "gradients",
    "Correction",
    "clip",
    "SpikeLimit",
    "limit_spikes",
    "update",
    "make_step",
    "step_metrics",
    "Run",
    "every",
    "open_run",
    "PendingSave",
    "checkpoint_load",
    "checkpoint_save",
    "wait_for_saves",
    "CheckpointError",
    "latest_checkpoint",
    "SavedState",
    "SavedValue",
    "Keep",
    "BadStepError",
    "BadSteps",
    "bad_step_policy",
    "roll_back",
    "read_bad_steps",
    "RunLockedError",
    "StopSignal",
    "lock_run",
    "write_status",
    "DataEnd",
    "HangError",
    "barrier",
    "Health",
    "live_tensors",
    "periodic_collection",
    "report_out_of_memory",
    "MetricsLog",
    "read_metrics",
    "evaluate",
    "generate",
    "write_sample",
    "plot_losses",
    "wrap_up",
    "VerifyReport",
    "verify",
]
