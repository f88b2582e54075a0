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
from forgekit.data.documents.text_files import stdlib_documents, text_documents
from forgekit.data.documents.huggingface_datasets import huggingface_documents
from forgekit.data.corpus.id_documents import random_documents, token_documents
from forgekit.data.corpus.tokenizer import load_tokenizer, train_tokenizer
from forgekit.data.corpus.prepare import prepare
from forgekit.data.corpus.token_files import open_tokens, write_tokens
from forgekit.data.packing.token_dataset import check_vocabulary, token_dataset
from forgekit.data.packing.bins import Bins
from forgekit.data.packing.pack import LongDocuments, PackingMethod, pack
from forgekit.data.packing.cached_bins import cached_bins
from forgekit.data.packing.packed_dataset import packed_dataset
from forgekit.data.mixture.permutation import permute, sample_rows
from forgekit.data.mixture.phases import Phase
from forgekit.data.mixture.order import Order, make_order
from forgekit.data.mixture.mixture_dataset import mixture_dataset
from forgekit.data.batches.batch import check_batch, mask_batch, shift_labels
from forgekit.data.samples import collate
from forgekit.data.batches.transforms import mask_prompts, pad_places, pad_positions
from forgekit.data.batches.sequence_slices import shard_sequence, unshard_sequence
from forgekit.data.loading.loader import make_loader
from forgekit.data.loading.document_stream import DocumentStream, stream_documents
from forgekit.data.loading.groups import groups
from forgekit.model.attention import attend_causal, document_mask
from forgekit.model.dispatch import dispatch_local
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.model.initial import init_weights
from forgekit.optim.parameter_groups import decay_groups
from forgekit.optim.adamw import adamw
from forgekit.optim.chain import chain_optimizers
from forgekit.optim.lr_schedules import (
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
from forgekit.parallel.activation_checkpoint import ActivationCheckpoint
from forgekit.parallel.pipeline.schedule import PipelineSchedule
from forgekit.parallel.context.context_parallel import ContextParallel
from forgekit.parallel.parallelize import parallelize
from forgekit.state import DonatedStateError, TrainState, donate
from forgekit.steps.losses import Loss, cross_entropy
from forgekit.steps.linear_cross_entropy import linear_cross_entropy
from forgekit.steps.per_source_loss import losses_by_source
from forgekit.steps.accumulate import accumulate, count_ahead
from forgekit.steps.totals import Totals, reduce_totals
from forgekit.steps.consistency import UnreducedError
from forgekit.steps.gradients import grad_norms, gradients
from forgekit.steps.clip import Correction, clip
from forgekit.steps.spikes import SpikeLimit, limit_spikes
from forgekit.steps.update import update
from forgekit.steps.make_step import make_step, step_metrics
from forgekit.run.recipe_parts import Setup, held_out_loader, train_loader
from forgekit.run.run_directory import Run, every, open_run
from forgekit.run.checkpoints.save import PendingSave, checkpoint_save, wait_for_saves
from forgekit.run.checkpoints.load import checkpoint_load
from forgekit.run.checkpoints.errors import CheckpointError
from forgekit.run.checkpoints.storage import latest_checkpoint
from forgekit.run.checkpoints.migration import SavedState, SavedValue
from forgekit.run.checkpoints.retention import Keep
from forgekit.run.bad_steps import BadStepError, BadSteps, bad_step_policy, roll_back
from forgekit.run.bad_step_records import read_bad_steps
from forgekit.run.run_status import RunLockedError, lock_run, write_status
from forgekit.run.stop_signal import StopSignal
from forgekit.run.data_end import DataEnd
from forgekit.run.health.rendezvous import HangError, barrier
from forgekit.run.health.health import Health
from forgekit.run.health.memory import live_tensors, periodic_collection, report_out_of_memory
from forgekit.run.metrics import MetricsLog, read_metrics
from forgekit.run.evaluate import evaluate
from forgekit.run.generate import generate, write_sample
from forgekit.run.report import plot_losses, wrap_up
from forgekit.run.verification.verify import VerifyReport, verify

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
    "mask_batch",
    "shift_labels",
    "collate",
    "mask_prompts",
    "pad_places",
    "pad_positions",
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
    "Setup",
    "held_out_loader",
    "train_loader",
    "Run",
    "every",
    "open_run",
    "PendingSave",
    "checkpoint_save",
    "wait_for_saves",
    "checkpoint_load",
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
    "lock_run",
    "write_status",
    "StopSignal",
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
