"""Around the training loop: checkpoints, metrics, evaluation, generation, and clean stops."""

from forgekit.run.run_directory import Run
from forgekit.checkpoints.save import wait_for_saves
from forgekit.run.bad_steps import BadStepError, roll_back
from forgekit.run.status import RunLockedError, is_running, lock_run, write_status
from forgekit.run.data_end import DataEnd
from forgekit.run.rendezvous import HangError, barrier
from forgekit.run.memory import periodic_collection, report_out_of_memory
from forgekit.metrics.records import read_bad_steps, read_metrics
from forgekit.metrics.trackers import Tracker, make_trackers
from forgekit.evaluation.generate import write_sample
from forgekit.metrics.hooks import every_steps, expert_loads, layer_norms
from forgekit.metrics.profile import Profile
from forgekit.report import plot_expert_loads, plot_losses
from forgekit.lora.adapters import relora
from forgekit.lora.adapters import reset_magnitudes
from forgekit.huggingface.transformers_models import transformers_model
from forgekit.huggingface.new_tokens import read_base
from forgekit.huggingface.export import check_new_directory, export_tuned

__all__ = [
    "Run",
    "wait_for_saves",
    "BadStepError",
    "roll_back",
    "read_bad_steps",
    "RunLockedError",
    "is_running",
    "lock_run",
    "write_status",
    "DataEnd",
    "HangError",
    "barrier",
    "periodic_collection",
    "report_out_of_memory",
    "read_metrics",
    "Tracker",
    "make_trackers",
    "write_sample",
    "expert_loads",
    "plot_expert_loads",
    "every_steps",
    "layer_norms",
    "Profile",
    "plot_losses",
    "relora",
    "reset_magnitudes",
    "check_new_directory",
    "export_tuned",
    "read_base",
    "transformers_model",
]
