"""A functional, composable step toolkit for training language models on PyTorch.

The names that recipes and research scripts use, in the order in which a run meets them. What is
needed less often is in ``forgekit.data``, ``forgekit.model``, ``forgekit.optim``,
``forgekit.steps`` and ``forgekit.run``. A name is imported when it is first used: commands that
compute nothing start without torch.
"""

from importlib import import_module as _import_module
from types import MappingProxyType as _MappingProxyType
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from forgekit.remote.urls import Location as Location
    from forgekit.mesh import (
        MeshSpec as MeshSpec,
        build_mesh as build_mesh,
        data_ranks as data_ranks,
        process_rank as process_rank,
        shutdown as shutdown,
    )
    from forgekit.data.token_files import write_tokens as write_tokens
    from forgekit.data.packing import pack as pack
    from forgekit.data.rows import (
        check_vocabulary as check_vocabulary,
        packed_dataset as packed_dataset,
        token_dataset as token_dataset,
    )
    from forgekit.data.order import (
        Phase as Phase,
        make_order as make_order,
        mixture_dataset as mixture_dataset,
    )
    from forgekit.data.batch import (
        check_batch as check_batch,
        shard_sequence as shard_sequence,
        shift_labels as shift_labels,
        unshard_sequence as unshard_sequence,
    )
    from forgekit.data.loader import make_loader as make_loader
    from forgekit.data.groups import groups as groups
    from forgekit.model.moe_spec import MoESpec as MoESpec
    from forgekit.model.attention_kernels import AttentionChoice as AttentionChoice
    from forgekit.model.rope_scaling import RopeScaling as RopeScaling
    from forgekit.model.transformer import (
        Transformer as Transformer,
        TransformerSpec as TransformerSpec,
    )
    from forgekit.model.initial import init_weights as init_weights
    from forgekit.optim.adamw import adamw as adamw
    from forgekit.optim.muon import muon as muon
    from forgekit.optim.lion import lion as lion
    from forgekit.optim.schedule_free import schedule_free as schedule_free
    from forgekit.optim.chain import chain_optimizers as chain_optimizers
    from forgekit.optim.optimizer import optimizer as optimizer
    from forgekit.optim.average import EMA as EMA, UniformAverage as UniformAverage
    from forgekit.optim.lr_schedules import (
        constant as constant,
        join_schedules as join_schedules,
        rex as rex,
        warmup_cosine as warmup_cosine,
        with_phases as with_phases,
        wsd as wsd,
    )
    from forgekit.parallel.fsdp import Precision as Precision
    from forgekit.parallel.activation_checkpoint import ActivationCheckpoint as ActivationCheckpoint
    from forgekit.parallel.pipeline.schedule import PipelineSchedule as PipelineSchedule
    from forgekit.parallel.context.context_parallel import ContextParallel as ContextParallel
    from forgekit.parallel.parallelize import parallelize as parallelize
    from forgekit.state import (
        DonatedStateError as DonatedStateError,
        TrainState as TrainState,
        donate as donate,
    )
    from forgekit.steps.losses import (
        Loss as Loss,
        losses_by_source as losses_by_source,
    )
    from forgekit.steps.cross_entropy import (
        cross_entropy as cross_entropy,
        linear_cross_entropy as linear_cross_entropy,
    )
    from forgekit.steps.log_probs import linear_log_probs as linear_log_probs
    from forgekit.steps.dpo import (
        check_dpo as check_dpo,
        document_log_probs as document_log_probs,
        dpo_loss as dpo_loss,
    )
    from forgekit.steps.accumulate import (
        accumulate as accumulate,
        begin_step as begin_step,
        count_ahead as count_ahead,
    )
    from forgekit.steps.totals import Totals as Totals, reduce_totals as reduce_totals
    from forgekit.steps.audit.agreement import UnreducedError as UnreducedError
    from forgekit.steps.audit.first_step import audit as audit
    from forgekit.steps.gradients import grad_norms as grad_norms, gradients as gradients
    from forgekit.steps.replicas import (
        OneGroup as OneGroup,
        Part as Part,
        Replicas as Replicas,
        sum_replicas as sum_replicas,
    )
    from forgekit.steps.clip import (
        Correction as Correction,
        SpikeLimit as SpikeLimit,
        clip as clip,
    )
    from forgekit.steps.update import update as update
    from forgekit.steps.make_step import make_step as make_step, step_metrics as step_metrics
    from forgekit.run.setup import (
        Setup as Setup,
        fitting_batch_size as fitting_batch_size,
        held_out_loader as held_out_loader,
        train_loader as train_loader,
    )
    from forgekit.replicas.groups import join_replicas as join_replicas
    from forgekit.run.run_directory import every as every, open_run as open_run
    from forgekit.checkpoints.save import (
        PendingSave as PendingSave,
        checkpoint_save as checkpoint_save,
    )
    from forgekit.checkpoints.load import checkpoint_load as checkpoint_load
    from forgekit.ranks import CheckpointError as CheckpointError
    from forgekit.checkpoints.directory import (
        Keep as Keep,
        latest_checkpoint as latest_checkpoint,
    )
    from forgekit.huggingface.load import (
        huggingface_spec as huggingface_spec,
        load_huggingface as load_huggingface,
    )
    from forgekit.huggingface.save import save_huggingface as save_huggingface
    from forgekit.run.bad_steps import BadSteps as BadSteps, bad_step_policy as bad_step_policy
    from forgekit.run.stop_signal import StopSignal as StopSignal
    from forgekit.run.health import Health as Health
    from forgekit.metrics.log import MetricsLog as MetricsLog
    from forgekit.metrics.trackers import TensorBoard as TensorBoard, WandB as WandB
    from forgekit.lora.adapters import (
        add_lora as add_lora,
        merge_lora as merge_lora,
        unmerge_lora as unmerge_lora,
    )
    from forgekit.lora.peft_files import load_adapter as load_adapter, save_adapter as save_adapter
    from forgekit.evaluation.evaluate import evaluate as evaluate
    from forgekit.evaluation.averaged import averaged as averaged
    from forgekit.evaluation.generate import generate as generate
    from forgekit.rollouts.batch import (
        group_advantages as group_advantages,
        join_rollouts as join_rollouts,
        rollout_batch as rollout_batch,
    )
    from forgekit.rollouts.losses import (
        KL as KL,
        ImportanceCorrection as ImportanceCorrection,
        cispo_loss as cispo_loss,
        dapo_loss as dapo_loss,
        dr_grpo_loss as dr_grpo_loss,
        grpo_loss as grpo_loss,
        gspo_loss as gspo_loss,
        ppo_loss as ppo_loss,
    )
    from forgekit.rollouts.sources import RedisSource as RedisSource
    from forgekit.rollouts.stream import RolloutStream as RolloutStream
    from forgekit.rollouts.weights import (
        publish_weights as publish_weights,
        read_weights as read_weights,
    )
    from forgekit.run.load_run import load_run as load_run
    from forgekit.report import wrap_up as wrap_up
    from forgekit.verification.verify import verify as verify

_NAMES = _MappingProxyType(
    {
        "remote.urls": "Location",
        "mesh": "MeshSpec build_mesh data_ranks process_rank shutdown",
        "data.token_files": "write_tokens",
        "data.packing": "pack",
        "data.rows": "check_vocabulary packed_dataset token_dataset",
        "data.order": "Phase make_order mixture_dataset",
        "data.batch": "check_batch shard_sequence shift_labels unshard_sequence",
        "data.loader": "make_loader",
        "data.groups": "groups",
        "model.moe_spec": "MoESpec",
        "model.attention_kernels": "AttentionChoice",
        "model.rope_scaling": "RopeScaling",
        "model.transformer": "Transformer TransformerSpec",
        "model.initial": "init_weights",
        "optim.adamw": "adamw",
        "optim.muon": "muon",
        "optim.lion": "lion",
        "optim.schedule_free": "schedule_free",
        "optim.chain": "chain_optimizers",
        "optim.optimizer": "optimizer",
        "optim.average": "EMA UniformAverage",
        "optim.lr_schedules": "constant join_schedules rex warmup_cosine with_phases wsd",
        "parallel.fsdp": "Precision",
        "parallel.activation_checkpoint": "ActivationCheckpoint",
        "parallel.pipeline.schedule": "PipelineSchedule",
        "parallel.context.context_parallel": "ContextParallel",
        "parallel.parallelize": "parallelize",
        "state": "DonatedStateError TrainState donate",
        "steps.losses": "Loss losses_by_source",
        "steps.cross_entropy": "cross_entropy linear_cross_entropy",
        "steps.log_probs": "linear_log_probs",
        "steps.dpo": "check_dpo document_log_probs dpo_loss",
        "steps.accumulate": "accumulate begin_step count_ahead",
        "steps.totals": "Totals reduce_totals",
        "steps.audit.agreement": "UnreducedError",
        "steps.audit.first_step": "audit",
        "steps.gradients": "grad_norms gradients",
        "steps.replicas": "OneGroup Part Replicas sum_replicas",
        "steps.clip": "Correction SpikeLimit clip",
        "steps.update": "update",
        "steps.make_step": "make_step step_metrics",
        "run.setup": "Setup fitting_batch_size held_out_loader train_loader",
        "replicas.groups": "join_replicas",
        "run.run_directory": "every open_run",
        "checkpoints.save": "PendingSave checkpoint_save",
        "checkpoints.load": "checkpoint_load",
        "ranks": "CheckpointError",
        "checkpoints.directory": "Keep latest_checkpoint",
        "huggingface.load": "huggingface_spec load_huggingface",
        "huggingface.save": "save_huggingface",
        "run.bad_steps": "BadSteps bad_step_policy",
        "run.stop_signal": "StopSignal",
        "run.health": "Health",
        "metrics.log": "MetricsLog",
        "metrics.trackers": "TensorBoard WandB",
        "lora.adapters": "add_lora merge_lora unmerge_lora",
        "lora.peft_files": "load_adapter save_adapter",
        "evaluation.evaluate": "evaluate",
        "evaluation.averaged": "averaged",
        "evaluation.generate": "generate",
        "rollouts.batch": "group_advantages join_rollouts rollout_batch",
        "rollouts.losses": "KL ImportanceCorrection cispo_loss dapo_loss dr_grpo_loss grpo_loss"
        " gspo_loss ppo_loss",
        "rollouts.sources": "RedisSource",
        "rollouts.stream": "RolloutStream",
        "rollouts.weights": "publish_weights read_weights",
        "run.load_run": "load_run",
        "report": "wrap_up",
        "verification.verify": "verify",
    }
)
"""Where the public names are, in the order in which a run meets them."""
_MODULES = _MappingProxyType(
    {name: f"forgekit.{module}" for module, names in _NAMES.items() for name in names.split()}
)
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    """Import a public name, or a room such as ``forgekit.data``, when it is first used."""
    if name == "__version__":
        from importlib.metadata import version

        value = version("forgekit")
    elif name in _MODULES:
        value = getattr(_import_module(_MODULES[name]), name)
    else:
        try:
            value = None if name.startswith("_") else _import_module(f"forgekit.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"forgekit.{name}":
                raise
            value = None
        if value is None:
            raise AttributeError(f"module 'forgekit' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, "__version__"})
