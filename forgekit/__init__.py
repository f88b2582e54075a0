"""A functional, composable step toolkit for training language models on PyTorch.

The names that recipes and research scripts use, in the order in which a run meets them. What is
needed less often is in ``forgekit.data``, ``forgekit.model``, ``forgekit.optim``,
``forgekit.steps`` and ``forgekit.run``.
"""

import warnings as _warnings
from importlib import import_module as _import_module
from importlib.metadata import version as _version
from typing import Any as _Any

from forgekit.mesh import MeshSpec, build_mesh, data_ranks, process_rank, shutdown
from forgekit.data.corpus.token_files import write_tokens
from forgekit.data.packing.token_dataset import check_vocabulary, token_dataset
from forgekit.data.packing.pack import pack
from forgekit.data.packing.packed_dataset import packed_dataset
from forgekit.data.mixture.phases import Phase
from forgekit.data.mixture.order import make_order
from forgekit.data.mixture.mixture_dataset import mixture_dataset
from forgekit.data.batches.batch import check_batch, shift_labels
from forgekit.data.batches.sequence_slices import shard_sequence, unshard_sequence
from forgekit.data.loading.loader import make_loader
from forgekit.data.loading.groups import groups
from forgekit.model.moe_spec import MoESpec
from forgekit.model.attention_kernels import AttentionChoice
from forgekit.model.rope_scaling import RopeScaling
from forgekit.model.transformer import Transformer, TransformerSpec
from forgekit.model.initial import init_weights
from forgekit.optim.adamw import adamw
from forgekit.optim.muon import muon
from forgekit.optim.lion import lion
from forgekit.optim.schedule_free import schedule_free
from forgekit.optim.chain import chain_optimizers
from forgekit.optim.average import EMA, UniformAverage
from forgekit.optim.lr_schedules import (
    constant,
    join_schedules,
    rex,
    warmup_cosine,
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
from forgekit.steps.dpo import check_dpo, document_log_probs, dpo_loss
from forgekit.steps.accumulate import accumulate, count_ahead
from forgekit.steps.totals import Totals, reduce_totals
from forgekit.steps.audit.agreement import UnreducedError
from forgekit.steps.gradients import grad_norms, gradients
from forgekit.steps.clip import Correction, clip
from forgekit.steps.spikes import SpikeLimit
from forgekit.steps.update import update
from forgekit.steps.make_step import make_step, step_metrics
from forgekit.run.recipe_parts import Setup, fitting_batch_size, held_out_loader, train_loader
from forgekit.run.run_directory import every, open_run
from forgekit.run.checkpoints.save import PendingSave, checkpoint_save
from forgekit.run.checkpoints.load import checkpoint_load
from forgekit.ranks import CheckpointError
from forgekit.run.checkpoints.storage import latest_checkpoint
from forgekit.run.checkpoints.retention import Keep
from forgekit.huggingface.load import huggingface_spec, load_huggingface
from forgekit.huggingface.save import save_huggingface
from forgekit.run.bad_steps import BadSteps, bad_step_policy
from forgekit.run.stop_signal import StopSignal
from forgekit.run.health.health import Health
from forgekit.metrics.log import MetricsLog
from forgekit.metrics.trackers import TensorBoard, WandB
from forgekit.lora.adapters import add_lora, merge_lora, unmerge_lora
from forgekit.lora.peft_files import load_adapter, save_adapter
from forgekit.evaluation.evaluate import evaluate
from forgekit.evaluation.averaged import averaged
from forgekit.evaluation.generate import generate
from forgekit.run.load_run import load_run
from forgekit.run.report import wrap_up
from forgekit.run.verification.verify import verify

__version__ = _version("forgekit")

__all__ = [
    "MeshSpec",
    "build_mesh",
    "data_ranks",
    "process_rank",
    "shutdown",
    "write_tokens",
    "check_vocabulary",
    "token_dataset",
    "pack",
    "packed_dataset",
    "Phase",
    "make_order",
    "mixture_dataset",
    "check_batch",
    "shift_labels",
    "shard_sequence",
    "unshard_sequence",
    "make_loader",
    "groups",
    "MoESpec",
    "AttentionChoice",
    "RopeScaling",
    "Transformer",
    "TransformerSpec",
    "init_weights",
    "adamw",
    "muon",
    "lion",
    "schedule_free",
    "chain_optimizers",
    "EMA",
    "UniformAverage",
    "constant",
    "join_schedules",
    "rex",
    "warmup_cosine",
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
    "check_dpo",
    "document_log_probs",
    "dpo_loss",
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
    "update",
    "make_step",
    "step_metrics",
    "Setup",
    "fitting_batch_size",
    "held_out_loader",
    "train_loader",
    "every",
    "open_run",
    "PendingSave",
    "checkpoint_save",
    "checkpoint_load",
    "CheckpointError",
    "latest_checkpoint",
    "Keep",
    "huggingface_spec",
    "load_huggingface",
    "save_huggingface",
    "BadSteps",
    "bad_step_policy",
    "StopSignal",
    "Health",
    "MetricsLog",
    "TensorBoard",
    "WandB",
    "add_lora",
    "merge_lora",
    "unmerge_lora",
    "load_adapter",
    "save_adapter",
    "evaluate",
    "averaged",
    "generate",
    "load_run",
    "wrap_up",
    "verify",
]

_MOVED = {
    "mesh": ["expert_ranks"],
    **{
        floor: _import_module(f"forgekit.{floor}").__all__
        for floor in ("data", "model", "optim", "steps", "run")
    },
}
"""Names that were here before, by the module where they are now: all that the floors offer."""


def __getattr__(name: str) -> _Any:
    """Find a name that has left the top level, and say where it is now."""
    for module, names in _MOVED.items():
        if name in names:
            new = f"forgekit.{module}.{name}"
            message = f"forgekit.{name} is {new} now; the old name goes with the next release."
            _warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(_import_module(f"forgekit.{module}"), name)
    raise AttributeError(f"module 'forgekit' has no attribute {name!r}")
