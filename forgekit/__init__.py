"""A functional, composable step toolkit for training language models on PyTorch.

The names of a first week, in the order in which a run meets them. All others are in the rooms
where they live: ``forgekit.data``, ``forgekit.optim``, ``forgekit.steps``, ``forgekit.rollouts``
and so on; each room lists its names. A name is imported when it is first used: commands that
compute nothing start without torch.
"""

from importlib import import_module as _import_module
from types import MappingProxyType as _MappingProxyType
from typing import Any as _Any

# The types of all of this are in __init__.pyi, which `python tests/stub.py` writes.
_NAMES = _MappingProxyType(
    {
        "mesh": "MeshSpec build_mesh data_ranks shutdown",
        "data.token_files": "write_tokens",
        "data.rows": "token_dataset",
        "data.batch": "shift_labels",
        "data.loader": "make_loader",
        "data.groups": "groups",
        "model.transformer": "Transformer TransformerSpec",
        "parallel.parallelize": "parallelize",
        "optim.named": "adamw muon",
        "optim.optimizer": "optimizer",
        "optim.lr_schedules": "warmup_cosine warmup_linear",
        "state": "TrainState",
        "steps.losses": "Loss",
        "steps.cross_entropy": "cross_entropy linear_cross_entropy",
        "steps.audit.first_step": "audit",
        "steps.accumulate": "accumulate begin_step",
        "steps.totals": "reduce_totals",
        "steps.gradients": "grad_norms gradients",
        "steps.clip": "clip",
        "steps.update": "update",
        "steps.make_step": "make_step step_metrics",
        "run.setup": "Setup fitting_batch_size held_out_loader train_loader",
        "run.run_directory": "open_run",
        "run.stop_signal": "StopSignal",
        "run.health": "Health",
        "metrics.log": "MetricsLog",
        "checkpoints.save": "checkpoint_save",
        "checkpoints.load": "checkpoint_load",
        "checkpoints.directory": "latest_checkpoint",
        "ranks": "CheckpointError",
        "evaluation.evaluate": "evaluate",
        "evaluation.generate": "generate",
        "run.load_run": "load_run",
        "report": "wrap_up",
        "verification.verify": "verify",
    }
)
"""Where the names of a first week are."""
_FLAT = _MappingProxyType(
    {
        "remote": "Location",
        "mesh": "process_rank",
        "data": "Phase check_batch check_vocabulary make_order mixture_dataset pack packed_dataset"
        " shard_sequence unshard_sequence",
        "model": "AttentionChoice MoESpec RopeScaling init_weights",
        "parallel": "ActivationCheckpoint ContextParallel PipelineSchedule Precision",
        "optim": "EMA UniformAverage chain_optimizers constant join_schedules lion rex"
        " schedule_free with_phases wsd",
        "state": "DonatedStateError donate",
        "steps": "Correction OneGroup Part Replicas SpikeLimit Totals UnreducedError check_dpo"
        " count_ahead document_log_probs dpo_loss linear_log_probs losses_by_source"
        " sparse_kl sum_replicas",
        "lora": "add_lora load_adapter merge_lora save_adapter unmerge_lora",
        "checkpoints": "Keep PendingSave",
        "huggingface": "huggingface_spec load_huggingface save_huggingface",
        "metrics": "TensorBoard WandB",
        "evaluation": "averaged",
        "rollouts": "ImportanceCorrection KL RedisSource RolloutStream cispo_loss dapo_loss"
        " dr_grpo_loss group_advantages grpo_loss gspo_loss join_rollouts ppo_loss publish_weights"
        " read_weights rollout_batch",
        "replicas": "join_replicas",
        "run": "BadSteps bad_step_policy every",
    }
)
"""Names of rooms that ``forgekit`` has itself, too, and always will: ``forgekit.grpo_loss``."""
_MODULES = _MappingProxyType(
    {name: f"forgekit.{module}" for module, names in _NAMES.items() for name in names.split()}
)
_ROOMS = _MappingProxyType({name: room for room, names in _FLAT.items() for name in names.split()})
__all__ = [*_MODULES]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> _Any:
    """Import a public name, or a room such as ``forgekit.data``, when it is first used."""
    if name == "__version__":
        from importlib.metadata import version

        value = version("forgekit")
    elif module := _MODULES.get(name) or (name in _ROOMS and f"forgekit.{_ROOMS[name]}"):
        value = getattr(_import_module(module), name)
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
    return [*_MODULES, *_FLAT, "__version__"]
